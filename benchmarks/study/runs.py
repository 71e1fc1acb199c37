"""Running a cell: each command in a process of its own, once, whatever was killed before."""

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.study.cells import Cell, Test
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import has_file, read_json, read_yaml
from swbn_lightning.files.writing import write_whole
from swbn_lightning.runs.checkpoints import find_checkpoint
from swbn_lightning.runs.folders import CONFIG_FILE, RESULTS_FILE, run_versions
from swbn_lightning.runs.page.folders import METRICS_FILE, read_metrics

CLI = Path(__file__).parents[2] / "cli.py"
OUTPUT_FILE = "output.txt"  # what the commands of a cell printed
SETTINGS_FILE = "settings.json"
_MOST_OUTPUT = 100_000  # bytes of the end, where the last lines are looked for


class Busy(Exception):
    """Another process is at work on the cell."""


class RunFailed(Exception):
    """A command of the cell ended otherwise than well."""


def complete(cell: Cell, wait: bool) -> int:
    """Train and test what is not done, and say how many commands that took.

    An unfinished training goes on from its last checkpoint; one without a readable checkpoint begins anew.

    Args:
        cell: what.
        wait: where another process is at work on it, wait for that, instead of raising :class:`Busy`.

    Raises:
        Busy: see above.
        RunFailed: with what the command said last.
    """
    commands = 0
    with _locked(cell.folder, wait) as lock:
        if finished_fit(cell) is None:
            commands += _fit(cell, lock)
        for test in cell.tests:
            if finished_test(cell, test) is None:
                checkpoint = f"--ckpt_path={chosen_checkpoint(cell)}"
                run_command(cell, "test", [*cell.arguments(test.name), *test.arguments, checkpoint], lock)
                commands += 1
                if finished_test(cell, test) is None:
                    raise RunFailed(f"the test left no {RESULTS_FILE} in {cell.folder / test.name}")
    return commands


def run_command(cell: Cell, command: str, arguments: Sequence[str], lock: int) -> None:
    """``swbn COMMAND ARGUMENTS`` in a process of its own, which holds the cell's lock as long as it lives.

    Raises:
        RunFailed: it ended with another code than 0.
    """
    output = cell.folder / OUTPUT_FILE
    with open(_own_file(output, os.O_APPEND), "r+b", buffering=0) as file:
        file.write(f"\n$ swbn {command} {' '.join(arguments)}\n".encode())
        process = subprocess.Popen(
            [sys.executable, str(CLI), command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
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


def finished_fit(cell: Cell) -> Path | None:
    """The folder of the training that came to its end, if one did."""
    for folder in reversed(run_versions(cell.folder)):
        found = read_results(folder)
        if found and found.get("command") == "fit" and found.get("completed"):
            return folder
    return None


def finished_test(cell: Cell, test: Test) -> Path | None:
    """The folder of that test of the cell's checkpoint, if it was made."""
    folders = [folder for folder in run_versions(cell.folder / test.name) if read_results(folder)]
    if not folders or finished_fit(cell) is None:
        return None
    wanted = chosen_checkpoint(cell).parts[-3:]  # so that the folder of the runs may be moved
    for folder in reversed(folders):
        found = read_results(folder) or {}
        if found.get("command") == "test" and Path(str(found.get("tested_checkpoint"))).parts[-3:] == wanted:
            return folder
    return None


def chosen_checkpoint(cell: Cell) -> Path:
    """What is tested: the best by validation or, where nothing validates, the last epoch's.

    A training that was interrupted and went on has several folders, and the best may be in any of them.
    """
    folder = finished_fit(cell)
    assert folder is not None
    candidates = [path for version in run_versions(cell.folder) for path in _kept(version)]
    if not candidates:
        return find_checkpoint(folder, "last")
    monitored = read_yaml(folder / CONFIG_FILE).get("checkpoint")
    monitored = monitored if isinstance(monitored, dict) else {}
    sign = -1 if monitored.get("mode") == "min" else 1
    monitor = monitored.get("monitor")
    monitor = monitor if isinstance(monitor, str) else None
    scores = {path: _score(path, monitor) for path in candidates} if len(candidates) > 1 else {}
    known = {path: sign * score for path, score in scores.items() if score is not None}
    return max(known, key=lambda path: known[path]) if known else candidates[-1]  # of equals the first, as Lightning


def logged(versions: Sequence[Path], name: str) -> dict[int, float]:
    """A quantity of ``metrics.csv`` by epoch; of an epoch that was run twice the later value."""
    values: dict[int, float] = {}
    for folder in versions:
        if has_file(folder, (METRICS_FILE,)):
            series = read_metrics(folder / METRICS_FILE, [name])["epoch"].get(name, {})
            values |= {trained - 1: value for trained, value in series.items()}
    return values


def read_results(folder: Path) -> dict[str, Any] | None:
    """``results.json`` of a run's folder, if it is there."""
    return read_json(folder / RESULTS_FILE) if has_file(folder, (RESULTS_FILE,)) else None


def read_environment(cell: Cell) -> dict[str, Any]:
    """Device and versions with which the cell's training was begun."""
    found = read_json(cell.folder / SETTINGS_FILE).get("environment")
    return found if isinstance(found, dict) else {}


def _fit(cell: Cell, lock: int) -> int:
    last = _last_checkpoint(cell.folder)
    if last is None:
        _begin(cell)
    run_command(cell, "fit", [*cell.arguments(), *([f"--ckpt_path={last}"] if last else [])], lock)
    if finished_fit(cell) is None and last is not None:
        # Killed between its last epoch and its results: nothing was left to train, so nothing was told.
        _begin(cell)
        run_command(cell, "fit", cell.arguments(), lock)
    if finished_fit(cell) is None:
        raise RunFailed(f"the training left no {RESULTS_FILE} in {cell.folder}")
    return 1


def _begin(cell: Cell) -> None:
    """Clear the cell's folder of what cannot be gone on with, and note what will be run there, and where."""
    for folder in [*run_versions(cell.folder), *cell.folder.glob("test-*")]:
        if folder.is_symlink() or not folder.is_dir():
            raise InputError(f"{folder} is in the way of the training: it is a link or no folder; remove it.")
        shutil.rmtree(folder)
    content = {"settings": cell.identity, "environment": environment("pytorch-lightning")}
    write_whole(cell.folder / SETTINGS_FILE, json.dumps(content, indent=2, default=str) + "\n")


def _last_checkpoint(folder: Path) -> Path | None:
    for version in reversed(run_versions(folder)):
        try:
            return find_checkpoint(version, "last")
        except InputError:  # none, or one that was being written
            continue
    return None


def _kept(folder: Path) -> list[Path]:
    """The best checkpoint of a run that ended; of one that was killed what it had kept by then."""
    found = read_results(folder)
    if found is not None:
        best = str(found.get("best_checkpoint") or "-")
        files = [folder / best] if has_file(folder, (best,)) else []
    else:
        files = [path for path in sorted((folder / "checkpoints").glob("*.ckpt")) if path.name != "last.ckpt"]
    # Not a pipe, which would be waited for, and none of another run, which the file of a stranger may name.
    return [path for path in files if path.is_file() and path.resolve().is_relative_to(folder.resolve())]


def _score(checkpoint: Path, monitor: str | None) -> float | None:
    try:
        epoch = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["epoch"]
    except Exception:  # half a file, whose writer was killed, raises almost anything
        return None
    return logged([checkpoint.parents[1]], monitor or "").get(epoch) if isinstance(epoch, int) else None


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
