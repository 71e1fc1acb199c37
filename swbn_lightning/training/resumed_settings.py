"""A training that goes on has the settings that its checkpoint restores; others than these are refused."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import flatten, printable
from swbn_lightning.training.callbacks.random_streams import STREAMS
from swbn_lightning.training.hyperparameters import PlainModule, class_name

KEY = "training_settings"
Settings = dict[str, Any]  # plain values by dotted names
# What follows from other settings, or moves as a training goes.
_DERIVED = {"params", "initial_lr", "base_lrs", "_last_lr", "last_epoch", "best", "mode_worse", "min_lrs", "T_i"}
_MOST_SAID = 10


class ResumableModule(PlainModule):
    """A module whose checkpoints say with what its optimiser and schedule were made.

    A checkpoint restores their state, settings among it: a learning rate that is given anew would be written down and
    never used. So a ``fit`` with other settings than its checkpoint's, or with a state that is missing or not of this
    training, ends before the first step. A subclass calls :meth:`settings_made`.
    """

    _made: Settings | None = None  # of optimiser and schedule, before a state was loaded
    _resumed: dict[str, Any] | None = None  # the checkpoint to go on from, until it is looked at
    _patience: Sequence[str] = ()

    def settings_made(self, optimizer: Optimizer, before: Settings, schedule: Any) -> None:
        """Take down what was just made; ``before`` are the :func:`optimizer_settings` from before the schedule."""
        # What a schedule wrote into the groups is a setting of its own: only there is OneCycleLR's `max_lr`.
        written = {k: v for k, v in optimizer_settings(optimizer).items() if before.get(k) != v}
        self._made = {**before, **schedule_settings(schedule), **{f"schedule's {k}": v for k, v in written.items()}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._made is not None:
            checkpoint[KEY] = dict(self._made)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        trainer = self.trainer_or_none
        if trainer is not None and trainer.state.fn == "fit":
            self._resumed = checkpoint
            self._patience = _changed_patience(trainer, checkpoint)  # before callbacks load their state
            if trainer.strategy.restore_checkpoint_after_setup:
                self._look_at_the_checkpoint()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._look_at_the_checkpoint()

    def _look_at_the_checkpoint(self) -> None:
        checkpoint, self._resumed = self._resumed, None
        if checkpoint is None or self._made is None:
            return
        source, told = printable(self.trainer.ckpt_path or "the checkpoint"), _told(checkpoint)
        if not told:
            rank_zero_warn(
                f"{source} does not say with which settings its optimiser and schedule were made. They go on as the "
                "checkpoint has them, whatever is given now."
            )
        found = changes(told, self._made) if told else []
        if found := [*found, *self._patience]:
            more = [f"and {len(found) - _MOST_SAID} more"] if len(found) > _MOST_SAID else []
            raise InputError(
                f"{source} restores settings that are given otherwise now: {'; '.join([*found[:_MOST_SAID], *more])}. "
                "Give the old ones to go on, or start a new training from these weights (--model.backbone_checkpoint)."
            )
        check_states(self.trainer, checkpoint, source)


def optimizer_settings(optimizer: Optimizer) -> Settings:
    """An optimiser's class and the plain options of its parameter groups; to be called before a schedule is made."""
    groups = [{k: v for k, v in group.items() if k not in _DERIVED} for group in optimizer.param_groups]
    alike = groups[0] if all(map(groups[0].__eq__, groups)) else {str(i): group for i, group in enumerate(groups, 1)}
    return {"optimizer": class_name(type(optimizer)), "groups": len(groups), **_plain({"optimizer": alike})}


def schedule_settings(schedule: Any) -> Settings:
    """A schedule's class and fresh state, and those of the schedules within it."""
    if schedule is None:
        return {"lr_scheduler": "none"}
    inner = getattr(schedule, "_schedulers", ())
    state = {"lr_scheduler": {**schedule.state_dict(), "_schedulers": None}}
    nested = {f"lr_scheduler.{i}": one for i, one in enumerate(map(schedule_settings, inner), 1)}
    return {"lr_scheduler": class_name(type(schedule)), **_plain(state), **_plain(nested)}


