"""Episodes: their properties, by hypothesis and by counting."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot import EpisodeSampler, sample_episodes


@st.composite
def problems(draw):
    """Labels of classes of different size, in any order and with any values; and numbers that fit them."""
    ways, shots, queries = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(shots + queries, 20), min_size=ways, max_size=10))
    values = draw(st.lists(st.integers(0, 1000), min_size=len(sizes), max_size=len(sizes), unique=True))
    labels = np.repeat(values, sizes)
    np.random.default_rng(draw(st.integers(0, 100))).shuffle(labels)
    return labels, ways, shots, queries


@settings(max_examples=150, deadline=None)
@given(problem=problems(), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), count=st.integers(1, 12))
def test_episodes_are_sound(problem, seed, epoch, count):
    labels, ways, shots, queries = problem
    episodes = sample_episodes(labels, ways, shots, queries, count, seed, epoch)
    assert episodes.classes.shape == (count, ways)
    assert episodes.support.shape == (count, ways, shots) and episodes.query.shape == (count, ways, queries)
    assert all(tensor.dtype == torch.int64 for tensor in episodes)
    for classes, support, query in zip(*episodes, strict=True):
        assert len(set(classes.tolist())) == ways  # no class twice
        images = torch.cat([support, query], dim=1)
        assert len(set(images.flatten().tolist())) == ways * (shots + queries)  # no image twice
        assert (labels[images.numpy()] == classes.numpy()[:, None]).all()  # each of its own class


@settings(max_examples=60, deadline=None)
@given(
    problem=problems(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 50),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_an_episode_depends_on_seed_epoch_and_number_alone(problem, seed, epoch, cuts):
    labels, ways, shots, queries = problem
    whole = sample_episodes(torch.from_numpy(labels), ways, shots, queries, sum(cuts), seed, epoch)
    start = 0
    for cut in cuts:
        part = sample_episodes(labels, ways, shots, queries, cut, seed, epoch, start)
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a, b[start : start + cut])
        start += cut
    shuffled = np.random.default_rng(0).permutation(sum(cuts))
    by_number = EpisodeSampler(labels, ways, shots, queries).draw(shuffled, seed, epoch)
    assert torch.equal(by_number.query, whole.query[shuffled])


def chance(counts, cells):
    """How probable counts as uneven as these are if all cells are alike (the chi-square test's p)."""
    observed = torch.tensor(list(counts.values()) + [0] * (cells - len(counts)), dtype=torch.float64)
    expected = observed.sum() / cells
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def test_drawing_is_uniform_in_sets_order_and_places():
    # 24 images of 4 classes: every ordered triple of classes, and every ordered pair of images of a class, alike.
    labels = np.repeat(np.arange(4), 6)
    episodes = sample_episodes(labels, 3, 1, 1, 24_000, seed=11)
    assert chance(Counter(map(tuple, episodes.classes.tolist())), 24) > 1e-4
    pairs = torch.cat([episodes.support, episodes.query], dim=2)[:, 0]
    assert chance(Counter(map(tuple, pairs.tolist())), 4 * 30) > 1e-4
    # Classes of an episode, and neighbours in number, do not go together.
    within = torch.stack([episodes.support[:, 0, 0] % 6, episodes.support[:, 1, 0] % 6], 1)
    assert chance(Counter(map(tuple, within.tolist())), 36) > 1e-4
    neighbours = torch.stack([episodes.support[:-1, 0, 0] % 6, episodes.support[1:, 0, 0] % 6], 1)
    assert chance(Counter(map(tuple, neighbours.tolist())), 36) > 1e-4


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((3, 1, 1), "3 ways asked of 2 classes; give at most 2"),
        ((2, 3, 2), "class 1 has 4 images, but 3 shots \\+ 2 queries need 5 \\(1 of 2"),
        ((0, 1, 1), "ways must be an integer of at least 1, got 0"),
        ((1, 1, 1.5), "queries must be"),
    ],
)
def test_errors(numbers, words):
    with pytest.raises(ValueError, match=words):
        sample_episodes(np.repeat([0, 1], [6, 4]), *numbers, num_episodes=1, seed=0)


def test_other_errors():
    labels = np.repeat([0, 1], 4)
    for labels_, episodes, seed, words in (
        (labels, 0, 0, "num_episodes"),
        (labels, 1, -1, "must not be negative"),
        (labels[None], 1, 0, "one dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            sample_episodes(labels_, 2, 1, 1, episodes, seed=seed)
    with pytest.raises(ValueError, match="class 'cat' has 4 images"):
        EpisodeSampler(labels, 2, 4, 1, class_names=("cat", "dog"))


def test_many_very_uneven_classes_cost_the_index_lists_and_a_chunk():
    sizes = np.full(20_000, 20)
    sizes[7] = 400_000  # as many images as all others together
    labels = np.repeat(np.arange(20_000), sizes)
    tracemalloc.start()
    sampler = EpisodeSampler(labels, ways=5, shots=5, queries=15)
    tracemalloc.reset_peak()
    kept = tracemalloc.get_traced_memory()[0]
    sampler.draw(np.arange(1000), seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # An index a label and three numbers a class; then a small multiple of the 100 numbers of each episode drawn.
    assert kept < 8 * (len(labels) + 3 * len(sizes)) + 2**20
    assert peak - kept < 10 * 8 * 1000 * 5 * 20


def test_a_class_is_drawn_as_often_however_many_images_it_has():
    sizes = [20, 25, 200, 3000, 40, 21]
    labels = np.repeat(np.arange(6), sizes)
    classes = EpisodeSampler(labels, 2, 1, 15).draw(np.arange(6000), seed=3).classes
    assert chance(Counter(classes.flatten().tolist()), 6) > 1e-4
