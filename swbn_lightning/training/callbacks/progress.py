"""What a run shows on its way: the network, then a bar on a terminal or, where there is none, a line now and then."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import rich
from pytorch_lightning.callbacks import ProgressBar, RichModelSummary, RichProgressBar
from pytorch_lightning.callbacks.progress.rich_progress import CustomBarColumn, ProcessingSpeedColumn
from pytorch_lightning.utilities.model_summary import get_formatted_model_size, get_human_readable_count
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.table import Table
from rich.text import Text

_NARROW = 110  # letters a line, below which the bar has no room for the speed
_SHORT_BAR = 10
_ACCURACIES = ("val/accuracy", "test/accuracy")  # that of the test, which chooses nothing, where nothing validates


class BriefModelSummary(RichModelSummary):
    """Lightning's summary without what says nothing: FLOPs of a model without an example, modes that are all one."""

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        evaluating = total_training_modes["eval"]
        left_out = {" ", *(() if evaluating else ("Mode",)), *(() if total_flops else ("FLOPs",))}
        columns = {name: values for name, values in summary_data if name not in left_out}
        table = Table(header_style=summarize_kwargs.get("header_style", "bold"))
        for name in columns:
            table.add_column(name, justify="left" if name in ("Name", "Type", "Mode") else "right")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        words = [f"{get_human_readable_count(int(total_parameters))} parameters"]
        if frozen := int(total_parameters - trainable_parameters):
            words.append(f"{get_human_readable_count(frozen)} of them frozen")
        words.append(f"{get_formatted_model_size(model_size)} MB")
        if evaluating:
            words.append(f"{evaluating} of {sum(total_training_modes.values())} modules in evaluation mode")
        if total_flops:
            words.append(f"{get_human_readable_count(total_flops)} FLOPs")
        console = rich.get_console()
        console.print(table)
        console.print(", ".join(words), highlight=False, soft_wrap=True)


class OneLineBar(RichProgressBar):
    """Lightning's bar in one line of 80 letters: accuracies in percent under short names, epochs counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = ""

    def configure_columns(self, trainer: pl.Trainer) -> list[ProgressColumn]:
        _, *columns = super().configure_columns(trainer)
        if rich.get_console().width < _NARROW:
            columns = [column for column in columns if not isinstance(column, ProcessingSpeedColumn)]
            for column in columns:
                if isinstance(column, CustomBarColumn):
                    column.bar_width = _SHORT_BAR
        return [_Description(self), *columns]

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        if trainer.sanity_checking:  # two batches, which say nothing about the network
            return {}
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)  # the run's folder is told at the end
        return {
            name.removesuffix("/accuracy"): f"{100 * value:.1f}%"
            if name.endswith("/accuracy") and isinstance(value, float)
            else value
            for name, value in shown.items()
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epoch = epoch_words(trainer).capitalize()
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epoch = epoch_words(trainer).capitalize()
        super().on_train_epoch_start(trainer, pl_module)


class _Description(ProgressColumn):
    """What a bar is of; Lightning's own words for a training count its epochs from 0."""

    def __init__(self, bar: OneLineBar) -> None:
        super().__init__()
        self._bar = bar

    def render(self, task: Task) -> Text:
        words = self._bar.epoch if task.id == self._bar.train_progress_bar_id else task.description
        return Text(f"{words:{len(self._bar.validation_description)}}")  # as wide as those that come beside it


class ProgressLines(ProgressBar):
    """A line at the end of every epoch and, within an epoch or an evaluation, one every so many seconds.

    For output that is no terminal, as the log of a SLURM job.

    Args:
        seconds: at least so many lie between a line and the next within an epoch.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        super().__init__()
        self._seconds, self._enabled, self._last = seconds, True, time.monotonic()

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due() and not trainer.is_last_batch:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self._say_training(trainer, "", loss, " in this batch", trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics  # in every process: what is read first is reduced then
        if self._enabled:
            self._say_training(trainer, " done", metrics.get("train/loss"), "", metrics)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self._say_evaluating("validation", batch_idx, trainer.num_val_batches, dataloader_idx)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._say_evaluating("test", batch_idx, trainer.num_test_batches, dataloader_idx)

    def _is_due(self) -> bool:
        return self._enabled and time.monotonic() - self._last >= self._seconds

    def _say_training(self, trainer: pl.Trainer, done: str, loss: Any, which: str, metrics: Mapping[str, Any]) -> None:
        words = [] if loss is None else [f"loss {float(loss):.4g}{which}"]
        words += [
            f"{name.replace('/', ' ')} {100 * float(metrics[name]):.2f} %" for name in _ACCURACIES if name in metrics
        ]
        self._say(f"{epoch_words(trainer)}{done}, step {trainer.global_step}: {', '.join(words)}")

    def _say_evaluating(self, what: str, batch: int, counts: Sequence[int | float], loader: int) -> None:
        if self._is_due():
            self._say(f"{what}: batch {batch + 1} of {counts[loader]}")

    def _say(self, words: str) -> None:
        self._last = time.monotonic()
        rank_zero_info(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}")


def epoch_words(trainer: pl.Trainer) -> str:
    """The epoch under way, counted from 1: ``epoch 2/4``."""
    planned = trainer.max_epochs
    return f"epoch {trainer.current_epoch + 1}" + (f"/{planned}" if planned is not None and planned > 0 else "")


def progress() -> ProgressBar:
    """A bar where it can be drawn, else lines."""
    console = Console()
    return OneLineBar() if console.is_interactive or console.is_jupyter else ProgressLines()
