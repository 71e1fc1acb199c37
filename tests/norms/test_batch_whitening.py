"""IterNorm and DBN against float64 references, and where their public code fails."""

import numpy as np
import pytest
import torch

from swbn_lightning import DBN1d, DBN2d, DBN3d, IterNorm1d, IterNorm2d, IterNorm3d
from swbn_lightning.norms.inverse_sqrt import newton_inverse_sqrt, zca_inverse_sqrt
from tests.norms.reference import ReferenceBatchWhitening, central_difference, correlated, from_columns, to_columns

LAYERS = {"iternorm": (IterNorm1d, IterNorm2d, IterNorm3d), "dbn": (DBN1d, DBN2d, DBN3d)}
SHAPES = [(40, 6), (12, 6, 5), (8, 6, 4, 5), (4, 6, 3, 2, 3)]
KINDS = list(LAYERS)


def make(kind, shape, groups=1, **options):
    layer = LAYERS[kind][max(len(shape) - 3, 0)]
    norm = layer(shape[1], num_groups=groups, dtype=torch.float64, **options)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(rng.uniform(0.5, 2, shape[1])))
        norm.bias.copy_(torch.from_numpy(rng.normal(size=shape[1])))
    reference = ReferenceBatchWhitening(shape[1], kind, groups=groups)
    reference.gamma, reference.beta = norm.weight.detach().numpy().copy(), norm.bias.detach().numpy().copy()
    return norm, reference


@pytest.mark.parametrize(("shape", "groups"), list(zip(SHAPES, (1, 3, 1, 3), strict=True)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_and_evaluation_follow_the_reference(kind, shape, groups):
    norm, reference = make(kind, shape, groups)
    rng = np.random.default_rng(0)
    for _ in range(5):
        x = correlated(rng, shape)
        y = norm(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(y, from_columns(reference.train(to_columns(x)), shape), atol=1e-8)
    np.testing.assert_allclose(norm.running_mean.numpy(), reference.mean, rtol=1e-10)
    np.testing.assert_allclose(norm.whitening_matrix.numpy(), np.stack(reference.matrices), rtol=1e-8, atol=1e-10)
    assert norm.num_batches_tracked == 5
    x = correlated(rng, shape)
    y = norm.eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(y, from_columns(reference.predict(to_columns(x)), shape), atol=1e-9)


@pytest.mark.parametrize(
    ("training", "groups", "shape"), [(True, 1, (40, 6)), (True, 2, (8, 6, 4, 5)), (False, 2, (40, 6))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_through_the_whitening(kind, shape, groups, training):
    norm, reference = make(kind, shape, groups)
    rng = np.random.default_rng(2)
    first = correlated(rng, shape)
    norm(torch.from_numpy(first)), reference.train(to_columns(first))
    x = rng.normal(size=shape) + 0.5 * rng.normal(size=(shape[0], 1, *shape[2:])) + 3
    upstream = rng.normal(size=shape)
    tensor = torch.from_numpy(x).requires_grad_()
    norm.train(training)(tensor).backward(torch.from_numpy(upstream))

    def loss():
        y = reference.batch(to_columns(x))[0] if training else reference.predict(to_columns(x))
        return (from_columns(y, shape) * upstream).sum()

    for place in rng.choice(x.size, 25, replace=False):
        index = np.unravel_index(place, shape)
        expected = central_difference(loss, x, index)
        assert tensor.grad.numpy()[index] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for channel in range(shape[1]):
        gamma, beta = (central_difference(loss, array, channel) for array in (reference.gamma, reference.beta))
        assert norm.weight.grad[channel].item() == pytest.approx(gamma, rel=1e-6, abs=1e-7)
        assert norm.bias.grad[channel].item() == pytest.approx(beta, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-10)])
def test_many_iterations_stay_at_the_root(dtype, tolerance):
    # The iteration as printed is unstable here: 25 steps of it end at 1e4 and more.
    torch.manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(8, 8, dtype=dtype))
    s = q @ torch.diag(torch.logspace(0, 2, 8, dtype=dtype)) @ q.T
    p = newton_inverse_sqrt(s, 60)
    assert (p @ s @ p - torch.eye(8, dtype=dtype)).abs().max() < tolerance


def newton_as_printed(s, iterations):
    """Algorithm 1 of Iterative Normalization, left to autograd."""
    trace = torch.einsum("gii->g", s)[:, None, None]
    p = torch.eye(s.shape[-1], dtype=s.dtype).expand_as(s)
    for _ in range(iterations):
        p = (3 * p - p @ p @ p @ (s / trace)) / 2
    return p / trace.sqrt()


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_gradient_of_newtons_iteration(iterations):
    torch.manual_seed(0)
    root = torch.randn(2, 4, 4, dtype=torch.float64)
    s = (root @ root.mT + torch.eye(4, dtype=torch.float64)).requires_grad_()
    upstream = torch.randn_like(s)
    results = []
    for function in (newton_inverse_sqrt, newton_as_printed):
        (first,) = torch.autograd.grad((function(s, iterations) * upstream).sum(), s)
        (once,) = torch.autograd.grad((function(s, iterations) * upstream).sum(), s, create_graph=True)
        (second,) = torch.autograd.grad(once.pow(3).sum(), s)
        results.append((first, once.detach(), second))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gap", [0.0, 1e-7])
def test_dbn_gradient_is_finite_and_right_where_eigenvalues_are_equal(gap):
    # Around S = c I the derivative of S^(-1/2) is -c^(-3/2) / 2 times the identity map.
    s = torch.diag(torch.tensor([4.0, 4.0 + gap, 4.0 - gap], dtype=torch.float64)).requires_grad_()
    upstream = torch.randn(3, 3, dtype=torch.float64)
    zca_inverse_sqrt(s).backward(upstream)
    torch.testing.assert_close(s.grad, -(4**-1.5) / 2 * (upstream + upstream.T) / 2)
    x = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]).requires_grad_()  # white already
    (DBN1d(2)(x) ** 3).sum().backward()
    assert x.grad.isfinite().all()


def test_dbn_stays_finite_where_rounding_makes_an_eigenvalue_negative():
    torch.manual_seed(0)
    x = torch.randn(64, 1) * 1e4 + torch.randn(64, 8) * 1e-3  # rank one in float32
    norm = DBN1d(8)
    x.requires_grad_()
    y = norm(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and norm.whitening_matrix.isfinite().all()


@pytest.mark.parametrize(("features", "groups"), [(64, 4), (10, 1), (34, 17)])
def test_dbn_groups_by_the_largest_divisor_up_to_16(features, groups):
    assert DBN2d(features).num_groups == groups


def test_errors():
    for layer in (IterNorm2d, DBN2d):
        with pytest.raises(ValueError, match="num_features must be an integer of at least 1, got 0"):
            layer(0)
    with pytest.raises(ValueError, match="IterNorm2d: num_iterations must be an integer of at least 1, got 0"):
        IterNorm2d(4, num_iterations=0)
