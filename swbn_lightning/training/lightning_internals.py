"""What this package needs of Lightning 2.6 and Lightning does not offer: the only file that uses its private names.

Each function says what it is for and why no public way serves. ``tests/test_house.py`` looks for private names
elsewhere. To be looked through again when the bounds of ``pytorch-lightning`` in ``pyproject.toml`` move.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from torch import nn


def in_the_midst_of_a_step(trainer: pl.Trainer) -> bool:
    """Whether some of the batches of one optimiser step have been and others have not (``accumulate_grad_batches``).

    2.6.6 computes it from its loop's progress, the last batch of an epoch and the strategy, in a private method.
    Nothing public says it, and a copy of the rule would stay as it is when Lightning's changes.
    """
    return trainer.fit_loop.epoch_loop._should_accumulate()


def answer_sigterm(trainer: pl.Trainer, answer: Callable[[int, FrameType], None]) -> None:
    """Have the trainer call ``answer`` at SIGTERM, instead of the handler that broadcasts at once.

    To be called before Lightning begins to listen. 2.6.6 broadcasts inside the signal handler, among the collectives of
    a training step, which then wait for ever; no argument of the Trainer turns that off, and ``signal.signal`` comes
    too early (Lightning calls that handler after its own) or too late.
    """
    trainer._signal_connector._sigterm_notifier_fn = answer  # type: ignore[method-assign, assignment]


def answer_sigterm_as_usual(trainer: pl.Trainer) -> None:
    """Take :func:`answer_sigterm` back."""
    vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)


def stop_at_next_step(trainer: pl.Trainer, stop: bool = True) -> None:
    """What a training ends by between two steps; ``trainer.received_sigterm`` can only be read (2.6.6)."""
    trainer._signal_connector.received_sigterm = stop


def training_batches(trainer: pl.Trainer, number: int | None) -> Iterator[Any]:
    """So many training batches (None: all) as they arrive in ``training_step``, moved and in its precision.

    ``trainer.train_dataloader`` gives several loaders without the way in which they are combined, and who answers
    ``on_before_batch_transfer``, the module or the data module, is decided in a private method (2.6.6).
    """
    loader = trainer.fit_loop._combined_loader
    assert loader is not None
    for batch, _, _ in itertools.islice(loader, number):
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch)
        yield trainer.strategy.batch_to_device(batch)


def averaged_copy(averaging: WeightAveraging) -> nn.Module | None:
    """The network that the callback averages into, and saves; 2.6.6 has no public name for it."""
    average = averaging._average_model
    return None if average is None else average.module


def leave_out_the_batch_under_way(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Of a save in the midst of a step (from the handler of SLURM's SIGUSR1): the batch under way is repeated.

    2.6.6 keeps the loaders' states as they are when it saves, and the batch under way has left the loader. It has no
    hook between the loader's state and the file; this is for ``on_save_checkpoint`` of a callback.
    """
    processed = trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
    for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
        if "batches" in state:
            state["batches"] = min(state["batches"], processed)


def begin_validation_anew(trainer: pl.Trainer) -> None:
    """Have a validation that was broken off start again with its first batch: its results so far are not kept.

    2.6.6 continues a validation if batches have begun in all and none in this run. It would continue in the middle, and
    figures of a part would stand for the whole.
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.reset()
    progress.total.ready = progress.total.started = 1  # type: ignore[attr-defined]


def set_help(parser: argparse.ArgumentParser, words: Mapping[str, str]) -> None:
    """Give options their help. Those of the trainer's methods take theirs from Lightning's docstrings.

    Neither Lightning nor argparse has a public way from an option's name to the option.
    """
    for action in parser._actions:
        for name in words.keys() & set(action.option_strings):
            action.help = words[name]


def read_numbers_of_batches(parser: argparse.ArgumentParser) -> None:
    """Have 1 of ``limit_train_batches`` and the like be one batch, not 1.0, which is all of them.

    Where other modules are loaded before Lightning, ``typing`` gives its ``int | float`` as ``float | int``, which it
    takes for equal, and jsonargparse reads a number as the first that fits.
    """
    for action in parser._actions:
        if action.dest.startswith("trainer.limit_"):
            action._typehint = int | float | None  # type: ignore[attr-defined]
