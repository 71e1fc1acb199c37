"""Triton kernels for SWBN's training pass on an NVIDIA GPU; off by default.

    from swbn_lightning.norms import use_kernels

    use_kernels()                # from here on; or SWBN_KERNELS=1 in the environment
    with use_kernels(False):     # or only for a block
        ...

PyTorch's operators are the reference. They run wherever there is no kernel: evaluation, float64, more than 512 channels
(256 per group for the step of W), contiguous images, compiled, synchronised or transformed layers, and second
derivatives. The kernels standardise the activation as they read it, and keep ``x`` for the backward. The forward
therefore writes no large tensor but the output, and the backward none but the gradient. A training pass takes a dozen
launches instead of sixty. Importing this module does not import Triton.
"""

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swbn_lightning.errors import InputError
from swbn_lightning.norms.passes.rows import is_transformed

MOST_CHANNELS = 512  # beyond, the products are bound by arithmetic, and the libraries' are the faster ones
MOST_WIDTH = 256  # of a group, for W's step
_MOST_OF_W = MOST_WIDTH**2  # numbers in all groups' W: one program steps through them
_MOST_OF_X = 2**31 - 1  # numbers in an activation: places are counted in 32 bits
_VARIABLE = "SWBN_KERNELS"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Availability:
    """Whether the kernels can run here; if not, ``reason`` says why."""

    reason: str | None

    def __bool__(self) -> bool:
        return self.reason is None


def available() -> Availability:
    """Return whether Triton and an NVIDIA GPU (compute capability 8.0 or more) are here, or its interpreter is on."""
    if importlib.util.find_spec("triton") is None:
        return Availability("Triton is not installed; it comes with PyTorch's CUDA builds for Linux")
    if interpreted():
        return Availability(None)
    if torch.version.cuda is None or not torch.cuda.is_available():
        return Availability("PyTorch finds no NVIDIA GPU")
    if not _capable(torch.cuda.current_device()):
        return Availability(f"{torch.cuda.get_device_name()} has a compute capability below 8.0")
    return Availability(None)


class _Switch:
    enabled: bool | None = None  # None: not asked for yet, so the environment decides


class use_kernels:
    """Switch SWBN's Triton kernels on or off for all layers, from the call on or inside a ``with`` block.

    They are off by default; ``SWBN_KERNELS=1`` in the environment switches them on too. They need Triton and an NVIDIA
    GPU of compute capability 8.0 or more. Cases without a kernel run with PyTorch's operators.

    The backward of a layer uses the kernels if its forward did, whatever the switch says by then. Recomputation by
    ``torch.utils.checkpoint`` must run under the same setting as the first forward.

    Args:
        enabled: True to switch the kernels on, False to switch them off.

    Raises:
        InputError: the kernels cannot run here; the message says why.
    """

    def __init__(self, enabled: bool = True) -> None:
        if enabled:
            _require("use_kernels(True)")
        self._before = _Switch.enabled
        _Switch.enabled = bool(enabled)

    def __enter__(self) -> "use_kernels":
        return self

    def __exit__(self, *_: Any) -> None:
        _Switch.enabled = self._before


def enabled() -> bool:
    """Return whether the kernels are switched on, by :class:`use_kernels` or else by ``SWBN_KERNELS=1``.

    Raises:
        InputError: the environment switches them on where they cannot run, or has a value other than 0 or 1.
    """
    if _Switch.enabled is None:
        value = os.environ.get(_VARIABLE, "0")
        if value not in ("0", "1"):
            raise InputError(f"{_VARIABLE} must be 0 or 1, got {value!r}.")
        if value == "1":
            _require(f"{_VARIABLE}=1")
        _Switch.enabled = value == "1"
    return _Switch.enabled


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def take_samples(x: Tensor, whitening_matrix: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether kernels run a training pass over ``x`` (channels last in memory), except the step of W."""
    tensors = [whitening_matrix, *(parameter for parameter in parameters if parameter is not None)]
    if not _take(x.movedim(1, -1) if x.dim() > 2 else x, *tensors):
        return False
    fits = x.shape[1] <= MOST_CHANNELS and x.numel() <= _MOST_OF_X
    return fits and whitening_matrix.dtype == torch.float32 and len(whitening_matrix) == 1


def take_step(whitening_matrix: Tensor, *statistics: Tensor | None) -> bool:
    """Return whether kernels take the step of W and update the state."""
    tensors = [whitening_matrix, *(values for values in statistics if values is not None)]
    if not _take(*tensors) or any(tensor.dtype != torch.float32 for tensor in tensors):
        return False
    return whitening_matrix.shape[-1] <= MOST_WIDTH and whitening_matrix.numel() <= _MOST_OF_W


def _take(*tensors: Tensor) -> bool:
    """Return whether all kernels' needs are met: plain, contiguous tensors on one supported device, and no tracing."""
    if torch.compiler.is_compiling() or not enabled() or is_transformed():
        return False
    device = tensors[0].device
    for tensor in tensors:
        plain = type(tensor) in (Tensor, torch.nn.Parameter)  # no tensor spread over processes, or without values
        if not (plain and tensor.device == device and tensor.dtype in _DTYPES and tensor.is_contiguous()):
            return False
    return _capable(device.index) if device.type == "cuda" else interpreted() and device.type == "cpu"


@functools.cache
def _capable(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def _require(what: str) -> None:
    here = available()
    if not here:
        raise InputError(f"{what}: {here.reason}. Without it the stock operators run, with the same results.")
