"""Results at the end of a run: a table on the terminal and ``results.json`` in the run's folder."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from rich.table import Table
from rich.text import Text

from swbn_lightning.data.image_data import ImageDataModule
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.screen import table_console
from swbn_lightning.files.writing import write_output
from swbn_lightning.runs.checkpoints import best_checkpoint, read_checkpoint
from swbn_lightning.runs.folders import RESULTS_FILE, write_json
from swbn_lightning.runs.record import now
from swbn_lightning.runs.trained_data import data_facts, saved_content, trained_on
from swbn_lightning.training.callbacks.run_file import run_folder
from swbn_lightning.training.module import TrainingModule, tested_file
from swbn_lightning.whiteness import WhitenessMonitor
from swbn_lightning.whiteness.records import measurements

Row = dict[str, Any]  # of the table
History = list[dict[str, float]]  # of whiteness
Files = Callable[[], Mapping[str, str]]  # what an evaluation leaves: texts by their names
_FIELDS = (
    "data", "trained_on", "classes", "images", "episodes", "ways", "shots", "queries", "head", "inference", "tasks",
)  # fmt: skip
_SHARES = {"top5": "top-5", "macro_f1": "macro F1"}  # shown in per cent


class ResultTable(pl.Callback):
    """Print the results of ``fit``, ``validate`` and ``test``, and write them to ``results.json`` in the run's folder.

    ``fit`` shows the validation results of the epoch whose checkpoint was kept as the best and, if different, the last
    one. An interrupted ``fit`` shows what it had reached, a resumed one only the epochs since then. Without validation,
    it shows the last epoch with the accuracy on its training batches.

    After ``fit`` the file also has ``completed`` (false if interrupted), ``fit_seconds`` (in total) and
    ``epoch_seconds`` (training steps and data of every whole epoch, without validation). A ``fit`` without a single
    step gives a warning, because Lightning ends as if it had trained.

    ``validate`` and ``test`` write further files beside it:

    - ``images.csv`` (classification): one row per image, ``image,class,predicted,probability``: its number in the
      split, the numbers of its class and of the predicted one, and the probability of the latter.
    - ``episodes.csv`` (few-shot): one row per episode, ``episode,accuracy``.
    - ``classes.csv``: one row per class, ``class,name,accuracy``: the share of its images (few-shot: queries) that were
      classified correctly, empty for a class that did not occur.
    - ``confusion.csv``: one row per pair of classes that occurred, ``class,predicted,count,of``: so many images of the
      class were given the predicted one, out of so many (few-shot: queries in episodes that had both classes).

    ``swbn compare`` pairs the first two with those of another run. A module of your own gives its files by
    :meth:`~swbn_lightning.training.module.TrainingModule.evaluation_files`.
    """

    def __init__(self) -> None:
        self._history: list[Row] = []  # validation rows of `fit`, one an epoch
        self._evaluated: Row | None = None  # the row of `validate` or `test`
        self._logged: dict[str, float] = {}  # what else they logged
        self._folder: Path | None = None
        self._trained = False  # whether a `fit` had a batch
        self._completed = False  # whether it ended by itself
        self._begun = 0.0
        self._clock = _EpochClock()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)
        self._begun = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.start(pl_module.device)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._trained = True
        if trainer.is_last_batch:
            self._clock.stop()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.pause()  # in the middle of an epoch (val_check_interval)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.go_on()
        if isinstance(pl_module, TrainingModule) and not trainer.sanity_checking and "val" in pl_module.results:
            row = {**pl_module.results["val"], "epoch": trainer.current_epoch, "step": trainer.global_step}
            if trainer.state.fn == "fit":
                self._history.append(row)
            else:
                self._evaluated = row
                self._logged = _other_quantities(trainer, "val", row)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, TrainingModule):
            self._evaluated = pl_module.results.get("test")
            self._logged = _other_quantities(trainer, "test", self._evaluated or {})

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Here, after the progress bar has ended, so that the table is the last thing to be seen.
        if stage == "fit":
            self._completed = True
            if not self._trained:
                rank_zero_warn(
                    f"nothing was trained: {trainer.current_epoch} epochs and {trainer.global_step} steps are behind "
                    f"this model, asked for were max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}, "
                    f"limit_train_batches={trainer.limit_train_batches}. With larger ones it goes on."
                )
            self._finish_fit(trainer)
        elif stage in ("validate", "test") and self._evaluated is not None and trainer.is_global_zero:
            assert isinstance(pl_module, TrainingModule)  # else nothing was evaluated
            checkpoint = tested_file(trainer, pl_module)
            saved = saved_content(checkpoint)
            history = _whiteness_in(saved)
            row = {**_with_whiteness(self._evaluated, history), **_trained_elsewhere(trainer, saved)}
            files = partial(pl_module.evaluation_files, "test" if stage == "test" else "val")
            self._finish("checkpoint", checkpoint, [row], history, files)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn != "fit":  # Ctrl-C among others: Lightning calls no teardown then
            return
        try:
            self._finish_fit(trainer)
        except Exception as error:  # the callbacks after this one save what was trained
            rank_zero_warn(f"the results of the interrupted training could not be told: {error!r}")

    def _finish_fit(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        monitors = [c for c in _callbacks(trainer) if isinstance(c, WhitenessMonitor)]
        history = monitors[0].history if monitors else []
        checkpoint = _kept_checkpoint(trainer)
        if self._history:
            self._finish("best checkpoint", checkpoint, self._validated(checkpoint, history), history)
        elif trained := _training_row(trainer):
            self._finish("last checkpoint", checkpoint, [_with_whiteness(trained, history)], history)

    def _validated(self, checkpoint: str | None, history: History) -> list[Row]:
        last = self._history[-1]
        rows = []
        if checkpoint:
            saved = read_checkpoint(checkpoint)
            best = [row for row in self._history if row["step"] == saved["global_step"]][-1:]
            rows = [_with_whiteness({**r, "split": _of_epoch("val (best", r)}, _whiteness_in(saved)) for r in best]
        if not rows or rows[0]["step"] != last["step"]:
            rows.append(_with_whiteness({**last, "split": _of_epoch("val (last", last)}, history))
        return rows

    def _finish(
        self, label: str, checkpoint: str | None, rows: list[Row], whiteness: History, files: Files | None = None
    ) -> None:
        lost: InputError | None = None
        try:  # the files first: a screen can fail in many ways
            self._write(checkpoint, rows, whiteness, files)
        except InputError as error:  # a full disk: what was found is at least seen
            lost = error
        console = table_console()
        console.print(result_table(rows, self._logged))
        for name, path in ((label, checkpoint), ("run folder", self._folder)):
            if path:
                console.print(f"{name}: {printable(path)}", soft_wrap=True, highlight=False, markup=False)
        if lost is not None:
            raise lost

    def _write(self, checkpoint: str | None, rows: list[Row], whiteness: History, files: Files | None) -> None:
        if self._folder is None:
            return
        # A checkpoint of this run by its path inside the folder, so that the folder can be moved.
        folder, file = self._folder.resolve(), Path(checkpoint or "/").resolve()
        own = str(file.relative_to(folder)) if folder in file.parents else None
        results: Row = {
            "ended": now(),
            "results": rows,
            "whiteness": whiteness,
            "best_checkpoint": own,
            "tested_checkpoint": None if own else checkpoint,
        }
        if files is None:  # of fit
            results["completed"] = self._completed
            results["fit_seconds"] = time.perf_counter() - self._begun
            results["epoch_seconds"] = self._clock.epochs
        write_json(self._folder / RESULTS_FILE, results)
        for name, text in (files() if files else {}).items():
            write_output(self._folder / name, text)


class _EpochClock:
    """Wall-clock seconds of each training epoch, without interruptions such as validation."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self._device: torch.device | None = None  # while an epoch is under way
        self._passed, self._since = 0.0, 0.0

    def start(self, device: torch.device) -> None:
        self._device, self._passed = device, 0.0
        self.go_on()

    def pause(self) -> None:
        if self._device is not None:
            self._passed += self._now(self._device) - self._since

    def go_on(self) -> None:
        if self._device is not None:
            self._since = self._now(self._device)

    def stop(self) -> None:
        if self._device is not None:  # an epoch that goes on in its middle is none of them
            self.pause()
            self.epochs.append(self._passed)
            self._device = None

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last steps are still under way
        return time.perf_counter()


