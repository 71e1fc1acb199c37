"""The parts of the command's trainer: its own beside those that the user gives."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateFinder, ProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.plugins import CheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from swbn_lightning.runs.folders import new_run_folder
from swbn_lightning.training.callbacks.last_checkpoint import LastCheckpoint


def as_list(given: Any) -> list[Any]:
    """One, several or none, as a trainer's argument has them."""
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


class Maker:
    """Makes loggers and callbacks of the user's, and knows what went wrong: the parser hides it among other errors."""

    def __init__(self) -> None:
        self.refused: InputError | None = None

    def __call__(self, kind: type, *args: Any, **given: Any) -> Any:
        try:
            return kind(*args, **given)
        except Exception as error:  # it may be anybody's, and want a package, a server, other values
            reason = "" if isinstance(error, InputError) else f"no {kind.__name__} can be made: "
            self.refused = InputError(f"{reason}{' '.join(str(error).split())}")
            raise self.refused from error


def trainer_settings(given: Mapping[str, Any], run: Any, log_every: int) -> tuple[dict[str, Any], Path | None]:
    """The trainer's settings with the command's in the places of those that are not given, but for callbacks.

    Args:
        given: the settings.
        run: the command's settings of this run: ``root``, of all runs, and ``name``.
        log_every: the command's default of ``log_every_n_steps``.

    Returns:
        The settings, and the folder that was made for the run; None for one that leaves no files.

    Raises:
        InputError: a number below 1.
    """
    config, folder = dict(given), None
    counts = {key: config.get(key) for key in ("accumulate_grad_batches", "check_val_every_n_epoch")}
    require_positive("trainer", **{key: value for key, value in counts.items() if value is not None})
    if config.get("barebones") and config.get("log_every_n_steps") == log_every:
        config["log_every_n_steps"] = None  # barebones would refuse the command's default
    if config.get("logger") is not False and not (config.get("fast_dev_run") or config.get("barebones")):
        config["logger"] = loggers(config.get("logger"), run.root, run.name)
        folder = Path(config["logger"][0].log_dir)
    config["plugins"] = with_checkpoint_io(config.get("plugins"))
    if config.get("default_root_dir") is None:
        # Where SLURM's requeueing keeps its checkpoint, and finds it: not the working folder, which all jobs share.
        config["default_root_dir"] = str(Path(run.root, run.name))
    return config, folder


def loggers(given: Any, root: str, name: str) -> list[Logger]:
    """The trainer's loggers: the run's own files first, whose folder is the run's; then the user's.

    A run's ``metrics.csv`` is always written. Another ``TensorBoardLogger`` takes the place of the run's own.

    Args:
        given: as the trainer takes them, without False.
        root: of all runs.
        name: of this one.
    """
    theirs = as_list(None if given is True else given)
    # The first process makes the folder; Lightning tells the others its path.
    version = int(new_run_folder(root, name).name.removeprefix("version_")) if rank_zero_only.rank == 0 else 0  # type: ignore[attr-defined]
    own: list[Logger] = [CSVLogger(root, name, version)]
    if not any(isinstance(logger, TensorBoardLogger) for logger in theirs):
        own.append(TensorBoardLogger(root, name, version, default_hp_metric=False))
    return [*own, *theirs]


def callbacks(given: Any, own: Sequence[pl.Callback], changed: Mapping[type, Sequence[str]]) -> list[pl.Callback]:
    """The user's callbacks and, of the command's, those of whose kind the user gave none.

    Args:
        given: as the trainer takes them.
        own: of the command.
        changed: of the kinds that have settings of their own, the names of those that were given.

    Raises:
        InputError: settings of a callback that the user's replaces; a callback that cannot work here.
    """
    theirs, kept = as_list(given), []
    if any(isinstance(callback, LearningRateFinder) for callback in theirs):
        raise InputError(
            "LearningRateFinder sets an attribute `lr` of the model, and the rate of this package's models is their "
            "optimizer's. Search in Python, with Tuner(trainer).lr_find(model, datamodule=..., update_attr=False), and "
            "give --model.optimizer.lr what it suggests."
        )
    for callback in own:
        kind: type = ProgressBar if isinstance(callback, ProgressBar) else type(callback)
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


def changed_settings(name: str, kind: type, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """The arguments of ``kind`` that are given otherwise than by default, as ``name.argument``.

    Args:
        name: of these settings in a configuration.
        kind: takes them.
        given: the settings.
        defaults: those that are not the constructor's.
    """
    usual = {key: p.default for key, p in inspect.signature(kind).parameters.items()} | dict(defaults)
    # The command sets the last one itself where it is not given.
    keys = [key for key in given if key != "save_on_train_epoch_end"]
    return [f"{name}.{key}" for key in keys if _plain(given[key]) != _plain(usual.get(key))]


def with_checkpoint_io(given: Any) -> list[Any]:
    """The trainer's plugins, with this package's way to write checkpoints unless another one is among them."""
    plugins = as_list(given)
    own = [] if any(isinstance(plugin, CheckpointIO) for plugin in plugins) else [WholeCheckpointIO()]
    return [*plugins, *own]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
