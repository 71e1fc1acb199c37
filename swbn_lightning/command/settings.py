"""What the command's settings mean where it is not what they say, one by one."""

import inspect
import pydoc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from swbn_lightning.command.parts import as_list
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import read_yaml

_NORMS = {"norm": "norm_args", "fusion_norm": "fusion_norm_args"}  # arguments of models


def check_seed(seed: Any) -> None:
    """Raises :class:`~swbn_lightning.errors.InputError` for a seed that numpy's generator does not take."""
    if type(seed) is int and not 0 <= seed < 2**32:
        raise InputError(f"seed_everything must be from 0 to {2**32 - 1}, as numpy's generator takes it, got {seed}.")


def without_alias(arguments: Sequence[str]) -> list[str]:
    """``swbn train`` is ``swbn fit``."""
    return ["fit" if i == 0 and word == "train" else word for i, word in enumerate(arguments)]


def keep_loggers_files_below(root: str, loggers: Any) -> None:
    """Have a logger that is not told where to write do so below the folder of runs, not in the working folder.

    Args:
        root: of all runs.
        loggers: the settings of the trainer's loggers; changed in place.
    """
    for logger in as_list(loggers):
        kind: Any = pydoc.locate(logger.class_path) if isinstance(logger, Namespace) else None
        parameter = inspect.signature(kind).parameters.get("save_dir") if kind else None
        if parameter is not None and parameter.default not in (None, parameter.empty):
            arguments = logger.get("init_args") or Namespace()
            if arguments.get("save_dir", parameter.default) == parameter.default:
                arguments.save_dir = str(Path(root, parameter.default))
                logger.init_args = arguments


def leave_out_other_norms_options(model: Any, files: Sequence[Any], words: Sequence[str]) -> list[str]:
    """A configuration's options of a norm are not those of another norm that the command line names.

    Args:
        model: the settings of the model; changed in place.
        files: the configuration files, in their order.
        words: of the command line.

    Returns:
        A sentence for each that was left out.
    """
    settings, said = model.get("init_args") or Namespace(), []
    for name, options in _NORMS.items():
        file, theirs, meant = _last_options(files, name, options)
        if not meant or theirs in (None, settings.get(name)):
            continue
        now = _plain(settings.get(options)) or {}
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
            model = read_yaml(Path(str(file)), link=True).get("model")
        except InputError:  # what the parser took and this reader does not
            continue
        said = model.get("init_args", model) if isinstance(model, Mapping) else None
        if isinstance(said, Mapping):
            norm = said.get(name, norm)
            if options in said:
                found = (file, norm, said[options])
            elif name in said and said[name] != found[1]:
                found = (None, None, None)  # another file pairs the two
    return found


def _plain(value: Any) -> Any:
    return value.as_dict() if isinstance(value, Namespace) else value
