"""SWBN's training pass by kernels of its own, in Triton, on an NVIDIA GPU: off until switched on.

    from swbn_lightning.norms import use_kernels

    use_kernels()                # from here on; or SWBN_KERNELS=1 in the environment
    with use_kernels(False):     # or for a part
        ...

The stock operators are the reference, and what runs wherever no kernel is made for the case: evaluation, float64, more
than 512 channels (256 a group for W's step), contiguous images, compiled, synchronised or transformed layers, second
derivatives. The kernels form the standardised activation where they read it and keep ``x`` for the backward, so no
tensor but the output is written forward, and none but the gradient backward; a training pass has a dozen launches
where the stock operators have sixty. Importing this module does not import Triton.
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
    """Whether the kernels can run here: true or false, and ``reason`` says why not."""

    reason: str | None

    def __bool__(self) -> bool:
        return self.reason is None


def available() -> Availability:
    """Whether Triton and an NVIDIA GPU of compute capability 8.0 or more are here, or ``TRITON_INTERPRET=1`` is set."""
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
    """Switch the kernels on or off for all layers, from the call on or inside a ``with`` block.

    A layer whose forward ran by kernels goes backward by kernels, whatever the switch says then. What
    ``torch.utils.checkpoint`` runs again must run under the same setting.

    Args:
        enabled: whether to use them.

    Raises:
        InputError: they cannot run here; :func:`available` says why.
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
    """Whether the kernels are switched on, by :class:`use_kernels` or else by ``SWBN_KERNELS=1``.

    Raises:
        InputError: the environment switches them on where they cannot run, or has another value than 0 or 1.
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
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def take_samples(x: Tensor, whitening_matrix: Tensor, *parameters: Tensor | None) -> bool:
    """Whether kernels do a training pass over ``x``, with its channels last in memory: all but the step of W."""
    tensors = [whitening_matrix, *(parameter for parameter in parameters if parameter is not None)]
    if not _take(x.movedim(1, -1) if x.dim() > 2 else x, *tensors):
        return False
    fits = x.shape[1] <= MOST_CHANNELS and x.numel() <= _MOST_OF_X
    return fits and whitening_matrix.dtype == torch.float32 and len(whitening_matrix) == 1


def take_step(whitening_matrix: Tensor, *statistics: Tensor | None) -> bool:
    """Whether kernels step W and keep the state, with statistics of the batch and running ones."""
    tensors = [whitening_matrix, *(values for values in statistics if values is not None)]
    if not _take(*tensors) or any(tensor.dtype != torch.float32 for tensor in tensors):
        return False
    return whitening_matrix.shape[-1] <= MOST_WIDTH and whitening_matrix.numel() <= _MOST_OF_W


def _take(*tensors: Tensor) -> bool:
    """What all kernels need: plain tensors on one device that they run on, without holes, and no tracing."""
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
