"""Running statistics made anew from data, for weights that no training batch has ever passed through."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.freeze import is_frozen
from swbn_lightning.norms.swbn import SWBN

Norm = WhiteningNorm | _BatchNorm


@torch.no_grad()
def update_norms(loader: Iterable[Any], model: nn.Module, forward: Callable[[Any], Any] | None = None) -> None:
    """Recompute running statistics over ``loader``, after averaging weights, as ``torch.optim.swa_utils.update_bn``.

    The mean of several networks' weights gives other features than any of them, so that no running statistics fit.
    Afterwards those of every whitening layer and BatchNorm are the plain average over the batches of ``loader``, and
    ``whitening_matrix`` is the plain average of the matrices that whitened them: IterNorm's and DBN's are computed
    from each batch; SWBN's starts from the W that the layer has (averaged as the weights were, with
    ``AveragedModel(..., use_buffers=True)``, or the last one) and takes its step at every batch. A batch that is not
    finite does not count.

    Only the normalisation layers run in training mode: unlike ``update_bn``, dropout and the like are off, since
    evaluation, which the statistics are for, is without them. Modes, momenta and frozen layers
    (:func:`swbn_lightning.freeze_norms`) stay as they are.

    In a distributed run every process calls it with its part of the data.

    Args:
        loader: batches. A list or tuple stands for its first element, as ``(images, labels)``.
        model: in place.
        forward: runs the model on a batch of ``loader`` as it comes; by default ``model(batch)``, tensors moved to the
            device of the model's first parameter.

    Raises:
        InputError: no layer with running statistics that is not frozen; no batch. An error on the way leaves the
            state as it was.
    """
    norms = [m for m in model.modules() if isinstance(m, Norm) and m.running_mean is not None and not is_frozen(m)]
    if not norms:
        raise InputError(
            f"{type(model).__name__} has no whitening layer or BatchNorm with running statistics (that is not frozen)."
        )
    run = forward or (lambda batch: model(_inputs(batch, model)))
    with _all_or_nothing(norms), _only_training(norms, model):
        averages = {norm: norm.whitening_matrix.clone() for norm in norms if isinstance(norm, SWBN)}
        for norm in norms:
            norm.momentum = None
            if isinstance(norm, _BatchNorm):
                norm.reset_running_stats()  # a poisoned one is no start
            else:
                norm.get_buffer("num_batches_tracked").zero_()
        none = True
        for batch in loader:
            before = {norm: norm.get_buffer("num_batches_tracked").clone() for norm in averages}
            run(batch)
            for norm, average in averages.items():
                counted = norm.get_buffer("num_batches_tracked")
                new = (counted - before[norm]).to(average.dtype)  # 0 for a batch that was rejected
                average.lerp_(norm.whitening_matrix, new / counted.clamp(min=1))
            none = False
        if none:
            raise InputError("the loader gave no batch, so there is nothing to compute statistics from.")
        for norm, average in averages.items():
            norm.whitening_matrix.copy_(average)


def _inputs(batch: Any, model: nn.Module) -> Any:
    if isinstance(batch, list | tuple):
        batch = batch[0]
    like = next(model.parameters(), None)
    if like is None:
        return batch
    return tree_map(lambda leaf: leaf.to(like.device) if isinstance(leaf, Tensor) else leaf, batch)


@contextmanager
def _only_training(norms: list[Norm], model: nn.Module) -> Iterator[None]:
    """``norms`` in training mode with a plain average, everything else in evaluation."""
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    try:
        for module in modes:
            module.training = module in momenta
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in momenta.items():
            norm.momentum = momentum


@contextmanager
def _all_or_nothing(norms: list[Norm]) -> Iterator[None]:
    state = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    except BaseException:
        for buffer, value in state:
            buffer.copy_(value)
        raise