def result_table(rows: list[Row], logged: Mapping[str, float] | None = None) -> Table:
    """Make the table: what was evaluated, accuracy with its 95% interval, loss, whiteness at the start and the end.

    Args:
        rows: as in :attr:`~swbn_lightning.training.module.TrainingModule.results`. If known, with ``distance`` and
            ``rms``, each a pair of values at the start and the end of training.
        logged: further quantities of a single row.
    """
    table = Table()
    table.add_column("split", overflow="fold")
    for row in rows:
        table.add_column(Text(str(row["split"])), justify="right", overflow="fold")
    for key in _FIELDS:
        if any(key in row for row in rows):
            table.add_row(key.replace("_", " "), *(Text(str(row.get(key, "–"))) for row in rows))
    table.add_row("accuracy ± 95% interval", *(_accuracy(row) for row in rows), style="bold")
    for key, label in _SHARES.items():
        if any(key in row for row in rows):
            table.add_row(label, *(f"{100 * row[key]:.2f} %" if key in row else "–" for row in rows))
    if any("held_out_accuracy" in row for row in rows):  # of training classes, beside episodes of others
        held_out = (_accuracy(row, "held_out_") if "held_out_accuracy" in row else "–" for row in rows)
        table.add_row("held-out images ± 95% interval", *held_out)
    if any("loss" in row for row in rows):
        table.add_row("loss", *(f"{row['loss']:.4f}" if "loss" in row else "–" for row in rows))
    for name, value in (logged or {}).items():
        table.add_row(Text(name), f"{value:.4g}")
    for label, key, digits in (("whiteness distance", "distance", 2), ("RMS correlation", "rms", 3)):
        courses = (" → ".join(f"{value:.{digits}f}" for value in row[key]) if key in row else "–" for row in rows)
        table.add_row(f"{label}, start → end", *courses)
    return table


