"""Base of all whitening layers: BatchNorm's contract, with statistics and W in float32 or better."""

import math
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.utils.fusion
from torch import Tensor, nn

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms.passes.rows import accumulation_dtype, per_channel
from swbn_lightning.norms.torch_internals import is_batched

_HEALTH = ("num_batches_rejected", "num_batches_small")  # counters for `check_norms`, not part of a state


class WhiteningNorm(nn.Module):
    """Base class of the whitening layers; a family adds ``forward``.

    It holds parameters and buffers, checks arguments and input, and handles casting and loading.

    It is not a subclass of PyTorch's ``_BatchNorm``. Code that searches a model for ``_BatchNorm`` (SyncBatchNorm's
    converter, the convolution fuser, ``Trainer(sync_batchnorm=True)``) would silently ignore the whitening matrix.
    """

    _version = 2  # as BatchNorm's: from 2 on a checkpoint has num_batches_tracked
    # What differs between the families: the buffers, and which of them are learnt also without running statistics.
    _statistics: tuple[str, ...] = ("running_mean",)
    _matrices: tuple[str, ...] = ("whitening_matrix",)
    _learnt: tuple[str, ...] = ()

    # Any number of spatial dimensions, as SyncBatchNorm takes it; the classes 1d, 2d, 3d say theirs.
    input_dims: tuple[int, ...] = (2, 3, 4, 5)
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    num_batches_tracked: Tensor | None
    whitening_matrix: Tensor | None
    num_batches_rejected: Tensor  # not finite
    num_batches_small: Tensor  # fewer samples than channels that are whitened together

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        bias: bool,
        track_running_stats: bool,
        num_groups: int | None,
        group_size: int | None,
        sync: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require_positive(name, num_features=num_features)
        if not (is_number(eps, Real) and 0 <= eps < math.inf):
            raise InputError(f"{name}: eps must be a finite number of at least 0, got {eps!r}.")
        if momentum is not None and not (is_number(momentum, Real) and 0 <= momentum <= 1):
            raise InputError(f"{name}: momentum must be in [0, 1] or None for a plain average, got {momentum!r}.")
        num_groups = _groups(name, num_features, num_groups, group_size)
        self.num_features = num_features = int(num_features)
        self.eps = float(eps)
        self.momentum = None if momentum is None else float(momentum)
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.num_groups = num_groups
        self.sync = sync

        state_dtype = accumulation_dtype(dtype or torch.get_default_dtype())
        width = num_features // num_groups
        for parameter, wanted in (("weight", affine), ("bias", affine and bias)):
            values = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(parameter, values)
        for buffer in self._statistics:
            tracked = torch.empty(num_features, device=device, dtype=state_dtype)
            self.register_buffer(buffer, tracked if track_running_stats else None)
        counter = torch.empty((), device=device, dtype=torch.long)
        self.register_buffer("num_batches_tracked", counter if track_running_stats else None)
        matrix = torch.empty(num_groups, width, width, device=device, dtype=state_dtype)
        for name in self._matrices:
            wanted = track_running_stats or name in self._learnt
            self.register_buffer(name, torch.empty_like(matrix) if wanted else None)
        for health in _HEALTH:
            self.register_buffer(health, torch.empty_like(counter), persistent=False)
        self.reset_parameters()

    def __getattr__(self, name: str) -> Any:
        # PyTorch's fusers ask for no class, only for a BatchNorm's attributes: they would leave W out, silently.
        asked = name == "running_var" and not torch.compiler.is_compiling()
        if asked and sys._getframe(1).f_code.co_filename == torch.nn.utils.fusion.__file__:
            raise InputError(
                f"torch.nn.utils fuses no {type(self).__name__}: it knows nothing of the whitening matrix. "
                "swbn_lightning.fuse_norms(model) fuses all whitening layers of a network."
            )
        return super().__getattr__(name)

    def reset_running_stats(self) -> None:
        """Reset what was learnt from batches: mean 0, variance 1, W the identity, counters 0."""
        if self.track_running_stats:
            for name in self._statistics:
                getattr(self, name).fill_(1 if name == "running_var" else 0)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()
        for name in self._matrices:
            if (w := getattr(self, name)) is not None:
                w.copy_(_identity(w, w.device))
        for health in _HEALTH:
            self.get_buffer(health).zero_()

    def reset_parameters(self) -> None:
        """Call :meth:`reset_running_stats`, and set gamma to 1 and beta to 0, as BatchNorm does."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def running_variance(self, batchnorm_state: dict[str, Any]) -> Tensor:
        """Return the running variance that a BatchNorm in this place would have, ``[C]``.

        Args:
            batchnorm_state: state dict of the BatchNorm that this layer replaced.
        """
        return self.get_buffer("running_var")

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, num_groups={self.num_groups}, sync={self.sync}"
        )

    @torch.no_grad()
    def affine_map(self) -> tuple[Tensor, Tensor]:
        """Return evaluation as ``y = A x + b``: the blocks ``A [g, C/g, C/g]`` and ``b [C]``, in float64.

        Raises:
            InputError: the layer has no running statistics, so evaluation depends on the batch and is not such a map.
        """
        if self.running_mean is None or self.whitening_matrix is None:
            raise InputError(
                f"{type(self).__name__} with track_running_stats=False uses the batch's own statistics in evaluation "
                "too, so it is no fixed affine map; make it with track_running_stats=True."
            )
        a = self.whitening_matrix.double()
        rows = (self.num_groups, -1, 1)
        running_var = getattr(self, "running_var", None)
        if running_var is not None:
            a = a * torch.rsqrt(running_var.double() + self.eps).view(self.num_groups, 1, -1)
        if self.weight is not None:
            a = a * self.weight.double().view(rows)
        shift = -(a @ self.running_mean.double().view(rows)).flatten()
        return a, shift if self.bias is None else shift + self.bias.double()

    def _check_input(self, x: Tensor) -> None:
        if x.dim() not in self.input_dims:
            expected = " or ".join(f"{dim}D" for dim in self.input_dims)
            raise ValueError(f"expected {expected} input (got {x.dim()}D input)")
        if x.shape[1] != self.num_features:
            raise RuntimeError(
                f"{type(self).__name__}: expected {self.num_features} channels in dimension 1, "
                f"got input of shape {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise NotImplementedError(f"{type(self).__name__} takes floating point input, got {x.dtype}")

    def _check_state(self) -> None:
        if self.whitening_matrix is not None and self.whitening_matrix.dtype.itemsize < 4:
            raise RuntimeError(
                f"{type(self).__name__}: whitening_matrix is {self.whitening_matrix.dtype}, too coarse for its small "
                "steps; something has cast the buffers. Under FullyShardedDataParallel give "
                "MixedPrecision(buffer_dtype=torch.float32), or use fully_shard, which leaves buffers as they are."
            )

    def _forward_empty(self, x: Tensor) -> Tensor:
        """Handle an empty batch as BatchNorm does: empty output, zero gradients for gamma and beta, no step."""
        weight, bias = (None if p is None else per_channel(p, x).to(x.dtype) for p in (self.weight, self.bias))
        y = x.clone() if weight is None else x * weight
        return y if bias is None else y + bias

    def _update_running(self, accepted: Tensor, samples: int | Tensor, **batch: Tensor) -> None:
        """Mix each value of ``batch`` into the buffer of its name, unless the batch was rejected; count both cases.

        Nothing branches on the host. Buffers are only copied into, because the graph may hold what they were made from.
        """
        # In place: checkpointing under torch.compile allows no assignment.
        self.num_batches_small.add_(samples < self.num_features // self.num_groups)
        # A counter that torch.func.vmap was not given cannot count what is one flag a model.
        if not is_batched(accepted) or is_batched(self.num_batches_rejected):
            self.num_batches_rejected.add_(~accepted)
        # The flag may have been set since, or the statistics taken away, as BatchNorm's may.
        if self.num_batches_tracked is None or self.running_mean is None or not self.track_running_stats:
            return
        self.num_batches_tracked.add_(accepted)
        factor = self._average_factor()
        for name, value in batch.items():
            running = getattr(self, name)
            mixed = torch.lerp(running, value.to(running.dtype), factor)
            if is_batched(mixed):  # for which `out=` has no rule
                running.copy_(torch.where(accepted, mixed, running))
            else:
                torch.where(accepted, mixed, running, out=running)

    def _average_factor(self) -> float | Tensor:
        """Return the share of the new batch in the running statistics; for a plain average if momentum is None."""
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None and self.running_mean is not None
        return 1.0 / self.num_batches_tracked.clamp(min=1).to(self.running_mean.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WhiteningNorm":
        # `.half()` and `.bfloat16()` cast weight and bias, but not the state: W would lose its small steps.
        before = {name: getattr(self, name) for name in (*self._statistics, *self._matrices)}
        empty = [health for health in _HEALTH if self.get_buffer(health).is_meta]
        super()._apply(fn, recurse)
        for health in empty:  # to_empty leaves what lies in memory, and no state dict has the counters
            self.get_buffer(health).zero_()
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
        own = [name for name in ("weight", "bias") if self._parameters.get(name) is not None]  # not a parametrised one
        own += ["running_mean", "running_var"] if self.track_running_stats else []
        if prefix + "whitening_matrix" not in state_dict and all(prefix + name in state_dict for name in own):
            if self.whitening_matrix is not None:
                # Without parameters and statistics a BatchNorm has no state at all, and says nothing about W.
                matrix = self._matrix_for_batchnorm(state_dict, prefix) if own else self.whitening_matrix
                state_dict[prefix + "whitening_matrix"] = matrix
            for name in self._matrices:  # another one starts anew
                if (w := getattr(self, name)) is not None and prefix + name not in state_dict:
                    device = next((v.device for k, v in state_dict.items() if k.startswith(prefix)), w.device)
                    state_dict[prefix + name] = _identity(w, device) if own else w
            if "running_var" not in self._statistics:
                state_dict.pop(prefix + "running_var", None)
            if self.track_running_stats and (local_metadata.get("version") or 0) < 2:
                state_dict.setdefault(prefix + "num_batches_tracked", torch.tensor(0))
        for name in (*self._statistics, *self._matrices):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor):  # with assign=True it takes the buffer's place, dtype and all
                state_dict[prefix + name] = value.to(accumulation_dtype(value.dtype))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        device = next((b.device for b in self.buffers() if not b.is_meta), None)
        for health in _HEALTH:  # not in the state: assign=True leaves them behind
            if self.get_buffer(health).is_meta and device is not None:
                setattr(self, health, torch.zeros((), dtype=torch.long, device=device))

    def _matrix_for_batchnorm(self, state_dict: dict[str, Any], prefix: str) -> Tensor:
        """Return the W with which this layer evaluates like the BatchNorm in ``state_dict``."""
        assert self.whitening_matrix is not None
        like = next(v for k, v in state_dict.items() if k.startswith(prefix) and v.is_floating_point())
        return _identity(self.whitening_matrix, like.device)


def _groups(name: str, num_features: int, num_groups: int | None, group_size: int | None) -> int:
    """Return the number of channel groups: as given, 1 by default, or the fewest that are small enough."""
    given = f"num_groups={num_groups!r}"
    if group_size is not None:
        given = f"group_size={group_size!r}"
        if num_groups is not None:
            raise InputError(f"{name}: give num_groups={num_groups!r} or {given}, not both.")
        if not is_number(group_size, Integral) or group_size < 1:
            raise InputError(f"{name}: group_size must be an integer of at least 1, got {group_size!r}.")
        num_groups = -(-num_features // group_size)
    groups: Any = 1 if num_groups is None else num_groups
    if not is_number(groups, Integral) or groups < 1 or num_features % groups:
        raise InputError(
            f"{name}: {given} does not divide num_features={num_features}; choose a divisor of the number of channels."
        )
    return int(groups)


def _identity(matrix: Tensor, device: torch.device) -> Tensor:
    """As many identities as ``matrix`` has blocks."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=device).expand_as(matrix).clone()


def is_number(value: object, kind: type) -> bool:
    """``isinstance``, but a bool is no number; hidden from the type checker, to which a ``float`` is no ``Real``."""
    return isinstance(value, kind) and not isinstance(value, bool)


def graph_may_hold_state() -> bool:
    """Return whether evaluation must copy the state because a backward may follow (never in ``torch.jit.trace``)."""
    return torch.is_grad_enabled() and not torch.jit.is_tracing()
