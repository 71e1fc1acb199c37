"""One Newton-Schulz step from a kept whitening matrix: what whitens in OnlineWhitening, with the gradient through it.

Sources: Higham, *Functions of Matrices*, 2008, chapter 6, for Newton's step to the inverse square root; Zhang et al.,
CVPR 2021, equation 3, for the kept matrix's, that of the KL criterion; Ledoit and Wolf, *A well-conditioned estimator
for large-dimensional covariance matrices*, 2004, for shrinkage.
"""

from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.passes.rows import is_transformed, without_autocast

_LARGEST = 2.0  # of M's eigenvalues in the Newton-Schulz step, which takes those below 3; at 2 it halves a direction


def newton_schulz_step(s: Tensor, w: Tensor, shrinkage: float, rate: float) -> tuple[Tensor, Tensor]:
    """The matrix that whitens a batch, and the kept matrix after this batch.

    With ``e = diag(S)^(-1/2)``, ``R = diag(e) S diag(e)``, ``R' = (1 - shrinkage) R + shrinkage I`` and
    ``M = W R' W^T``, whose largest row sum of absolute values is ``b``::

        c = min(1, 2 / b);         V  = sym(sqrt(c) (3 W - c M W) / 2);   A = V diag(e)
        k = min(1, 1 / (rate b));  W' = sym(sqrt(k) ((1 + rate) W - rate k M W))

    with ``sym(X) = (X + X^T) / 2``.

    ``c`` and ``k`` are 1 unless W is far from the covariance: in the first batches, or when it changes suddenly. Then
    they keep both steps stable. Products of ``d x d``: three forward, three backward.

    Args:
        s: ``S``, covariance of the centred batch, positive on its diagonal, ``[g, d, d]``.
        w: ``W``, the kept matrix, ``[g, d, d]``; a constant.
        shrinkage: of the correlation towards the identity, in [0, 1].
        rate: of the kept matrix's step.

    Returns:
        ``A`` with the gradient through ``S``, and ``W'`` without one.
    """
    if is_transformed():
        a, kept, *_ = _step(s, w.detach(), shrinkage, rate)
        return a, kept.detach()
    return _NewtonSchulz.apply(s, w, shrinkage, rate)


def _step(s: Tensor, w: Tensor, shrinkage: float, rate: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``A``, ``W'``, ``e``, ``c`` and ``A diag(e)^(-1)``."""
    identity = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    # No view of the diagonal: a compiled backward (inductor, torch 2.14) writes over S while it still reads the view.
    e = torch.rsqrt((s * identity).sum(-1))
    # Not in place: a derivative of any kind goes through it.
    r = (1 - shrinkage) * (e.unsqueeze(-1) * s * e.unsqueeze(-2)) + shrinkage * identity
    m = w @ r @ w.mT
    bound = m.detach().abs().sum(-1).amax(-1)[:, None, None]
    mw = m @ w
    c = (_LARGEST / bound).clamp(max=1)
    v = _symmetric(c.sqrt() * (1.5 * w - 0.5 * c * mw))
    k = (1 / (rate * bound)).clamp(max=1)
    kept = k.sqrt() * ((1 + rate) * w - rate * k * mw.detach())
    return v * e.unsqueeze(-2), _symmetric(kept), e, c, v


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.mT) / 2


class _NewtonSchulz(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, w: Tensor, shrinkage: float, rate: float) -> tuple[Tensor, Tensor]:
        a, kept, e, c, v = _step(s, w, shrinkage, rate)
        ctx.shrinkage, ctx.rate = shrinkage, rate
        ctx.save_for_backward(s, w, e, c, v)
        ctx.mark_non_differentiable(kept)
        return a, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
        s, w, e, c, v = ctx.saved_tensors
        with without_autocast(s.device.type):
            if torch.is_grad_enabled():  # a derivative of this one is wanted
                again = _step(s, w, ctx.shrinkage, ctx.rate)[0]
                return torch.autograd.grad(again, s, grad, create_graph=True)[0], None, None, None
            # dL/dR = -(1 - shrinkage) c^(3/2) / 2 W^T (sym(dL/dV) W^T) W
            scale = c.pow(1.5) * (0.5 * (ctx.shrinkage - 1))
            grad_r = scale * (w.mT @ _symmetric(grad * e.unsqueeze(-2)) @ (w.mT @ w))
            grad_s = e.unsqueeze(-1) * grad_r * e.unsqueeze(-2)
            through_r = grad_s * s
            grad_log_e = through_r.sum(-1) + through_r.sum(-2) + (grad * v).sum(-2) * e
            grad_s.diagonal(dim1=-2, dim2=-1).sub_(0.5 * grad_log_e * e.square())
            return grad_s, None, None, None
