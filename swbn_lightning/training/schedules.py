"""Learning rate schedules that PyTorch does not have, and how Lightning receives a schedule."""

from abc import ABCMeta, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import cli
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swbn_lightning.errors import InputError


class PiecewiseConstantLR(LRScheduler):
    """Keep the optimiser's rate until the first milestone, then use the given rates.

    The steps can have any ratio (``MultiStepLR`` has only one). The cross attention network's public code uses 0.1,
    then 0.006, 0.0012, 0.00024 (Hou et al., NeurIPS 2019).

    Args:
        optimizer: the optimiser to schedule; parameter groups keep their ratio to the first.
        milestones: rising numbers of epochs (or of steps, with ``lr_interval: step``).
        rates: rate of the first parameter group from each milestone on.
        last_epoch: as in PyTorch's schedules.

    Raises:
        InputError: the milestones do not rise, the number of rates differs, or a rate is below 0.
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

    def get_lr(self) -> list[Any]:  # versions of torch differ in the type of a rate
        """Return each parameter group's current rate."""
        place = bisect_right(self.milestones, self.last_epoch)
        first = float(self.base_lrs[0])
        rate = self.rates[place - 1] if place else first
        return [rate * float(base) / first for base in self.base_lrs]


class ReduceLROnPlateau(cli.ReduceLROnPlateau):
    """PyTorch's ``ReduceLROnPlateau``, with a default for the metric that it watches.

    Args:
        optimizer: the optimiser whose rate is reduced.
        monitor: a logged metric. None: ``val/loss``, or ``val/accuracy`` if ``mode`` is ``max``.
        mode: as in PyTorch, like all further options.
    """

    def __init__(self, optimizer: Optimizer, monitor: str | None = None, mode: str = "min", **options: Any) -> None:
        super().__init__(optimizer, monitor, mode=mode, **options)  # type: ignore[arg-type]


class _ByShortNames(ABCMeta):
    """Let a parser find every schedule by its class name; torch and Lightning both have a ``ReduceLROnPlateau``."""

    def __subclasses__(cls) -> list[type]:
        found: list[type] = [ReduceLROnPlateau]
        left = list(LRScheduler.__subclasses__())
        while left:
            kind = left.pop()
            if not issubclass(kind, torch.optim.lr_scheduler.ReduceLROnPlateau):
                found.append(kind)
                left += kind.__subclasses__()
        return found


class Schedule(metaclass=_ByShortNames):
    """Any ``LRScheduler``, as the type of an argument."""

    @abstractmethod
    def step(self) -> None: ...


Schedule.register(LRScheduler)
ScheduleCallable = Callable[[Optimizer], Schedule]


class WarmUp:
    """Another schedule with rates that rise linearly over the first steps of the optimiser.

    Step s of the first ``steps`` uses the share ``(s + 1) / (steps + 1)`` of the other schedule's rate. The trainer
    knows only this schedule. The other one sees its own rates, as if there were no warm-up.

    Args:
        optimizer: the optimiser to schedule.
        steps: number of warm-up steps.
        schedule: the other schedule, already made for that optimiser; None for the optimiser's own rates.
        interval: unit of the other schedule, ``"step"`` or ``"epoch"``.
    """

    def __init__(self, optimizer: Optimizer, steps: int, schedule: Any = None, interval: str = "epoch") -> None:
        self.optimizer, self.steps, self.schedule, self.interval = optimizer, steps, schedule, interval
        self._done = 0  # steps of the optimiser
        self._rates = self.get_last_lr()  # of the other schedule
        self._warm()

    def step(self, epoch_ended: bool = False) -> None:
        """Advance after a step of the optimiser."""
        self._done += 1
        plateau = isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
        act = self.schedule is not None and not plateau and (self.interval == "step" or epoch_ended)
        self._let(self.schedule.step if act else lambda: None)

    def look(self, metric: Any) -> None:
        """Give a ``ReduceLROnPlateau`` its metric at the end of an epoch."""
        self._let(lambda: self.schedule.step(metric))

    def get_last_lr(self) -> list[float]:
        """Return each parameter group's current rate."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        inner = None if self.schedule is None else self.schedule.state_dict()
        return {"steps_done": self._done, "rates": list(self._rates), "schedule": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done, self._rates = state["steps_done"], list(state["rates"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])

    def _let(self, act: Any) -> None:
        """Let the other schedule work on its own rates."""
        self._set(self._rates)
        act()
        self._rates = self.get_last_lr()
        self._warm()

    def _warm(self) -> None:
        share = min(1.0, (self._done + 1) / (self.steps + 1))
        self._set([rate * share for rate in self._rates])

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):  # which a captured step reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def schedule_for_trainer(
    schedule: Any, optimizer: Optimizer, interval: str, warmup_steps: int, module: pl.LightningModule
) -> list[Any]:
    """Return a schedule in the form ``configure_optimizers`` needs: one entry, or none for a constant rate."""
    if warmup_steps:
        return [{"scheduler": WarmUp(optimizer, warmup_steps, schedule, interval), "interval": "step"}]
    if schedule is None:
        return []
    entry: dict[str, Any] = {"scheduler": schedule, "interval": interval}
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        entry |= {"monitor": watched_by(schedule), "strict": False}  # there may be no validation yet
        if interval == "epoch":
            entry["frequency"] = epochs_between_values(schedule, module.trainer)
    return [entry]


def watched_by(plateau: torch.optim.lr_scheduler.ReduceLROnPlateau) -> str:
    """Return the watched metric: as given, else the validation loss, or its accuracy if ``mode`` is ``max``."""
    return getattr(plateau, "monitor", None) or ("val/loss" if plateau.mode == "min" else "val/accuracy")


def epochs_between_values(plateau: torch.optim.lr_scheduler.ReduceLROnPlateau, trainer: pl.Trainer) -> int:
    """Return in how many epochs the watched metric is new once; Lightning gives its last value in the others, too."""
    return (trainer.check_val_every_n_epoch or 1) if watched_by(plateau).startswith("val/") else 1
