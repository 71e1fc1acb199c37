"""Prototypes against a literal version, and evaluation over cached features."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fewshot import PrototypicalHead, evaluate_episodes, sample_episodes


def literal_logits(support, query, metric, scale, average):
    """Snell et al., equation 1 and 2, with loops."""
    episodes, ways, _, channels = support.shape
    logits = np.zeros((episodes, query.shape[1], ways))
    for e in range(episodes):
        for i in range(query.shape[1]):
            for c in range(ways):
                prototype, q = support[e, c].mean(0), query[e, i]
                if metric == "cosine":
                    logits[e, i, c] = scale * (q @ prototype) / np.linalg.norm(q) / np.linalg.norm(prototype)
                else:
                    logits[e, i, c] = -scale * ((q - prototype) ** 2).sum() / (channels if average else 1)
    return logits


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 1.0),
        ({"average_channels": True}, 10.0),
        ({"metric": "cosine"}, 10.0),
        ({"metric": "cosine", "scale": 2.5}, 2.5),
    ],
)
def test_prototypes_equal_the_literal_version(options, scale):
    rng = np.random.default_rng(0)
    support, query = rng.normal(size=(3, 4, 2, 7)) + 5, rng.normal(size=(3, 12, 7)) + 5
    head = PrototypicalHead(**options)
    logits = head(torch.from_numpy(support).float(), torch.from_numpy(query).float())
    expected = literal_logits(
        support, query, options.get("metric", "euclidean"), scale, options.get("average_channels", False)
    )
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-4)
    assert not list(head.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "euclid"}, "did you mean 'euclidean'"),
        ({"metric": "cosine", "average_channels": True}, "belongs to metric 'euclidean'"),
        ({"scale": 0.0}, "positive and finite, got 0.0"),
    ],
)
def test_head_errors(options, words):
    with pytest.raises(ValueError, match=words):
        PrototypicalHead(**options)


@pytest.fixture
def embedded():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(12).repeat_interleave(25)
    centres = torch.randn(12, 16, generator=generator)
    return centres[labels] + 1.5 * torch.randn(300, 16, generator=generator), labels


def evaluate(features, labels, episodes=200, **options):
    head = PrototypicalHead()
    return evaluate_episodes(
        features, labels, head, ways=5, shots=2, queries=8, num_episodes=episodes, seed=3, **options
    )


def test_evaluation_equals_episode_by_episode(embedded):
    features, labels = embedded
    result = evaluate(features, labels)
    episodes = sample_episodes(labels, 5, 2, 8, 200, seed=3)
    accuracies = []
    for support, query in zip(episodes.support, episodes.query, strict=True):
        prototypes = features[support].mean(1)
        distances = (features[query][:, :, None] - prototypes).square().sum(-1)  # [W, Q, W]
        accuracies.append((distances.argmin(-1) == torch.arange(5)[:, None]).double().mean().item())
    assert result.accuracies.tolist() == pytest.approx(accuracies)
    assert 0.4 < result.mean < 0.99 and result.mean == pytest.approx(np.mean(accuracies))
    assert result.std == pytest.approx(np.std(accuracies, ddof=1))
    assert result.ci95 == pytest.approx(1.97196 * np.std(accuracies, ddof=1) / math.sqrt(200), rel=1e-4)  # t(199)
    assert (result.num_episodes, result.seed) == (200, 3)
    few = evaluate(features, labels, episodes=50, chunk_size=7)  # a longer evaluation begins with a shorter one's
    assert torch.equal(few.accuracies, result.accuracies[:50])


def test_evaluation_errors(embedded):
    features, labels = embedded
    with pytest.raises(ValueError, match="299 features but 300 labels"):
        evaluate(features[1:], labels)
    with pytest.raises(ValueError, match="5 ways asked of 0 classes"):
        evaluate(features[:0], labels[:0])
    with pytest.raises(ValueError, match="num_episodes"):
        evaluate(features, labels, episodes=0)
    result = evaluate(features, labels, episodes=1)
    assert result.std is None and result.ci95 is None and result.mean == result.accuracies.item()


class Largest(TorchFunctionMode):
    """Notes the largest tensor that a call of torch gave."""

    numbers = 0

    def __torch_function__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_features_that_are_not_finite_are_found_without_a_copy_of_all(embedded):
    features, labels = embedded
    with Largest() as largest:
        evaluate(features, labels, episodes=1)
    assert 0 < largest.numbers < features.numel()
    for bad in (math.nan, math.inf, -math.inf):
        features[7, 3] = bad
        with pytest.raises(ValueError, match="1 of 300 features are not finite, the first of number 7: no accuracy"):
            evaluate(features, labels)


class Recorder(nn.Module):
    """A head that says how it was called."""

    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(16), []

    def forward(self, support, query):
        self.calls.append((len(support), self.training or self.norm.training))
        return self.norm(query.flatten(0, 1)).view_as(query)[..., : support.shape[1]]


def test_a_head_is_run_in_evaluation_mode_a_chunk_at_a_time(embedded):
    def calls(head, **options):
        evaluate_episodes(*embedded, head, ways=5, shots=2, queries=8, seed=3, **options)
        return head.calls

    head = Recorder()
    state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    assert calls(head, num_episodes=10, chunk_size=7) == [(7, False), (3, False)]
    assert head.training and all(torch.equal(state[n], tensor) for n, tensor in head.state_dict().items())
    greedy = Recorder()
    greedy.features_held = 4
    # 16 MiB of four times 50 features of 16 float32 each.
    assert calls(greedy, num_episodes=2000) == [(1310, False), (690, False)]
    head.norm = nn.BatchNorm1d(16, track_running_stats=False)
    with pytest.raises(ValueError, match=r"norm \(BatchNorm1d\) keeps no running statistics"):
        calls(head, num_episodes=10)


def test_a_network_that_normalises_by_its_batch_goes_episode_by_episode():
    torch.manual_seed(0)
    images, labels = torch.randn(60, 3, 4, 4), torch.arange(6).repeat_interleave(10)
    images += labels.view(-1, 1, 1, 1) / 2
    norm = torch.nn.BatchNorm2d(3, track_running_stats=False)
    network = torch.nn.Sequential(norm, torch.nn.Conv2d(3, 8, 4), torch.nn.Flatten()).eval()
    settings = {"ways": 3, "shots": 2, "queries": 4}
    result = evaluate_episodes(
        images, labels, PrototypicalHead(), embed=network, num_episodes=7, seed=5, chunk_size=4, **settings
    )
    episodes = sample_episodes(labels, num_episodes=7, seed=5, **settings)
    for number, (support, query) in enumerate(zip(episodes.support, episodes.query, strict=True)):
        together = images[torch.cat([support.flatten(), query.flatten()])].double()
        mean, var = together.mean((0, 2, 3)), together.var((0, 2, 3), correction=0)
        white = (together - mean.view(3, 1, 1)) / (var.view(3, 1, 1) + 1e-5).sqrt()
        weight, bias = network[1].weight.double(), network[1].bias.double()
        features = torch.einsum("nchw,ochw->no", white, weight) + bias
        prototypes = features[:6].unflatten(0, (3, 2)).mean(1)
        nearest = torch.cdist(features[6:], prototypes).argmin(1)
        right = (nearest == torch.arange(3).repeat_interleave(4)).double().mean()
        assert result.accuracies[number] == right
    assert 0.4 < result.mean < 1
