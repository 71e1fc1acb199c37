"""Derivatives of every kind through the layers: ``torch.func``, forward mode, and both nested either way."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp

from swbn_lightning import NormFactory
from tests.norms.reference import ReferenceSWBN, to_columns

NAMES = ["swbn-fro", "swbn-kl", "online", "iternorm", "dbn"]
# Of (4, 4) the covariance is singular.
CASES = [
    ("swbn-fro", (3, 4, 2, 2), True), ("swbn-kl", (4, 4), True), ("swbn-kl", (3, 4, 2, 2), False),
    *((name, shape, True) for name in ("online", "iternorm", "dbn") for shape in ((3, 4, 2, 2), (4, 4))),
]  # fmt: skip
STEP = 0.1


def problem(name, shape, training=True, **options):
    """A layer that has seen a batch, and input, gamma, beta and what the output is multiplied by, in float64."""
    torch.manual_seed(0)
    step = {"step_size": STEP} if name.startswith("swbn") else {}
    norm = NormFactory(name, eps=1e-3, dtype=torch.float64, **step, **options)(shape[1], max(len(shape) - 2, 1))
    x, upstream = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    norm(x * 2 + x.sum(1, keepdim=True))
    parameters = [torch.randn(shape[1], dtype=torch.float64) for _ in range(2)]
    return norm.train(training), (x + 0.5 * x.sum(1, keepdim=True) + 1, *parameters), upstream


def loss_of(norm, upstream):
    """As a function of input, gamma and beta; a copy of the state steps and is thrown away."""

    def loss(x, weight, bias):
        buffers = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        y = functional_call(norm, {"weight": weight, "bias": bias, **buffers}, (x,))
        return (y * upstream).sum() + (y**3).sum() / 10

    return loss


def literal_loss(norm, upstream, x):
    """The same from the papers' formulas in plain operators, W of SWBN a constant made by numpy."""
    matrix = norm.whitening_matrix[0].clone()
    training, eps, name = norm.training, norm.eps, type(norm).__name__
    mean, variance = norm.running_mean.clone(), getattr(norm, "running_var", None)
    kept = norm.online_matrix[0].clone() if name.startswith("Online") else None
    if training and name.startswith("SWBN"):
        reference = ReferenceSWBN(x.shape[1], norm.criterion, STEP, eps)
        reference.w = [matrix.numpy()]
        reference.train(to_columns(x.numpy()))
        matrix = torch.from_numpy(np.stack(reference.w))[0]

    def loss(x, weight, bias):
        flat = x.movedim(1, 0).reshape(x.shape[1], -1)
        n = flat.shape[1]
        centred = flat - (flat.mean(1, keepdim=True) if training else mean[:, None])
        w = matrix
        if name.startswith("SWBN"):
            v = centred.square().sum(1) / (n - 1) if training else variance
            centred = centred / (v + eps).sqrt()[:, None]
        elif training:
            s = centred @ centred.T / n + eps * torch.eye(len(flat), dtype=flat.dtype)
            if name.startswith("Online"):
                w = one_step(s, kept, norm.shrinkage)
            else:
                w = newton(s) if name.startswith("IterNorm") else zca(s)
        y = weight[:, None] * (w @ centred) + bias[:, None]
        y = y.view(x.shape[1], x.shape[0], *x.shape[2:]).movedim(0, 1)
        return (y * upstream).sum() + (y**3).sum() / 10

    return loss


def newton(s):
    p = torch.eye(len(s), dtype=s.dtype)
    for _ in range(5):
        p = (3 * p - p @ p @ p @ s / s.trace()) / 2
    return p / s.trace().sqrt()


def one_step(s, w, shrinkage):
    e = torch.diag(s.diagonal().rsqrt())
    m = w @ ((1 - shrinkage) * e @ s @ e + shrinkage * torch.eye(len(s), dtype=s.dtype)) @ w.T
    c = min(1, 2 / m.detach().abs().sum(1).max())
    v = (3 * w - c * m @ w) / 2 * c**0.5
    return (v + v.T) / 2 @ e


def zca(s):
    values, vectors = torch.linalg.eigh(s)
    return vectors @ torch.diag(values.rsqrt()) @ vectors.T


@pytest.mark.parametrize(("name", "shape", "training"), CASES, ids=str)
def test_every_transform_of_torch_func(name, shape, training):
    norm, inputs, upstream = problem(name, shape, training)
    loss, literal = loss_of(norm, upstream), literal_loss(norm, upstream, inputs[0])
    tangents = tuple(torch.randn_like(value) for value in inputs)
    which = (0, 1, 2)
    first = torch.autograd.functional.jacobian(literal, inputs)
    second = torch.autograd.functional.hessian(literal, inputs)

    def close(found, expected):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)

    close(loss(*inputs), literal(*inputs))
    slope = sum((a * b).sum() for a, b in zip(first, tangents, strict=True))
    close(jvp(loss, inputs, tangents)[1], slope)
    close(vjp(loss, *inputs)[1](torch.ones((), dtype=torch.float64)), first)
    for transform in (grad, jacfwd, jacrev):
        close(transform(loss, argnums=which)(*inputs), first)
    for both in ((jacfwd, jacrev), (jacrev, jacfwd), (jacfwd, jacfwd), (jacrev, jacrev)):
        close(both[0](both[1](loss, argnums=which), argnums=which)(*inputs), second)
    close(hessian(loss, argnums=which)(*inputs), second)
    curvature = jvp(lambda *at: jvp(loss, at, tangents)[1], inputs, tangents)[1]
    expected = sum(
        torch.tensordot(torch.tensordot(block, b, b.dim()), a, a.dim())
        for a, row in zip(tangents, second, strict=True)
        for b, block in zip(tangents, row, strict=True)
    )
    close(curvature, expected)


@pytest.mark.parametrize("name", ["swbn-fro", "dbn"])
def test_derivatives_of_the_third_and_fourth_order_in_forward_mode(name):
    norm, inputs, upstream = problem(name, (9, 4))
    loss, literal = (make(norm, upstream, *rest) for make, rest in ((loss_of, ()), (literal_loss, (inputs[0],))))
    direction = torch.randn_like(inputs[0])
    line = torch.zeros((), dtype=torch.float64)

    def along(function, order):
        derived = lambda t: function(inputs[0] + t * direction, *inputs[1:])  # noqa: E731
        for _ in range(order):
            derived = (lambda f: lambda t: jvp(f, (t,), (torch.ones_like(t),))[1])(derived)
        return derived(line)

    def expected(order):
        t = line.clone().requires_grad_()
        value = literal(inputs[0] + t * direction, *inputs[1:])
        for _ in range(order):
            (value,) = torch.autograd.grad(value, t, create_graph=True)
        return value.detach()

    for order in (1, 2, 3, 4):
        torch.testing.assert_close(along(loss, order), expected(order), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_leaves_no_tangent_in_the_state(name):
    norm, (x, *_), upstream = problem(name, (9, 4))
    literal = literal_loss(norm, upstream, x)
    ones = (torch.ones_like(norm.weight), torch.zeros_like(norm.bias))
    expected = torch.autograd.functional.jacobian(literal, (x, *ones))[0]
    with forward_ad.dual_level():
        y = norm(forward_ad.make_dual(x, upstream))
        slope = forward_ad.unpack_dual((y * upstream).sum() + (y**3).sum() / 10).tangent
        assert all(forward_ad.unpack_dual(buffer).tangent is None for buffer in norm.buffers())
    torch.testing.assert_close(slope, (expected * upstream).sum(), rtol=1e-8, atol=1e-8)
