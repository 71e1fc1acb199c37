"""Write the report page at the end of a command."""

from pathlib import Path

import pytorch_lightning as pl

from swbn_lightning.files.reading import printable
from swbn_lightning.runs.page.page import REPORT_FILE, write_report
from swbn_lightning.training.callbacks.run_file import AtTheEnd


class ReportPage(AtTheEnd):
    """Write ``report.html`` into the run's folder when ``fit``, ``validate`` or ``test`` ends or is interrupted.

    Put it after the callbacks whose files it shows (``WhitenessMonitor``, ``ResultTable``).
    """

    def finish(self, trainer: pl.Trainer, folder: Path) -> None:
        if trainer.state.fn == "predict":  # which has no results
            return
        for logger in trainer.loggers:
            logger.save()  # otherwise done after this
        print(f"report: {printable(write_report([folder], folder / REPORT_FILE))}")
