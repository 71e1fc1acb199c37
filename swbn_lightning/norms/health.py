"""Report what went wrong inside the layers, from counters that they keep on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.factory import named_norms
from swbn_lightning.norms.swbn import SWBN

GROWN = 100  # W this many times as large as the identity it started from


@dataclass(frozen=True)
class NormFinding:
    """One finding about one layer.

    Its text has the layer's name, what happened and a remedy. :func:`check_norms` lists the values of ``kind``.
    """

    name: str
    kind: Literal["rejected", "few_samples", "grown"]
    message: str

    def __str__(self) -> str:
        return f"{self.name or 'the layer'}: {self.message}"


@torch.no_grad()
def check_norms(model: nn.Module) -> list[NormFinding]:
    """Report what the whitening layers of a model have met in training so far, in the order of its modules.

    The layers do not inspect values on the host, because the device would have to wait. This function does, so call it
    now and then; :class:`swbn_lightning.WhitenessMonitor` calls it after each epoch. ``reset_running_stats`` resets the
    counters. They are not part of a state dict.

    ===============  ==================================================================================
    ``rejected``     non-finite batches, or non-finite steps of W, which left the state unchanged
    ``few_samples``  training batches with fewer samples per channel than channels per group
    ``grown``        SWBN's W is more than 100 times as large (Frobenius norm) as at the start
    ===============  ==================================================================================
    """
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, WhiteningNorm)]
    return [finding for name, norm in norms for finding in _findings(name, norm)]


def _findings(name: str, norm: WhiteningNorm) -> Iterator[NormFinding]:
    if rejected := int(norm.num_batches_rejected):
        yield NormFinding(
            name,
            "rejected",
            f"{rejected} training batches were not finite, or would have made the whitening matrix so; its state "
            "stayed as it was. Look for what overflows before it (learning rate, loss scale, input); if the input is "
            "finite, take a smaller step_size.",
        )
    width = norm.num_features // norm.num_groups
    if small := int(norm.num_batches_small):
        yield NormFinding(
            name,
            "few_samples",
            f"{small} training batches had fewer samples a channel than the {width} channels that are whitened "
            "together, so their covariance is singular. Take a larger batch, or more groups (num_groups).",
        )
    if isinstance(norm, SWBN):
        w = norm.whitening_matrix.cpu().double()  # its square may be beyond float32, and MPS has no float64
        growth = float(torch.linalg.vector_norm(w)) / norm.num_features**0.5
        if growth > GROWN:
            yield NormFinding(
                name,
                "grown",
                f"its whitening matrix is {growth:.4g} times as large as at its start. Take a smaller step_size, or "
                "criterion='fro', which does not grow in directions without samples.",
            )


def check_running_statistics(model: nn.Module) -> None:
    """Raise :class:`InputError` if features in evaluation would depend on the other images of the batch."""
    if layer := norm_by_batch(model):
        raise InputError(
            f"{layer} keeps no running statistics, so it would normalise test images by the batch they happen to be "
            "in; evaluation embeds each image by itself. Leave out track_running_stats: false."
        )


def norm_by_batch(model: nn.Module) -> str | None:
    """Return the first layer that uses batch statistics in evaluation, as ``name (class)``; None if there is none."""
    for name, layer in named_norms(model):
        by_batch = isinstance(layer, WhiteningNorm | nn.modules.batchnorm._BatchNorm)
        if by_batch and layer.running_mean is None:
            return f"{name} ({type(layer).__name__})"
    return None
