"""The command with Lightning loaded: ``swbn fit|train|validate|test|predict --config FILE``, and
``swbn compare|report|embed|export RUN…``, ``swbn study CONFIG…``."""

import importlib
import shlex
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.exceptions import SIGTERMException

import classification  # noqa: F401 (its classes are known by their short names)
import fewshot  # noqa: F401
from swbn_lightning.command import parts, settings
from swbn_lightning.command.help import CommandParser, about
from swbn_lightning.command.messages import errors_as_messages, say_less, say_less_of_own_models
from swbn_lightning.command.model import classes_made_with_care
from swbn_lightning.command.run_files import RunConfiguration, RunFilesToLoggers, remove_if_nothing_came
from swbn_lightning.command.signals import code_after_sigterm, let_sigterm_kill
from swbn_lightning.data.image_data import ImageDataModule
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import flatten
from swbn_lightning.training.callbacks.check_ranks_agree import CheckRanksAgree  # noqa: F401 (for --trainer.callbacks)
from swbn_lightning.training.callbacks.last_checkpoint import LastCheckpoint
from swbn_lightning.training.callbacks.model_card import ModelCard
from swbn_lightning.training.callbacks.prediction_table import PredictionTable
from swbn_lightning.training.callbacks.progress import BriefModelSummary, progress
from swbn_lightning.training.callbacks.random_streams import RandomStreams
from swbn_lightning.training.callbacks.result_table import ResultTable
from swbn_lightning.training.callbacks.run_file import RunFile
from swbn_lightning.training.callbacks.stop_on_non_finite import StopOnNonFinite
from swbn_lightning.training.callbacks.stop_together import StopTogether
from swbn_lightning.training.callbacks.update_norms import UpdateNorms  # noqa: F401 (for --trainer.callbacks)
from swbn_lightning.training.lightning_internals import read_numbers_of_batches
from swbn_lightning.training.module import TrainingModule
from swbn_lightning.whiteness import WhitenessMonitor

# By steps, of which no two files have the same: Lightning's epochs count from 0 here, and from 1 in all that is shown.
_BEST = "step{step:06d}-accuracy{val/accuracy:.4f}"
_EVERY = "step{step:06d}"  # of a checkpoint that nothing is monitored for
_DEFAULTS = {
    "checkpoint": {"monitor": "val/accuracy", "mode": "max", "filename": _BEST, "auto_insert_metric_name": False}
}
# The command's callbacks that have settings of their own.
_CONFIGURED = {"checkpoint": ModelCheckpoint, "whiteness": WhitenessMonitor, "finite": StopOnNonFinite}
_LOG_EVERY = 10


