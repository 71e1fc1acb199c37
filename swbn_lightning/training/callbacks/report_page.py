"""The report page at the end of a command."""

from pathlib import Path

import pytorch_lightning as pl

from swbn_lightning.files.reading import printable
from swbn_lightning.runs.page.page import REPORT_FILE, write_report


class ReportPage(pl.Callback):
    """Writes ``report.html`` into the run's folder when ``fit``, ``validate`` or ``test`` ends or is interrupted.

    It has to stand after the callbacks whose files it shows (``WhitenessMonitor``,
    ``ResultTable``). A run without a folder (``logger: false``) gets none.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # the processes agree on it here
        # A predict has no results.
        self._folder = Path(log_dir) if trainer.loggers and log_dir and stage != "predict" else None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):  # Lightning calls no teardown then
            self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        if self._folder is None or not trainer.is_global_zero or not self._folder.is_dir():
            return
        for logger in trainer.loggers:
            logger.save()  # otherwise done after this
        print(f"report: {printable(write_report([self._folder], self._folder / REPORT_FILE))}")
