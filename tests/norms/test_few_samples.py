"""Batches in which some directions have no variance: no more samples than channels, channels that depend on others."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from swbn_lightning import NormFactory

FAMILIES = [
    ("swbn-fro", {"step_size": 1e-2}),
    ("swbn-kl", {"step_size": 1e-2}),
    ("iternorm", {}),
    ("iternorm", {"num_iterations": 9}),
    ("iternorm", {"num_iterations": 20}),
    ("dbn", {}),
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


@pytest.mark.parametrize(("n", "d"), [(2, 16), (4, 10), (8, 16), (16, 16)])
def test_derivatives_of_dbn_are_those_of_a_form_without_large_values(n, d):
    torch.manual_seed(0)
    x, upstream = torch.randn(n, d, dtype=torch.float64), torch.randn(n, d, dtype=torch.float64)
    found = derivatives(NormFactory("dbn", dtype=torch.float64)(d, 1), x, upstream)
    for mine, expected, tolerance in zip(found, derivatives(by_samples, x, upstream), (1e-9, 1e-8, 1e-6), strict=True):
        scale = max(1.0, 1 / expected.norm().item())  # two samples' output does not depend on their distance
        assert off(mine, expected) < tolerance * scale


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize("shape", [(3, 16), (8, 16), (16, 16), (17, 16), (20, 16), (4, 10), (2, 16, 2, 2)], ids=str)
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
    elif kind == "twins":
        x[:, 5] = x[:, 4]
    else:
        x = x * torch.logspace(-4, 3, 16)
    return x


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize("kind", ["rank 3", "constant", "twins", "scales"])
def test_float32_is_float64_with_channels_that_depend_on_others(name, options, kind):
    torch.manual_seed(0)
    x, upstream = dependent(kind), torch.randn(256, 16)
    norm = NormFactory(name, **options)(16, 1)
    expected = derivatives(copy.deepcopy(norm).double(), x.double(), upstream)
    found = derivatives(norm, x, upstream)
    # What centring rounds is multiplied by up to 1 / sqrt(eps), which is 316.
    for mine, theirs in zip(found[:2], expected, strict=False):
        assert off(mine, theirs) < 3e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_of_dbn_with_few_samples(dtype):
    torch.manual_seed(0)
    x, upstream = torch.randn(8, 16).to(dtype), torch.randn(8, 16).to(dtype)
    grads = []
    for kind in (dtype, torch.float64):
        inputs = x.to(kind, copy=True).requires_grad_()
        NormFactory("dbn")(16, 1).to(kind)(inputs).backward(upstream.to(kind))
        grads.append(inputs.grad)
    assert grads[0].dtype == dtype and off(*grads) < 4 * torch.finfo(dtype).eps


def test_a_resnet_of_dbn_with_a_batch_of_eight():
    # Its last layers see eight samples of 512 channels, in groups of 16.
    torch.manual_seed(0)
    model = resnet18(norm_layer=NormFactory("dbn"), num_classes=10)
    images, labels, lengths = torch.randn(8, 3, 32, 32), torch.arange(8), []
    for network, x in ((model, images), (copy.deepcopy(model).double(), images.double())):
        nn.functional.cross_entropy(network(x), labels).backward()
        lengths.append(torch.stack([p.grad.double().norm() for p in network.parameters()]).norm().item())
    assert lengths[0] == pytest.approx(lengths[1], rel=0.02)
