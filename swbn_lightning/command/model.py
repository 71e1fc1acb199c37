"""How the command makes the classes that a configuration names: a model past the parser, the user's parts with care."""

import functools
import pydoc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.loggers import Logger

from swbn_lightning.command.settings import plain
from swbn_lightning.errors import InputError
from swbn_lightning.runs.checkpoints import read_checkpoint
from swbn_lightning.training.hyperparameters import kept_hyperparameters

_MADE_LATER = {"optimizer", "lr_scheduler"}  # arguments of the model
_UNFIT = (AttributeError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError)


@contextmanager
def classes_made_with_care(parser: LightningArgumentParser, config: Namespace) -> Iterator[None]:
    """While Lightning makes the classes of a configuration: what a checkpoint keeps beats what is given.

    A logger or callback that cannot be made is an error in its own words, which the parser would hide among others.
    """
    refused: list[InputError] = []

    def make_part(kind: type, *args: Any, **given: Any) -> Any:
        try:
            return kind(*args, **given)
        except Exception as error:  # it may be anybody's, and want a package, a server, other values
            reason = "" if isinstance(error, InputError) else f"no {kind.__name__} can be made: "
            refused.append(InputError(f"{reason}{' '.join(str(error).split())}"))
            raise refused[0] from error

    for kind in (pl.Callback, Logger):
        parser.add_instantiator(make_part, kind)
    given, kept = Namespace(), {}
    if config.get("model"):
        given = config.model.get("init_args") or Namespace()
        model_class: Any = pydoc.locate(config.model.class_path)
        if checkpoint := config.get("ckpt_path"):
            kept = kept_hyperparameters(read_checkpoint(checkpoint), model_class, checkpoint)
            for key, value in kept.items():  # as in Lightning, which does not say so
                if key in given and plain(given[key]) != value:
                    print(
                        f"swbn: the checkpoint's {key}={value!r} is used, not {plain(given[key])!r}.", file=sys.stderr
                    )
        # Past the parser, which would read a checkpoint's strings as YAML, and its mappings as classes.
        parser.add_instantiator(_model_maker(given, kept, checkpoint), model_class, subclasses=False)
    try:
        yield
    except ValueError as error:
        if not refused:
            raise
        raise refused[0] from error
    if kept:
        config.model.init_args = Namespace({**vars(given), **kept})


def _model_maker(settings: Namespace, kept: dict[str, Any], checkpoint: str | None) -> Callable[..., Any]:
    def make(kind: type, *args: Any, **given: Any) -> Any:
        given |= {name: _without_parser(settings.get(name), given[name]) for name in _MADE_LATER if name in given}
        try:
            return kind(*args, **{**given, **kept})
        except InputError:
            raise
        except _UNFIT as error:
            if not checkpoint:
                raise
            raise InputError(f"{checkpoint}: no {kind.__name__} can be made as it says: {error}") from error

    return make


def _without_parser(settings: Any, made: Any) -> Any:
    """What makes an optimiser or schedule later, as a class and its arguments.

    jsonargparse's own (``made``) holds the parser, and by it the command, the trainer and the data: whoever copies the
    model would copy them. It stays where an argument is to be made, too.
    """
    arguments = plain(settings.get("init_args", {})) if isinstance(settings, Namespace) else {"class_path": ""}
    if "class_path" in str(arguments) or settings.get("dict_kwargs"):
        return made
    return functools.partial(pydoc.locate(settings.class_path), **arguments)  # type: ignore[misc, arg-type, operator]
