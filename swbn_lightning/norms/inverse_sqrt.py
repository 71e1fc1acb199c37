"""``S^(-1/2)`` of a covariance, with the gradient through it: the whitening of IterNorm and DBN.

Sources: Huang et al., *Iterative Normalization*, CVPR 2019, Algorithm 1; Huang et al., *Decorrelated Batch
Normalization*, CVPR 2018. Both backward passes are written out. Higher derivatives and other kinds of derivatives use
plain operators.
"""

from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.passes.rows import is_transformed, without_autocast


def newton_inverse_sqrt(covariance: Tensor, num_iterations: int = 5) -> Tensor:
    """Return ``S^(-1/2)`` approximately, by Newton's iteration; the gradient flows through it.

    ``P_0 = I``, ``P_k = (3 P_{k-1} - P_{k-1}^3 S / tr S) / 2``, result ``P_T / sqrt(tr S)`` (Iterative Normalization,
    Algorithm 1). Directions of small variance are whitened last, so few iterations leave them correlated.

    The computation is the coupled iteration ``T = (3 I - P Y) / 2``, ``Y <- Y T``, ``P <- T P`` from ``Y = S / tr S``.
    It gives the same ``P_k`` with as many products, but is stable. The form above amplifies rounding where the largest
    eigenvalue is more than nine times the smallest (Higham, *Functions of Matrices*, 2008, chapter 6), and then
    diverges.

    Args:
        covariance: ``S``, symmetric and positive, ``[..., d, d]``.
        num_iterations: ``T``; 5 as in the paper.
    """
    flat = covariance.reshape(-1, *covariance.shape[-2:])
    if is_transformed():
        return _iterate(flat, num_iterations)[0].view_as(covariance)
    return _NewtonInverseSqrt.apply(flat, num_iterations).view_as(covariance)


def _iterate(s: Tensor, num_iterations: int) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """Return the result, and ``Y``, ``T``, ``P`` after each iteration."""
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
    """Newton's iteration with a backward of six products per iteration."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, num_iterations: int) -> Tensor:
        w, steps = _iterate(s, num_iterations)
        ctx.num_iterations = num_iterations
        ctx.save_for_backward(s, w, *(matrix for step in steps for matrix in step))
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        s, w, *saved = ctx.saved_tensors
        with without_autocast(s.device.type):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a derivative of this one is wanted
                again, _ = _iterate(s, ctx.num_iterations)
                return torch.autograd.grad(again, s, grad, create_graph=True)[0], None
            steps = [tuple(saved[i : i + 3]) for i in range(0, len(saved), 3)]
            trace = s.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            grad_y = _backward_of_iterations(grad * torch.rsqrt(trace), steps)
            of_trace = -(0.5 * grad * w + grad_y * steps[0][0]).sum((-2, -1), keepdim=True) / trace
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
    """Return ``S^(-1/2) = U diag(1/sqrt(lambda)) U^T`` by eigendecomposition; the gradient flows through it.

    This is the ZCA whitening of Decorrelated Batch Normalization. The gradient (up to the fourth order) is that of the
    matrix function itself. It divides by no difference of eigenvalues, so equal eigenvalues are no problem.

    Args:
        covariance: ``S``, symmetric, ``[..., d, d]``.
        floor: lower bound of the eigenvalues (eps, for ``S = cov + eps I``); rounding can put one below it.

    Returns:
        ``[..., d, d]``; NaN where ``S`` is not finite (the decomposition itself would raise an error).
    """
    finite = torch.isfinite(covariance).all(-1, keepdim=True).all(-2, keepdim=True)
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    s = torch.where(finite, covariance, eye)
    w = _by_corrections(s, floor) if is_transformed() else _InverseSqrt.apply(s, floor)
    return torch.where(finite, w, torch.nan)


def _decompose(s: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``S^(-1/2)``, ``S^(1/2)``, and the eigenvalues and eigenvectors of the latter."""
    values, vectors = torch.linalg.eigh(s)
    roots = values.clamp(min=floor).sqrt()
    return (vectors / roots.unsqueeze(-2)) @ vectors.mT, (vectors * roots.unsqueeze(-2)) @ vectors.mT, roots, vectors


def _solve(g: Tensor, roots: Tensor, vectors: Tensor) -> Tensor:
    """Return the solution ``X`` of ``Q X + X Q = G`` for a symmetric ``Q`` with the given eigenvalues and vectors."""
    return vectors @ (vectors.mT @ g @ vectors / (roots.unsqueeze(-1) + roots.unsqueeze(-2))) @ vectors.mT


def _by_corrections(s: Tensor, floor: float) -> Tensor:
    """Compute the same with plain operators, with derivatives of every kind up to the fourth order.

    It starts from exact constants and adds corrections that are 0: ``Q <- Q + X`` with ``Q0 X + X Q0 = S - Q Q``, and
    ``W <- 2 W - W Q W``. Each correction of ``Q`` makes one more order of the derivatives exact; each of ``W`` doubles
    the order. (An autograd function with a forward-mode rule is silently wrong where two such derivatives are nested.)
    """
    w, q, roots, vectors = (constant.detach() for constant in _decompose(s.detach(), floor))
    s = (s + s.mT) / 2
    change = s - s.detach() + q @ q
    for _ in range(4):
        q = q + _solve(change - q @ q, roots, vectors)
    for _ in range(3):
        w = 2 * w - w @ q @ w
    return w


class _InverseSqrt(torch.autograd.Function):
    """``W = Q^(-1)`` and ``Q = S^(1/2)``, so ``dW = -W dQ W`` with ``Q dQ + dQ Q = dS``.

    The derivative goes through ``Q``, which is as small as ``S``. For a small eigenvalue W is large, and each factor W
    multiplies the rounding error.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, floor: float) -> Tensor:
        w, _, roots, vectors = _decompose(s, floor)
        ctx.floor = floor
        ctx.save_for_backward(s, w, roots, vectors)
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        s, w, roots, vectors = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this one is wanted
            return torch.autograd.grad(_by_corrections(s, ctx.floor), s, grad, create_graph=True)[0], None
        of_root = -w @ grad @ w
        return _solve((of_root + of_root.mT) / 2, roots, vectors), None
