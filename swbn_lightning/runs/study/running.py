"""Running a cell: each command in a process of its own, once, whatever was killed before."""

import json
import math
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import folders_with, has_file
from swbn_lightning.files.writing import write_whole
from swbn_lightning.runs.checkpoints import find_checkpoint, saved_score
from swbn_lightning.runs.folders import LAST_CHECKPOINT, RESULTS_FILE, run_versions
from swbn_lightning.runs.read import FILES, Run, Training, as_trainings, read_runs
from swbn_lightning.runs.study.cells import SETTINGS_FILE, Cell, Test

try:
    import fcntl
except ImportError:
    raise InputError("swbn study needs the file locks of Linux or macOS; `swbn fit` and `swbn test` do not.") from None

# `swbn`, whether installed or in a checkout. -P: like `swbn`, it does not import from the current folder.
COMMAND = (sys.executable, "-P", "-m", "swbn_lightning")
_HOME = str(Path(__file__).parents[3])  # of the packages
OUTPUT_FILE = "output.txt"  # what the commands of a cell printed
_MOST_OUTPUT = 100_000  # bytes of the end, where the last lines are looked for


class Busy(Exception):
    """Another process is at work on the cell."""


class RunFailed(Exception):
    """A command of the cell ended otherwise than well."""


def complete(cell: Cell, wait: bool) -> int:
    """Train and test what is not done, and say how many commands that took.

    An unfinished training goes on from its last checkpoint; one without a readable checkpoint begins anew.

    Raises:
        Busy: another process is at work on it, and this one should not ``wait``.
        RunFailed: with what the command said last.
    """
    commands = 0
    with _locked(cell.folder, wait) as lock:
        if (training := finished_training(cell)) is None:
            training, commands = _fit(cell, lock), 1
        for test in cell.tests:
            if finished_test(training, test) is None:
                checkpoint = f"--ckpt_path={chosen_checkpoint(training)}"
                run_command(cell, "test", [*cell.arguments(test.name), *test.arguments, checkpoint], lock)
                commands += 1
                if (tested := finished_training(cell)) is None or finished_test(tested, test) is None:
                    raise RunFailed(f"the test left no {RESULTS_FILE} in {cell.folder / test.name}")
    return commands


def run_command(cell: Cell, command: str, arguments: Sequence[str], lock: int) -> None:
    """``swbn COMMAND ARGUMENTS`` in a process of its own, which holds the cell's lock as long as it lives.

    Raises:
        RunFailed: it ended with another code than 0.
    """
    output = cell.folder / OUTPUT_FILE
    modules = os.pathsep.join(filter(None, [_HOME, os.environ.get("PYTHONPATH")]))
    with open(_own_file(output, os.O_APPEND), "r+b", buffering=0) as file:
        file.write(f"\n$ swbn {command} {' '.join(arguments)}\n".encode())
        process = subprocess.Popen(
            [*COMMAND, command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            env={**os.environ, "PYTHONPATH": modules},
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the child has got Ctrl-C too: let it write what it has reached
            process.wait()
            raise
        file.seek(-min(_MOST_OUTPUT, file.seek(0, os.SEEK_END)), os.SEEK_END)
        last = file.read(_MOST_OUTPUT).decode(errors="replace").strip().splitlines()[-3:]
    if code:
        raise RunFailed("\n".join([f"swbn {command} ended with {code}; see {output}", *last]))


def finished_training(cell: Cell) -> Training | None:
    """The training in the cell's folder that came to its end, with its tests; None where none did.

    Raises:
        InputError: a file of one of its runs that cannot be read.
    """
    runs = read_runs(sorted(folders_with(cell.folder, FILES)))
    for run in runs:
        for error in run.unreadable.values():
            raise error
    finished = [own for own in as_trainings(runs) if own.parts and own.last.results.get("completed") is True]
    return finished[-1] if finished else None


def finished_test(training: Training, test: Test) -> Run | None:
    """That test of the training's checkpoint, if it was made."""
    checkpoint = chosen_checkpoint(training)
    made = {part.id for part in training.parts if checkpoint.is_relative_to(part.folder)}
    for run in reversed(training.tests):
        here = run.folder.parent.name == test.name and Path(run.checkpoint or "").name == checkpoint.name
        if here and run.rows and run.origin in made:
            return run
    return None


def chosen_checkpoint(training: Training) -> Path:
    """What is tested: the best by validation or, where nothing validates, the last epoch's.

    A training that was interrupted and went on has several folders, and the best may be in any of them.
    """
    candidates = [path for part in training.parts for path in _kept(part)]
    if not candidates:
        return find_checkpoint(training.last.folder, "last")
    scores: dict[Path, float] = {}
    for path in candidates if len(candidates) > 1 else ():
        with suppress(InputError):  # half a file, whose writer was killed
            if (score := saved_score(path)[0]) > -math.inf:
                scores[path] = score
    return max(scores, key=lambda path: scores[path]) if scores else candidates[-1]  # of equals the first, as Lightning


def _fit(cell: Cell, lock: int) -> Training:
    last = _last_checkpoint(cell.folder)
    if last is None:
        _begin(cell)
    run_command(cell, "fit", [*cell.arguments(), *([f"--ckpt_path={last}"] if last else [])], lock)
    if (training := finished_training(cell)) is None and last is not None:
        # Killed between its last epoch and its results: nothing was left to train, so nothing was told.
        _begin(cell)
        run_command(cell, "fit", cell.arguments(), lock)
        training = finished_training(cell)
    if training is None:
        raise RunFailed(f"the training left no {RESULTS_FILE} in {cell.folder}")
    return training


def _begin(cell: Cell) -> None:
    """Clear the cell's folder of what cannot be continued, and note what will be run there."""
    for folder in [*run_versions(cell.folder), *cell.folder.glob("test-*")]:
        if folder.is_symlink() or not folder.is_dir():
            raise InputError(f"{folder} is in the way of the training: it is a link or no folder; remove it.")
        shutil.rmtree(folder)
    write_whole(cell.folder / SETTINGS_FILE, json.dumps({"settings": cell.identity}, indent=2, default=str) + "\n")


def _last_checkpoint(folder: Path) -> Path | None:
    for version in reversed(run_versions(folder)):
        with suppress(InputError):  # none, or one that was being written
            return find_checkpoint(version, "last")
    return None


def _kept(part: Run) -> list[Path]:
    """The best checkpoint of a run that ended; of one that was killed what it had kept by then."""
    if part.results:
        best = str(part.results.get("best_checkpoint") or "-")
        files = [part.folder / best] if has_file(part.folder, (best,)) else []
    else:
        files = [path for path in sorted((part.folder / "checkpoints").glob("*.ckpt")) if path.name != LAST_CHECKPOINT]
    # Not a pipe, which would be waited for, and none of another run, which the file of a stranger may name.
    return [path for path in files if path.is_file() and path.resolve().is_relative_to(part.folder.resolve())]


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[int]:
    """Hold the cell for this process and its children: a child that outlives a killed study holds it on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror or error}.") from error
    with open(_own_file(folder / "lock"), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise Busy(str(folder)) from error
        yield file.fileno()


def _own_file(path: Path, flags: int = 0) -> int:
    """A file of the cell, opened to be written, and made where there is none.

    Raises:
        InputError: a link, which could lead to any file of the user's, or no regular file: a pipe would be waited for.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else error.strerror or str(error)
        raise InputError(f"{path} cannot be written: {reason}; remove it.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"{path} cannot be written: it is not a regular file; remove it.")
    return handle
