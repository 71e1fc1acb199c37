"""Stops trainings in every way and compares what is left, or trains long and watches the process.

::

    python -m benchmarks.reliability faults [--folder DIR]     one line a fault: tried, survived, steps lost
    python -m benchmarks.reliability soak [--episodes 5000]    memory, files and workers of a long few-shot training

Every training is ``swbn fit`` in a process of its own, of seconds, on letters drawn in memory. The processes are killed
from outside, when the log or the checkpoints say that the moment has come.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment_line
from swbn_lightning.runs.checkpoints import find_checkpoint
from swbn_lightning.runs.folders import run_versions

REPOSITORY = Path(__file__).parents[2]
TINY = [
    "--config", str(REPOSITORY / "configs" / "classification" / "glyphs.yaml"), "--trainer.max_epochs=4",
    "--trainer.accelerator=cpu", "--model.backbone=mlp", "--model.backbone_args={hidden: [64, 64]}",
    "--model.num_classes=4", "--data.num_classes=4", "--data.images_per_class=32", "--data.batch_size=4",
    "--data.crop_padding=2", "--model.warmup_steps=5", "--whiteness.every_n_epochs=0",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.log_every_n_steps=1",
]  # fmt: skip
STEPS_AN_EPOCH = 32
PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "random_streams", "epoch", "global_step")


@dataclass(frozen=True)
class Fault:
    """What is done to a training, and when."""

    name: str
    signal: signal.Signals
    moment: Callable[[Path], bool]  # of the run's newest version
    processes: int = 1  # of which the first gets the signal
    workers: int = 0  # of each process for its data
    group: bool = False  # the signal is sent to all processes, workers too, as SLURM and Kubernetes do


@dataclass(frozen=True)
class Outcome:
    """What a fault left: the process's code, steps that had to be trained again, whether the end is the same."""

    name: str
    code: int
    lost: int | None  # None: it came too late, the training had ended
    same: bool

    def __str__(self) -> str:
        lost = (
            "came too late" if self.lost is None else f"{self.lost} step{'' if self.lost == 1 else 's'} trained again"
        )
        return f"| {self.name} | {self.code} | {lost} | {'yes, bit for bit' if self.same else 'NO'} |"


def epochs_saved(count: int) -> Callable[[Path], bool]:
    """The moment at which ``last.ckpt`` is that of so many epochs."""

    def moment(version: Path) -> bool:
        return count == 0 or steps_of(version) >= count * STEPS_AN_EPOCH

    return moment


def being_written(version: Path) -> bool:
    """The moment at which a checkpoint is under way."""
    return any((version / "checkpoints").glob(".*.tmp"))


FAULTS = (
    Fault("SIGTERM in the second epoch", signal.SIGTERM, epochs_saved(1)),
    Fault("SIGTERM in the third epoch", signal.SIGTERM, epochs_saved(2)),
    Fault("SIGKILL in the second epoch", signal.SIGKILL, epochs_saved(1)),
    Fault("SIGKILL in the third epoch", signal.SIGKILL, epochs_saved(2)),
    Fault("SIGKILL while a checkpoint is written", signal.SIGKILL, being_written),
    Fault("SIGINT (Ctrl-C) in the second epoch", signal.SIGINT, epochs_saved(1)),
    Fault("SIGTERM to one of two processes in the second epoch", signal.SIGTERM, epochs_saved(1), 2),
    Fault("SIGTERM to all processes in the second epoch, two workers", signal.SIGTERM, epochs_saved(1), 1, 2, True),
    Fault("SIGTERM to all of two processes, two workers each", signal.SIGTERM, epochs_saved(1), 2, 2, True),
    Fault("SIGKILL to one of two processes in the third epoch", signal.SIGKILL, epochs_saved(2), 2),
)


def start(root: Path, processes: int, *arguments: str) -> "subprocess.Popen[bytes]":
    """``swbn fit`` on the tiny training, as many steps for two processes as for one; output in ``root/output.txt``."""
    if processes > 1:
        batch = f"--data.batch_size={4 // processes}"
        arguments = (f"--trainer.devices={processes}", "--trainer.strategy=ddp", batch, *arguments)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    root.mkdir(parents=True, exist_ok=True)
    with (root / "output.txt").open("ab") as file:
        command = [sys.executable, str(REPOSITORY / "cli.py"), "fit", *TINY, f"--run.root={root}", "--run.name=run"]
        return subprocess.Popen(
            [*command, *arguments], env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            # A shell has its background jobs ignore Ctrl-C, and their children after them.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip


def steps_of(version: Path) -> int:
    """Optimiser steps in a version's last checkpoint; 0 without one."""
    last = version / "checkpoints" / "last.ckpt"
    return torch.load(last, weights_only=True)["global_step"] if last.is_file() else 0


def suffer(fault: Fault, root: Path, expected: dict[str, Any]) -> Outcome:
    """Train, do what ``fault`` says, go on, and compare with ``expected``."""
    workers = f"--data.num_workers={fault.workers}"
    process = start(root, fault.processes, workers)
    while process.poll() is None:
        versions = run_versions(root / "run")
        if versions and (fault.moment(versions[-1])):
            if fault.group:
                os.killpg(process.pid, fault.signal)
            else:
                process.send_signal(fault.signal)
            break
        time.sleep(0.001)
    code = process.wait()
    wait_for_the_others(process.pid)
    logged = last_logged_step(run_versions(root / "run")[-1])
    saved = steps_of(run_versions(root / "run")[-1])
    finished = code == 0
    if not finished:
        arguments = ["--ckpt_path", str(root / "run")] if saved else []
        start(root, fault.processes, workers, *arguments).wait()
    found = torch.load(find_checkpoint(root / "run", "last"), weights_only=True)
    lost = None if finished else max(0, logged - saved)
    return Outcome(fault.name, code, lost, all(same(found[part], expected[part]) for part in PARTS))


def wait_for_the_others(group: int, seconds: float = 120) -> None:
    """Until what a killed process had started has noticed and ended; at last by force."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


def last_logged_step(version: Path) -> int:
    """How many steps the run's log has heard of; it is written in pieces, so this is a lower bound."""
    path = version / "metrics.csv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        return 0
    column = lines[0].split(",").index("step")
    numbers = [line.split(",")[column] for line in lines[1:] if line.count(",") >= column]
    return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)


