"""Classes with different numbers of support images: every head beside a literal version, and a head that cannot."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.special import softmax as probabilities
from torch.nn import functional as F

from fewshot import (
    CrossAttentionHead,
    LogisticRegressionHead,
    MatchingHead,
    NearestCentroidHead,
    PrototypicalHead,
    RidgeHead,
)
from fewshot.heads import EpisodeHead
from fewshot.prediction import nearest_images
from tests.fewshot.cross_attention_reference import literal
from tests.fewshot.test_cross_attention import weights_of
from tests.fewshot.test_matching import literal_context, softmax
from tests.fewshot.test_transfer_heads import minimum

COUNTS = (1, 4, 2)
HEADS = {
    "euclidean": PrototypicalHead(),
    "cosine": PrototypicalHead("cosine"),
    "centroid": NearestCentroidHead("l2"),
    "ridge": RidgeHead("l2", penalty=0.5, scale=3.0),
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


def of_length_1(rows):
    return rows / np.linalg.norm(rows, axis=1)[:, None]


def with_ones(rows):
    return np.hstack([rows, np.ones((len(rows), 1))])


def owners(support):
    return np.repeat(np.arange(len(support)), [len(rows) for rows in support])


def literal_logits(name, support, query, head):
    if name in ("centroid", "ridge"):
        support, query = [of_length_1(rows) for rows in support], of_length_1(query)
    if name == "ridge":
        x, y = with_ones(np.concatenate(support)), np.eye(len(support))[owners(support)]
        return 3 * with_ones(query) @ np.linalg.solve(x.T @ x + 0.5 * np.eye(7), x.T @ y)
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
    owner = owners(support)
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


@pytest.mark.parametrize(("counts", "C"), [(COUNTS, 2.0), ((1, 9), 0.3), ((5, 1, 1, 12), 100.0)])
def test_uneven_logistic_regression_is_the_minimum_and_scikit_learns(counts, C):
    support, query = vectors(counts)
    head = LogisticRegressionHead("l2", C).double()
    found = head.uneven_logits(*tensors(support, query)).numpy()
    x, q, labels = of_length_1(np.concatenate(support)), of_length_1(query), owners(support)
    w, b = minimum(x, labels, len(counts), C)
    expected = log_softmax(q @ w.T + b, axis=1)
    np.testing.assert_allclose(log_softmax(found, axis=1), expected, rtol=2e-6, atol=2e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = head.float().uneven_logits(
            [torch.from_numpy(rows).bfloat16() for rows in support], torch.from_numpy(query).bfloat16()
        )
    assert half.dtype == torch.float32 and np.abs(log_softmax(half, axis=1) - expected).max() < 0.2

    linear_model = pytest.importorskip("sklearn.linear_model", reason="`make test` installs scikit-learn")
    theirs = linear_model.LogisticRegression(
        C=C if len(counts) > 2 else 2 * C, solver="newton-cg", tol=1e-10, max_iter=10_000
    )  # of two classes it has one vector, whose penalty is half of ours
    np.testing.assert_allclose(probabilities(found, axis=1), theirs.fit(x, labels).predict_proba(q), atol=1e-4)


@pytest.mark.parametrize("name", [*HEADS, "regression"])
def test_of_equal_numbers_they_are_those_of_an_episode(name):
    head = {**HEADS, "regression": LogisticRegressionHead()}[name].double()
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
