"""SIGTERM ends the program with 143 wherever it is."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def _leave(number: int, _: FrameType | None) -> None:
    # Lightning calls the handler that it found, too.
    if signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)


@contextmanager
def sigterm_is_143() -> Iterator[None]:
    """For all that a program does: SIGTERM ends it with code 143 also where Lightning does not listen.

    Lightning does from the sanity check on until the training is torn down. A second signal, as ``timeout`` sends it,
    does not disturb what the program does to end. Afterwards the process ignores SIGTERM. For the main thread only.
    """
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def let_sigterm_kill() -> None:
    """Within :func:`sigterm_is_143`: while nothing listens, SIGTERM kills the process at once, as it does by itself.

    For one of several processes. Before the training it waits for the others where no Python is run: if they left, the
    signal would not be answered. (A process that a signal killed has code 143 for a shell and for SLURM as well.)
    """
    if signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def code_after_sigterm() -> int:
    """What a process whose training SIGTERM ended exits with: 143.

    Of a process that Lightning itself started beside the command's, any code but 0 would have the latter killed.
    """
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    started = os.environ.get("LOCAL_RANK", "0") != "0" and not TorchElasticEnvironment.detect()
    return 0 if started else 128 + signal.SIGTERM
