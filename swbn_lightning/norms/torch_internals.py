"""What the layers need of torch (2.10 to 2.14) and torch does not offer: the only file that uses its private names.

Each says what it is for and why no public way serves. ``tests/test_house.py`` looks for private names elsewhere.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

# To move the tensors of a batch, and to find those that modules hold: `torch.utils.pytree` is no part of 2.10.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

#: Whether a transform of ``torch.func`` is under way. Public names tell it of a tensor only, and not of every one.
are_transforms_active = torch._C._are_functorch_transforms_active
#: Whether a tensor is one of many under ``vmap``, whose values must not be looked at.
is_batched = torch._C._functorch.is_batchedtensor
#: The same under ``torch.autograd.grad(is_grads_batched=True)``, which has a ``vmap`` of its own.
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def is_exporting() -> bool:
    """``torch.compiler.is_exporting``, which in torch 2.10 is true in all compiled code."""
    return torch.compiler._is_exporting_flag


def in_forward_derivatives() -> bool:
    """Whether ``torch.autograd.forward_ad`` is on: ``unpack_dual`` asks a tensor, and this is before there is one."""
    return torch.autograd.forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether a backward pass runs this code. No public name tells it without a hook in the graph."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_graph() -> bool:
    """Whether the backward under way was called with ``retain_graph=True``, so that another may follow."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def saved_tensor_hooks() -> Any:
    """The innermost hooks on saved tensors, by which checkpointing with ``use_reentrant=False`` works; or None.

    ``torch.autograd.graph.saved_tensors_hooks`` sets them, and nothing public reads them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def outside_selective_checkpointing() -> AbstractContextManager[Any]:
    """For what only the first run does: selective checkpointing takes its n-th operator for the n-th of the second.

    It works by dispatch modes, which have no public way to be found or left out for a while.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    modes = _get_current_dispatch_mode_stack()
    selective = any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in modes)
    return _disable_current_modes() if selective else nullcontext()
