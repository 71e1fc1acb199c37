"""Episodes whose ways and shots are drawn from ranges: drawn, trained on, evaluated and named in results."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import main
from fewshot import (
    CrossAttentionNetwork,
    EpisodeSampler,
    EpisodeSettings,
    EpisodicDataModule,
    MatchingHead,
    MatchingNetwork,
    PrototypicalHead,
    PrototypicalNetwork,
    evaluate_episodes,
    sample_episodes,
)
from fewshot.saving import episodes_identity
from tests.fewshot.conftest import QUIET
from tests.fewshot.test_episodes import chance

LABELS = np.repeat(np.arange(12), np.arange(12) + 11)
RANGES = {"ways": (2, 6), "shots": (1, 4), "queries": 3}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 50), number=st.integers(0, 10_000))
def test_an_episode_of_a_range_is_that_of_its_own_ways_and_shots(seed, epoch, number):
    sampler = EpisodeSampler(LABELS, **RANGES)
    ((ways, shots),) = sampler.shapes([number], seed, epoch)
    assert 2 <= ways <= 6 and 1 <= shots <= 4
    drawn = sampler.draw([number], seed, epoch)
    plain = sample_episodes(LABELS, int(ways), int(shots), 3, 1, seed, epoch, start=number)
    assert all(torch.equal(a, b) for a, b in zip(drawn, plain, strict=True))
    among = sampler.shapes(range(number, number + 5), seed, epoch)
    assert among[0].tolist() == [ways, shots]  # whatever it is drawn with


def test_all_shapes_are_drawn_alike_and_apart_from_the_classes():
    sampler = EpisodeSampler(LABELS, **RANGES)
    shapes = sampler.shapes(np.arange(20_000), seed=5)
    assert chance(Counter(map(tuple, shapes.tolist())), 5 * 4) > 1e-4
    assert chance(Counter(map(tuple, np.hstack([shapes[:-1], shapes[1:]]).tolist())), 20**2) > 1e-4
    assert not np.array_equal(shapes, sampler.shapes(np.arange(20_000), seed=6))
    assert not np.array_equal(shapes, sampler.shapes(np.arange(20_000), seed=5, epoch=1))
    of_two = np.flatnonzero((shapes == (2, 1)).all(1))
    classes = sampler.draw(of_two, seed=5).classes
    assert chance(Counter(map(tuple, classes.tolist())), 12 * 11) > 1e-4
    only_shots = EpisodeSampler(LABELS, 5, (1, 4), 3).shapes(range(200), 0)
    assert set(only_shots[:, 0]) == {5} and set(only_shots[:, 1]) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ways": (6, 2)}, r"ways must be a number or two rising ones, as \[5, 20\], got \[6, 2\]"),
        ({"shots": [3, 3]}, r"shots must be .* got \[3, 3\]"),
        ({"shots": (1, 2, 3)}, r"shots must be .* got \[1, 2, 3\]"),
        ({"ways": (0, 2)}, "ways must be an integer of at least 1, got 0"),
        ({"ways": (2, "6")}, "ways must be an integer of at least 1, got '6'"),
        ({"queries": (1, 3)}, "queries must be an integer"),
        ({"ways": (2, 13)}, "2-13 ways asked of 12 classes; give at most 12 ways"),
        ({"shots": (1, 9)}, r"class 0 has 11 images, but 1-9 shots \+ 3 queries need 12 \(1 of 12"),
    ],
)
def test_ranges_that_cannot_be(given, words):
    with pytest.raises(ValueError, match=words):
        EpisodeSampler(LABELS, **{**RANGES, **given})


def test_episodes_of_several_shapes_are_not_drawn_at_once():
    sampler = EpisodeSampler(LABELS, **RANGES)
    with pytest.raises(
        ValueError, match=r"not all of these have \d ways and \d shots as the first: draw one at a time"
    ):
        sampler.draw(range(20), seed=0)
    assert sampler.draw([], seed=0).classes.shape[0] == 0


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("head", [PrototypicalHead(), MatchingHead()])
@pytest.mark.parametrize("shape", [RANGES, {"ways": 3, "shots": 2, "queries": 3}])
def test_evaluation_is_that_of_every_episode_by_itself(shape, head, chunk_size):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.from_numpy(LABELS)
    features, labels = numbers[:, None] / 4 + torch.randn(len(numbers), 8, generator=generator), 10 * numbers + 3
    found = evaluate_episodes(features, labels, head, **shape, num_episodes=60, seed=3, chunk_size=chunk_size)
    sampler = EpisodeSampler(labels, **shape)
    accuracies, losses, hits = [], [], {label: [] for label in range(12)}
    named, met = np.zeros((12, 12), int), np.zeros((12, 12), int)
    for number in range(60):
        (classes,), (support,), (query,) = sampler.draw([number], seed=3)
        logits = head(features[support][None], features[query.flatten()][None])[0].detach()
        target = torch.arange(len(classes)).repeat_interleave(3)
        right = logits.argmax(-1) == target
        accuracies.append(right.double().mean().item())
        losses.append(torch.nn.functional.cross_entropy(logits, target).item())
        classes = (classes - 3) // 10
        for place, label in enumerate(classes.tolist()):
            hits[label] += right[target == place].tolist()
            met[label, classes] += 3
        np.add.at(named, (classes[target], classes[logits.argmax(-1)]), 1)
    assert found.accuracies.tolist() == pytest.approx(accuracies)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.class_accuracies.tolist() == pytest.approx([np.mean(hits[label]) for label in range(12)])
    assert (found.ways, found.shots, found.queries) == tuple(shape.values()) and len(set(accuracies)) > 5
    assert found.classes.tolist() == [10 * number + 3 for number in range(12)]
    assert shape is RANGES or not met.all()  # some classes never meet
    assert found.confusion.matrix.tolist() == named.tolist()
    assert found.confusion.of.tolist() == met[named > 0].tolist()
    short = evaluate_episodes(features, labels, head, **shape, num_episodes=25, seed=3)
    assert torch.equal(short.accuracies, found.accuracies[:25])
    one = evaluate_episodes(features, labels, head, **shape, num_episodes=1, seed=3)
    drawn = torch.isin(one.classes, sampler.draw([0], seed=3).classes)
    assert torch.equal(one.class_accuracies.isnan(), ~drawn) and not drawn.all()


def test_the_identity_of_episodes_tells_ranges_apart_and_numbers_as_before():
    labels = torch.zeros(3, dtype=torch.int64)
    shapes = [(5, 1), (5, (1, 2)), ((5, 6), 1), ((5, 6), (1, 2)), ((5, 7), (1, 2))]
    found = [episodes_identity(labels, "a", EpisodeSettings(*shape), 0) for shape in shapes]
    assert len(set(found)) == 5 and found[0] == "3084b84a48da525a"
    assert episodes_identity(labels, "a", EpisodeSettings([5, 6], [1, 2]), 0) == found[3]


def module(**options):
    ranged = EpisodeSettings(ways=(2, 5), shots=(1, 3), queries=4, episodes=8)
    plain = EpisodeSettings(ways=3, shots=2, queries=4, episodes=30)
    defaults = {"train": ranged, "val": plain, "test": ranged, "episodes_per_step": 1, "seed": 1}
    return EpisodicDataModule("shades", **{**defaults, **options})


@pytest.mark.usefixtures("small_things")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_has_one_episode_of_its_own_shape(workers):
    data = module(num_workers=workers, crop_padding=1, erasing=0.5)
    loader = data.train_dataloader()
    shapes = EpisodeSampler(data.image_set("train").labels, (2, 5), (1, 3), 4).shapes(range(8), 1)
    batches = list(loader)
    assert [tuple(batch.support.shape[1:3]) for batch in batches] == list(map(tuple, shapes)) and len(
        set(map(tuple, shapes))
    ) > 3
    for number, batch in enumerate(batches):
        ways, shots = batch.support.shape[1:3]
        assert batch.query.shape[1] == 4 * ways and batch.augmentation.shape[1] == ways * (shots + 4)
        again = loader.dataset.__getitems__([number])
        assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))
        assert data.on_after_batch_transfer(batch, 0).support.shape == batch.support.shape


@pytest.mark.usefixtures("small_things")
def test_settings_of_the_data_that_do_not_fit_a_range():
    with pytest.raises(
        ValueError, match="episodes_per_step=2 needs training episodes of one shape, .*: 1, and trainer.acc"
    ):
        module(episodes_per_step=2)
    with pytest.raises(ValueError, match=r"test episodes: ways must be .*got \[5, 2\]"):
        module(test=EpisodeSettings(ways=(5, 2)))
    with pytest.raises(ValueError, match="2-7 ways asked of 6 classes"):
        module(test=EpisodeSettings(ways=(2, 7), queries=3)).setup("test")


@pytest.mark.usefixtures("small_things")
@pytest.mark.parametrize("method", [PrototypicalNetwork, MatchingNetwork, CrossAttentionNetwork])
def test_every_method_trains_on_ranges(method):
    model, trainer = method(backbone="tiny", norm="swbn-fro"), pl.Trainer(max_epochs=1, **QUIET)
    trainer.fit(model, datamodule=module())
    assert trainer.global_step == 8
    trainer.test(model, datamodule=module())
    assert model.episode_results["test"].accuracies.shape == (8,)


@pytest.mark.usefixtures("small_things")
def test_the_command_names_ranges_in_all_that_it_writes(capsys):
    arguments = [
        "--model=fewshot.PrototypicalNetwork", "--model.backbone=tiny", "--data=fewshot.EpisodicDataModule",
        "--data.dataset=shades", "--data.train={ways: [2, 4], queries: 2, episodes: 4}", "--data.episodes_per_step=1",
        "--data.val={ways: 3, shots: 2, queries: 4, episodes: 30}", "--trainer.accelerator=cpu",
        "--data.test={ways: [2, 5], shots: [1, 3], queries: 4, episodes: 30}", "--whiteness.num_images=16",
    ]  # fmt: skip
    for name in ("a", "b"):
        main(["fit", *arguments, "--trainer.max_epochs=1", f"--run.name={name}"])
        own = ["--config", f"runs/{name}/version_0/config.yaml", "--ckpt_path", f"runs/{name}"]
        main(["test", *own])
    (row,) = json.loads(Path("runs/a/version_1/results.json").read_text())["results"]
    assert (row["ways"], row["shots"], row["episodes"]) == ("2-5", "1-3", 30)
    main(["test", *own, "--data.test.shots=2"])
    assert json.loads(Path("runs/b/version_2/results.json").read_text())["results"][0]["shots"] == 2
    capsys.readouterr()
    main(["compare", "runs/a", "runs/b"])
    assert "test, 2-5-way 1-3-shot, 4 queries, seed 0, 30 episodes" in capsys.readouterr().out
    main(["report", "runs/b"])
    page = Path("runs/b/report.html").read_text()
    assert "test, 2-5-way 1-3-shot" in page and "test, 2-5-way 2-shot" in page
    for wrong, words in (
        ("[4, 2]", "or two rising ones"),
        ("many", "data.test.ways: expected int or a list, got 'many'"),
    ):
        with pytest.raises(SystemExit):
            main(["test", *own, f"--data.test.ways={wrong}"])
        assert words in capsys.readouterr().err


@pytest.mark.usefixtures("small_things")
def test_a_part_of_the_split_holds_whole_episodes_of_the_most_shots():
    few = EpisodeSettings(ways=(2, 3), shots=(1, 3), queries=4, episodes=20)
    data = module(test=few, eval_batch_size=27)  # three classes of 7 images, and six images of another class
    model, trainer = PrototypicalNetwork(backbone="tiny"), pl.Trainer(limit_test_batches=1, **QUIET)
    with pytest.warns(UserWarning, match="evaluated on 21 of the test split's 66 images"):
        trainer.test(model, datamodule=data)
    assert model.episode_results["test"].num_episodes == 20