def same(first: Any, second: Any) -> bool:
    """Bit for bit, tensors in nests of dicts, lists and tuples."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(*pair) for pair in zip(first, second, strict=True))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def faults(folder: Path, only: str = "") -> bool:
    """Every fault whose name holds ``only``, one line each; whether all were survived."""
    chosen = [fault for fault in FAULTS if only in fault.name]
    if not chosen:
        raise SystemExit(f"--only {only!r}: no fault has that in its name; there are {[f.name for f in FAULTS]}")
    expected = {}
    for processes in sorted({fault.processes for fault in chosen}):
        root = folder / f"whole{processes}"
        if start(root, processes).wait():
            raise SystemExit(f"the training itself fails; see {root / 'output.txt'}")
        expected[processes] = torch.load(find_checkpoint(root / "run", "last"), weights_only=True)
    print("| fault | exit code | lost | end the same as without it |\n| --- | ---: | --- | --- |")
    outcomes = []
    for number, fault in enumerate(chosen):
        outcomes.append(suffer(fault, folder / f"fault{number}", expected[fault.processes]))
        print(outcomes[-1], flush=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {environment_line('pytorch-lightning')}")
    return all(outcome.same for outcome in outcomes)


def soak(episodes: int, folder: Path) -> bool:
    """A few-shot training with two workers, watched once a second; whether memory and files are flat in its last half.

    Flat: the 10th percentile of the last quarter is at most 3% (memory) or 2 files above that of the quarter before.
    Low, since validation adds to it for a while; not the least, which the end of the process sets. glibc's allocator is
    told to give large blocks back as soon as they are freed: by itself it keeps what it likes, and the memory that a
    process seems to have swings by a fifth from epoch to epoch.
    """
    config = REPOSITORY / "configs" / "quickstart.yaml"
    epochs = 10
    train = f"{{ways: 5, shots: 1, queries: 3, episodes: {episodes // epochs}}}"
    process = subprocess.Popen(
        [
            sys.executable, str(REPOSITORY / "cli.py"), "fit", "--config", str(config), f"--data.train={train}",
            f"--trainer.max_epochs={epochs}", "--data.num_workers=2", "--trainer.accelerator=cpu",
            f"--run.root={folder}", "--trainer.enable_progress_bar=false",
        ],
        env={
            **os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20),
        },
    )  # fmt: skip
    seen = watch(process, folder / "soak.csv")
    sizes, handles = ([row[column] for row in seen] for column in (0, 1))
    memory, files = growth(sizes), growth(handles)
    print("| exit code | median, MiB | growth, 10th percentile | growth, median | files, 10th percentile | samples |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {process.returncode} | {statistics.median(sizes) / 2**20:.0f} | {memory:+.1%} "
        f"| {growth(sizes, statistics.median):+.1%} | {files:+.1%} | {len(seen)} |"
    )
    return process.returncode == 0 and memory <= 0.03 and files * seen[-1][1] <= 2


def watch(process: "subprocess.Popen[bytes]", table: Path) -> list[tuple[int, int]]:
    """Bytes in memory and open files of a process, once a second until it ends; a line each in ``table`` too."""
    seen: list[tuple[int, int]] = []
    with table.open("w", encoding="utf-8", buffering=1) as file:
        file.write("second,bytes,files\n")
        while process.poll() is None:
            try:
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            except (OSError, IndexError):
                continue  # it has just ended
            file.write(f"{len(seen)},{pages * os.sysconf('SC_PAGE_SIZE')},{files}\n")
            seen.append((pages * os.sysconf("SC_PAGE_SIZE"), files))
            time.sleep(1)
    return seen


def floor(values: Sequence[int]) -> float:
    """The 10th percentile."""
    return statistics.quantiles(values, n=10, method="inclusive")[0] if len(values) > 1 else values[0]


def growth(values: Sequence[int], of: Callable[[Sequence[int]], float] = floor) -> float:
    """How far the floor, or another statistic, of the last quarter is above that of the third."""
    quarter = max(1, len(values) // 4)
    before, after = values[-2 * quarter : -quarter] or values[:1], values[-quarter:]
    return of(after) / of(before) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("faults", "soak"))
    parser.add_argument("--folder", type=Path, default=None, help="of the runs; a temporary one by default")
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--episodes", type=int, default=5000, help="of the soak")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if folder.is_dir() and any(folder.iterdir()):
            raise SystemExit(f"--folder {folder} is not empty; the runs in it would be taken for those of this call.")
        folder.mkdir(parents=True, exist_ok=True)
        good = faults(folder, given.only) if given.what == "faults" else soak(given.episodes, folder)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
