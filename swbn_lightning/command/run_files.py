"""What a run's folder holds beside what its callbacks measure, and who else gets it."""

import contextlib
from pathlib import Path

import pytorch_lightning as pl
import yaml
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only, rank_zero_warn

from swbn_lightning.files.writing import write_whole
from swbn_lightning.runs.folders import CONFIG_FILE, RUN_FILE
from swbn_lightning.training.callbacks.run_file import AtTheEnd

# What a run writes before it has trained or evaluated anything.
_FIRST_FILES = (CONFIG_FILE, RUN_FILE, "hparams.yaml", "events.out.tfevents.*")
_SENT = ("*.json", "*.csv", "*.png", "*.html")


class RunConfiguration(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder and tells the user's loggers every setting."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger) and logger is trainer.loggers[0]:
                Path(logger.log_dir).mkdir(parents=True, exist_ok=True)
                write_whole(Path(logger.log_dir, CONFIG_FILE), text)
            elif not isinstance(logger, CSVLogger | TensorBoardLogger):
                logger.log_hyperparams({"config": yaml.safe_load(text)})


class RunFilesToLoggers(AtTheEnd):
    """Gives Weights & Biases and MLflow the files of a run's folder (results, whiteness, pictures, report).

    Checkpoints excepted: ``log_model`` of these loggers decides on them.
    """

    def finish(self, trainer: pl.Trainer, folder: Path) -> None:
        for logger in trainer.loggers:
            try:
                for pattern in _SENT:
                    if isinstance(logger, WandbLogger):  # which has a config.yaml of its own
                        logger.experiment.save(str(folder / pattern), str(folder), "now")
                    elif isinstance(logger, MLFlowLogger):
                        for file in sorted(folder.glob(pattern)):
                            logger.experiment.log_artifact(logger.run_id, str(file))
            except Exception as error:  # a server's, of any kind; the run is done and its files are there
                rank_zero_warn(f"{type(logger).__name__} did not take all files of {folder}: {error}")


@rank_zero_only
def remove_if_nothing_came(folder: Path | None) -> None:
    """Remove a run's folder if it holds no more than what a run writes before its first step."""
    if folder is None or not folder.is_dir():
        return
    files = list(folder.iterdir())
    if all(file.is_file() and any(map(file.match, _FIRST_FILES)) for file in files):
        with contextlib.suppress(OSError):
            for file in files:
                file.unlink()
            folder.rmdir()
