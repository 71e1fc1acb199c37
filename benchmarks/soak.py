"""Trains long and watches the process: whether its memory and its open files stay flat.

    python -m benchmarks.soak [--episodes 5000]

(What is done to trainings from outside, SIGTERM, SIGKILL, Ctrl-C, is in `tests/reliability`.)
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="of the run; a temporary one by default")
    parser.add_argument("--episodes", type=int, default=5000)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        good = soak(given.episodes, folder)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