def _of_epoch(words: str, row: Row) -> str:
    """Add the epoch, which readers count from 1; ``epoch`` in the files is Lightning's, from 0."""
    return f"{words}, epoch {row['epoch'] + 1})"


def _with_whiteness(row: Row, history: History) -> Row:
    ends = {key: [history[0][key], history[-1][key]] for key in ("distance", "rms")} if history else {}
    return {**row, **ends}


def _other_quantities(trainer: pl.Trainer, split: str, row: Row) -> dict[str, float]:
    """Return what an evaluation logged besides its row of results."""
    shown = {*row} & {"accuracy", "loss", "held_out_accuracy", "held_out_ci95", *_SHARES}
    told = {f"{split}/{name}" for name in (*shown, "accuracy_ci95")}
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name not in told}


def _accuracy(row: Row, of: str = "") -> str:
    interval = "% while training"
    if (ci95 := f"{of}ci95") in row:
        interval = "± – %" if row[ci95] is None else f"± {100 * row[ci95]:.2f} %"  # a single episode has none
    return f"{100 * row[f'{of}accuracy']:.2f} {interval}"


def _training_row(trainer: pl.Trainer) -> Row | None:
    """Return the last finished epoch's metrics on its own training batches, each before its step, or None."""
    measured = {key: trainer.callback_metrics.get(f"train/{key}") for key in ("accuracy", "loss")}
    epoch = trainer.current_epoch - 1  # it counts on at the end of an epoch
    if epoch < 0 or any(value is None for value in measured.values()):
        return None
    figures = {key: float(value) for key, value in measured.items() if value is not None}
    return {"split": _of_epoch("train (last", {"epoch": epoch}), "epoch": epoch, **figures}


def _kept_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return the checkpoint kept by the callback with a monitored quantity, or else the other one's: the last epoch.

    If the file is missing (the disk was full), it is the best of those that exist.
    """
    callbacks = [c for c in _callbacks(trainer) if isinstance(c, ModelCheckpoint)]
    callbacks.sort(key=lambda c: c.monitor is None)
    for path in (Path(c.best_model_path) for c in callbacks if c.best_model_path):
        if found := path if path.is_file() else best_checkpoint(path.parent):
            return str(found)
    return None


def _trained_elsewhere(trainer: pl.Trainer, saved: Row) -> Row:
    """Name the training's data, if they are known and others than those of the evaluation."""
    data = getattr(trainer, "datamodule", None)
    name = trained_on(data_facts(saved), data.facts()) if isinstance(data, ImageDataModule) else None
    return {} if name is None else {"trained_on": name}


def _whiteness_in(checkpoint: Row) -> History:
    """Return the whiteness history in a checkpoint (Lightning restores callbacks only to resume training)."""
    states = checkpoint.get("callbacks")
    for key, state in states.items() if isinstance(states, dict) else ():
        if str(key).startswith(WhitenessMonitor.__name__) and isinstance(state, dict):
            return measurements(state.get("history"))
    return []


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]
