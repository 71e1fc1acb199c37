"""``S^(-1/2)`` of a covariance, with the gradient through it: what whitens in IterNorm and DBN.

Sources: Huang et al., *Iterative Normalization*, CVPR 2019, Algorithm 1; Huang et al., *Decorrelated Batch
Normalization*, CVPR 2018. Both derivatives are written out, and made of differentiable operations where a derivative
of theirs is wanted.
"""

from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.closed_form import is_transformed


def newton_inverse_sqrt(covariance: Tensor, num_iterations: int = 5) -> Tensor:
    """``S^(-1/2)`` approximately, by Newton's iteration; the gradient goes through it.

    ``P_0 = I``, ``P_k = (3 P_{k-1} - P_{k-1}^3 S / tr S) / 2``, result ``P_T / sqrt(tr S)``: Iterative
    Normalization, Algorithm 1. Directions of small variance are whitened last: few iterations leave them correlated.
    Computed as the coupled iteration ``T = (3 I - P Y) / 2``, ``Y <- Y T``, ``P <- T P`` from ``Y = S / tr S``: the
    same ``P_k`` and as many products, but stable. The form above amplifies rounding where the largest eigenvalue is
    more than nine times the smallest (Higham, *Functions of Matrices*, 2008, chapter 6) and then diverges.

    Args:
        covariance: ``S``, symmetric and positive, ``[..., d, d]``.
        num_iterations: ``T``; 5 as in the paper.
    """
    flat = covariance.reshape(-1, *covariance.shape[-2:])
    if is_transformed():
        return _iterate(flat, num_iterations)[0].view_as(covariance)
    return _NewtonInverseSqrt.apply(flat, num_iterations).view_as(covariance)


def _iterate(s: Tensor, num_iterations: int) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """The result, and ``Y``, ``T``, ``P`` after each iteration."""
    trace = s.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    three_halves = 1.5 * torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    y = s / trace
    p = t = three_halves - 0.5 * y
    steps = [(y, t, p)]
    for _ in range(num_iterations - 1):
        y = y @ t
        t = torch.baddbmm(three_halves, p, y, alpha=-0.5)
        p = t @ p
        steps.append((y, t, p))
    return p * torch.rsqrt(trace), steps


class _NewtonInverseSqrt(torch.autograd.Function):
    """Six products an iteration backward, each with the addition of what else reaches the same matrix."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, num_iterations: int) -> Tensor:
        w, steps = _iterate(s, num_iterations)
        ctx.num_iterations = num_iterations
        ctx.save_for_backward(s, w, *(matrix for step in steps for matrix in step))
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        s, w, *saved = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a derivative of this one is wanted
            again, _ = _iterate(s, ctx.num_iterations)
            return torch.autograd.grad(again, s, grad, create_graph=True)[0], None
        steps = [tuple(saved[i : i + 3]) for i in range(0, len(saved), 3)]
        trace = s.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        grad_y = _backward_of_iterations(grad * torch.rsqrt(trace), steps)
        y = steps[0][0]
        of_trace = -(0.5 * grad * w + grad_y * y).sum((-2, -1), keepdim=True) / trace
        grad_s = grad_y / trace
        grad_s.diagonal(dim1=-2, dim2=-1).add_(of_trace.squeeze(-1))
        return grad_s, None


def _backward_of_iterations(grad_p: Tensor, steps: list[tuple[Tensor, ...]]) -> Tensor:
    """The gradient of ``Y`` before the first iteration from that of the last ``P``."""
    grad_y = grad_t = None  # what the iteration after this one adds
    for (y_before, t_before, p_before), (y, t, _) in zip(steps[-2::-1], steps[:0:-1], strict=True):
        grad_t = grad_p @ p_before.mT if grad_t is None else torch.baddbmm(grad_t, grad_p, p_before.mT)
        if grad_y is None:
            grad_y = -0.5 * (p_before.mT @ grad_t)
        else:
            grad_y = torch.baddbmm(grad_y, p_before.mT, grad_t, alpha=-0.5)
        grad_p = torch.baddbmm(t.mT @ grad_p, grad_t, y.mT, alpha=-0.5)
        grad_t, grad_y = y_before.mT @ grad_y, grad_y @ t_before.mT
    # The first T is the first P, and linear in Y.
    grad_t = grad_p if grad_t is None else grad_p + grad_t
    return -0.5 * grad_t if grad_y is None else torch.add(grad_y, grad_t, alpha=-0.5)


def zca_inverse_sqrt(covariance: Tensor, floor: float = 0.0) -> Tensor:
    """``S^(-1/2) = U diag(1/sqrt(lambda)) U^T`` by eigendecomposition; the gradient goes through it.

    The ZCA whitening of Decorrelated Batch Normalization. The gradient (of any order) is that of the matrix function
    itself, in which no difference of eigenvalues is divided by: equal ones are no trouble.

    Args:
        covariance: ``S``, symmetric, ``[..., d, d]``.
        floor: what no eigenvalue can be below (eps, when ``S = cov + eps I``): rounding can put it there.

    Returns:
        ``[..., d, d]``; NaN where ``S`` is not finite (the decomposition itself would raise an error).
    """
    finite = torch.isfinite(covariance).all(-1, keepdim=True).all(-2, keepdim=True)
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    w = _InverseSqrt.apply(torch.where(finite, covariance, eye), floor)
    return torch.where(finite, w, torch.nan)


class _InverseSqrt(torch.autograd.Function):
    """``W = S^(-1/2)``. From ``W W = S^(-1)``: ``dL/dS = -W^2 X W^2`` with ``X W + W X = dL/dW``."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, floor: float) -> Tensor:
        values, vectors = torch.linalg.eigh(s)
        inverse_roots = values.clamp(min=floor).rsqrt()
        w = (vectors * inverse_roots.unsqueeze(-2)) @ vectors.mT
        ctx.save_for_backward(w, inverse_roots, vectors)
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        w, inverse_roots, vectors = ctx.saved_tensors
        x = _Sylvester.apply(w, (grad + grad.mT) / 2, inverse_roots, vectors)
        square = w @ w
        return -square @ x @ square, None


class _Sylvester(torch.autograd.Function):
    """``X`` of ``X W + W X = G`` for a symmetric ``W`` with given eigenvalues and vectors."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, g: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        inner = vectors.mT @ g @ vectors / (values.unsqueeze(-1) + values.unsqueeze(-2))
        x = vectors @ inner @ vectors.mT
        ctx.save_for_backward(w, x, values, vectors)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        w, x, values, vectors = ctx.saved_tensors
        z = _Sylvester.apply(w, grad, values, vectors)
        return -(x.mT @ z + z @ x.mT), z, None, None
