"""Heads for trained features against literal versions in float64, and what every head has to keep."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, logsumexp, softmax

from fewshot import (
    CrossAttentionHead,
    LaplacianShotHead,
    LogisticRegressionHead,
    MatchingHead,
    NearestCentroidHead,
    PrototypicalHead,
    RidgeHead,
    SoftKMeansHead,
    evaluate_episodes,
)
from fewshot.heads import build_head

EPISODES, WAYS, SHOTS, QUERIES, CHANNELS = 3, 4, 2, 6, 5
NEW_HEADS = [NearestCentroidHead, LogisticRegressionHead, RidgeHead, SoftKMeansHead, LaplacianShotHead]


def episodes(ways=WAYS, shots=SHOTS, channels=CHANNELS, seed=0, spread=1.0):
    """Support and query of episodes whose classes overlap, far from the origin, and a base mean near them."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(EPISODES, ways, 1, channels)) + 3
    support = centres + spread * rng.normal(size=(EPISODES, ways, shots, channels))
    query = (centres + spread * rng.normal(size=(EPISODES, ways, QUERIES, channels))).reshape(EPISODES, -1, channels)
    return support, query, rng.normal(size=channels) + 2


def prepared(x, features, base_mean):
    """Wang et al., section 3."""
    x = x - base_mean if features == "cl2" else x
    return x if features == "plain" else x / np.linalg.norm(x, axis=-1, keepdims=True)


def logits_of(head, support, query, base_mean):
    if head.needs_base_mean:
        head.set_base_mean(torch.from_numpy(base_mean))
    return head.double()(torch.from_numpy(support), torch.from_numpy(query)).detach().numpy()


def distances(query, means):
    return np.array([[((q - m) ** 2).sum() for m in means] for q in query])


