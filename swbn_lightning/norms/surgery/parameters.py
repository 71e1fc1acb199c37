"""Exempt normalisation layers and biases from weight decay."""

from typing import Any

from torch import nn

from swbn_lightning.errors import InputError
from swbn_lightning.norms.factory import norm_layer_types


def norm_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups for an optimiser: weights with decay, normalisation layers and biases without.

    The second group has gamma and beta of every normalisation layer (this package's, PyTorch's and registered ones) and
    every other bias (a parameter whose name begins or ends with ``bias``). W is not a parameter and never decays. Each
    parameter appears once, in the model's order. Parameters that need no gradient are left out. Example::

        optimizer = torch.optim.SGD(norm_parameter_groups(model, 5e-4), lr=0.1, momentum=0.9)

    Args:
        model: any network.
        weight_decay: weight decay of the first group.

    Raises:
        InputError: the weight decay is negative, or no parameter needs a gradient.
    """
    if not weight_decay >= 0:
        raise InputError(f"weight_decay must be at least 0, got {weight_decay!r}.")
    spared = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("bias") or name.endswith("bias") or isinstance(module, norm_layer_types())
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError(f"{type(model).__name__} has no parameter that needs a gradient.")
    return [
        {"params": [p for p in trained if id(p) not in spared], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
    ]
