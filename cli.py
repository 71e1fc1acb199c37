"""The command: ``swbn fit|train|validate|test|predict --config FILE``, and ``swbn compare|report RUN…``,
``swbn study CONFIG…``."""

import functools
import os
import pydoc
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from jsonargparse import Namespace
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

import classification  # noqa: F401 (its classes are known by their short names)
import fewshot  # noqa: F401
from fewshot.prediction import PredictionTable
from fewshot.saving import EpisodeFiles
from swbn_lightning.command import parts, settings
from swbn_lightning.command.messages import mistake, printable_lines, say_less
from swbn_lightning.command.run_files import RunConfiguration, RunFilesToLoggers, remove_if_nothing_came
from swbn_lightning.command.signals import let_sigterm_kill, sigterm_is_143
from swbn_lightning.data.image_data import ImageDataModule
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.files.reading import flatten, parse_yaml
from swbn_lightning.files.screen import forgiving_screen
from swbn_lightning.runs import compare
from swbn_lightning.runs.checkpoints import find_checkpoint, read_checkpoint
from swbn_lightning.training.callbacks.check_ranks_agree import CheckRanksAgree  # noqa: F401 (for --trainer.callbacks)
from swbn_lightning.training.callbacks.last_checkpoint import LastCheckpoint
from swbn_lightning.training.callbacks.nothing_to_train import NothingToTrain
from swbn_lightning.training.callbacks.random_streams import RandomStreams
from swbn_lightning.training.callbacks.result_table import ResultTable
from swbn_lightning.training.callbacks.run_file import RunFile
from swbn_lightning.training.callbacks.stop_on_non_finite import StopOnNonFinite
from swbn_lightning.training.callbacks.stop_together import StopTogether
from swbn_lightning.training.callbacks.update_norms import UpdateNorms  # noqa: F401 (for --trainer.callbacks)
from swbn_lightning.training.hyperparameters import kept_hyperparameters
from swbn_lightning.whiteness import WhitenessMonitor