@pytest.mark.parametrize("features", ["plain", "l2", "cl2"])
def test_nearest_centroid(features):
    support, query, base_mean = episodes()
    found = logits_of(NearestCentroidHead(features), support, query, base_mean)
    scale = 1 if features == "plain" else 10
    for e in range(EPISODES):
        s, q = (prepared(x[e], features, base_mean) for x in (support, query))
        np.testing.assert_allclose(found[e], -scale * distances(q, s.mean(1)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("features", "steps", "scale"), [("plain", 1, 1.0), ("l2", 1, 10.0), ("cl2", 3, 4.0)])
def test_soft_k_means(features, steps, scale):
    """Ren et al., equations 3 and 4, image by image."""
    support, query, base_mean = episodes()
    head = SoftKMeansHead(features, steps, scale=None if scale in (1, 10) else scale)
    found = logits_of(head, support, query, base_mean)
    for e in range(EPISODES):
        s, q = (prepared(x[e], features, base_mean) for x in (support, query))
        means = [s[c].mean(0) for c in range(WAYS)]
        for _ in range(steps):
            z = [softmax([-scale * ((x - m) ** 2).sum() for m in means]) for x in q]
            means = [
                (sum(s[c]) + sum(z[j][c] * q[j] for j in range(len(q)))) / (SHOTS + sum(own[c] for own in z))
                for c in range(WAYS)
            ]
        np.testing.assert_allclose(found[e], -scale * distances(q, means), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shots", [1, 3])  # fewer and more images than channels
@pytest.mark.parametrize("features", ["plain", "cl2"])
def test_ridge_is_the_regression_in_the_space_of_the_features(features, shots):
    support, query, base_mean = episodes(shots=shots)
    found = logits_of(RidgeHead(features, penalty=0.5, scale=3.0), support, query, base_mean)
    for e in range(EPISODES):
        s, q = (prepared(x[e], features, base_mean) for x in (support, query))
        x = np.hstack([s.reshape(-1, CHANNELS), np.ones((WAYS * shots, 1))])
        y = np.repeat(np.eye(WAYS), shots, axis=0)
        weights = np.linalg.solve(x.T @ x + 0.5 * np.eye(CHANNELS + 1), x.T @ y)
        expected = 3 * np.hstack([q, np.ones((len(q), 1))]) @ weights
        np.testing.assert_allclose(found[e], expected, rtol=1e-5, atol=1e-6)  # the parameters' float32


def test_ridge_learns_through_the_solution():
    support, query, _ = (torch.from_numpy(x) for x in episodes())
    head = RidgeHead(penalty=2.0).double()
    inputs = [x.requires_grad_() for x in (support, query, head.log_penalty, head.log_scale)]

    def loss():
        return head(support, query).log_softmax(-1)[..., 0].mean()

    for x, gradient in zip(inputs, torch.autograd.grad(loss(), inputs), strict=True):
        way = torch.randn_like(x)
        with torch.no_grad():
            ends = []
            for step in (1e-5, -2e-5, 1e-5):
                x += step * way
                ends.append(loss())
        slope = (ends[0] - ends[1]) / 2e-5
        torch.testing.assert_close((gradient * way).sum(), slope, rtol=1e-6, atol=1e-8)
        assert gradient.abs().sum() > 1e-4
    assert not list(RidgeHead(learn=False).parameters())


@pytest.mark.parametrize(("knn", "rectify"), [(3, False), (3, True), (1000, True)])
def test_laplacian_shot(knn, rectify):
    """Ziko et al.: the rectified means, then equation 12 in rounds, query by query."""
    support, query, base_mean = episodes()
    head = LaplacianShotHead(strength=0.7, neighbours=knn - 1, rounds=4, rectify=rectify)
    found = logits_of(head, support, query, base_mean)
    for e in range(EPISODES):
        s, q = (prepared(x[e], "cl2", base_mean) for x in (support, query))
        means = s.mean(1)
        if rectify:
            q = q + (s.mean((0, 1)) - q.mean(0))

            def weight(x, means=means):
                return np.array([10 * x @ m / np.linalg.norm(x) / np.linalg.norm(m) for m in means])

            members = [list(s[c]) + [x for x in q if weight(x).argmax() == c] for c in range(WAYS)]
            means = np.array([np.mean([softmax(weight(x))[c] * x for x in own], 0) for c, own in enumerate(members)])
        a = distances(q, means)
        order = np.argsort(distances(q, q), axis=1)[:, 1:knn]  # the first is the query itself
        y = softmax(-a, axis=1)
        for _ in range(4):
            logits = np.array([-a[i] + 0.7 * sum(y[j] for j in order[i]) for i in range(len(q))])
            y = softmax(logits, axis=1)
        np.testing.assert_allclose(found[e], logits, rtol=1e-6, atol=1e-9)


def minimum(x, labels, ways, C):
    """scikit-learn's objective by a general optimiser: weights ``[W, C]``, intercepts ``[W]``."""
    channels, y = x.shape[1], np.eye(ways)[labels]

    def objective(values):
        w, b = values[:-ways].reshape(ways, channels), values[-ways:]
        z = x @ w.T + b
        slope = C * (softmax(z, axis=1) - y)
        value = (w**2).sum() / 2 + C * (logsumexp(z, axis=1) - (z * y).sum(1)).sum()
        return value, np.concatenate([(w + slope.T @ x).ravel(), slope.sum(0)])

    found = minimize(objective, np.zeros(ways * (channels + 1)), jac=True, method="BFGS", options={"gtol": 1e-9})
    return found.x[:-ways].reshape(ways, channels), found.x[-ways:]


@pytest.mark.parametrize(
    ("ways", "shots", "C", "spread", "features"),
    [
        (4, 2, 1.0, 1.0, "l2"),
        (4, 1, 1.0, 1.0, "cl2"),
        (4, 3, 100.0, 10.0, "plain"),  # whole Newton steps would not arrive
        (2, 12, 0.3, 2.0, "plain"),
    ],
)
def test_logistic_regression_is_the_minimum(ways, shots, C, spread, features):
    support, query, base_mean = episodes(ways, shots, spread=spread)
    found = logits_of(LogisticRegressionHead(features, C), support, query, base_mean)
    for e in range(EPISODES):
        s, q = (prepared(x[e], features, base_mean) for x in (support, query))
        w, b = minimum(s.reshape(-1, CHANNELS), np.repeat(np.arange(ways), shots), ways, C)
        expected = log_softmax(q @ w.T + b, axis=1)
        np.testing.assert_allclose(log_softmax(found[e], axis=1), expected, rtol=2e-6, atol=2e-6)


def test_logistic_regression_says_what_it_cannot_solve():
    support, query = 1e9 * torch.randn(2, 3, 2, 4), torch.randn(2, 6, 4)
    with pytest.raises(ValueError, match=r"[12] of 2 episodes are not solved after 50 steps; take a smaller C"):
        LogisticRegressionHead("plain", C=1e9)(support, query)


def any_head(kind, **options):
    if kind is CrossAttentionHead:
        head = CrossAttentionHead(4, **options)
    elif kind is MatchingHead:
        head = MatchingHead(**options)
    else:
        head = kind(**options)
    if getattr(head, "needs_base_mean", False):
        head.set_base_mean(torch.full((8,), 0.1))
    return head.eval()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in (PrototypicalHead, MatchingHead, CrossAttentionHead, *NEW_HEADS)),
        (CrossAttentionHead, {"transductive": True}),
        (LaplacianShotHead, {"rectify": False}),
    ],
)
@torch.no_grad()
def test_no_order_changes_a_head_and_no_episode_another(kind, options):
    head = any_head(kind, **options)
    shape = (8, 2, 2) if kind is CrossAttentionHead else (8,)
    generator = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(6, 4, 1, *shape, generator=generator)
    support = centres + torch.randn(6, 4, 3, *shape, generator=generator)
    query = (centres + torch.randn(6, 4, 5, *shape, generator=generator)).flatten(1, 2)
    logits = head(support, query)
    assert logits.shape == (6, 20, 4) and logits.isfinite().all() and logits.dtype == torch.float32

    def assert_equal(found, expected):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    classes, shots, queries = (torch.randperm(n, generator=generator) for n in (4, 3, 20))
    assert_equal(head(support[:, classes], query), logits[..., classes])
    assert_equal(head(support[:, :, shots], query), logits)
    assert_equal(head(support, query[:, queries]), logits[:, queries])
    assert_equal(head(support.flip(0), query.flip(0)), logits.flip(0))
    assert_equal(torch.cat([head(support[:1], query[:1]), head(support[1:], query[1:])]), logits)
    if not head.transductive:  # then each query is classified by itself, too
        assert_equal(head(support, query[:, :1]), logits[:, :1])


