"""Loaders whose workers stay when SIGTERM reaches the whole job, as SLURM, Kubernetes and ``timeout`` send it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader

#: What a job's manager sends to every process of a job for the training to answer: SLURM's requeueing takes one.
_MESSAGES = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGHUP") if hasattr(signal, name))
_CAN_TELL_SENDERS = hasattr(signal, "sigtimedwait")
_LOOK_EVERY = 5.0  # seconds


class StayOnSigterm:
    """A ``worker_init_fn``: SIGTERM ends the worker only if the process that started the worker sent it, or is gone.

    A worker that dies of the signal takes the training along, and nothing is saved. So the worker hands out batches
    until the training has ended its step and ends the worker. A training that was killed leaves no worker either: each
    looks every five seconds whether it is still there. A worker that is killed by SIGKILL is still an error.

    :class:`StayingLoader` sets this by itself. With a ``DataLoader`` of one's own a worker still dies of a signal that
    comes before this is called. Only on Linux, where the sender of a signal can be told; elsewhere SIGTERM must go to
    the training's process only. A program that the data set starts in the worker inherits the blocked signal.

    Args:
        then: called afterwards in the worker, with its number; another ``worker_init_fn``.
        ignored: signals that the training answers, and the worker must not: SLURM's requeueing would save the model as
            it was when the worker was forked.
    """

    def __init__(self, then: Callable[[int], None] | None = None, ignored: tuple[int, ...] = ()) -> None:
        self.then, self.ignored = then, ignored

    def __call__(self, worker: int) -> None:
        # Workers that are threads must leave the process's signals as they are.
        if _CAN_TELL_SENDERS and threading.current_thread() is threading.main_thread():
            for number in self.ignored:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.ignored)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            threading.Thread(target=_leave_when_told, daemon=True).start()
        if self.then is not None:
            self.then(worker)


class StayingLoader(DataLoader[Any]):
    """A ``DataLoader`` whose workers are made by :class:`StayOnSigterm`, whatever its ``worker_init_fn`` is.

    Signals that come while the workers are started wait until they are there.
    """

    def __iter__(self) -> Any:
        given = self.worker_init_fn
        if self.num_workers == 0 or not _CAN_TELL_SENDERS:
            return super().__iter__()
        answered = tuple(number for number in _MESSAGES if callable(signal.getsignal(number)))
        # Only meanwhile, as Lightning looks here for a function of the user's before it sets one that seeds workers.
        self.worker_init_fn = given if isinstance(given, StayOnSigterm) else StayOnSigterm(given, answered)
        try:
            with _held_back(*answered):
                if self.multiprocessing_context is not None or multiprocessing.get_start_method() != "fork":
                    # Python starts this helper with the first worker that is not forked; it lets SIGTERM through then.
                    resource_tracker.ensure_running()
                with _held_back(signal.SIGTERM):
                    return super().__iter__()
        finally:
            self.worker_init_fn = given


@contextmanager
def _held_back(*signals: int) -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts meanwhile, from their first moment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_when_told() -> None:
    """Wait for SIGTERM from the process that started this one, or for its end."""
    starter = multiprocessing.parent_process()
    assert starter is not None  # of a worker
    while True:
        told = signal.sigtimedwait([signal.SIGTERM], _LOOK_EVERY)
        if (told is not None and told.si_pid == starter.pid) or not starter.is_alive():
            os._exit(0)