def changes(told: Settings, now: Settings) -> list[str]:
    """A sentence for every setting that is another one now; what only one of the two knows is none."""
    for whole in ("optimizer", "lr_scheduler", "groups"):  # then their options have nothing to do with each other
        if whole in told and not _same(told[whole], now[whole]):
            told = {k: v for k, v in told.items() if k == whole or not k.startswith((whole, "schedule's "))}
    found = [name for name in now if name in told and not _same(told[name], now[name])]
    return [f"{name} was {_shown(told[name])} and is now {_shown(now[name])}" for name in found]


def check_states(trainer: pl.Trainer, checkpoint: Mapping[str, Any], source: str) -> None:
    """That there is the state which a training needs to go on; to be called before Lightning loads it."""
    loops = checkpoint.get("loops")
    parts: dict[str, tuple[list[Any], Any]] = {
        "loops": ([trainer.fit_loop], [loops.get("fit_loop")] if isinstance(loops, dict) and loops else None),
        "optimizer_states": (list(trainer.optimizers), checkpoint.get("optimizer_states")),
        "lr_schedulers": ([c.scheduler for c in trainer.lr_scheduler_configs], checkpoint.get("lr_schedulers")),
    }
    if not trainer.strategy.lightning_restore_optimizer:  # the strategy has its own way
        del parts["optimizer_states"], parts["lr_schedulers"]
    for part, (things, states) in parts.items():
        if not isinstance(states, list) or (things and not states):
            raise InputError(
                f"{source} holds no {part}, without which a training cannot go on, as one that was saved with "
                "save_weights_only. Give a whole checkpoint (last.ckpt of the run), or start a new training from these "
                "weights (--model.backbone_checkpoint)."
            )
        if len(states) < len(things):
            reason = f"{len(states)} for {len(things)}"
        else:  # weight averaging has a schedule of its own behind them, and restores that itself
            reason = next(filter(None, map(_misfit, things, states)), "")
        if reason:
            raise InputError(f"{source}: its {part} are not those of this training ({printable(reason)[:300]}).")
    for part in ("callbacks", STREAMS):
        if not checkpoint.get(part):
            rank_zero_warn(f"{source} holds no {part}: they begin anew, so the end is not that of one long training.")


def _misfit(thing: Any, state: Any) -> str:
    """Why a loop, an optimiser or a schedule does not take a state, which it will be given once more."""
    try:
        thing.load_state_dict(copy.deepcopy(state))
    except Exception as error:  # a file may hold anything
        return f"{type(thing).__name__} does not take them: {type(error).__name__}: {error}"
    return ""


def _changed_patience(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> list[str]:
    states, found = checkpoint.get("callbacks"), []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and isinstance(states, dict):
            state = states.get(callback.state_key)
            told = state.get("patience", callback.patience) if isinstance(state, dict) else callback.patience
            if told != callback.patience:
                found.append(f"patience of EarlyStopping was {_shown(told)} and is now {callback.patience}")
    return found


def _told(checkpoint: Mapping[str, Any]) -> Settings:
    told = checkpoint.get(KEY)
    values = told.items() if isinstance(told, dict) else ()
    return {k: v for k, v in values if isinstance(k, str) and isinstance(v, bool | int | float | str | None)}


def _plain(settings: Mapping[str, Any]) -> Settings:
    """Flat, without what is no plain value, as a function or a whole tensor, and without what follows from others."""
    found: Settings = {}
    for name, value in flatten({k: _words(v) for k, v in settings.items()}).items():
        if not _DERIVED & set(name.split(".")) and isinstance(value, bool | int | float | str):
            found[name] = value
    return found


def _words(value: Any) -> Any:
    """Mappings stay; a list of numbers or words is its text; a tensor of one element is a number."""
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {k: _words(v) for k, v in value.items()}
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return str(list(map(_words, value))) if isinstance(value, list | tuple) else value


def _same(told: Any, now: Any) -> bool:
    """NaN is NaN, and a rate that was a tensor has seven digits."""
    if isinstance(told, float) and isinstance(now, float):
        return told == now or (told != told and now != now) or abs(told - now) <= 1e-6 * min(abs(told), abs(now))
    return bool(told == now)


def _shown(value: Any) -> str:
    return printable(value)[:200]
