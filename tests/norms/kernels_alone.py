"""Each kernel against a reference in numpy, in float64."""

import numpy as np
import pytest
import torch

from swbn_lightning.norms.passes import kernels
from swbn_lightning.norms.passes.kernels import launch
from tests.norms.device_tools import DEVICE, EPS, TOLERANCE, assert_near, exactly, vectors
from tests.norms.reference import ReferenceSWBN


@pytest.fixture(autouse=True)
def _switched_on():
    with kernels.use_kernels(), DEVICE:
        yield


def draw(n, d, dtype, mean=0.0, seed=0):
    """Correlated samples as rows, of different scale; the tensor and what it holds in float64."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) @ (np.eye(d) + rng.normal(size=(d, d)) / d) * np.exp(rng.normal(size=d) / 2)
    x = torch.from_numpy(x + mean * x.std(0)).to(DEVICE, dtype)
    return x, exactly(x)


def statistics(x):
    """Algorithm 1, steps 1, 2 and 5, in float64."""
    mean, variance = x.mean(0), x.var(0, ddof=1)
    return mean, variance, (x - mean) / np.sqrt(variance + EPS)


@pytest.mark.parametrize(("n", "d", "dtype", "mean"), [
    (2, 16, torch.float32, 0), (777, 24, torch.float32, 300), (203, 100, torch.bfloat16, 5),
    (1500, 16, torch.float16, 20), (130, 130, torch.float32, 1e4),
])  # fmt: skip
def test_moments(n, d, dtype, mean):
    x, exact = draw(n, d, dtype, mean)
    x[:, 3], exact[:, 3] = 3.0, 3.0
    found = launch.moments(x, EPS)
    expected = statistics(exact)
    expected = *expected[:2], 1 / np.sqrt(expected[1] + EPS)
    tolerance = 1e-3 if mean == 1e4 else 1e-5  # of a deviation, float32 itself has 1e-3 there
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        np.testing.assert_allclose(exactly(mine), theirs, rtol=tolerance, atol=1e-9)
    assert found[1][3] == 0
    x[n // 2, 5] = torch.nan
    assert [v.isnan().nonzero().flatten().tolist() for v in launch.moments(x, EPS)] == [[5]] * 3
    again = launch.moments(x, EPS)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again, launch.moments(x, EPS), strict=True))


@pytest.mark.parametrize(("n", "d", "dtype", "mean"), [
    (203, 24, torch.float32, 300), (100, 100, torch.float16, 5), (90, 160, torch.float32, 0),
    (70, 16, torch.bfloat16, 0),
])  # fmt: skip
def test_covariance_of_the_standardised(n, d, dtype, mean):
    x, exact = draw(n, d, dtype, mean)
    middle, variance, xs = statistics(exact)
    found = launch.covariance(x, *vectors(middle, 1 / np.sqrt(variance + EPS)))
    assert found.shape == (1, d, d) and torch.equal(found, found.mT)
    tolerance = TOLERANCE[dtype] if mean != 300 else 1e-4  # of a deviation, float32 itself has 2e-5 there
    assert_near(found[0], xs.T @ xs / len(xs), tolerance)


CASES = [(203, 24, torch.float32), (150, 100, torch.float16), (70, 16, torch.bfloat16), (90, 160, torch.float32)]


@pytest.mark.parametrize(("n", "d", "dtype"), CASES)
def test_output_and_gradients(n, d, dtype):
    x, exact = draw(n, d, dtype, mean=5)
    rng = np.random.default_rng(1)
    w, gamma, beta = np.eye(d) + rng.normal(size=(d, d)) / d, rng.uniform(0.5, 2, d), rng.normal(size=d)
    matrix = torch.from_numpy(gamma[:, None] * w).to(DEVICE, dtype)
    a = exactly(matrix)
    mean, variance, xs = statistics(exact)
    middle, rstd, bias = vectors(mean, 1 / np.sqrt(variance + EPS), beta)
    y = launch.output(x, middle, rstd, matrix, bias)
    assert y.dtype == dtype
    assert_near(y, xs @ a.T + beta, TOLERANCE[dtype])
    assert_near(launch.output(x, middle, rstd, matrix, None), xs @ a.T, TOLERANCE[dtype])

    # By the chain rule through the variance and the mean, one after the other.
    upstream = torch.from_numpy(rng.normal(size=(n, d)) + 0.5).to(DEVICE, dtype)
    g = exactly(upstream)
    of_xs, centred, scale = g @ a, exact - mean, 1 / np.sqrt(variance + EPS)
    of_variance = (of_xs * centred * -0.5 * scale**3).sum(0)
    of_mean = -(of_xs * scale).sum(0) - of_variance * 2 * centred.sum(0) / (n - 1)
    of_x = of_xs * scale + of_variance * 2 * centred / (n - 1) + of_mean / n
    kinds = (True, torch.float32, torch.float32)
    found = launch.gradients(upstream, x, middle, rstd, vectors(w)[0][None], matrix, kinds)
    assert found[0].dtype == dtype
    expected = of_x, (g * (xs @ w.T)).sum(0), g.sum(0)
    for mine, theirs, tolerance in zip(found, expected, (TOLERANCE[dtype], TOLERANCE[dtype], 2e-6), strict=True):
        assert_near(mine, theirs, tolerance)
    # dL/dx adds up to nothing over the samples, and is at right angles to xs.
    assert abs(exactly(found[0]).sum(0)).max() <= 2 * TOLERANCE[dtype] * abs(of_x).sum(0).max()


def state(groups, width):
    """Buffers of a layer: W, running mean, running variance, counters of the accepted, rejected and small."""
    rng = np.random.default_rng(2)
    w = np.eye(width) + rng.normal(size=(groups, width, width)) / width
    root = np.eye(width) + rng.normal(size=(groups, width, width)) / width**0.5
    s = root @ root.transpose(0, 2, 1)
    d = groups * width
    mean, variance, old_mean, old_variance = rng.normal(size=(4, d)) + np.array([[0], [5], [0], [5]])
    counters = [torch.tensor(value) for value in (7, 2, 3)]
    return w, s, mean, variance, old_mean, old_variance, counters


@pytest.mark.parametrize(("groups", "width", "criterion", "momentum"), [
    (1, 24, "fro", 0.05), (1, 24, "kl", 0.9), (3, 16, "fro", None), (3, 16, "kl", 0.05), (1, 100, "fro", 0.05),
])  # fmt: skip
def test_step_and_state(groups, width, criterion, momentum):
    w, s, mean, variance, old_mean, old_variance, (tracked, rejected, small) = state(groups, width)
    buffer, *running = vectors(w, old_mean, old_variance)
    before = buffer._version
    out = launch.update_state(
        buffer, vectors(s)[0], *vectors(mean, variance), (*running, tracked), rejected, small, True,
        criterion, 0.3, momentum,
    )  # fmt: skip
    paper = ReferenceSWBN(width, criterion, 0.3)
    stepped = np.stack([w[g] - 0.3 * paper._delta(w[g], s[g]) for g in range(groups)])
    assert_near(out, (stepped + stepped.transpose(0, 2, 1)) / 2, 1e-6)
    assert torch.equal(out, buffer) and out.data_ptr() != buffer.data_ptr() and torch.equal(out, out.mT)
    assert (tracked, rejected, small) == (8, 2, 4) and buffer._version > before
    share = 1 / 8 if momentum is None else momentum
    for found, old, new in zip(running, (old_mean, old_variance), (mean, variance), strict=True):
        assert_near(found, (1 - share) * old + share * new, 1e-6)


@pytest.mark.parametrize("criterion", ["fro", "kl"])
@pytest.mark.parametrize("where", ["covariance", "mean", "variance", "overflow"])
def test_all_groups_are_accepted_or_rejected_together(criterion, where):
    w, s, mean, variance, *_, (tracked, rejected, small) = state(3, 16)
    buffer, s, mean, variance = vectors(w, s, mean, variance)
    if where == "covariance":
        s[2, 3, 4] = torch.nan
    elif where == "mean":
        mean[40] = torch.nan
    elif where == "overflow":
        buffer[1] *= 1e30
    else:
        variance[0] = torch.inf
    old = buffer.clone()
    running = torch.zeros(48), torch.ones(48), tracked
    out = launch.update_state(buffer, s, mean, variance, running, rejected, small, False, criterion, 0.1, 0.5)
    assert torch.equal(out, old) and torch.equal(buffer, old)
    assert torch.equal(running[0], torch.zeros(48)) and torch.equal(running[1], torch.ones(48))
    assert (tracked, rejected, small) == (7, 3, 3)


@pytest.mark.parametrize("criterion", ["fro", "kl"])
def test_a_w_that_whitens_stays(criterion):
    buffer = torch.eye(24)[None]
    counters = [torch.tensor(0) for _ in range(2)]
    mean, variance = torch.zeros(24), torch.ones(24)
    out = launch.update_state(buffer, torch.eye(24)[None], mean, variance, None, *counters, False, criterion, 50.0, 0.1)
    assert torch.equal(out[0], torch.eye(24)) and counters == [0, 0]
