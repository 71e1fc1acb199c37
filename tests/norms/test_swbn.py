"""SWBN against the paper's algorithms; what it shares with its peers is in test_contract.py."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from swbn_lightning import SWBN1d, SWBN2d, SWBN3d
from swbn_lightning.norms import functional as WF
from tests.norms.reference import ReferenceSWBN, central_difference, correlated, from_columns, to_columns

CASES = [
    (SWBN1d, (40, 6), "kl"), (SWBN1d, (12, 6, 5), "fro"),
    (SWBN2d, (8, 6, 4, 5), "fro"), (SWBN3d, (4, 6, 3, 2, 3), "kl"),
]  # fmt: skip
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
@pytest.mark.parametrize(("layer", "shape", "criterion"), CASES)
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
@pytest.mark.parametrize(("layer", "shape", "criterion"), CASES[::2])
def test_gradients_are_those_with_w_held_fixed(layer, shape, criterion, groups):
    norm, reference = make(layer, shape, criterion, num_groups=groups)
    rng = np.random.default_rng(2)
    x = correlated(rng, shape)
    upstream = rng.normal(size=shape)
    tensor = torch.from_numpy(x).requires_grad_()
    norm(tensor).backward(torch.from_numpy(upstream))
    reference.train(to_columns(x))  # the W of this forward is the stepped one

    def loss():
        return (from_columns(reference.with_w_fixed(to_columns(x)), shape) * upstream).sum()

    reference.gamma, reference.beta = reference.gamma.copy(), reference.beta.copy()
    for place in rng.choice(x.size, 25, replace=False):
        index = np.unravel_index(place, shape)
        assert tensor.grad.numpy()[index] == pytest.approx(central_difference(loss, x, index), rel=1e-5, abs=1e-6)
    for channel in range(shape[1]):
        gamma, beta = (central_difference(loss, array, channel) for array in (reference.gamma, reference.beta))
        assert norm.weight.grad[channel].item() == pytest.approx(gamma, rel=1e-6)
        assert norm.bias.grad[channel].item() == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_step_that_would_not_be_finite_is_rejected(criterion):
    norm = SWBN1d(32, criterion=criterion, step_size=1e30)
    x = torch.randn(64, 1) + 0.1 * torch.randn(64, 32)
    for _ in range(8):
        norm(x)
    assert norm.whitening_matrix.isfinite().all() and norm.num_batches_rejected > 0


def test_the_step_size_and_the_criterion_are_checked():
    for number in (np.float32(1e-3), np.int64(1), Fraction(1, 1000)):
        assert SWBN2d(4, step_size=number).step_size == float(number)
    for other in (True, "1e-3", None, 0, -1e-3, float("nan")):
        with pytest.raises(ValueError, match="step_size of SWBN.* must be positive and finite, got"):
            SWBN2d(4, step_size=other)
    with pytest.raises(ValueError, match="'fr'.*did you mean 'fro'.*fro, kl"):
        SWBN2d(4, criterion="fr")
    with pytest.raises(ValueError, match="'l2'.*fro, kl"):
        WF.whitening_loss(torch.eye(2), "l2")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_over_samples_accumulate_in_float32(dtype, groups):
    x = (torch.randn(5000, 6) + torch.randn(5000, 1)).to(dtype)
    # Of the rounded values, so that what is left is accumulation: of 2, float32 is 1e-5 off, 16 bits 1e-3 or more.
    width = 6 // groups
    exact = torch.stack([part.double().T @ part.double() / 5000 for part in x.split(width, 1)])
    with torch.no_grad():
        assert (WF.covariance(x, groups).double() - exact).abs().max() < 1e-4