class SwbnCLI(LightningCLI):
    """LightningCLI with run folders, checkpoints by validation accuracy, whiteness, and a table at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._folder: Path | None = None  # of this run
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            remove_if_nothing_came(self._folder)
            raise

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--imports",
            type=list[str] | str,
            default=[],
            help="modules to import first, for the norms and data sets that they register, as my_norms",
        )
        parser.add_argument("--run.root", type=str, default="runs", help="folder of all runs")
        parser.add_argument("--run.name", type=str, default="default", help="runs go to ROOT/NAME/version_N")
        parser.add_argument("--run.report", type=bool, default=False, help="write report.html there at the end")
        read_numbers_of_batches(parser)
        # Made callbacks of the trainer below, unless it is told to have none of their kind, or another one.
        for name, kind in _CONFIGURED.items():
            parser.add_class_arguments(kind, name, fail_untyped=False, instantiate=True, sub_configs=True)
            parser.set_defaults({f"{name}.{key}": value for key, value in _DEFAULTS.get(name, {}).items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        self._command_line = shlex.join(["swbn", *args])
        own = self.config[command := self.config.subcommand]
        settings.import_modules(own.imports)
        settings.settle(own, command, args)
        self._checkpoint = settings.checkpoint_to_load(own, command)
        own.ckpt_path = None  # else Lightning would now have jsonargparse import and call whatever a checkpoint names

    def before_instantiate_classes(self) -> None:
        self.config[self.subcommand].ckpt_path = self._checkpoint

    def instantiate_classes(self) -> None:
        with classes_made_with_care(self.parser, self.config[self.subcommand]):
            super().instantiate_classes()
        settings.require_trained(self.model, self.config[self.subcommand], str(self.subcommand))
        if isinstance(self.model, TrainingModule):
            say_less_of_own_models()
            if "verbose" in (own := self.config_init[self.subcommand]):
                own.verbose = False  # else Lightning shows what stands in the table of results, too

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        made = self.config_init[self.subcommand]
        config, self._folder = parts.trainer_settings({**made.trainer, **kwargs}, made.run, _LOG_EVERY)
        own = [ResultTable()] if config.get("barebones") else self._own_callbacks(config)
        changed = parts.changed_settings(_CONFIGURED, self.config[self.subcommand], _DEFAULTS)
        try:
            config["callbacks"] = parts.callbacks(config.get("callbacks"), own, changed)
            trainer = super().instantiate_trainer(**config)
        except (ValueError, TypeError, ImportError, RuntimeError) as error:  # settings that do not go together
            raise InputError(f"trainer: {error}") from error
        if trainer.world_size > 1:
            let_sigterm_kill()
        return trainer

    def _own_callbacks(self, config: dict[str, Any]) -> list[pl.Callback]:
        """The command's callbacks, in their order."""
        made, logs = self.config_init[self.subcommand], bool(config.get("logger"))
        callbacks: list[pl.Callback] = [made.whiteness]
        if config.get("enable_progress_bar") is not False:
            callbacks.append(progress())
        if config.get("enable_model_summary") is not False:
            callbacks.append(BriefModelSummary())
        if logs:
            callbacks.append(LearningRateMonitor())
        callbacks += [RunFile(self._command_line, self._flat_settings), made.finite, RandomStreams(), StopTogether()]
        callbacks += [ResultTable(), ModelCard(), PredictionTable()]
        if logs and made.run.report:
            from swbn_lightning.training.callbacks.report_page import ReportPage  # matplotlib, as below

            callbacks.append(ReportPage())  # after those whose files it shows
        if logs:
            callbacks.append(RunFilesToLoggers())
        if config.get("enable_checkpointing") is not False and not config.get("fast_dev_run"):
            best = made.checkpoint
            if best.filename == _BEST and best.monitor is None:
                best.filename = _EVERY
            if self._can_be_monitored(best.monitor):
                callbacks.append(best)
            callbacks.append(LastCheckpoint())
        return callbacks

    def _flat_settings(self) -> dict[str, Any]:
        """As in ``config.yaml``."""
        return flatten(yaml.safe_load(self.parser.dump(self.config, skip_none=False))[str(self.subcommand)])

    def _can_be_monitored(self, quantity: str | None) -> bool:
        """Not what validation would measure, where no images validate: then the last epoch is what a run leaves."""
        data = self.datamodule if self.subcommand != "predict" else None  # which can do without the training's data
        validates = not isinstance(data, ImageDataModule) or data.has_validation
        return validates or not (quantity or "").startswith("val/")


# What is no command of Lightning's Trainer: a first word to the module whose ``main`` takes the words after it. It is
# imported when it is called: most commands can do without matplotlib.
_COMMANDS = {
    "compare": "swbn_lightning.runs.compare",
    "embed": "swbn_lightning.command.embed",
    "export": "swbn_lightning.runs.export",
    "report": "swbn_lightning.runs.page.page",
    "study": "swbn_lightning.runs.study.command",
}


def run(words: list[str]) -> None:
    """One command that needs Lightning; see :func:`swbn_lightning.__main__.main`, which has looked at the words."""
    other = _COMMANDS.get(words[0]) if words else None
    with errors_as_messages(shows_only=other is not None):
        if other is not None:
            importlib.import_module(other).main(words[1:])
        else:
            _run_lightning(["fit", *words[1:]] if words[:1] == ["train"] else words)


def _run_lightning(words: list[str]) -> None:
    """One of the Trainer's commands."""
    say_less()
    quiet: dict[str, Any] = {"exit_on_error": False}  # it would show all options first
    try:
        SwbnCLI(
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=RunConfiguration,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=0,
            load_from_checkpoint_support=False,  # see SwbnCLI.parse_arguments
            parser_class=CommandParser,
            parser_kwargs={"prog": "swbn", **quiet, **{c: quiet | about(c) for c in LightningCLI.subcommands()}},
            trainer_defaults={"log_every_n_steps": _LOG_EVERY},
            args=words,
        )
    except SIGTERMException:  # which by itself would end with 0, as if the training were done
        raise SystemExit(code_after_sigterm()) from None
