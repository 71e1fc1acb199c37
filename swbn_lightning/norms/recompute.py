"""Activation checkpointing runs a training forward twice: the second run must change nothing and use the first's W."""

import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


def may_run_again(grad_enabled: bool) -> bool:
    """Whether checkpointing may run a forward again that began with gradients or without; quick, true of some others.

    Of its two kinds one runs with hooks on saved tensors and the other without gradients.
    """
    return _hooks() is not None or not grad_enabled


def is_recomputing() -> bool:
    """Whether this forward runs to restore what checkpointing did not keep: inside a backward pass, as a rule."""
    if torch._C._current_graph_task_id() != -1:
        return True
    # Outside it, when somebody looks at a saved tensor.
    return _hooks() is not None and any(frame.f_code.co_name == "unpack_hook" for frame in _checkpoint_frames())


@torch.library.custom_op("swbn_lightning::first_run", mutates_args=())
def first_run(values: Tensor) -> Tensor:
    """A copy of ``values`` when a compiled layer's training forward runs for the first time; an error in a second run.

    An operator, so that the check is made when the compiled code runs, and so that a recomputation which the compiler
    has put into the backward meets it too: there the state that a step starts from has been overwritten.
    """
    if is_recomputing():
        raise RuntimeError(
            "activation checkpointing runs a compiled normalisation layer again, where it would take a second step. "
            "Leave the layer out of compilation: layer.forward = torch.compiler.disable(layer.forward)."
        )
    return values.clone()


@first_run.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


@dataclass
class _Run:
    mean: Tensor
    variance: Tensor
    matrix: Tensor
    segments: "weakref.WeakSet[Any]"  # the checkpointed segments that it was part of, while they can be run again
    ambiguous: bool = False  # the same batch twice in one segment: which W belongs to which cannot be told


class FirstRuns:
    """What a layer's forwards inside ``torch.utils.checkpoint`` did, kept for as long as they can be run again.

    A recomputation is known by its segment and the statistics of its batch, which are those of its first run to the
    bit. Belongs to one layer in one process: a copy or pickle starts empty.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def __reduce__(self) -> tuple[type["FirstRuns"], tuple[()]]:
        return FirstRuns, ()

    def note(self, mean: Tensor, variance: Tensor, matrix: Tensor) -> None:
        """Keep the ``matrix`` that a forward used, if it is one that checkpointing runs again."""
        self._runs = [run for run in self._runs if run.segments]
        segments = list(_segments())
        if not segments:
            return
        run = _Run(mean.detach(), variance.detach(), matrix, weakref.WeakSet(segments))
        for old in self._runs:
            same = any(segment in old.segments for segment in segments) and _same(old, run)
            # With a batch that is not finite the gradient is not finite either, whichever W it is.
            if same and not torch.equal(old.matrix, matrix) and run.variance.isfinite().all():
                old.ambiguous = run.ambiguous = True
        self._runs.append(run)

    def find(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The matrix that the first run on the batch with these statistics used.

        Raises:
            RuntimeError: no such run is known, or two of one segment that cannot be told apart.
        """
        segments = list(_segments())
        here = _Run(mean.detach(), variance.detach(), mean, weakref.WeakSet())
        # From the inside out: in nested segments the inner ones are made anew when the outer one runs again.
        known = ((segment, run) for segment in segments for run in self._runs)
        run = next((run for segment, run in known if segment in run.segments and _same(run, here)), None)
        if run is None:
            # An outer segment of torch's composable checkpoint cannot be seen in the first run, behind an inner one.
            fitting = [run for run in self._runs if run.segments and _same(run, here)]
            if fitting and all(torch.equal(other.matrix, fitting[0].matrix) for other in fitting):
                run = fitting[0]
        if run is None:
            raise RuntimeError(
                "a normalisation layer runs inside a backward pass on a batch that it has not seen in a forward under "
                "torch.utils.checkpoint: it cannot know its whitening matrix of that time. The checkpointed function "
                "must give the same values again (preserve_rng_state=True where it draws random numbers), and the "
                "checkpointing must be torch.utils.checkpoint's."
            )
        if run.ambiguous:
            raise RuntimeError(
                "a checkpointed segment uses a normalisation layer twice on the very same batch: which of its two "
                "whitening matrices belongs to which use cannot be told. Checkpoint the two uses apart."
            )
        run.segments.update(segments)
        return run.matrix


def outside_selective_checkpointing() -> AbstractContextManager[Any]:
    """For what a forward does in its first run alone.

    Selective checkpointing counts the operators of both runs and takes the n-th result of the first for the n-th of the
    second, so it must not see these.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    modes = _get_current_dispatch_mode_stack()
    selective = any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in modes)
    return _disable_current_modes() if selective else nullcontext()


def _same(a: _Run, b: _Run) -> bool:
    return _equal(a.mean, b.mean) and _equal(a.variance, b.variance)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)  # which takes much longer


def _hooks() -> Any:
    """The innermost pair of hooks on saved tensors; None without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _checkpoint_frames() -> Iterator[Any]:
    """The frames of PyTorch's checkpointing among the callers, from the inside out."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _segments() -> Iterator[Any]:
    """The checkpointed segments that run now, for the first time or again, from the inside out.

    Each is an object that lives as long as the segment can be run again: the context of the reentrant kind's function,
    which its forward and backward share, and the other kind's ``_CheckpointFrame``.
    """
    hooks = _hooks()
    code = None if hooks is None else getattr(hooks[0], "__code__", None)  # any callable may be a hook
    if code is not None and code.co_filename == _CHECKPOINT_FILE:
        # Without a caller to be found where a module's own hooks make the segment (torch's composable checkpoint).
        closed = dict(zip(code.co_freevars, hooks[0].__closure__ or (), strict=True))
        if "frame" in closed:
            yield closed["frame"].cell_contents
    for frame in _checkpoint_frames():
        name, variables = frame.f_code.co_name, frame.f_locals
        if name in ("forward", "backward") and "ctx" in variables:
            yield variables["ctx"]
        elif name == "unpack_hook" and "frame" in variables:
            yield variables["frame"]
        elif getattr(variables.get("gen"), "gi_frame", None) is not None:
            segment = variables["gen"].gi_frame.f_locals.get("new_frame")
            if segment is not None:
                yield segment
