"""What ``swbn`` answers without loading Lightning: its commands, its version, an error for any other word."""

import difflib
import sys
from collections.abc import Sequence

from swbn_lightning import __version__
from swbn_lightning.files.screen import forgiving_screen

COMMANDS = {
    "fit": "train a network by a configuration (`train` is the same)",
    "validate": "measure a checkpoint on the validation data",
    "test": "test a checkpoint: accuracy with its interval, whiteness",
    "predict": "classify images of your own with a checkpoint",
    "embed": "write the features of a split, or of your own images, to a file",
    "compare": "pair runs by their test episodes or images: differences with intervals",
    "report": "write one HTML page about runs",
    "export": "write a checkpoint as one folder to publish: weights, settings, card",
    "study": "train and test a grid of networks, norms and seeds: one table",
}
_ALIASES = ("train",)


def answer(words: Sequence[str]) -> None:
    """Help, version or an error for the words of a command line that need nothing else; otherwise nothing.

    Raises:
        SystemExit: 0 after an answer; 1 where it could not be shown; 2 after an error, which names the commands.
    """
    first, known = words[0] if words else "", [*COMMANDS, *_ALIASES]
    if first in known or (first.startswith("-") and first not in ("-h", "--help", "--version")):
        return
    text, code = f"swbn {__version__}" if first == "--version" else _help(), 0 if first.startswith("-") else 2
    if code and first:
        near = difflib.get_close_matches(first, known, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        text = f"swbn: error: {first!r} is no command.{meant} The commands: {', '.join(known)}."
    with forgiving_screen() as screen:
        print(text, file=sys.stderr if code else sys.stdout)
        screen.flush()
    raise SystemExit(code or int(screen.lost is not None and not isinstance(screen.lost, BrokenPipeError)))


def _help() -> str:
    listed = "\n".join(f"  {name:<10}{does}" for name, does in COMMANDS.items())
    return f"""\
usage: swbn COMMAND ...

Train, test and compare networks with whitening normalisation layers.

{listed}

  --version   the version of this package
  --help      this; `swbn COMMAND --help` shows what a command takes

A configuration is code: it names classes that are imported and called. Read one that is not yours before you use it
(docs/security.md)."""
