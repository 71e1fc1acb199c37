"""Cross attention against a literal version: every pair by itself, with its correlation and its attended maps."""

import math

import pytest
import torch
from torch.nn import functional as F

from fewshot import CrossAttentionHead, evaluate_episodes
from fewshot.heads.cross_attention import transductive_rounds
from tests.fewshot.cross_attention_reference import literal, rounds_by_loops

EPISODES, WAYS, SHOTS, QUERIES, CHANNELS, HEIGHT, WIDTH = 2, 3, 2, 4, 5, 3, 4
POSITIONS = HEIGHT * WIDTH


def a_head(dtype=torch.float64, **options):
    """A head with statistics and affine parameters that are nothing special."""
    head = CrossAttentionHead(POSITIONS, **options).to(dtype)
    with torch.no_grad():
        for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
            if "norm" in name and tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
        head.fusion.expand.weight.mul_(3)
    return head.eval()


def weights_of(head):
    return {name: tensor.detach().clone() for name, tensor in head.fusion.state_dict().items()}


def some_maps(dtype=torch.float64, shots=SHOTS):
    support = torch.randn(EPISODES, WAYS, shots, CHANNELS, HEIGHT, WIDTH, dtype=dtype)
    return support, torch.randn(EPISODES, WAYS * QUERIES, CHANNELS, HEIGHT, WIDTH, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_logits_equal_the_literal_version(dtype, tolerance):
    head, (support, query) = a_head(dtype), some_maps(dtype)
    weights = {name: tensor.double() for name, tensor in weights_of(head).items()}
    expected = literal(support.double().mean(2), query.double(), weights)
    with torch.no_grad():
        torch.testing.assert_close(head(support, query).double(), expected.logits, rtol=tolerance, atol=tolerance)
        channels_last = [maps.movedim(-3, -1).contiguous().movedim(-1, -3) for maps in (support, query)]
        torch.testing.assert_close(head(*channels_last).double(), expected.logits, rtol=tolerance, atol=tolerance)
    factors = expected.attended_query[0, 0] / query[0, 0].double().flatten(1).mT
    assert expected.logits.std() > 0.5 and factors.std() > 0.1  # nothing flat that any formula would give


def test_a_training_forward_normalises_by_the_batch_and_each_direction_by_itself():
    head, (support, query) = a_head().train(), some_maps()
    weights = weights_of(head)
    expected = literal(support.mean(2), query, weights, training=True)
    torch.testing.assert_close(head(support, query), expected.logits, rtol=1e-10, atol=1e-10)
    after = weights_of(head)
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(after[name], weights[name], rtol=1e-10, atol=1e-10)
    assert after["norm.num_batches_tracked"] == 2


@pytest.mark.parametrize("training", [True, False])
def test_what_the_losses_are_made_of_equals_the_literal_version(training):
    head, (support, query) = a_head().train(training), some_maps()
    expected = literal(support.mean(2), query, weights_of(head), training)
    found = head.position_logits(support, query)
    for e in range(EPISODES):
        for i in range(WAYS * QUERIES):
            true = expected.attended_query[e, i, i // QUERIES]
            torch.testing.assert_close(found.attended[e, i], true, rtol=1e-10, atol=1e-10)
    vectors = F.normalize(expected.attended_class.mean(-2), dim=-1)
    cosines = torch.einsum("emwpc,emwc->emwp", F.normalize(expected.attended_query, dim=-1), vectors)
    torch.testing.assert_close(found.episodic, 7 * cosines, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.pooled, expected.logits, rtol=1e-10, atol=1e-10)
    assert found.episodic.requires_grad and not found.pooled.requires_grad


def test_transductive_inference_equals_the_literal_version():
    head, (support, query) = a_head(transductive=True), some_maps()
    weights = weights_of(head)
    logits = head(support, query).detach()
    assert head.transductive
    for e in range(EPISODES):
        expected = rounds_by_loops(support[e], query[e], weights, (5, 10))  # 7/15 of 12 queries, and twice that
        torch.testing.assert_close(logits[e], expected, rtol=1e-10, atol=1e-10)
    inductive = a_head()
    inductive.load_state_dict(head.state_dict())
    assert not torch.allclose(inductive(support, query), logits, atol=1e-3)


def test_rounds_are_the_public_codes_share_of_the_queries():
    assert transductive_rounds(75) == (35, 70)
    assert transductive_rounds(150) == (70, 140)
    assert [transductive_rounds(n) for n in (1, 2, 3, 25)] == [(1, 1), (1, 2), (1, 2), (11, 22)]


@pytest.mark.parametrize("transductive", [False, True])
def test_no_episode_changes_another(transductive):
    head = a_head(torch.float32, transductive=transductive)
    support = torch.randn(6, 4, 3, CHANNELS, HEIGHT, WIDTH)
    query = torch.randn(6, 10, CHANNELS, HEIGHT, WIDTH)
    logits = head(support, query)
    order = torch.tensor([4, 0, 2])
    torch.testing.assert_close(head(support[order], query[order]), logits[order])
    some = torch.tensor([3, 9, 0])
    alone = torch.allclose(head(support, query[:, some]), logits[:, some], rtol=1e-5, atol=1e-5)
    assert alone is not transductive  # a query by itself, or with the help of the others


@pytest.mark.parametrize(("ways", "shots", "queries"), [(2, 1, 1), (7, 1, 3), (3, 5, 20)])
def test_any_ways_shots_and_queries(ways, shots, queries):
    head = CrossAttentionHead(6).train()
    support, query = torch.randn(2, ways, shots, 4, 2, 3), torch.randn(2, ways * queries, 4, 2, 3)
    assert head(support, query).shape == (2, ways * queries, ways)
    found = head.position_logits(support, query)
    assert found.episodic.shape == (2, ways * queries, ways, 6) and found.attended.shape == (2, ways * queries, 6, 4)


@pytest.mark.parametrize(("positions", "hidden", "parameters"), [(36, 6, 486), (64, 10, 1374)])
def test_the_fusion_has_the_published_parameters(positions, hidden, parameters):
    # m -> m // 6 -> m with biases, as the public code's convolutions have, and gamma and beta.
    by_hand = positions * hidden + hidden + 2 * hidden + hidden * positions + positions
    assert by_hand == parameters
    assert sum(p.numel() for p in CrossAttentionHead(positions).parameters()) == parameters


def test_the_fusion_starts_by_fan_out():
    fusion = CrossAttentionHead(3600).fusion
    assert fusion.squeeze.weight.std().item() == pytest.approx(math.sqrt(2 / 600), rel=0.01)
    assert fusion.expand.weight.std().item() == pytest.approx(math.sqrt(2 / 3600), rel=0.01)


@pytest.mark.parametrize("name", ["bn", "ln", "swbn-kl", "iternorm", "dbn"])
def test_the_fusion_with_every_norm_that_can_be_there(name):
    torch.manual_seed(0)
    head = CrossAttentionHead(36, norm=name)
    support, query = torch.randn(2, 5, 1, 8, 6, 6), torch.randn(2, 10, 8, 6, 6)
    head(support, query).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    head.eval()
    torch.testing.assert_close(head(support[:1], query[:1]), head(support, query)[:1])
    torch.manual_seed(0)
    plain = CrossAttentionHead(36, norm="none")
    assert torch.equal(plain.fusion.expand.weight, head.fusion.expand.weight)  # the same start whatever the norm


def test_logits_are_float32_under_autocast_and_in_16_bits():
    support, query = (maps.bfloat16() for maps in some_maps())
    head = a_head(torch.float32)
    expected = head(support.float(), query.float())
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(support, query)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)
    assert head.bfloat16()(support, query).dtype == torch.float32  # parameters of another dtype than the features


def test_evaluation_gives_the_same_digits_in_chunks_of_any_size():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat_interleave(20)
    features = torch.randn(8, 16, 1, 1, generator=generator)[labels]
    features = features + 6 * torch.randn(160, 16, HEIGHT, WIDTH, generator=generator)
    for transductive in (False, True):
        head = CrossAttentionHead(POSITIONS, transductive=transductive)
        options = {"ways": 5, "shots": 2, "queries": 6, "num_episodes": 13, "seed": 1}
        state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        whole = evaluate_episodes(features, labels, head, **options)
        assert 0.3 < whole.mean < 0.99 and whole.transductive is transductive
        for chunk in (1, 4, 12):
            part = evaluate_episodes(features, labels, head, chunk_size=chunk, **options)
            assert torch.equal(part.accuracies, whole.accuracies) and part.loss == whole.loss
        assert head.training  # evaluated in evaluation mode, and then what it was
        assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_positions": 0}, "num_positions must be an integer of at least 1, got 0"),
        ({"reduction": 0}, "reduction must be"),
        ({"temperature": 0.0}, "temperature of cross attention must be positive and finite, got 0.0"),
        ({"scale": math.inf}, "scale of cross attention must be positive and finite, got inf"),
        ({"norm": "bm"}, "unknown norm 'bm'; did you mean 'bn'"),
        ({"norm_args": {"step_size": 1}}, "unknown option of norm 'bn'"),
        ({"norm_args": {"track_running_stats": False}}, r"fusion.norm \(BatchNorm1d\) keeps no running statistics"),
        ({"norm": "in"}, "cannot have .*InstanceNorm1d"),
        ({"norm": "gn"}, r"cannot have GroupNorm\(6, 6.*num_groups: 1"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        CrossAttentionHead(**{"num_positions": 36, **options})


def test_maps_of_another_size_are_refused():
    with pytest.raises(ValueError, match="made for maps of 36 positions, but these have 5x5"):
        CrossAttentionHead(36)(torch.randn(1, 2, 1, 4, 5, 5), torch.randn(1, 2, 4, 5, 5))
