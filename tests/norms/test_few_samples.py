"""Batches in which some directions have no variance: no more samples than channels, channels that depend on others."""

import copy

import pytest
import torch

from swbn_lightning import NormFactory

FAMILIES = [
    ("swbn-fro", {"step_size": 1e-2}),
    ("iternorm", {"num_iterations": 9}),
    ("iternorm", {"num_iterations": 20}),
    ("dbn", {"num_groups": 2}),
]
EPS = 1e-5


def derivatives(function, x, upstream):
    """Output, gradient and one second derivative of a loss that is not quadratic."""
    x = x.clone().requires_grad_()
    upstream = upstream.to(x.dtype)
    y = function(x)
    (first,) = torch.autograd.grad((y * upstream).sum() + (y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * upstream.flip(0)).sum(), x)
    return y.detach(), first.detach(), second


def by_samples(x):
    """DBN's output from the samples' matrix in place of the channels': ``(X X^T/n + eps)^(-1/2) X``.

    No value in it is large, for it has no direction without variance but the samples' sum. There ``X`` is 0, so that
    another eigenvalue may stand for it. For a batch without equal samples.
    """
    n = len(x)
    centred = x - x.mean(0)
    gram = centred @ centred.T / n + EPS * torch.eye(n, dtype=x.dtype) + torch.ones(n, n, dtype=x.dtype) / n
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.rsqrt()) @ vectors.T @ centred


def off(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("n", "d"), [(2, 16), (4, 10), (16, 16)])
def test_derivatives_of_dbn_are_those_of_a_form_without_large_values(n, d):
    torch.manual_seed(0)
    x, upstream = torch.randn(n, d, dtype=torch.float64), torch.randn(n, d, dtype=torch.float64)
    found = derivatives(NormFactory("dbn", dtype=torch.float64)(d, 1), x, upstream)
    for mine, expected, tolerance in zip(found, derivatives(by_samples, x, upstream), (1e-9, 1e-8, 1e-6), strict=True):
        scale = max(1.0, 1 / expected.norm().item())  # two samples' output does not depend on their distance
        assert off(mine, expected) < tolerance * scale


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize("shape", [(3, 16), (17, 16), (2, 16, 2, 2)], ids=str)
def test_float32_is_float64_with_few_samples(name, options, shape):
    torch.manual_seed(0)
    x, upstream = torch.randn(shape) * 3 + 1, torch.randn(shape)
    norm = NormFactory(name, **options)(shape[1], max(len(shape) - 2, 1))
    expected = derivatives(copy.deepcopy(norm).double(), x.double(), upstream)
    found = derivatives(norm, x, upstream)
    # The second derivative of nine iterations loses what they multiply, 1.5 ** 9; with more float64 is used.
    tolerances = (1e-5, 2e-5, 1e-3 if options == {"num_iterations": 9} else 1e-5)
    for mine, theirs, tolerance in zip(found, expected, tolerances, strict=True):
        assert mine.dtype == torch.float32 and off(mine, theirs) < tolerance


def dependent(kind):
    x = torch.randn(256, 16)
    if kind == "rank 3":
        x = torch.randn(256, 3) @ torch.randn(3, 16)
    elif kind == "constant":
        x[:, 3:6] = 0.5
    else:
        x = x * torch.logspace(-4, 3, 16)
    return x


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize("kind", ["rank 3", "constant", "scales"])
def test_float32_is_float64_with_channels_that_depend_on_others(name, options, kind):
    torch.manual_seed(0)
    x, upstream = dependent(kind), torch.randn(256, 16)
    norm = NormFactory(name, **options)(16, 1)
    expected = derivatives(copy.deepcopy(norm).double(), x.double(), upstream)
    found = derivatives(norm, x, upstream)
    # What centring rounds is multiplied by up to 1 / sqrt(eps), which is 316.
    for mine, theirs in zip(found[:2], expected, strict=False):
        assert off(mine, theirs) < 3e-4
