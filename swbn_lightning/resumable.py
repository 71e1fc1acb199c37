"""A training that goes on has the settings that its checkpoint restores; others than these are refused."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from swbn_lightning.errors import InputError
from swbn_lightning.hyperparameters import PlainModule
from swbn_lightning.resumed_settings import (
    LEFT_OUT,
    Changes,
    changes,
    constructor_values,
    plain,
    same,
    schedule_settings,
    told_settings,
)
from swbn_lightning.resumed_state import check_callbacks, check_training_state, source
from swbn_lightning.run_files import printable

KEY = "training_settings"
_MOST_SAID = 20
# Whose callbacks keep what they were made with; others may change it as they go.
_KNOWN = {"pytorch_lightning", "swbn_lightning", "torch"}


class ResumableModule(PlainModule):
    """A module whose checkpoints say with what its optimiser, schedule and callbacks were made.

    A checkpoint restores the state of all three, settings among it: a learning rate that is given anew would be
    written down and never used. So a ``fit`` with other settings than its checkpoint's ends before the first step.
    A subclass calls :meth:`settings_made`; what it has of ``on_save_checkpoint``, ``on_load_checkpoint`` and
    ``on_fit_start`` calls the one above.

    Raises:
        InputError: in ``fit`` with a checkpoint: another setting, by name and with both values; a part of the
            checkpoint that is missing, empty or not of this training (:mod:`swbn_lightning.resumed_state`). It is a
            warning that a checkpoint does not say its settings, as one of an older version.
    """

    _settings: dict[str, Any] | None = None  # of optimiser and schedule, as they were made
    _callbacks_made: dict[str, Any] | None = None  # before a state was loaded

    def settings_made(self, optimizer: Optimizer, before: dict[str, Any], schedule: Any) -> None:
        """Take down what was just made, and compare it with a checkpoint that is being resumed.

        Args:
            optimizer: of the training.
            before: its :func:`~swbn_lightning.resumed_settings.optimizer_settings` before the schedule was made.
            schedule: just made for it, or None.
        """
        self._settings = {"optimizer": before, "schedule": schedule_settings(schedule, optimizer, before)}
        if self._trainer is None:
            return
        checkpoint = self.trainer._checkpoint_connector._loaded_checkpoint
        if not checkpoint:  # a new training, or a strategy that loads later
            self._callbacks_made = _callbacks_now(self.trainer)
        elif self.trainer.state.fn == "fit":
            self._refuse(changes(_told(checkpoint), self._settings))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._settings is not None:
            states = checkpoint.get("callbacks", {})
            made = {k: _named_in(v, states.get(k)) for k, v in (self._callbacks_made or {}).items()}
            checkpoint[KEY] = {**self._settings, "callbacks": {k: v for k, v in made.items() if v}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self._trainer is None or self.trainer.state.fn != "fit":
            return
        told = _told(checkpoint)
        check_callbacks(self.trainer, checkpoint)
        self._refuse(_callback_changes(self.trainer, checkpoint, told.get("callbacks")))
        self._callbacks_made = _callbacks_now(self.trainer)
        if not told_settings(told):
            rank_zero_warn(
                f"{source(self.trainer)} does not say with which settings its optimiser and schedule were made. They "
                "go on as the checkpoint has them, whatever is given now."
            )
        if self.trainer.strategy.restore_checkpoint_after_setup:
            self._refuse(changes(told, self._settings) if self._settings else [])
            check_training_state(self.trainer, checkpoint)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        checkpoint = self.trainer._checkpoint_connector._loaded_checkpoint
        if checkpoint and not self.trainer.strategy.restore_checkpoint_after_setup:
            check_training_state(self.trainer, checkpoint)

    def _refuse(self, found: Changes) -> None:
        said = [f"{printable(what)[:200]} was {_shown(old)} and is now {_shown(new)}" for what, old, new in found]
        if said:
            more = [f"and {len(said) - _MOST_SAID} more"] if len(said) > _MOST_SAID else []
            raise InputError(
                f"{source(self.trainer)} restores settings that are given otherwise now: "
                f"{'; '.join([*said[:_MOST_SAID], *more])}. Give the old value{'s' if len(said) > 1 else ''} to go on, "
                "or start a new training from these weights (--model.backbone_checkpoint)."
            )


def _told(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its settings; nothing where that is no plain data."""
    told = plain(checkpoint.get(KEY))
    return told if isinstance(told, dict) else {}


def _shown(value: Any) -> str:
    return printable(value if isinstance(value, str) else repr(value))[:200]


def _callbacks_now(trainer: pl.Trainer) -> dict[str, Any]:
    return {c.state_key: constructor_values(c) for c in trainer.callbacks}  # type: ignore[attr-defined]


def _named_in(values: Mapping[str, Any], state: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in state} if isinstance(state, dict) else {}


def _callback_changes(trainer: pl.Trainer, checkpoint: Mapping[str, Any], made: Any) -> Changes:
    """Constructor values that the state of a callback, or of the loss scaler, would replace."""
    found = []
    for key, thing, state in _stateful(trainer, checkpoint):
        before = (
            made.get(key) if isinstance(made, dict) and type(thing).__module__.split(".")[0] not in _KNOWN else None
        )
        for name, now in _named_in(constructor_values(thing), state).items():
            old = before[name] if isinstance(before, dict) and name in before else plain(state[name])
            if old is not LEFT_OUT and not same(old, now):
                found.append((f"{name} of {type(thing).__name__}", old, now))
    return found


def _stateful(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Callbacks, and the scaler of a mixed precision, with the state that the checkpoint has for each."""
    states = checkpoint["callbacks"] if isinstance(checkpoint.get("callbacks"), dict) else {}
    things = [(c.state_key, c, states.get(c.state_key)) for c in trainer.callbacks]  # type: ignore[attr-defined]
    precision = trainer.precision_plugin
    key = type(precision).__qualname__
    things.append((key, getattr(precision, "scaler", None), checkpoint.get(key)))
    return ((key, thing, state) for key, thing, state in things if thing is not None and isinstance(state, dict))
