"""The parts of the command's trainer: its own beside those that the user gives."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateFinder, ModelSummary, ProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.plugins import CheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from swbn_lightning.runs.folders import new_run_folder
from swbn_lightning.training.callbacks.last_checkpoint import LastCheckpoint

_ONE_OF_A_KIND: tuple[type[pl.Callback], ...] = (ProgressBar, ModelSummary)  # of which a trainer has one at most


def as_list(given: Any) -> list[Any]:
    """One, several or none, as a trainer's argument has them."""
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def trainer_settings(given: Mapping[str, Any], run: Any, log_every: int) -> tuple[dict[str, Any], Path | None]:
    """The trainer's settings with the command's where none are given, but for callbacks; and the folder made for it."""
    config, folder = dict(given), None
    counts = {key: config.get(key) for key in ("accumulate_grad_batches", "check_val_every_n_epoch")}
    require_positive("trainer", **{key: value for key, value in counts.items() if value is not None})
    if config.get("barebones") and config.get("log_every_n_steps") == log_every:
        config["log_every_n_steps"] = None  # barebones would refuse the command's default
    if config.get("logger") is not False and not (config.get("fast_dev_run") or config.get("barebones")):
        config["logger"] = loggers(config.get("logger"), run.root, run.name)
        folder = Path(config["logger"][0].log_dir)
    config["plugins"] = as_list(config.get("plugins"))
    if not any(isinstance(plugin, CheckpointIO) for plugin in config["plugins"]):
        config["plugins"].append(WholeCheckpointIO())
    if config.get("default_root_dir") is None:
        # Where SLURM's requeueing keeps its checkpoint, and finds it: not the working folder, which all jobs share.
        config["default_root_dir"] = str(Path(run.root, run.name))
    return config, folder


def loggers(given: Any, root: str, name: str) -> list[Logger]:
    """The run's own, whose folder is the run's, then the user's. (Their ``TensorBoardLogger`` replaces the run's.)"""
    theirs = as_list(None if given is True else given)
    # The first process makes the folder; Lightning tells the others its path.
    version = int(new_run_folder(root, name).name.removeprefix("version_")) if rank_zero_only.rank == 0 else 0  # type: ignore[attr-defined]
    own: list[Logger] = [CSVLogger(root, name, version)]
    if not any(isinstance(logger, TensorBoardLogger) for logger in theirs):
        own.append(TensorBoardLogger(root, name, version, default_hp_metric=False))
    return [*own, *theirs]


def callbacks(given: Any, own: Sequence[pl.Callback], changed: Mapping[type, Sequence[str]]) -> list[pl.Callback]:
    """The user's callbacks and, of the command's own, those of whose kind the user gave none.

    ``changed`` has the settings that were given to a kind of the command's; they must not be lost.
    """
    theirs, kept = as_list(given), []
    if any(isinstance(callback, LearningRateFinder) for callback in theirs):
        raise InputError(
            "LearningRateFinder sets an attribute `lr` of the model, and the rate of this package's models is their "
            "optimizer's. Search in Python, with Tuner(trainer).lr_find(model, datamodule=..., update_attr=False), and "
            "give --model.optimizer.lr what it suggests."
        )
    for callback in own:
        kind = next((base for base in _ONE_OF_A_KIND if isinstance(callback, base)), type(callback))
        # That of the last epoch, to go on from, is another kind than one that keeps the best.
        by = [c for c in theirs if isinstance(c, kind) and isinstance(c, LastCheckpoint) == (kind is LastCheckpoint)]
        if not by:
            kept.append(callback)
        elif changed.get(kind):
            raise InputError(
                f"{type(by[0]).__name__} among the trainer's callbacks takes the place of the command's, which is "
                f"given settings ({', '.join(changed[kind])}): give one of the two."
            )
    return [*theirs, *kept]


def changed_settings(
    kinds: Mapping[str, type], given: Any, defaults: Mapping[str, Mapping[str, Any]]
) -> dict[type, list[str]]:
    """Of callbacks with settings of their own: what is given otherwise than by default, as ``name.argument``."""
    changed = {}
    for name, kind in kinds.items():
        usual = {key: p.default for key, p in inspect.signature(kind).parameters.items()} | dict(defaults.get(name, {}))
        # The command sets the last one itself where it is not given.
        settings = {key: value for key, value in vars(given[name]).items() if key != "save_on_train_epoch_end"}
        changed[kind] = [f"{name}.{k}" for k, v in settings.items() if _plain(v) != _plain(usual.get(k))]
    return changed


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
