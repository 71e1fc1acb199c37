"""Online whitening with the gradient of one Newton-Schulz step: the layers."""

from numbers import Real

import torch
from torch import Tensor

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import is_number
from swbn_lightning.norms.batch_whitening import BatchWhitening
from swbn_lightning.norms.checkpointing import FirstRuns, first_run, is_recomputing
from swbn_lightning.norms.newton_schulz import newton_schulz_step
from swbn_lightning.norms.passes import Batch
from swbn_lightning.norms.torch_internals import outside_selective_checkpointing

_RATE = 0.1  # follows the features within some ten batches; stable for every covariance that the shrinkage leaves
_GAIN = 1.5**4  # at most, of the direction without variance: that of four of IterNorm's iterations


class OnlineWhitening(BatchWhitening):
    r"""Whiten a batch by one Newton-Schulz step from a matrix that is learnt online.

    In training, for ``n`` samples of ``d`` channels::

        xc = x - mean;   S = xc^T xc / n + eps I;   e = diag(S)^(-1/2)
        R' = (1 - s) diag(e) S diag(e) + s I                      correlation, shrunk towards the identity
        V  = sym((3 I - W R' W^T) W / 2);   A = V diag(e)         one step from the kept W
        y  = gamma * (A xc) + beta
        W <- sym(W + 0.1 (I - W R' W^T) W)                        after the output

    with ``sym(X) = (X + X^T) / 2``. The gradient goes through mean, covariance and the step. W, which is kept from
    batch to batch, is a constant to the task loss. Where a batch is far from what W knows, both steps are scaled down,
    so that they stay stable (:func:`.newton_schulz_step`). The running mean and the running A follow ``running <- (1 -
    momentum) * running + momentum * batch``. Evaluation uses both, or the batch's own without running statistics. A
    batch that is not finite leaves the state as it was and is counted in ``num_batches_rejected``. The page "Online
    whitening" of the documentation derives the method and has measurements.

    Args:
        num_features: ``d``, the channels.
        eps: added to the covariance's diagonal; 1e-5 as BatchNorm's.
        momentum: share of the new batch in the running state, PyTorch's convention; 0.1 as BatchNorm's. None for
            a plain average over all batches.
        affine: learn gamma and beta.
        track_running_stats: keep running mean and whitening matrix for evaluation.
        shrinkage: ``s`` in (0, 1]. The larger, the less directions of small variance, which are mostly the batch's
            noise, are amplified: by ``1 / sqrt(s)`` at most. None: ``d / (d + 1.5^8)`` for ``d`` channels that are
            whitened together (0.38, 0.71, 0.91 for 16, 64, 256), the limit of four iterations of IterNorm.
        num_groups: number of contiguous channel groups, each whitened separately. None means 1.
        group_size: instead of ``num_groups``, the largest number of channels per group.
        sync: in a distributed run, use the statistics of the whole batch over all processes.
        bias: with ``affine``, learn beta too, as in BatchNorm of newer PyTorch.

    Shape:
        1d: ``[N, C]`` or ``[N, C, L]``; 2d: ``[N, C, H, W]``; 3d: ``[N, C, D, H, W]``. The output has the shape, dtype
        and memory layout of the input.

    State: ``weight``, ``bias``, ``running_mean`` of ``[C]``, ``whitening_matrix`` (the running A) and
    ``online_matrix`` (W) of ``[num_groups, C/num_groups, C/num_groups]``, ``num_batches_tracked``. All but weight and
    bias stay float32 under ``.half()``, ``.bfloat16()`` and autocast.

    Raises:
        ValueError: in the constructor, for a number of groups that does not divide ``num_features``, or a shrinkage
            that is not in (0, 1]. In ``forward``, for a wrong number of dimensions or, in training, only one value per
            channel.
        RuntimeError: in ``forward``, for a wrong number of channels, or if the state was cast to 16 bits.
    """

    online_matrix: Tensor
    _matrices = ("whitening_matrix", "online_matrix")
    _learnt = ("online_matrix",)

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
        shrinkage: float | None = None,
        num_groups: int | None = None,
        group_size: int | None = None,
        sync: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, bias, track_running_stats, num_groups, group_size, sync, device, dtype
        )
        width = num_features // self.num_groups
        if shrinkage is None:
            shrinkage = width / (width + _GAIN**2)
        elif not (is_number(shrinkage, Real) and 0 < shrinkage <= 1):
            raise InputError(f"{type(self).__name__}: shrinkage must be in (0, 1] or None, got {shrinkage!r}.")
        self.shrinkage = float(shrinkage)
        self.first_runs = FirstRuns()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shrinkage={self.shrinkage:.3g}"

    def _output(self, batch: Batch, covariance: Tensor, training: bool) -> Tensor:
        again = training and is_recomputing()
        with torch.no_grad(), outside_selective_checkpointing():
            variance = covariance.diagonal(dim1=-2, dim2=-1).flatten().contiguous()
            if again:
                w = self.first_runs.find(batch.mean, variance)
            else:
                w = self.online_matrix.clone()  # the graph keeps it, and the buffer is written to
                # A compiled backward would make the copy again, from the buffer that was written to.
                w = first_run(w) if training else w
        a, kept = newton_schulz_step(covariance, w.to(covariance.dtype), self.shrinkage, _RATE)
        if training and not again:
            self._learn(batch, a, online_matrix=kept)
        y = batch.output(a, self.weight, self.bias)
        if training and not again:
            self.first_runs.note(batch.mean, variance, w, y)
        return y


class OnlineWhitening1d(OnlineWhitening):
    """:class:`OnlineWhitening` for ``[N, C]`` or ``[N, C, L]``."""

    input_dims = (2, 3)


class OnlineWhitening2d(OnlineWhitening):
    """:class:`OnlineWhitening` for ``[N, C, H, W]``."""

    input_dims = (4,)


class OnlineWhitening3d(OnlineWhitening):
    """:class:`OnlineWhitening` for ``[N, C, D, H, W]``."""

    input_dims = (5,)
