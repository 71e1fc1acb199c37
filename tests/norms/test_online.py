"""OnlineWhitening against a float64 reference written from its formulas, and what the method promises."""

import numpy as np
import pytest
import torch

from swbn_lightning import NormFactory, OnlineWhitening1d, OnlineWhitening2d, OnlineWhitening3d
from tests.norms.reference import ReferenceBatchWhitening, central_difference, correlated, from_columns, to_columns

SHAPES = [(40, 6), (12, 6, 5), (8, 6, 4, 5), (4, 6, 3, 2, 3)]


class Reference(ReferenceBatchWhitening):
    """The layer's formulas, literally, with columns as samples; nothing here is shared with the package."""

    def __init__(self, d, groups=1, rate=0.1):
        super().__init__(d, "online", groups=groups)
        k = d // groups
        rho = k * 1.5**-8
        self.shrinkage, self.rate = rho / (1 + rho), rate
        self.w = [np.eye(k) for _ in range(groups)]

    def batch(self, x, c=None):
        """Output, mean and matrices; ``c``, a constant to the derivative, may be given. Keeps ``c`` and the next W."""
        d, n = x.shape
        mean, k = x.mean(axis=1), d // self.groups
        matrices, self.after, self.c = [], [], []
        for g, w in enumerate(self.w):
            centred = (x - mean[:, None])[g * k : (g + 1) * k]
            sigma = centred @ centred.T / n + self.eps * np.eye(k)
            scale = np.diag(np.diag(sigma) ** -0.5)
            m = w @ ((1 - self.shrinkage) * scale @ sigma @ scale + self.shrinkage * np.eye(k)) @ w.T
            bound = np.abs(m).sum(axis=1).max()
            self.c.append(min(1, 2 / bound) if c is None else c[g])
            b = np.sqrt(self.c[-1]) * w
            v = (3 * np.eye(k) - self.c[-1] * m) @ b / 2
            matrices.append((v + v.T) / 2 @ scale)
            ratio = min(1, 1 / (self.rate * bound))
            stepped = np.sqrt(ratio) * w - self.rate * (ratio * m - np.eye(k)) @ (np.sqrt(ratio) * w)
            self.after.append((stepped + stepped.T) / 2)
        return self._output(x, mean, matrices), mean, matrices

    def train(self, x):
        y = super().train(x)
        self.w = self.after
        return y


def make(shape, groups=1):
    layer = (OnlineWhitening1d, OnlineWhitening2d, OnlineWhitening3d)[max(len(shape) - 3, 0)]
    norm, reference = layer(shape[1], num_groups=groups, dtype=torch.float64), Reference(shape[1], groups)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(rng.uniform(0.5, 2, shape[1])))
        norm.bias.copy_(torch.from_numpy(rng.normal(size=shape[1])))
    reference.gamma, reference.beta = norm.weight.detach().numpy().copy(), norm.bias.detach().numpy().copy()
    return norm, reference


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_and_evaluation_follow_the_reference(shape, groups):
    norm, reference = make(shape, groups)
    rng = np.random.default_rng(0)
    for step in range(20):
        x = correlated(rng, shape) * (1000 if step == 10 else 1)
        y = norm(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(y, from_columns(reference.train(to_columns(x)), shape), atol=1e-8)
    assert min(reference.c) < 1 or groups > 1  # the batches change so much that the caps are met
    np.testing.assert_allclose(norm.online_matrix.numpy(), np.stack(reference.w), atol=1e-10)
    np.testing.assert_allclose(norm.whitening_matrix.numpy(), np.stack(reference.matrices), atol=1e-10)
    np.testing.assert_allclose(norm.running_mean.numpy(), reference.mean, rtol=1e-10)
    x = correlated(rng, shape)
    y = norm.eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(y, from_columns(reference.predict(to_columns(x)), shape), atol=1e-9)


@pytest.mark.parametrize("batches", [0, 30])  # W at its start, where c is below 1, and near the covariance
@pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
def test_gradients_go_through_the_step(shape, batches):
    norm, reference = make(shape)
    rng = np.random.default_rng(2)
    x = correlated(rng, shape)
    for _ in range(batches):
        norm(torch.from_numpy(x)), reference.train(to_columns(x))
    upstream = rng.normal(size=shape)
    tensor = torch.from_numpy(x).requires_grad_()
    reference.batch(to_columns(x))
    c = reference.c
    assert (c[0] < 1) == (batches == 0)

    def loss():
        return (from_columns(reference.batch(to_columns(x), c)[0], shape) * upstream).sum()

    norm(tensor).backward(torch.from_numpy(upstream))
    for place in [tuple(rng.integers(0, size) for size in shape) for _ in range(12)]:
        assert tensor.grad[place].item() == pytest.approx(central_difference(loss, x, place, 1e-6), rel=1e-5, abs=1e-6)
    for parameter, array in ((norm.weight, reference.gamma), (norm.bias, reference.beta)):
        for channel in range(shape[1]):
            wanted = central_difference(loss, array, (channel,))
            assert parameter.grad[channel].item() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("width", "shrinkage"), [(16, 0.384), (64, 0.714), (256, 0.909), (512, 0.952)])
def test_the_default_shrinkage_is_that_of_four_iterations(width, shrinkage):
    assert NormFactory("online")(width).shrinkage == pytest.approx(shrinkage, abs=0.0005)
    assert NormFactory("online", num_groups=4)(4 * width).shrinkage == pytest.approx(shrinkage, abs=0.0005)
    assert NormFactory("online", shrinkage=0.3)(width).shrinkage == 0.3


@pytest.mark.parametrize("shrinkage", [0, 1.1, -1, "much", float("nan"), True])
def test_a_wrong_shrinkage_is_named(shrinkage):
    with pytest.raises(ValueError, match=r"shrinkage must be in \(0, 1\] or None, got"):
        NormFactory("online", shrinkage=shrinkage)(8)


def test_w_becomes_the_inverse_root_of_the_shrunk_correlation():
    torch.manual_seed(0)
    norm = NormFactory("online", dtype=torch.float64)(12, 1)
    x = torch.randn(500, 12, dtype=torch.float64) @ torch.randn(12, 12, dtype=torch.float64)
    for _ in range(300):
        norm(x)
    r = (1 - norm.shrinkage) * torch.corrcoef(x.T) + norm.shrinkage * torch.eye(12)
    values, vectors = torch.linalg.eigh(r)
    wanted = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    torch.testing.assert_close(norm.online_matrix[0], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("samples", "steps"), [(32, 200), pytest.param(32, 5000, marks=pytest.mark.slow)])
def test_few_samples_and_a_constant_channel_stay_finite(samples, steps):
    torch.manual_seed(0)
    norm = NormFactory("online")(64, 1)
    mix = torch.randn(64, 64)
    for _ in range(steps):
        x = torch.randn(samples, 64) @ mix
        x[:, 5] = 3
        x.requires_grad_()
        y = norm(x)
        y.square().mean().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
    assert norm.num_batches_rejected == 0 and norm.online_matrix.abs().max() < 10
    assert norm.eval()(x).isfinite().all()


def test_the_variant_of_the_ablations_is_the_layer_where_nothing_is_switched():
    from benchmarks.online_variants import OnlineVariant  # registers two names

    layer, variant = NormFactory("online")(6, 1), OnlineVariant(6)
    torch.manual_seed(0)
    for _ in range(3):
        inputs = [torch.randn(20, 6).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        for norm, x in zip((layer, variant), inputs, strict=True):
            norm(x).pow(3).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(variant.state_dict()[name], value)
