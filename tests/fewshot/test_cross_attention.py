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
    assert [transductive_rounds(n) for n in (1, 2, 3, 25)] == [(1, 1), (1, 2), (1, 2), (11, 22)]


def test_the_fusion_has_the_published_parameters_and_starts_by_fan_out():
    # m -> m // 6 -> m with biases, as the public code's convolutions have, and gamma and beta.
    assert sum(p.numel() for p in CrossAttentionHead(36).parameters()) == 36 * 6 + 6 + 2 * 6 + 6 * 36 + 36
    fusion = CrossAttentionHead(3600).fusion
    assert fusion.squeeze.weight.std().item() == pytest.approx(math.sqrt(2 / 600), rel=0.01)
    assert fusion.expand.weight.std().item() == pytest.approx(math.sqrt(2 / 3600), rel=0.01)


@pytest.mark.parametrize("name", ["ln", "swbn-kl", "dbn"])
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


def test_evaluation_gives_the_same_in_chunks_of_any_size():
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
        for chunk in (1, 4):
            part = evaluate_episodes(features, labels, head, chunk_size=chunk, **options)
            assert torch.equal(part.accuracies, whole.accuracies) and part.loss == pytest.approx(whole.loss)
        assert head.training  # evaluated in evaluation mode, and then what it was
        assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_positions": 0}, "num_positions must be an integer of at least 1, got 0"),
        ({"temperature": 0.0}, "temperature of cross attention must be positive and finite, got 0.0"),
        ({"scale": math.inf}, "scale of cross attention must be positive and finite, got inf"),
        ({"norm_args": {"track_running_stats": False}}, r"fusion.norm \(BatchNorm1d\) keeps no running statistics"),
        ({"norm": "in"}, "cannot have .*InstanceNorm1d"),
        ({"norm": "gn"}, r"cannot have GroupNorm\(6, 6.*num_groups: 1"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        CrossAttentionHead(**{"num_positions": 36, **options})
    with pytest.raises(ValueError, match="made for maps of 36 positions, but these have 5x5"):
        CrossAttentionHead(36)(torch.randn(1, 2, 1, 4, 5, 5), torch.randn(1, 2, 4, 5, 5))
