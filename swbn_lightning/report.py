"""What a run says at its end: a table on the terminal and ``results.json`` in its folder."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table

from swbn_lightning.runs import write_results
from swbn_lightning.training import TrainingModule
from swbn_lightning.whiteness import WhitenessMonitor

_FIELDS = ("classes", "images", "episodes", "ways", "shots", "queries")


class ResultTable(pl.Callback):
    """Prints the results of ``fit`` (validation), ``validate`` and ``test``, and writes them to the run's folder.

    ``fit`` shows the best epoch by validation accuracy and, where it is another one, the last. An interrupted
    ``fit`` shows what it had reached.
    """

    def __init__(self) -> None:
        self._history: list[dict[str, Any]] = []  # validation rows of `fit`, one an epoch
        self._evaluated: dict[str, Any] | None = None  # the row of `validate` or `test`
        self._folder: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # the processes agree on it here; at the end some may be gone
        self._folder = Path(log_dir) if trainer.loggers and log_dir else None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, TrainingModule) and not trainer.sanity_checking and "val" in pl_module.results:
            row = {**pl_module.results["val"], "epoch": trainer.current_epoch}
            if trainer.state.fn == "fit":
                self._history.append(row)
            else:
                self._evaluated = row

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, TrainingModule):
            self._evaluated = pl_module.results.get("test")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Here, after the progress bar has ended, so that the table is the last thing to be seen.
        if stage == "fit" and self._history:
            monitors = [c for c in _callbacks(trainer) if isinstance(c, WhitenessMonitor)]
            self._finish(trainer, _best_and_last(self._history), monitors[0].history if monitors else [])
        elif stage in ("validate", "test") and self._evaluated is not None:
            self._finish(trainer, [self._evaluated], _trained_whiteness(trainer))

    def state_dict(self) -> dict[str, Any]:
        return {"history": [dict(row) for row in self._history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._history = [dict(row) for row in state_dict["history"]]

    def _finish(self, trainer: pl.Trainer, rows: list[dict[str, Any]], whiteness: list[dict[str, float]]) -> None:
        if not trainer.is_global_zero:
            return
        checkpoint = _checkpoint_path(trainer)
        console = Console()
        console.print(result_table(rows, whiteness))
        if checkpoint:
            label = "best checkpoint" if trainer.state.fn == "fit" else "checkpoint"
            console.print(f"{label}: {checkpoint}", soft_wrap=True, highlight=False, markup=False)
        folder = self._folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            own = _relative_to(checkpoint, folder)
            results = {
                "command": str(trainer.state.fn),
                "results": rows,
                "whiteness": whiteness,
                "best_checkpoint": own,
                "tested_checkpoint": None if own else checkpoint,
            }
            write_results(folder, results)
            console.print(f"run folder: {folder}", soft_wrap=True, highlight=False, markup=False)


def result_table(rows: list[dict[str, Any]], whiteness: list[dict[str, float]]) -> Table:
    """The table: what was evaluated, accuracy with its 95% interval, whiteness at the start and the end.

    Args:
        rows: as :attr:`~swbn_lightning.training.TrainingModule.results`.
        whiteness: as :attr:`~swbn_lightning.whiteness.WhitenessMonitor.history`.
    """
    table = Table()
    table.add_column("split")
    for row in rows:
        table.add_column(str(row["split"]), justify="right")
    for key in _FIELDS:
        if any(key in row for row in rows):
            table.add_row(key, *(str(row.get(key, "–")) for row in rows))
    accuracies = (f"{100 * row['accuracy']:.2f} ± {100 * row['ci95']:.2f} %" for row in rows)
    table.add_row("accuracy ± 95% interval", *accuracies, style="bold")
    for label, key, digits in (("whiteness distance", "distance", 2), ("RMS correlation", "rms", 3)):
        table.add_row(f"{label}, start → end", *[_course(whiteness, key, digits)] * len(rows))
    return table


def _relative_to(checkpoint: str | None, folder: Path) -> str | None:
    """A checkpoint of this run by its path inside the run's folder, so that the folder can be moved."""
    if checkpoint and folder.resolve() in Path(checkpoint).resolve().parents:
        return str(Path(checkpoint).resolve().relative_to(folder.resolve()))
    return None


def _best_and_last(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    best, last = max(history, key=lambda row: row["accuracy"]), history[-1]
    rows = [{**best, "split": f"val (best, epoch {best['epoch']})"}]
    if last is not best:
        rows.append({**last, "split": f"val (last, epoch {last['epoch']})"})
    return rows


def _course(whiteness: list[dict[str, float]], key: str, digits: int) -> str:
    if not whiteness:
        return "–"
    return f"{whiteness[0][key]:.{digits}f} → {whiteness[-1][key]:.{digits}f}"


def _checkpoint_path(trainer: pl.Trainer) -> str | None:
    if trainer.state.fn != "fit":
        return str(trainer.ckpt_path) if trainer.ckpt_path else None
    checkpoints = [c for c in _callbacks(trainer) if isinstance(c, ModelCheckpoint)]
    return checkpoints[0].best_model_path or None if checkpoints else None


def _trained_whiteness(trainer: pl.Trainer) -> list[dict[str, float]]:
    """The history that the evaluated checkpoint carries (Lightning restores callbacks only to go on training)."""
    if not trainer.ckpt_path:
        return []
    content = torch.load(trainer.ckpt_path, map_location="cpu", weights_only=True, mmap=True)
    for key, state in content.get("callbacks", {}).items():
        if key.startswith(WhitenessMonitor.__name__):
            return state["history"]
    return []


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]
