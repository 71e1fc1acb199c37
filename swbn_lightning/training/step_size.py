"""``step_size: auto``: the step of SWBN's whitening matrix for the length of a run.

What counts is the step size times the number of steps. The paper's 1e-5 over about 58,000 steps is 0.6; the same step
leaves a run of 1,000 steps hardly whitened (docs/step-size.md).
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
    """``budget / num_forwards``, at most 1e-2.

    Args:
        criterion: ``"kl"`` or ``"fro"``, which have different budgets.
        num_forwards: training forwards of the whole run.
        budget: step size times number of steps; None for 0.5 (KL) or 5 (Fro).

    Raises:
        InputError: a budget that is not positive; a run without an end.
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
    """Give all SWBN layers of a model the step size for a run; returns it.

    Raises:
        InputError: no SWBN layer; as :func:`auto_step_size`.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SWBN)]
    if not layers:
        raise InputError("step_size: auto is for SWBN layers (norm: swbn-fro or swbn-kl); this model has none.")
    for layer in layers:
        layer.step_size = auto_step_size(layer.criterion, num_forwards, budget)
    return layers[0].step_size
