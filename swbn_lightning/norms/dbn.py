"""DBN layers: Decorrelated Batch Normalization (CVPR 2018)."""

import torch
from torch import Tensor

from swbn_lightning.errors import require_positive
from swbn_lightning.norms.batch_whitening import BatchWhitening
from swbn_lightning.norms.inverse_sqrt import zca_inverse_sqrt
from swbn_lightning.norms.passes.rows import widest_dtype

GROUP_WIDTH = 16  # channels a group at most, as Huang et al. (CVPR 2018) group them


class DBN(BatchWhitening):
    """Whiten a batch exactly, by eigendecomposition of its covariance in groups of channels (ZCA).

    Training, for ``n`` samples of ``d`` channels (Huang et al., *Decorrelated Batch Normalization*, CVPR 2018)::

        xc = x - mean;   S = xc^T xc / n + eps I = U diag(lambda) U^T
        W  = U diag(1 / sqrt(lambda)) U^T
        y  = gamma * (W xc) + beta

    The gradient flows through mean, covariance and decomposition. It is finite even where eigenvalues are equal. The
    running mean and the running W follow ``running <- (1 - momentum) * running + momentum * batch``. Evaluation uses
    both, or the batch's own without running statistics.

    Directions without variance are multiplied by ``1 / sqrt(eps)``. For accuracy, everything of size d x d is therefore
    computed in float64, and so is a whole batch that has at most one sample more than a group has channels. On a GPU,
    the decomposition synchronises with the host, so this layer cannot be captured in a CUDA graph.

    Args:
        num_features: number of channels, ``d``.
        eps: added to the diagonal of the covariance.
        momentum: share of the new batch in the running state; 0.1 as in BatchNorm. None: plain average.
        num_groups: number of contiguous channel groups, each whitened separately; 1 whitens all channels together.
            None: groups as wide as the largest divisor of ``num_features`` up to 16.
        group_size: instead of ``num_groups``, the largest number of channels per group, as in SWBN.

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
        num_groups: int | None = None,
        group_size: int | None = None,
        sync: bool = True,
        bias: bool = True,
    ) -> None:
        require_positive(type(self).__name__, num_features=num_features)
        if num_groups is None and group_size is None:
            width = max(k for k in range(1, GROUP_WIDTH + 1) if num_features % k == 0)
            num_groups = num_features // width
        super().__init__(
            num_features, eps, momentum, affine, bias, track_running_stats, num_groups, group_size, sync, device, dtype
        )

    def _covariance_dtype(self, x: Tensor) -> torch.dtype:
        return widest_dtype(x.device)

    def _inverse_sqrt(self, covariance: Tensor) -> Tensor:
        return zca_inverse_sqrt(covariance, floor=self.eps)


class DBN1d(DBN):
    """:class:`DBN` for ``[N, C]`` or ``[N, C, L]``."""

    input_dims = (2, 3)


class DBN2d(DBN):
    """:class:`DBN` for ``[N, C, H, W]``."""

    input_dims = (4,)


class DBN3d(DBN):
    """:class:`DBN` for ``[N, C, D, H, W]``."""

    input_dims = (5,)
