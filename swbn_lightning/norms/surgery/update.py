"""Recompute running statistics from data, for weights that no training batch has passed through."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.frozen import is_frozen
from swbn_lightning.norms.online import OnlineWhitening
from swbn_lightning.norms.swbn import SWBN
from swbn_lightning.norms.torch_internals import tree_map

Norm = WhiteningNorm | _BatchNorm


@torch.no_grad()
def update_norms(loader: Iterable[Any], model: nn.Module, forward: Callable[[Any], Any] | None = None) -> None:
    """Recompute running statistics over ``loader``, for example after averaging weights.

    Use it in place of ``torch.optim.swa_utils.update_bn``. Afterwards the statistics of every whitening layer and
    BatchNorm are the plain average over the batches, and ``whitening_matrix`` is the average of the matrices that
    whitened them. IterNorm and DBN compute their matrix from each batch. SWBN starts from its current W and takes one
    step per batch; if a layer is used more than once per batch, the last W counts.

    A non-finite batch does not count, and a layer that no batch reaches stays unchanged. Only the normalisation layers
    run in training mode, so dropout is off. Modes and momenta are restored, and frozen layers do not change. In a
    distributed run, every process calls this function with its part of the data.

    Args:
        loader: batches. Of a list or tuple, such as ``(images, labels)``, the first element is used.
        model: updated in place.
        forward: runs the model on a batch exactly as it comes from ``loader``. By default ``model(batch)``, with
            tensors moved to the device of the model's first parameter.

    Raises:
        InputError: the model has no unfrozen layer with running statistics; such a layer has seen no input yet; or the
            loader has no finite batch. After any error the state is what it was.
    """
    norms = updated_norms(model)
    run = forward or (lambda batch: model(_inputs(batch, model)))
    with _all_or_nothing(norms) as restore, _only_training(norms, model):
        averages = {norm: norm.whitening_matrix.clone() for norm in norms if isinstance(norm, SWBN)}
        for norm in norms:
            norm.momentum = None
            if isinstance(norm, _BatchNorm):
                norm.reset_running_stats()  # a poisoned one is no start
            else:
                norm.get_buffer("num_batches_tracked").zero_()
        for batch in loader:
            before = {norm: norm.get_buffer("num_batches_tracked").clone() for norm in averages}
            with _finite_or_not_at_all(norms):
                run(batch)
            for norm, average in averages.items():
                counted = norm.get_buffer("num_batches_tracked")
                new = (counted - before[norm]).to(average.dtype)  # 0 for a batch that was rejected
                average.lerp_(norm.whitening_matrix, new / counted.clamp(min=1))
        reached = [norm for norm in norms if norm.get_buffer("num_batches_tracked") > 0]
        if not reached:
            raise InputError("the loader gave no batch that is finite, so there is nothing to compute statistics from.")
        for norm, average in averages.items():
            norm.whitening_matrix.copy_(average)
        for norm in norms:
            if isinstance(norm, SWBN | OnlineWhitening):
                norm.first_runs.forget()
        restore(set(norms) - set(reached))


def updated_norms(model: nn.Module) -> list[Norm]:
    """Return the layers that :func:`update_norms` works on; :class:`InputError` if there are none."""
    norms: list[Norm] = []
    for name, module in model.named_modules():
        if not isinstance(module, Norm) or module.running_mean is None or is_frozen(module):
            continue
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise InputError(f"{name!r} ({type(module).__name__}) has seen no input yet; run the network once first.")
        norms.append(module)
    if not norms:
        raise InputError(
            f"{type(model).__name__} has no whitening layer or BatchNorm with running statistics (that is not frozen)."
        )
    return norms


def _inputs(batch: Any, model: nn.Module) -> Any:
    if isinstance(batch, list | tuple):
        batch = batch[0]
    like = next(model.parameters(), None)
    if like is None:
        return batch
    return tree_map(lambda leaf: leaf.to(like.device) if isinstance(leaf, Tensor) else leaf, batch)


@contextmanager
def _only_training(norms: list[Norm], model: nn.Module) -> Iterator[None]:
    """Put ``norms`` in training mode with a plain average, and everything else in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    try:
        for module in modes:
            module.training = False
        for norm in norms:  # last: a compiled module hands its mode on
            norm.training = True
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in momenta.items():
            norm.momentum = momentum


@contextmanager
def _all_or_nothing(norms: list[Norm]) -> Iterator[Callable[[Iterable[Norm]], None]]:
    """Restore the state after an error; yield a function that restores only some layers."""
    state = {norm: [(buffer, buffer.clone()) for buffer in norm.buffers(recurse=False)] for norm in norms}

    def restore(some: Iterable[Norm]) -> None:
        for norm in some:
            for buffer, value in state[norm]:
                buffer.copy_(value)

    try:
        yield restore
    except BaseException:
        restore(norms)
        raise


@contextmanager
def _finite_or_not_at_all(norms: list[Norm]) -> Iterator[None]:
    """Undo a non-finite batch in BatchNorm, whose statistics would never recover; whitening layers reject it."""
    before = {n: [buffer.clone() for buffer in n.buffers(recurse=False)] for n in norms if isinstance(n, _BatchNorm)}
    yield
    for norm, values in before.items():
        buffers = list(norm.buffers(recurse=False))
        finite = torch.stack([torch.isfinite(buffer).all() for buffer in buffers]).all()
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(torch.where(finite, buffer, value))