@pytest.mark.parametrize("kind", NEW_HEADS)
def test_features_of_16_bits_are_computed_in_32(kind):
    head = any_head(kind)
    support, query = (torch.randn(2, 5, 3, 8) + 1).bfloat16(), torch.randn(2, 10, 8).bfloat16()
    expected = head(support.float(), query.float())
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(support, query)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("kind", NEW_HEADS)
@pytest.mark.parametrize(("ways", "queries"), [(1, 1), (1, 4), (2, 1)])
def test_the_smallest_episodes(kind, ways, queries):
    assert any_head(kind)(torch.randn(2, ways, 1, 8), torch.randn(2, ways * queries, 8)).isfinite().all()


def test_many_images_in_an_episode_make_small_chunks():
    """A head with N x N systems for each class must not be given as many episodes as one that only has features."""
    given = []

    class Recorder(LogisticRegressionHead):
        def logits(self, support, query):
            given.append(len(support))
            return query.new_zeros(len(query), query.shape[1], support.shape[1])

    features, labels = torch.randn(200, 4), torch.arange(10).repeat_interleave(20)
    evaluate_episodes(features, labels, Recorder(), ways=10, shots=15, queries=1, num_episodes=12, seed=0)
    assert max(given) == 16 * 2**20 // (4 * 8 * 10 * 150**2 + 2 * 10 * 16 * 4 * 4)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("logistic", {}, r"unknown head 'logistic'; did you mean 'logistic-regression'\? Known: laplacian-shot, "),
        ("ridge", {"lambda": 1}, r"unknown option of head 'ridge': 'lambda'.* Known: features, learn, penalty, scale"),
        ("ridge", {"penalty": "much"}, "penalty of ridge must be positive and finite, got 'much'"),
        ("ridge", {"learn": "no"}, "ridge: learn must be true or false, got 'no'"),
        ("logistic-regression", {"C": 0}, "C of logistic regression must be positive and finite, got 0"),
        ("nearest-centroid", {"features": "cl2n"}, "unknown features 'cl2n'; did you mean 'cl2'"),
        ("soft-kmeans", {"steps": 0}, "soft k-means: steps must be an integer of at least 1, got 0"),
        ("laplacian-shot", {"neighbours": 2.5}, "neighbours must be an integer of at least 1, got 2.5"),
    ],
)
def test_errors(name, options, words):
    with pytest.raises(ValueError, match=words):
        build_head(name, options)


def test_centred_features_need_their_mean():
    with pytest.raises(ValueError, match=r"which this head was not given: call set_base_mean\(training_features.mean"):
        NearestCentroidHead()(torch.randn(1, 5, 1, 8), torch.randn(1, 5, 8))
    with pytest.raises(ValueError, match=r"is one vector \[C\], got \[2, 8\]"):
        NearestCentroidHead().set_base_mean(torch.zeros(2, 8))