_HELP = (
    "Besides the subcommands: `swbn compare RUN RUN...` pairs runs on the same test episodes, `swbn report RUN...` "
    "writes one HTML page about runs, `swbn study CONFIG...` trains and tests a grid of norms and seeds; see `swbn "
    "compare --help` and so on. A configuration is code: it names classes that are imported and called. Read one that "
    "is not yours before you use it (docs/security.md)."
)
_BEST = "epoch{epoch:03d}-accuracy{val/accuracy:.4f}"
_EVERY = "epoch{epoch:03d}-step{step:06d}"  # of a checkpoint that nothing is monitored for; no two are of one step
_MADE_LATER = {"optimizer", "lr_scheduler"}  # arguments of the model
_PROCESS_WORDS = ("best", "last", "hpc", "registry")
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
        parser.add_argument("--run.root", type=str, default="runs", help="folder of all runs")
        parser.add_argument("--run.name", type=str, default="default", help="runs go to ROOT/NAME/version_N")
        parser.add_argument("--run.report", type=bool, default=False, help="write report.html there at the end")
        # Made callbacks of the trainer below, unless it is told to have none of their kind, or another one.
        for name, kind in _CONFIGURED.items():
            parser.add_class_arguments(kind, name, fail_untyped=False, instantiate=True, sub_configs=True)
            parser.set_defaults({f"{name}.{key}": value for key, value in _DEFAULTS.get(name, {}).items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        words = sys.argv[1:] if args is None else args
        self._command_line = shlex.join(["swbn", *words])
        command = self.config.subcommand
        own = self.config[command]
        settings.check_seed(own.get("seed_everything"))
        own.run.root = str(Path(own.run.root).expanduser())
        settings.keep_loggers_files_below(own.run.root, own.trainer.logger)
        for said in settings.leave_out_other_norms_options(own.get("model") or {}, own.get("config") or [], words):
            print(printable_lines(f"swbn: {said}"), file=sys.stderr)
        timed = own.checkpoint.every_n_train_steps or own.checkpoint.train_time_interval if command == "fit" else None
        if timed and str(own.checkpoint.monitor).startswith("val/"):
            raise InputError(
                "checkpoints by steps or time are saved between validations, when there is no "
                f"{own.checkpoint.monitor}: give --checkpoint.monitor null, and --checkpoint.save_top_k -1 to keep all."
            )
        if command == "fit" and own.checkpoint.save_on_train_epoch_end is None:
            # At an epoch's end where it has just been validated: then its whiteness is measured, too, and the file
            # holds it. Else right after the validation whose figures its name has.
            trainer = own.trainer
            every_epoch = trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval in (None, 1.0)
            own.checkpoint.save_on_train_epoch_end = every_epoch
        path = self.config[command].get("ckpt_path")
        if path is None:
            if command != "fit" and not self.config[command].trainer.fast_dev_run:
                raise InputError(
                    f"{command} needs the weights of a trained model: --ckpt_path runs/NAME (the best checkpoint of "
                    "the newest run of that name) or a .ckpt file."
                )
            return
        if str(path) in _PROCESS_WORDS:
            raise InputError(
                f"ckpt_path={path!r} is known only inside the process that trained; give the .ckpt file or the "
                "run folder, as runs/NAME."
            )
        self.config[command].ckpt_path = str(find_checkpoint(path, "last" if command == "fit" else "best"))

    def _parse_ckpt_path(self) -> None:
        """Not Lightning's way: it has jsonargparse import and call whatever a checkpoint names."""

    def instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        maker = parts.Maker()
        for kind in (pl.Callback, Logger):
            self.parser.add_instantiator(maker, kind)
        try:
            self._instantiate(config)
        except ValueError as error:
            if maker.refused is None:
                raise
            raise maker.refused from error

    def _instantiate(self, config: Namespace) -> None:
        if not config.get("model"):
            super().instantiate_classes()
            return
        model_class: Any = pydoc.locate(config.model.class_path)
        given_model = config.model.get("init_args") or Namespace()
        checkpoint, kept = config.get("ckpt_path"), {}
        if checkpoint:
            kept = kept_hyperparameters(read_checkpoint(checkpoint), model_class, checkpoint)
            _say_what_the_checkpoint_overrides(given_model, kept)

        def make(kind: type, *args: Any, **given: Any) -> Any:
            given |= {
                name: _without_parser(given_model.get(name), given[name]) for name in _MADE_LATER if name in given
            }
            try:
                return kind(*args, **{**given, **kept})
            except InputError:
                raise
            except (AttributeError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
                if not checkpoint:
                    raise
                raise InputError(f"{checkpoint}: no {kind.__name__} can be made as it says: {error}") from error

        # Past the parser, which would read a checkpoint's strings as YAML, and its mappings as classes.
        self.parser.add_instantiator(make, model_class, subclasses=False)
        super().instantiate_classes()
        if kept:
            config.model.init_args = Namespace({**vars(given_model), **kept})  # to be saved

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        made = self.config_init[self.subcommand]
        config = {**made.trainer, **kwargs}
        counts = {key: config.get(key) for key in ("accumulate_grad_batches", "check_val_every_n_epoch")}
        require_positive("trainer", **{key: value for key, value in counts.items() if value is not None})
        barebones, probing = bool(config.get("barebones")), bool(config.get("fast_dev_run"))
        if barebones and config.get("log_every_n_steps") == _LOG_EVERY:
            config["log_every_n_steps"] = None  # the command's default, which barebones would refuse
        if config.get("logger") is not False and not (probing or barebones):
            config["logger"] = parts.loggers(config.get("logger"), made.run.root, made.run.name)
            self._folder = Path(config["logger"][0].log_dir)
        own = [ResultTable(), NothingToTrain()] if barebones else self._own_callbacks(config)
        given = vars(self.config[self.subcommand])
        changed = {
            kind: parts.changed_settings(name, kind, vars(given[name]), _DEFAULTS.get(name, {}))
            for name, kind in _CONFIGURED.items()
        }
        config["plugins"] = parts.with_checkpoint_io(config.get("plugins"))
        if config.get("default_root_dir") is None:
            # Where SLURM's requeueing keeps its checkpoint, and finds it: not the working folder, which all jobs share.
            config["default_root_dir"] = str(Path(made.run.root, made.run.name))
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
            callbacks.append(RichProgressBar())
        if logs:
            callbacks.append(LearningRateMonitor())
        callbacks += [RunFile(self._command_line, self._flat_settings), made.finite, RandomStreams(), StopTogether()]
        callbacks += [ResultTable(), EpisodeFiles(), PredictionTable(), NothingToTrain()]
        if logs and made.run.report:
            callbacks.append(_report_page())  # after those whose files it shows
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
        text = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False)
        return flatten(parse_yaml(text))

    def _can_be_monitored(self, quantity: str | None) -> bool:
        """Not what validation would measure, where no images validate: then the last epoch is what a run leaves."""
        validates = not isinstance(self.datamodule, ImageDataModule) or self.datamodule.has_validation
        return validates or not (quantity or "").startswith("val/")


def _report(args: Sequence[str]) -> None:
    from swbn_lightning.runs.page.page import main as report  # matplotlib, which most commands can do without

    report(args)


def _study(args: Sequence[str]) -> None:
    from swbn_lightning.runs.study.command import main as study

    study(args)


# What is no command of Lightning's Trainer: a first word to what takes the words after it.
_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"compare": compare.main, "report": _report, "study": _study}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; ``args`` as on the command line, ``sys.argv`` by default.

    Raises:
        SystemExit: 2 for input that cannot work, after a message that says what would; 143 when SIGTERM ended it.
    """
    given = sys.argv[1:] if args is None else list(args)
    run = _COMMANDS.get(given[0]) if given else None
    with forgiving_screen() as screen:
        try:
            if run is not None:
                run(given[1:])
            else:
                _run_lightning(args)
            screen.flush()
        except (ValueError, RuntimeError, MisconfigurationException) as error:
            wrong = mistake(error)
            if wrong is None:
                raise
            print(f"swbn: error: {printable_lines(str(wrong))}", file=sys.stderr)
            raise SystemExit(2) from None
        if screen.lost is not None and not isinstance(screen.lost, BrokenPipeError):  # whose reader had enough
            print(f"swbn: not all could be shown ({screen.lost}); files are whole.", file=sys.stderr)
            if run is not None:  # what it shows is what it is for
                raise SystemExit(1)


def _run_lightning(args: Sequence[str] | None) -> None:
    """One of the Trainer's commands."""
    if args is None:
        sys.argv[1:] = settings.without_alias(sys.argv[1:])
    else:
        args = settings.without_alias(args)
    say_less()
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
            load_from_checkpoint_support=False,  # see SwbnCLI._parse_ckpt_path
            parser_kwargs={"prog": "swbn", "description": __doc__, "epilog": _HELP},
            trainer_defaults={"log_every_n_steps": _LOG_EVERY},
            args=args,
        )
    except SIGTERMException:  # which alone would end with 0, as if the training were done
        # Of a process that Lightning itself started beside the command's, any code but 0 would have the latter killed.
        started = os.environ.get("LOCAL_RANK", "0") != "0" and not TorchElasticEnvironment.detect()
        raise SystemExit(0 if started else 128 + signal.SIGTERM) from None


