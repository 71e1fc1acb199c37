"""``step_size: auto``: the step size of SWBN's whitening matrix for the length of a run.

What counts is the step size times the number of steps. For the paper's 1e-5 and about 58,000 steps this is 0.6. The
same step size hardly whitens in a run of 1,000 steps (docs/step-size.md).
"""

import math

from torch import nn

from swbn_lightning.errors import InputError
from swbn_lightning.norms.swbn import SWBN

# Step size times training forwards. KL: what worked best in short runs, and about the paper's 0.6. Fro bears ten times
# that, because its step is divided by a norm that grows with the number of channels (docs/step-size.md).
BUDGETS = {"kl": 0.5, "fro": 5.0}
LARGEST = 1e-2  # both criteria stayed finite there; 0.05 diverged (KL, 256 channels)


def auto_step_size(criterion: str, num_forwards: float, budget: float | None = None) -> float:
    """Return ``budget / num_forwards``, at most 1e-2.

    Args:
        criterion: ``"kl"`` or ``"fro"``, which have different budgets.
        num_forwards: number of training forwards in the whole run.
        budget: step size times number of steps; None for 0.5 (KL) or 5 (Frobenius).

    Raises:
        InputError: the budget is not positive and finite, or the run has no end.
    """
    if budget is None:
        budget = BUDGETS[criterion]
    if not 0 < budget < math.inf:
        raise InputError(f"step_budget must be positive and finite, got {budget!r}.")
    if not 0 < num_forwards < math.inf:
        raise InputError(
            f"step_size: auto divides by the number of training steps, which is {num_forwards}; give max_epochs or "
            "max_steps, or a step size."
        )
    return min(budget / num_forwards, LARGEST)


def set_step_size(model: nn.Module, num_forwards: float, budget: float | None = None) -> float:
    """Set the step size of all SWBN layers in a model for a run, and return the first layer's.

    The arguments besides ``model`` are as in :func:`auto_step_size`.

    Raises:
        InputError: the model has no SWBN layer; also as in :func:`auto_step_size`.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SWBN)]
    if not layers:
        raise InputError("step_size: auto is for SWBN layers (norm: swbn-fro or swbn-kl); this model has none.")
    for layer in layers:
        layer.step_size = auto_step_size(layer.criterion, num_forwards, budget)
    return layers[0].step_size
