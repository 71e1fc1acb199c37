"""IterNorm layers: Iterative Normalization (CVPR 2019)."""

import torch
from torch import Tensor

from swbn_lightning.errors import require_positive
from swbn_lightning.norms.batch_whitening import BatchWhitening
from swbn_lightning.norms.inverse_sqrt import newton_inverse_sqrt
from swbn_lightning.norms.passes.rows import widest_dtype

_MOST_IN_FLOAT32 = 9  # iterations


class IterNorm(BatchWhitening):
    """Whiten a batch by the inverse square root of its covariance, computed by Newton's iteration.

    Training, for ``n`` samples of ``d`` channels (Huang et al., *Iterative Normalization: Beyond Standardization
    towards Efficient Whitening*, CVPR 2019)::

        xc = x - mean;   S = xc^T xc / n + eps I
        P_0 = I;         P_k = (3 P_{k-1} - P_{k-1}^3 S / tr S) / 2
        W  = P_T / sqrt(tr S)
        y  = gamma * (W xc) + beta

    The gradient flows through mean, covariance and iteration. The running mean and the running W follow ``running <- (1
    - momentum) * running + momentum * batch``. Evaluation uses both, or the batch's own without running statistics.

    Args:
        num_features: number of channels, ``d``.
        eps: added to the diagonal of the covariance; 1e-5 as in the paper.
        momentum: share of the new batch in the running state; 0.1 as in BatchNorm. None: plain average.
        num_iterations: number of iterations, ``T``; 5 as in the paper. With more iterations, directions of small
            variance are whitened further.

    The other arguments, the shapes, the state (without ``running_var``) and the errors are as in
    :class:`~swbn_lightning.norms.swbn.SWBN`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_iterations: int = 5,
        num_groups: int | None = None,
        group_size: int | None = None,
        sync: bool = True,
        bias: bool = True,
    ) -> None:
        require_positive(type(self).__name__, num_iterations=num_iterations)
        super().__init__(
            num_features, eps, momentum, affine, bias, track_running_stats, num_groups, group_size, sync, device, dtype
        )
        self.num_iterations = num_iterations

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_iterations={self.num_iterations}"

    def _covariance_dtype(self, x: Tensor) -> torch.dtype:
        # Each iteration multiplies directions without variance, and what rounding left there, by up to 1.5.
        exact = self.num_iterations > _MOST_IN_FLOAT32
        return widest_dtype(x.device) if exact else super()._covariance_dtype(x)

    def _inverse_sqrt(self, covariance: Tensor) -> Tensor:
        return newton_inverse_sqrt(covariance, self.num_iterations)


class IterNorm1d(IterNorm):
    """:class:`IterNorm` for ``[N, C]`` or ``[N, C, L]``."""

    input_dims = (2, 3)


class IterNorm2d(IterNorm):
    """:class:`IterNorm` for ``[N, C, H, W]``."""

    input_dims = (4,)


class IterNorm3d(IterNorm):
    """:class:`IterNorm` for ``[N, C, D, H, W]``."""

    input_dims = (5,)
