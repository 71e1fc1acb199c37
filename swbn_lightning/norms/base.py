"""What every whitening layer shares: BatchNorm's contract, and state that never drops below float32."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms.functional import accumulation_dtype


class WhiteningNorm(nn.Module):
    """Parameters, buffers, checks, casting and loading of a whitening layer; a family adds ``forward``.

    Not a subclass of ``_BatchNorm``: whatever walks a model for ``_BatchNorm`` (SyncBatchNorm's converter,
    the convolution fuser, ``Trainer(sync_batchnorm=True)``) would treat the whitening matrix as if it were
    not there, silently.
    """

    _version = 2  # as BatchNorm's: from 2 on a checkpoint has num_batches_tracked
    _state = ("running_mean", "running_var", "whitening_matrix")

    input_dims: tuple[int, ...]  # set by 1d, 2d, 3d
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    whitening_matrix: Tensor
    num_batches_rejected: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        num_groups: int,
        sync: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require_positive(name, num_features=num_features)
        if not (isinstance(eps, int | float) and 0 <= eps < math.inf):
            raise InputError(f"{name}: eps must be a finite number of at least 0, got {eps!r}.")
        if momentum is not None and not (isinstance(momentum, int | float) and 0 <= momentum <= 1):
            raise InputError(f"{name}: momentum must be in [0, 1] or None for a plain average, got {momentum!r}.")
        if not isinstance(num_groups, int) or num_groups < 1 or num_features % num_groups:
            raise InputError(
                f"{name}: num_groups={num_groups!r} does not divide num_features={num_features}; "
                "choose a divisor of the number of channels."
            )
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.num_groups = num_groups
        self.sync = sync

        state_dtype = accumulation_dtype(dtype or torch.get_default_dtype())
        width = num_features // num_groups
        if affine:
            self.weight = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        for buffer in ("running_mean", "running_var"):
            tracked = torch.empty(num_features, device=device, dtype=state_dtype)
            self.register_buffer(buffer, tracked if track_running_stats else None)
        counter = torch.empty((), device=device, dtype=torch.long)
        self.register_buffer("num_batches_tracked", counter if track_running_stats else None)
        matrix = torch.empty(num_groups, width, width, device=device, dtype=state_dtype)
        self.register_buffer("whitening_matrix", matrix)
        self.register_buffer("num_batches_rejected", torch.empty_like(counter), persistent=False)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Mean 0, variance 1, W the identity, counters 0: everything that was learnt from batches."""
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()
        self.whitening_matrix.copy_(self._initial_matrix())
        self.num_batches_rejected.zero_()

    def reset_parameters(self) -> None:
        """Also gamma 1 and beta 0, as BatchNorm's."""
        self.reset_running_stats()
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, num_groups={self.num_groups}, sync={self.sync}"
        )

    def _initial_matrix(self) -> Tensor:
        w = self.whitening_matrix
        return torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand_as(w)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in self.input_dims:
            expected = " or ".join(f"{dim}D" for dim in self.input_dims)
            raise ValueError(f"expected {expected} input (got {x.dim()}D input)")
        if x.shape[1] != self.num_features:
            raise RuntimeError(
                f"{type(self).__name__}: expected {self.num_features} channels in dimension 1, "
                f"got input of shape {tuple(x.shape)}"
            )

    def _average_factor(self) -> float | Tensor:
        """The share of the new batch in the running statistics; a plain average if momentum is None."""
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None and self.running_mean is not None
        return 1.0 / self.num_batches_tracked.clamp(min=1).to(self.running_mean.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WhiteningNorm":
        # `.half()` and `.bfloat16()` cast weight and bias, but not the state: W would lose its small steps.
        before = {name: getattr(self, name) for name in self._state}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new is not None and new.dtype.itemsize < 4:
                setattr(self, name, old.to(new.device))
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # A BatchNorm checkpoint loads strictly: what it lacks is what it would have been there. A part of a state
        # (strict=False) leaves the rest as it is, W above all.
        whole = ("running_mean", "running_var") if self.track_running_stats else ("weight", "bias")
        if all(prefix + name in state_dict for name in whole):
            state_dict.setdefault(prefix + "whitening_matrix", self._matrix_for_batchnorm(state_dict, prefix))
            if self.track_running_stats and (local_metadata.get("version") or 0) < 2:
                state_dict.setdefault(prefix + "num_batches_tracked", torch.tensor(0))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _matrix_for_batchnorm(self, state_dict: dict[str, Any], prefix: str) -> Tensor:
        """The W with which this layer, evaluated, does what the BatchNorm in ``state_dict`` did."""
        return torch.eye(self.whitening_matrix.shape[-1]).expand(self.whitening_matrix.shape).clone()


def num_samples(x: Tensor) -> int:
    """Values a channel: ``N``, ``N * L`` or ``N * H * W``."""
    return x.shape[0] * math.prod(x.shape[2:])
