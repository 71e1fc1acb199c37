"""What the command says: errors in one sentence, no advertisements, nothing that acts on the terminal."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytorch_lightning.utilities.exceptions import MisconfigurationException

from swbn_lightning.command.parser_errors import in_one_sentence
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.screen import forgiving_screen

# What the command's user can do nothing about, or has asked for: text, module that says it, and why it is left out.
_NOISE = (
    (".*does not have many workers", "pytorch_lightning", "the data lie in memory"),
    ("The number of training batches .* logging interval", "pytorch_lightning", "a run that is short on purpose"),
    ("LightningCLI's args parameter", "pytorch_lightning", "they are those of the command line, or a program's own"),
    ("The dirpath has changed", "pytorch_lightning", "a test has a folder of its own; the training's is another"),
    ("Total length of `list` across ranks is zero", "pytorch_lightning", "no validation, as the data module was told"),
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", "pytorch_lightning", "torch's, of Lightning 2.6.6"),
    (
        r"torch\.distributed\.nn\.functional\.all_gather is deprecated",
        "lightning_fabric",
        "torch's, of Lightning 2.6.6",
    ),
    (r"`torch\._prims_common\.check` is deprecated", "torch", "torch's, of its own compiler (2.14)"),
)
# An advertisement; that the command gives the trainer its summary.
_UNSAID = ("Tip: For seamless cloud", "Trainer already configured with model summary callbacks")
# Lightning's, once there are batches and metrics, and torch's, of weights that do not fit.
_MISTAKES = ("`val_check_interval`", "Early stopping conditioned on", "Error(s) in loading state_dict")

# What stands before the message of an error in a data worker, as torch hands it on: its traceback.
_IN_A_WORKER = f"\n{InputError.__module__}.{InputError.__name__}: "


def say_less() -> None:
    """From now on, leave out warnings that tell the command's user nothing, and print the others safely."""
    # Lightning 2.6 uses calls of jsonargparse 4 that version 5, outside our range, removes.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for message, package, _ in _NOISE:
        warnings.filterwarnings("ignore", message, module=rf"{package}(\.|$)")
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(_to_be_said)
    warnings.formatwarning = _printable_warning


def say_less_of_own_models() -> None:
    """Leave out a warning of images that count twice: these models take each once, in however many processes."""
    warnings.filterwarnings("ignore", "Using `DistributedSampler` with the dataloaders", module="pytorch_lightning")


@contextmanager
def errors_as_messages(shows_only: bool) -> Iterator[None]:
    """For one command: a mistake of the user's is a message and exit code 2; a screen that takes no more is no end.

    A command that only shows something ends with 1 where it could not.
    """
    with forgiving_screen() as screen:
        try:
            yield
            screen.flush()
        except (ValueError, RuntimeError, MisconfigurationException, argparse.ArgumentError) as error:
            parsing = isinstance(error, argparse.ArgumentError)
            wrong = in_one_sentence(str(error)) if parsing else mistake(error)
            if wrong is None:
                raise
            said = str(wrong).rpartition(_IN_A_WORKER)[2].strip()
            print(f"swbn: error: {printable_lines(said)}", file=sys.stderr)
            raise SystemExit(2) from None
        if screen.lost is not None and not isinstance(screen.lost, BrokenPipeError):  # whose reader had enough
            print(f"swbn: not all could be shown ({screen.lost}); files are whole.", file=sys.stderr)
            if shows_only:
                raise SystemExit(1)


def mistake(error: BaseException | None) -> BaseException | None:
    """The user's mistake among the causes of an error: jsonargparse wraps what a constructor raises."""
    if str(error).lstrip().startswith(_MISTAKES):
        return error
    while error is not None and not isinstance(error, InputError | MisconfigurationException):
        error = error.__cause__
    return error


def printable_lines(text: str) -> str:
    """Names of files and what stands in them may be anything, a terminal's commands too."""
    return "\n".join(printable(line) for line in text.splitlines())


def _to_be_said(record: logging.LogRecord) -> bool:
    """Whether a message of Lightning's tells the user something; and no name in it acts on the terminal."""
    record.msg, record.args = printable_lines(record.getMessage()), ()
    return not any(words in record.msg for words in _UNSAID)


def _printable_warning(message: Any, category: type[Warning], filename: str, lineno: int, line: Any = None) -> str:
    return f"{filename}:{lineno}: {category.__name__}: {printable_lines(str(message))}\n"
