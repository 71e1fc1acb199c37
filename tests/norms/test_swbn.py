"""SWBN against the paper's algorithms, and what a drop-in for BatchNorm must honour."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from swbn_lightning import SWBN1d, SWBN2d, SWBN3d
from swbn_lightning.norms import functional as WF
from tests.norms.reference import ReferenceSWBN, correlated, from_columns, to_columns

SHAPES = {
    SWBN1d: [(40, 6), (12, 6, 5)],
    SWBN2d: [(8, 6, 4, 5)],
    SWBN3d: [(4, 6, 3, 2, 3)],
}
CASES = [(layer, shape) for layer, shapes in SHAPES.items() for shape in shapes]
CRITERIA = ["kl", "fro"]


def make(layer, shape, criterion, step_size=0.05, **options):
    norm = layer(shape[1], criterion=criterion, step_size=step_size, dtype=torch.float64, **options)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(rng.uniform(0.5, 2, shape[1])))
        norm.bias.copy_(torch.from_numpy(rng.normal(size=shape[1])))
    reference = ReferenceSWBN(shape[1], criterion, step_size, groups=options.get("num_groups", 1))
    reference.gamma, reference.beta = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    return norm, reference


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("layer", "shape"), CASES)
def test_ten_steps_follow_algorithms_1_and_3(layer, shape, criterion, groups):
    norm, reference = make(layer, shape, criterion, num_groups=groups)
    rng = np.random.default_rng(0)
    for _ in range(10):
        x = correlated(rng, shape)
        y = norm(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(y, from_columns(reference.train(to_columns(x)), shape), atol=1e-9)
    w = norm.whitening_matrix.numpy()
    assert abs(w - np.eye(6 // groups)).max() > 0.05  # it did move
    np.testing.assert_allclose(w, np.stack(reference.w), atol=1e-11)
    np.testing.assert_allclose(norm.running_mean.numpy(), reference.mu_e, rtol=1e-12)
    np.testing.assert_allclose(norm.running_var.numpy(), reference.v_e, rtol=1e-12)
    assert norm.num_batches_tracked == 10

    norm.eval()
    x = correlated(rng, shape)
    y = norm(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(y, from_columns(reference.predict(to_columns(x)), shape), atol=1e-10)
    np.testing.assert_array_equal(norm.whitening_matrix.numpy(), w)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("layer", "shape"), CASES)
def test_gradients_are_those_with_w_held_fixed(layer, shape, criterion, groups):
    norm, reference = make(layer, shape, criterion, num_groups=groups)
    rng = np.random.default_rng(2)
    x = correlated(rng, shape)
    upstream = rng.normal(size=shape)
    tensor = torch.from_numpy(x).requires_grad_()
    norm(tensor).backward(torch.from_numpy(upstream))
    reference.train(to_columns(x))  # the W of this forward is the stepped one

    def loss():
        return (from_columns(reference.frozen(to_columns(x)), shape) * upstream).sum()

    def central_difference(array, place, h=1e-5):
        kept = array[place]
        array[place] = kept + h
        above = loss()
        array[place] = kept - h
        below = loss()
        array[place] = kept
        return (above - below) / (2 * h)

    reference.gamma, reference.beta = reference.gamma.copy(), reference.beta.copy()
    for place in rng.choice(x.size, 25, replace=False):
        index = np.unravel_index(place, shape)
        assert tensor.grad.numpy()[index] == pytest.approx(central_difference(x, index), rel=1e-5, abs=1e-6)
    for channel in range(shape[1]):
        assert norm.weight.grad[channel].item() == pytest.approx(central_difference(reference.gamma, channel), rel=1e-6)
        assert norm.bias.grad[channel].item() == pytest.approx(central_difference(reference.beta, channel), rel=1e-6)


def test_fro_step_is_the_gradient_of_its_criterion():
    # Appendix B: the Fro rule is the exact derivative of C_Fro(W S W^T); S from data, W anything symmetric.
    torch.manual_seed(0)
    x = torch.randn(200, 5, dtype=torch.float64) @ torch.randn(5, 5, dtype=torch.float64)
    s = WF.covariance(x)[0]
    w = torch.eye(5, dtype=torch.float64) + 0.1 * torch.randn(5, 5, dtype=torch.float64)
    w = ((w + w.T) / 2).requires_grad_()
    (gradient,) = torch.autograd.grad(WF.whitening_loss(w @ s @ w.T, "fro"), w)
    stepped = WF.whitening_update(w.detach(), s, 0.1, "fro")
    expected = w.detach() - 0.1 * gradient
    torch.testing.assert_close(stepped, (expected + expected.T) / 2)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_criteria_are_zero_at_the_identity_alone_and_fall_by_steps(criterion):
    assert WF.whitening_loss(torch.eye(4, dtype=torch.float64), criterion) == 0
    torch.manual_seed(0)
    mixing = torch.eye(4) + 0.5 * torch.rand(4, 4)
    x = torch.randn(500, 4, dtype=torch.float64) @ mixing.double()
    s = WF.covariance(WF.standardize(x, *WF.moments(x)))
    w = torch.eye(4, dtype=torch.float64)[None]
    losses = []
    for _ in range(200):
        losses.append(WF.whitening_loss(w @ s @ w.mT, criterion).item())
        w = WF.whitening_update(w, s, 0.02, criterion)
    assert losses[0] > 0.3 and losses[-1] < 0.1 * losses[0]
    # Fro's steps are of nearly constant length, so near the optimum they go around it; until there each one gains.
    assert all(b < a for a, b in itertools.pairwise(losses[:20]))


def test_fro_step_of_white_input_is_zero():
    w = torch.eye(3)[None]
    assert torch.equal(WF.whitening_update(w, torch.eye(3)[None], 0.1, "fro"), w)


def test_unknown_criterion_in_functions():
    with pytest.raises(ValueError, match="'l2'.*fro, kl"):
        WF.whitening_loss(torch.eye(2), "l2")


@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_float32_stays_near_float64_even_far_from_zero_mean(mean):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(64, 8, 6, 6)) + mean)
    exact, single = SWBN2d(8, step_size=0.1, dtype=torch.float64), SWBN2d(8, step_size=0.1)
    error = (single(x.float()) - exact(x)).abs().max()
    assert error < (5e-6 if mean == 0 else 5e-4)  # at 300 deviations float32 itself is off by 2e-5
    torch.testing.assert_close(single.whitening_matrix.double(), exact.whitening_matrix, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", ["input", "module"])
def test_state_stays_float32_in_half_precision(dtype, cast):
    torch.manual_seed(0)
    norm = SWBN2d(4, step_size=1e-4)
    if cast == "module":
        norm = norm.to(dtype)
        assert norm.weight.dtype == dtype
    for _ in range(3):
        y = norm(torch.randn(8, 4, 5, 5).to(dtype))
        assert y.dtype == dtype and y.isfinite().all()
    for name in ("running_mean", "running_var", "whitening_matrix"):
        assert getattr(norm, name).dtype == torch.float32
    # The step is far below the resolution of 16 bits around 1, and is there nevertheless.
    assert 0 < (norm.whitening_matrix - torch.eye(4)).abs().max() < 1e-3
    assert norm.eval()(torch.randn(2, 4, 5, 5).to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_made_in_half_precision_has_state_in_float32(dtype):
    norm = SWBN2d(4, dtype=dtype)
    assert norm.weight.dtype == dtype
    assert norm.whitening_matrix.dtype == norm.running_mean.dtype == norm.running_var.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_over_samples_accumulate_in_float32(dtype):
    x = (torch.randn(5000, 6) + torch.randn(5000, 1)).to(dtype)
    # Of the rounded values, so that what is left is accumulation: of 2, float32 is 1e-5 off, 16 bits 1e-3 or more.
    exact = x.double().T @ x.double() / 5000
    assert (WF.covariance(x)[0].double() - exact).abs().max() < 1e-4
    mean, variance = WF.moments(x)
    assert (mean.double() - x.double().mean(0)).abs().max() < 1e-5
    assert (variance.double() - x.double().var(0)).abs().max() < 1e-4


def test_buffers_are_copied_into_and_never_replaced():
    # What holds a buffer (a CUDA graph, another process's broadcast) must see the new W.
    norm = SWBN2d(4, step_size=0.1)
    held = dict(norm.named_buffers())
    norm(torch.randn(8, 4, 5, 5))
    assert all(buffer is held[name] for name, buffer in norm.named_buffers())
    assert not torch.equal(held["whitening_matrix"], torch.eye(4)[None])


def test_casting_to_half_and_back_keeps_w_to_the_bit():
    norm = SWBN1d(4, step_size=1e-5)
    norm(torch.randn(64, 4))
    before = norm.whitening_matrix.clone()
    assert torch.equal(norm.half().float().whitening_matrix, before)
    assert norm.double().whitening_matrix.dtype == torch.float64


def test_autocast_keeps_state_and_dtype():
    norm = SWBN2d(4, step_size=1e-3)
    conv = nn.Conv2d(3, 4, 1)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(conv(torch.randn(8, 3, 6, 6)))
    assert y.dtype == torch.bfloat16 and norm.whitening_matrix.dtype == torch.float32


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_layout_is_kept_and_does_not_matter(layout, training):
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, 3)
    plain, laid = (SWBN2d(4, step_size=0.1).train(training) for _ in range(2))
    y = laid(x.contiguous(memory_format=layout))
    assert y.is_contiguous(memory_format=layout)
    torch.testing.assert_close(y, plain(x))
    torch.testing.assert_close(laid.whitening_matrix, plain.whitening_matrix)


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (SWBN1d, (3, 4, 5, 6), "2D or 3D input"),
        (SWBN2d, (3, 4), "4D input"),
        (SWBN3d, (3, 4, 5, 6), "5D input"),
    ],
)
def test_wrong_rank(layer, shape, words):
    with pytest.raises(ValueError, match=f"expected {words}"):
        layer(4)(torch.randn(shape))


def test_wrong_channels_and_one_value_a_channel():
    with pytest.raises(RuntimeError, match="expected 4 channels"):
        SWBN2d(4)(torch.randn(2, 3, 5, 5))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SWBN1d(4)(torch.randn(1, 4))
    SWBN1d(4).eval()(torch.randn(1, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_groups": 4}, r"num_groups=4 .* num_features=6"),
        ({"num_groups": 0}, "num_groups=0"),
        ({"criterion": "fr"}, "'fr'.*did you mean 'fro'.*fro, kl"),
        ({"step_size": 0.0}, "positive and finite, got 0.0"),
        ({"step_size": float("nan")}, "positive and finite, got nan"),
        ({"step_size": -1}, "positive and finite, got -1"),
        ({"eps": -1e-5}, "eps must be"),
        ({"momentum": 1.5}, "momentum must be"),
        ({"num_groups": "two"}, "num_groups='two'"),
    ],
)
def test_constructor_errors(options, words):
    with pytest.raises(ValueError, match=words):
        SWBN2d(6, **options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_leaves_the_state(bad):
    norm = SWBN2d(3, step_size=0.1)
    norm(torch.randn(4, 3, 5, 5))
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(4, 3, 5, 5)
    x[0, 1, 2, 2] = bad
    norm(x)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert norm.num_batches_rejected == 1
    norm(torch.randn(4, 3, 5, 5))
    assert norm.num_batches_tracked == 2 and norm.num_batches_rejected == 1


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_step_that_would_not_be_finite_is_rejected(criterion):
    norm = SWBN1d(32, criterion=criterion, step_size=1e30)
    x = torch.randn(64, 1) + 0.1 * torch.randn(64, 32)
    for _ in range(8):
        norm(x)
    assert norm.whitening_matrix.isfinite().all() and norm.num_batches_rejected > 0


def test_a_norm_that_is_not_a_number_is_not_taken_for_zero():
    # Fro: where W S W^T overflows with both signs, its norm is NaN; that step is no zero step.
    w = torch.tensor([[[1e20, 2e20], [2e20, -1e20]]])
    assert not WF.whitening_update(w, torch.eye(2)[None] * 1e20, 0.1, "fro").isfinite().all()


def test_two_forwards_before_one_backward():
    norm = SWBN1d(4, step_size=0.1)
    a, b = torch.randn(16, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    alone = copy.deepcopy(norm)
    (alone(a) ** 3).sum().backward()
    expected = a.grad.clone()
    a.grad = None
    ((norm(a) ** 3).sum() + (norm(b) ** 3).sum()).backward()
    torch.testing.assert_close(a.grad, expected)


def test_an_evaluation_forward_survives_a_training_forward_before_its_backward():
    norm = SWBN1d(4, step_size=0.1)
    norm(torch.randn(16, 4))
    a = torch.randn(16, 4, requires_grad=True)
    (norm.eval()(a) ** 3).sum().backward()
    expected = a.grad.clone()
    a.grad = None
    y = norm(a)
    norm.train()(torch.randn(16, 4))
    (y**3).sum().backward()
    assert torch.equal(a.grad, expected)


def test_a_part_of_a_state_leaves_w_alone():
    norm = SWBN1d(4, step_size=0.1)
    norm(torch.randn(16, 4))
    w = norm.whitening_matrix.clone()
    norm.load_state_dict({"weight": torch.ones(4)}, strict=False)
    assert torch.equal(norm.whitening_matrix, w) and norm.num_batches_tracked == 1


def test_without_affine_and_without_running_statistics():
    norm = SWBN2d(4, affine=False, track_running_stats=False, step_size=0.1)
    assert set(norm.state_dict()) == {"whitening_matrix"}
    x = torch.randn(8, 4, 5, 5)
    y = norm(x)
    w = norm.whitening_matrix.clone()
    torch.testing.assert_close(norm.eval()(x), y)  # the batch's own statistics, in both modes
    assert torch.equal(norm.whitening_matrix, w)


def test_momentum_none_is_the_plain_average():
    norm, batch_norm = SWBN1d(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for _ in range(4):
        x = torch.randn(20, 3) * 2 + 1
        norm(x), batch_norm(x)
    torch.testing.assert_close(norm.running_mean, batch_norm.running_mean)
    torch.testing.assert_close(norm.running_var, batch_norm.running_var)


def test_a_batchnorm_checkpoint_loads_strictly_and_gives_the_same_output():
    batch_norm = nn.BatchNorm2d(5, eps=1e-5)
    for _ in range(3):
        batch_norm(torch.randn(8, 5, 4, 4) * 3 + 1)
    nn.init.normal_(batch_norm.weight)
    norm = SWBN2d(5, eps=1e-5, step_size=0.1)
    norm(torch.randn(8, 5, 4, 4))
    norm.load_state_dict(batch_norm.state_dict())
    x = torch.randn(2, 5, 4, 4)
    torch.testing.assert_close(norm.eval()(x), batch_norm.eval()(x))
    with pytest.raises(RuntimeError, match="running_mean"):
        norm.load_state_dict({k: v for k, v in batch_norm.state_dict().items() if k != "running_mean"})


@pytest.mark.parametrize("groups", [1, 2])
def test_copies_pickles_and_state_dicts_are_their_own(groups):
    norm = SWBN2d(4, step_size=0.1, num_groups=groups)
    norm(torch.randn(8, 4, 5, 5))
    other = SWBN2d(4, num_groups=groups)
    other.load_state_dict(norm.state_dict())
    twins = copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), other
    learnt = norm.whitening_matrix.clone()
    norm(torch.randn(8, 4, 5, 5))
    assert not torch.equal(norm.whitening_matrix, learnt)
    for twin in twins:
        assert torch.equal(twin.whitening_matrix, learnt)
        twin.load_state_dict(norm.state_dict())
        assert torch.equal(twin.whitening_matrix, norm.whitening_matrix)


def test_reset_repr_and_meta_device():
    norm = SWBN2d(4, step_size=0.1, criterion="kl")
    norm(torch.randn(8, 4, 5, 5))
    norm.reset_running_stats()
    assert torch.equal(norm.whitening_matrix, torch.eye(4)[None]) and norm.num_batches_tracked == 0
    assert "criterion=kl, step_size=0.1" in repr(norm)
    meta = SWBN2d(4, device="meta")
    assert meta.whitening_matrix.is_meta
    meta.to_empty(device="cpu").reset_parameters()
    assert torch.equal(meta.whitening_matrix, torch.eye(4)[None])
