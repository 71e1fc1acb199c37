"""A process that loads hostile files for a test, within limits, and says what came of each.

The parent writes ``loader<tab>path`` a line; the answer is a line of JSON. A crash ends this process and not the test.
"""

import json
import resource
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

MEMORY = 2 * 2**30  # bytes of addresses above what the imports take
SECONDS = 10  # of the processor, for one file; several times as many on the clock


class Child:
    """The parent's side: one process for many files, begun again when it died, which fails the test."""

    def __init__(self):
        self.process = None

    def load(self, loader: str, path: Path) -> dict:
        if self.process is None:
            arguments = [sys.executable, "-c", "from tests.security.pickle_child import main; main()"]
            root = Path(__file__).parents[2]
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, bufsize=1
            )
            assert self.process.stdout.readline() == "ready\n"
        self.process.stdin.write(f"{loader}\t{path}\n")
        if not select.select([self.process.stdout], [], [], 6 * SECONDS)[0]:
            self.close()
            raise AssertionError(f"{loader} was not done after {6 * SECONDS} s")
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.close()
            raise AssertionError(f"{loader} ended the process with status {status}")
        answer = json.loads(line)
        assert answer["error"] in (None, "InputError"), answer
        assert (seconds := answer.pop("seconds")) < SECONDS, f"{loader} took {seconds} s"
        assert "MemoryError" not in answer.get("message", ""), answer  # the limit held, not the code
        return answer

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def check_loaded(loader: str, path: Path) -> None:
    """Load the file; fails where what comes of it is anything but data, or names are no text."""
    from swbn_lightning.data import arrays, cifar
    from swbn_lightning.data.safe_pickle import load_pickle

    images, labels, names = None, None, ()
    if loader == "class_arrays":
        found = arrays.load_class_arrays(path, "fuzz", 2)
        images, labels, names = found.images, found.labels, found.class_names
    elif loader == "names":
        names = cifar.cifar10_class_names(path.parent)
    elif loader == "pickle":
        check_plain(load_pickle(path))
    else:
        read = {"cifar10": cifar.read_cifar10, "cifar100": cifar.read_cifar100}[loader]
        images, labels = read(path.parent, "test")
    assert all(name.encode().decode() == name for name in names)
    if images is not None:
        assert str(images.dtype) == "torch.uint8" and str(labels.dtype) == "torch.int64" and len(images) == len(labels)
        assert int(images.long().sum()) >= 0  # every byte can be read


def check_plain(content) -> None:
    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            pending += [*value, *value.values()] if isinstance(value, dict) else value
        elif isinstance(value, np.ndarray):
            assert value.dtype.kind in "buif" and value.dtype.fields is None and value.tobytes() is not None
        else:
            kinds = (dict, list, tuple, str, bytes, int, float, type(None), np.number, np.bool_)
            assert isinstance(value, kinds), type(value)


def main():
    import swbn_lightning.data.cifar  # noqa: F401 (torch and all: before the limit)
    from swbn_lightning.errors import InputError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        loader, path = line.rstrip("\n").split("\t")
        start = time.process_time()
        try:
            check_loaded(loader, Path(path))
            answer = {"error": None}
        except InputError as error:
            answer = {"error": "InputError", "message": str(error)}
        except BaseException as error:  # what the parent has to hear of
            answer = {"error": type(error).__name__, "message": str(error)[:500]}
        print(json.dumps({**answer, "seconds": time.process_time() - start}), flush=True)
