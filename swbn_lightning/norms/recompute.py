"""Activation checkpointing runs a training forward twice: the second run must change nothing and use the first's W."""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

# First runs whose second has not come: more than a pipeline's micro-batches, few enough to hold when it never comes.
_MOST_PENDING = 64


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, to restore what checkpointing did not keep."""
    return torch._C._current_graph_task_id() != -1


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
    segment: Any  # tells one checkpointed segment from another
    used: bool = False
    ambiguous: bool = False  # the same batch twice in one segment: which W belongs to which cannot be told


class FirstRuns:
    """What a layer's forwards inside ``torch.utils.checkpoint`` did, kept until they are run again.

    A recomputation is known by the statistics of its batch, which are those of its first run to the bit. Belongs to
    one layer in one process: a copy or pickle starts empty.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def __reduce__(self) -> tuple[type["FirstRuns"], tuple[()]]:
        return FirstRuns, ()

    def note(self, mean: Tensor, variance: Tensor, matrix: Tensor) -> None:
        """Keep the ``matrix`` that a forward used, if checkpointing may run it again."""
        segment = _segment()
        if segment is None:
            return
        run = _Run(mean.detach(), variance.detach(), matrix, segment)
        # What has been run again may be once more (nested checkpoints), but not after a new forward.
        kept = [old for old in self._runs if not old.used][-_MOST_PENDING:]
        for old in kept:
            if old.segment == segment and _same(old, run):
                old.ambiguous = run.ambiguous = True
        self._runs = [*kept, run]

    def find(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The matrix that the first run on the batch with these statistics used.

        Raises:
            RuntimeError: no such run is known, or two of one segment that cannot be told apart.
        """
        here = _Run(mean.detach(), variance.detach(), mean, None)
        # The latest: of an earlier one, on the same batch in another segment, the backward comes later.
        fitting = [run for run in self._runs if _same(run, here)]
        waiting = [run for run in fitting if not run.used] or fitting
        if not waiting:
            raise RuntimeError(
                "a normalisation layer runs inside a backward pass on a batch that it has not seen in a forward under "
                "torch.utils.checkpoint: it cannot know its whitening matrix of that time. The checkpointed function "
                "must give the same values again (preserve_rng_state=True where it draws random numbers), and the "
                f"checkpointing must be torch.utils.checkpoint's; at most {_MOST_PENDING} forwards are remembered."
            )
        run = waiting[-1]
        if run.ambiguous:
            raise RuntimeError(
                "a checkpointed segment uses a normalisation layer twice on the very same batch: which of its two "
                "whitening matrices belongs to which use cannot be told. Checkpoint the two uses apart."
            )
        run.used = True
        return run.matrix


def _same(a: _Run, b: _Run) -> bool:
    return torch.equal(a.mean, b.mean) and torch.equal(a.variance, b.variance)


def _segment() -> Any:
    """The checkpointed segment that this forward is in; None for a forward that no recomputation follows."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None and torch.is_grad_enabled():
        return None
    # The reentrant kind runs without gradients, as many a forward does that nobody repeats: look who calls.
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    # One object a segment: the reentrant kind's context, the other's hook.
    segment = frame.f_locals.get("ctx") if hooks is None else hooks[0]
    return None if segment is None else weakref.ref(segment)  # None: checkpoint called where no gradient is wanted