def console() -> None:
    """The entry point of the ``swbn`` command."""
    with sigterm_is_143():
        main()


def _report_page() -> pl.Callback:
    from swbn_lightning.training.callbacks.report_page import ReportPage  # matplotlib, as above

    return ReportPage()


def _say_what_the_checkpoint_overrides(given: Any, kept: dict[str, Any]) -> None:
    """A checkpoint's hyperparameters beat the ones given, as in Lightning; said where they differ."""
    for key, value in kept.items():
        if key in given and _plain(given[key]) != value:
            print(f"swbn: the checkpoint's {key}={value!r} is used, not {_plain(given[key])!r}.", file=sys.stderr)


def _without_parser(settings: Any, made: Any) -> Any:
    """What makes an optimiser or schedule later, as a class and its arguments.

    jsonargparse's own (``made``) holds the parser, and by it the command, the trainer and the data: whoever copies the
    model would copy them. It stays where an argument is to be made, too.
    """
    arguments = _plain(settings.get("init_args", {})) if isinstance(settings, Namespace) else {"class_path": ""}
    if "class_path" in str(arguments) or settings.get("dict_kwargs"):
        return made
    return functools.partial(pydoc.locate(settings.class_path), **arguments)  # type: ignore[misc, arg-type, operator]


def _plain(value: Any) -> Any:
    return value.as_dict() if isinstance(value, Namespace) else value


if __name__ == "__main__":
    console()
