"""Activation checkpointing runs a training forward twice: the second run must change nothing and use the first's W."""

import weakref

import torch
from torch import Tensor

from swbn_lightning.norms.torch_internals import (
    are_transforms_active,
    backward_keeps_graph,
    in_backward,
    is_exporting,
    saved_tensor_hooks,
)

# Runs without a graph that are kept: at least, at most, and between them as many as take so much memory.
_LEAST, _MOST, _BYTES = 4, 256, 2**22


def is_recomputing() -> bool:
    """Whether this forward runs to restore what checkpointing did not keep: inside a backward pass, as a rule."""
    if torch.compiler.is_compiling() or are_transforms_active():
        return False
    if in_backward():
        return True
    hooks = saved_tensor_hooks()  # outside a backward, when somebody looks at a saved tensor
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


class _Run:
    def __init__(self, mean: Tensor, variance: Tensor, matrix: Tensor) -> None:
        self.mean, self.variance, self.matrix = mean, variance, matrix
        # Whether a backward pass has run it again and freed its graph; None: that is to be seen.
        self.is_over = False if torch.is_grad_enabled() else None


class FirstRuns:
    """The W of a layer's training forwards, known by the statistics of their batches, while a backward may follow.

    A run is kept as long as its graph. Where it has none, as with ``use_reentrant=True``, the last few are kept.
    A copy or pickle of a layer starts empty.
    """

    def __init__(self) -> None:
        self._with_graph: weakref.WeakSet[_Run] = weakref.WeakSet()
        self._last: list[_Run] = []

    def __reduce__(self) -> tuple[type["FirstRuns"], tuple[()]]:
        return FirstRuns, ()

    def note(self, mean: Tensor, variance: Tensor, matrix: Tensor, output: Tensor) -> None:
        """Keep the ``matrix`` that made ``output``, if checkpointing may run this forward again."""
        if torch.compiler.is_compiling() or are_transforms_active():
            return
        if output.grad_fn is None and not torch.is_inference_mode_enabled():
            kept = min(_MOST, max(_LEAST, _BYTES // (matrix.numel() * matrix.element_size()))) - 1
            waiting = [run for run in self._last if not run.is_over]
            self._last = [*waiting[-kept:], _Run(mean, variance, matrix)]
        elif output.grad_fn is not None and saved_tensor_hooks() is not None:
            run = _Run(mean, variance, matrix)
            output.grad_fn.metadata[__name__] = run  # type: ignore[index]
            self._with_graph.add(run)

    def forget(self) -> None:
        """No backward follows on the forwards without a graph."""
        self._last.clear()

    def find(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The matrix of the first run on the batch with these statistics; an error where it cannot be told."""
        known = (*self._with_graph, *self._last)
        found = [run for run in known if _same(run.mean, mean) and _same(run.variance, variance)]
        found = [run for run in found if not run.is_over] or found
        if not found:
            raise RuntimeError(
                "a normalisation layer runs inside a backward pass on a batch that it has not seen in a forward under "
                "torch.utils.checkpoint. What is checkpointed must give the same values again (preserve_rng_state=True "
                "if it draws random numbers); with use_reentrant=True only the last few forwards are known."
            )
        # With a batch that is not finite the gradient is not finite either, whichever W it is.
        if any(not torch.equal(run.matrix, found[0].matrix) for run in found) and variance.isfinite().all():
            raise RuntimeError(
                "under torch.utils.checkpoint a normalisation layer ran twice on the very same batch before the "
                "backward: which of its two whitening matrices belongs to which run cannot be told."
            )
        if found[0].is_over is None:
            found[0].is_over = not backward_keeps_graph()
        return found[0].matrix


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # to the bit, NaN too


def first_run(values: Tensor) -> Tensor:
    """``values``, and an error where compiled code takes a step of state a second time."""
    compiled = torch.compiler.is_compiling() and not is_exporting()
    return _first_run(values) if compiled else values


@torch.library.custom_op("swbn_lightning::first_run", mutates_args=())
def _first_run(values: Tensor) -> Tensor:
    # An operator, so that the check is made when the compiled code runs, and in a recomputation that the compiler has
    # put into the backward: there the state that a step starts from has been overwritten.
    if is_recomputing():
        raise RuntimeError(
            "activation checkpointing runs a compiled normalisation layer again, where it would take a second step. "
            "Leave the layer out of compilation: layer.forward = torch.compiler.disable(layer.forward)."
        )
    return values.clone()


@_first_run.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)
