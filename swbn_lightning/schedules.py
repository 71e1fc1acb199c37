"""Learning rates that no schedule of PyTorch's gives."""

from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swbn_lightning.errors import InputError


class PiecewiseConstantLR(LRScheduler):
    """The optimiser's rate until the first milestone, then given ones: steps of any ratio (``MultiStepLR``'s has one).

    The cross attention network's public code trains so: 0.1, then 0.006, 0.0012, 0.00024 (Hou et al., NeurIPS 2019).

    Args:
        optimizer: whose rate is scheduled; parameter groups keep their ratio to the first.
        milestones: rising numbers of epochs (or steps, with ``lr_interval: step``).
        rates: the rate from each milestone on, of the first parameter group.
        last_epoch: as PyTorch's schedules have it.

    Raises:
        InputError: milestones that do not rise; another number of rates; a rate below 0.
    """

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[int], rates: Sequence[float], last_epoch: int = -1
    ) -> None:
        if len(milestones) != len(rates) or sorted(set(milestones)) != list(milestones) or min(rates, default=0.0) < 0:
            raise InputError(
                f"PiecewiseConstantLR takes rising milestones and a rate from 0 for each, got {milestones=}, {rates=}."
            )
        self.milestones, self.rates = list(milestones), list(rates)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Each parameter group's rate now."""
        place = bisect_right(self.milestones, self.last_epoch)
        first = float(self.base_lrs[0])
        rate = self.rates[place - 1] if place else first
        return [rate * float(base) / first for base in self.base_lrs]
