"""Classes with different numbers of support images: every head beside a literal version, and a head that cannot."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fewshot import CrossAttentionHead, MatchingHead, NearestCentroidHead, PrototypicalHead
from fewshot.heads import EpisodeHead
from fewshot.prediction import nearest_images
from tests.fewshot.cross_attention_reference import literal
from tests.fewshot.test_cross_attention import weights_of
from tests.fewshot.test_matching import literal_context, softmax

COUNTS = (1, 4, 2)
HEADS = {
    "euclidean": PrototypicalHead(),
    "cosine": PrototypicalHead("cosine"),
    "centroid": NearestCentroidHead("l2"),
    "matching": MatchingHead(2.5),
    "context": MatchingHead(2.5, full_context=True, num_features=6, context_steps=2),
}


def vectors(counts=COUNTS):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(count, 6)) + 1 for count in counts], rng.normal(size=(5, 6)) + 1


def tensors(support, query):
    return [torch.from_numpy(rows) for rows in support], torch.from_numpy(query)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def literal_logits(name, support, query, head):
    if name == "centroid":
        support, query = (
            [rows / np.linalg.norm(rows, axis=1)[:, None] for rows in support],
            [q / np.linalg.norm(q) for q in query],
        )
    prototypes = [rows.mean(0) for rows in support]
    if name in ("euclidean", "centroid"):
        scale = 10 if name == "centroid" else 1
        return np.array([[-scale * ((x - p) ** 2).sum() for p in prototypes] for x in query])
    if name == "cosine":
        return np.array([[10 * cosine(x, p) for p in prototypes] for x in query])
    examples = np.concatenate(support)
    if name == "context":
        weights = {key: value.numpy() for key, value in head.context.state_dict().items()}
        examples, query = literal_context(examples, query, weights, 2)
    owner = np.repeat(np.arange(len(support)), [len(rows) for rows in support])
    attention = [softmax(np.array([2.5 * cosine(x, s) for s in examples])) for x in query]
    return np.log([[a[owner == c].sum() for c in range(len(support))] for a in attention])


@pytest.mark.parametrize("name", HEADS)
def test_uneven_logits_equal_the_literal_version(name):
    head = HEADS[name].double()
    support, query = vectors()
    with torch.no_grad():
        logits = head.uneven_logits(*tensors(support, query))
        np.testing.assert_allclose(
            logits, literal_logits(name, support, query, head), rtol=1e-6
        )  # of log 2.5 in float32
        half = [rows.bfloat16() for rows in tensors(support, query)[0]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert head.float().uneven_logits(half, torch.from_numpy(query).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("name", HEADS)
def test_of_equal_numbers_they_are_those_of_an_episode(name):
    head = HEADS[name].double()
    support, query = tensors(*vectors((3, 3)))
    with torch.no_grad():
        torch.testing.assert_close(head.uneven_logits(support, query), head(torch.stack(support)[None], query[None])[0])


def test_cross_attention_attends_to_mean_maps():
    torch.manual_seed(0)
    head = CrossAttentionHead(num_positions=4).double().eval()
    support = [torch.randn(count, 6, 2, 2, dtype=torch.float64) for count in COUNTS]
    query = torch.randn(5, 6, 2, 2, dtype=torch.float64)
    maps = torch.stack([rows.mean(0) for rows in support])
    expected = literal(maps[None], query[None], weights_of(head)).logits[0]
    with torch.no_grad():
        torch.testing.assert_close(head.uneven_logits(support, query), expected, rtol=1e-10, atol=1e-10)
    head.transductive = True
    with pytest.raises(ValueError, match="CrossAttentionHead needs the same number of support images .* have 1, 4, 2"):
        head.uneven_logits(support, query)


def test_a_head_that_does_not_say_how_is_refused_by_name():
    class DotHead(EpisodeHead):
        def forward(self, support, query):
            return query @ support.mean(2).mT

    with pytest.raises(ValueError, match="DotHead needs the same number of support images of every class; .* 1, 4, 2"):
        DotHead().uneven_logits(*tensors(*vectors()))


def test_the_nearest_image_has_the_largest_cosine_of_averaged_maps():
    torch.manual_seed(0)
    support, query = torch.randn(7, 6, 2, 3) + 1, torch.randn(5, 6, 2, 3) + 1
    examples, images = (features.double().mean((2, 3)).numpy() for features in (support, query))
    expected = np.array([[cosine(x, s) for s in examples] for x in images])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        numbers, cosines = nearest_images(support, query)
    assert numbers.tolist() == expected.argmax(1).tolist() and len(set(numbers.tolist())) > 2
    np.testing.assert_allclose(cosines, expected.max(1), rtol=1e-5)
    flat = nearest_images(F.normalize(support.mean((2, 3))), 3 * query.mean((2, 3)))
    assert torch.equal(flat[0], numbers)
