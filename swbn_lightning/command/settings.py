"""What the command's settings mean where it is not what they say, one by one."""

import importlib
import inspect
import pydoc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from swbn_lightning.command.messages import printable_lines
from swbn_lightning.command.parts import as_list
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import read_yaml
from swbn_lightning.runs.checkpoints import find_checkpoint
from swbn_lightning.training.module import TrainingModule

_NORMS = {"norm": "norm_args", "fusion_norm": "fusion_norm_args"}  # arguments of models
_PREFERENCES = ("best", "last")  # Lightning's words for a checkpoint


def settle(own: Namespace, command: str, words: Sequence[str]) -> None:
    """Check a subcommand's settings, and make them what they mean, in place; ``words`` are the command line's."""
    seed = own.get("seed_everything")
    if type(seed) is int and not 0 <= seed < 2**32:
        raise InputError(f"seed_everything must be from 0 to {2**32 - 1}, as numpy's generator takes it, got {seed}.")
    own.run.root = str(Path(own.run.root).expanduser())
    keep_loggers_files_below(own.run.root, own.trainer.logger)
    for said in leave_out_other_norms_options(own.get("model") or {}, own.get("config") or [], words):
        print(printable_lines(f"swbn: {said}"), file=sys.stderr)
    model = (own.get("model") or {}).get("init_args")
    if own.get("ckpt_path") is not None and model and not any(".backbone_checkpoint" in word for word in words):
        # A checkpoint has all weights. The first stage's, which the configuration names, may be gone.
        for name in ("backbone_checkpoint", "backbone_names"):
            if name in model:
                model[name] = None
    if command == "fit":
        _settle_checkpoints(own.checkpoint, own.trainer)


def import_modules(names: list[str] | str) -> None:
    """Import the user's modules."""
    for name in as_list(names):
        if not all(part.isidentifier() for part in name.split(".")):  # a path, or nothing
            raise InputError(f"imports: {name!r} is no module's name; give one as my_norms or package.my_norms.")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # from within the module
            raise InputError(
                f"imports: there is no module {name!r} on the Python path; PYTHONPATH=FOLDER swbn … adds its folder."
            ) from error


def checkpoint_to_load(own: Namespace, command: str) -> str | None:
    """The file that ``ckpt_path`` means; None where none is given."""
    path = own.get("ckpt_path")
    if path is None:
        return None
    if path in _PREFERENCES and not Path(path).exists():
        return str(find_checkpoint(Path(own.run.root, own.run.name), path))
    return str(find_checkpoint(path, "last" if command == "fit" else "best"))


def require_trained(model: Any, own: Namespace, command: str) -> None:
    """Raise :class:`InputError` for an evaluation of weights that nobody trained (``fast_dev_run`` is probing)."""
    if command == "fit" or own.get("ckpt_path") is not None or own.trainer.fast_dev_run:
        return
    if isinstance(model, TrainingModule) and model.can_be_evaluated_as_made:
        return
    raise InputError(
        f"{command} needs the weights of a trained model: --ckpt_path runs/NAME (the best checkpoint of the newest run "
        "of that name) or a .ckpt file. A few-shot model whose head needs no training can do with a trained backbone: "
        "--model.backbone_checkpoint runs/NAME, weights of another program (with --model.backbone_names), or "
        "pretrained ones of a library."
    )


def _settle_checkpoints(checkpoint: Namespace, trainer: Namespace) -> None:
    if (checkpoint.every_n_train_steps or checkpoint.train_time_interval) and str(checkpoint.monitor).startswith(
        "val/"
    ):
        raise InputError(
            "checkpoints by steps or time are saved between validations, when there is no "
            f"{checkpoint.monitor}: give --checkpoint.monitor null, and --checkpoint.save_top_k -1 to keep all."
        )
    if checkpoint.save_on_train_epoch_end is None:
        # At an epoch's end where it has just been validated: then its whiteness is measured, too, and the file holds
        # it. Else right after the validation whose figures its name has.
        every_epoch = trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval in (None, 1.0)
        checkpoint.save_on_train_epoch_end = every_epoch


def keep_loggers_files_below(root: str, loggers: Any) -> None:
    """Have a logger that is not told where to write do so below the folder of runs, not in the working folder."""
    for logger in as_list(loggers):
        kind: Any = pydoc.locate(logger.class_path) if isinstance(logger, Namespace) else None
        parameter = inspect.signature(kind).parameters.get("save_dir") if kind else None
        if parameter is not None and parameter.default not in (None, parameter.empty):
            arguments = logger.get("init_args") or Namespace()
            if arguments.get("save_dir", parameter.default) == parameter.default:
                arguments.save_dir = str(Path(root, parameter.default))
                logger.init_args = arguments


def leave_out_other_norms_options(model: Any, files: Sequence[Any], words: Sequence[str]) -> list[str]:
    """A configuration's options of a norm are not those of another norm, which the command line or a later file names.

    Changes the settings of the model in place, and returns a sentence for each option that was left out.
    """
    settings, said = model.get("init_args") or Namespace(), []
    for name, options in _NORMS.items():
        file, theirs, meant = _last_options(files, name, options)
        if not meant or theirs in (None, settings.get(name)):
            continue
        now = plain(settings.get(options)) or {}
        # What the command line says itself stays: `--model.norm_args.eps 0.01`, or all of them at once.
        named = {word.partition(f".{options}")[2].partition("=")[0] for word in words if f".{options}" in word}
        foreign = [k for k, v in meant.items() if k in now and now[k] == v and not named & {"", f".{k}"}]
        if foreign:
            settings[options] = {k: v for k, v in now.items() if k not in foreign} or None
            said.append(
                f"{name}={settings[name]} does not take over {theirs}'s {options} in {file} ({', '.join(foreign)}). "
                f"Give --model.{options} to set its own."
            )
    return said


def _last_options(files: Sequence[Any], name: str, options: str) -> tuple[Any, Any, Any]:
    """The file that says a norm's options last, that norm and those options."""
    found: tuple[Any, Any, Any] = (None, None, None)
    norm = None
    for file in files:
        try:
            model = read_yaml(Path(str(file))).get("model")
        except InputError:  # what the parser took and this reader does not
            continue
        said = model.get("init_args", model) if isinstance(model, Mapping) else None
        if isinstance(said, Mapping):
            norm = said.get(name, norm)
            if options in said:
                found = (file, norm, said[options])
    return found


def plain(value: Any) -> Any:
    """A part of a configuration as dictionaries."""
    return value.as_dict() if isinstance(value, Namespace) else value
