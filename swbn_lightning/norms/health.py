"""What went wrong inside the layers, read from counters that the layers keep on the device."""

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
    """Something about one layer that its user should know; as text: the layer's name, what happened, a remedy."""

    name: str
    kind: Literal["rejected", "few_samples", "grown"]
    message: str

    def __str__(self) -> str:
        return f"{self.name or 'the layer'}: {self.message}"


@torch.no_grad()
def check_norms(model: nn.Module) -> list[NormFinding]:
    """What the whitening layers of a model have met in training so far, in the order of its modules.

    Layers never look at values themselves, which would make the device wait. This does, so call it now and then:
    :class:`swbn_lightning.WhitenessMonitor` does so after each epoch. Counters start anew with
    ``reset_running_stats`` and are not part of a state dict.

    ===============  ==================================================================================
    ``rejected``     batches, or steps of W, that were not finite and so left the state as it was
    ``few_samples``  training batches with fewer samples a channel than channels in a group
    ``grown``        the W of SWBN is more than 100 times as large (Frobenius norm) as at its start
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
        w = norm.whitening_matrix.double()  # its square may be beyond float32
        growth = float(torch.linalg.vector_norm(w)) / norm.num_features**0.5
        if growth > GROWN:
            yield NormFinding(
                name,
                "grown",
                f"its whitening matrix is {growth:.4g} times as large as at its start. Take a smaller step_size, or "
                "criterion='fro', which does not grow in directions without samples.",
            )


def check_running_statistics(model: nn.Module) -> None:
    """Raise :class:`InputError` if an image's features in evaluation would depend on the images beside it."""
    if layer := norm_by_batch(model):
        raise InputError(
            f"{layer} keeps no running statistics, so it would normalise test images by the batch they happen to be "
            "in; evaluation embeds each image by itself. Leave out track_running_stats: false."
        )


def norm_by_batch(model: nn.Module) -> str | None:
    """The first layer that normalises by its batch in evaluation too, as ``name (class)``; None where none does."""
    for name, layer in named_norms(model):
        by_batch = isinstance(layer, WhiteningNorm | nn.modules.batchnorm._BatchNorm)
        if by_batch and layer.running_mean is None:
            return f"{name} ({type(layer).__name__})"
    return None
