"""A compiled step of state, which activation checkpointing must not run a second time."""

import torch
from torch import Tensor

from swbn_lightning.norms.checkpointing import is_recomputing


def first_run(values: Tensor) -> Tensor:
    """``values``, and an error where compiled code takes a step of state a second time."""
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
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
