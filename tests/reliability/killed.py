"""A program whose children are killed in the middle of their work; started by tests, in an interpreter without threads.

A process with threads, as a test run has, cannot fork safely: a child may wait for a lock that nobody will let go.
"""

import json
import os
import sys
from pathlib import Path

import torch

from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from tests.reliability.tiny_runs import Kill, classification, fit

BIG = {"state_dict": {"weight": torch.arange(100_000.0)}}


def write(path: str, stop: int) -> None:
    """Save a checkpoint and die when ``stop`` bytes of it are written."""
    written = 0

    class Slow:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            nonlocal written
            written += self.file.write(data)
            self.file.flush()
            if written >= stop:
                os.kill(os.getpid(), 9)
            return len(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    save = torch.save
    torch.save = lambda content, file: save(content, Slow(file))
    WholeCheckpointIO().save_checkpoint(BIG, Path(path))


def train(root: str, folder: str, number: int) -> None:
    """Train and die at the given batch."""
    torch.manual_seed(0)
    fit(Path(folder), *classification(root), Kill(number, "SIGKILL"))


def main() -> None:
    """Each job of the JSON list ``[[name, *arguments], ...]`` in a child; prints the signals that ended them."""
    torch.set_num_threads(1)
    signals = []
    for name, *arguments in json.loads(sys.argv[1]):
        pid = os.fork()
        if pid == 0:
            {"write": write, "train": train}[name](*arguments)
            os._exit(1)
        signals.append(os.waitpid(pid, 0)[1])
    print(json.dumps(signals))


if __name__ == "__main__":
    main()
