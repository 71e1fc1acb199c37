"""What keeps a layer's state and output finite, without a look at values on the host."""

import torch
from torch import Tensor

from swbn_lightning.norms.passes.rows import scaled


def all_finite(*values: Tensor) -> Tensor:
    """Whether no value is infinite or NaN, ``[]``, without asking the device; few operators, for small tensors."""
    # 0 times what is not finite is NaN. (One `cat` would take fewer operators still; torch 2.14 compiles it wrongly.)
    first, *rest = (value.mul(0).sum() for value in values)
    return sum(rest, start=first) == 0


def keep_in_range(
    whitening_matrix: Tensor, covariance: Tensor, samples: int | Tensor, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``W``, made smaller as a whole where a value of ``gamma * (W xs)`` could otherwise overflow in ``dtype``.

    No value exceeds ``gamma_i sqrt(n (W S W^T)_ii)``, because ``sum_j y_ij^2 = gamma_i^2 n (W S W^T)_ii``. Where ``W``
    whitens, that diagonal is 1: only a ``W`` that has diverged is touched, and each group's by itself.
    """
    w = scaled(whitening_matrix, weight)
    largest = w.abs().amax((-2, -1), keepdim=True).clamp(min=1)
    w = w / largest  # so that no square overflows on the way
    variances = ((w @ covariance) * w).sum(-1).amax(-1)[:, None, None]
    bound = largest * (samples * variances).sqrt().clamp(min=1)
    return whitening_matrix * (torch.finfo(dtype).max / bound).clamp(max=1)
