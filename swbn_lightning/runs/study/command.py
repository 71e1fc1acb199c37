"""A grid of networks, norms and seeds through the ``swbn`` command, with one table at the end.

    swbn study configs/quickstart.yaml --norms bn swbn-fro
    swbn study configs/fewshot/cifar_fs_prototypical.yaml --root DIR --seeds 0,1,2 --shots 1 5
    swbn study configs/classification/glyphs.yaml --norms bn swbn-fro swbn-fro:step_size=1e-3

Each run is the ``swbn`` command in a process of its own. The norms see the same network at the start, the same batches
and the same test. What is done is not done again: stopped or killed, the same command goes on where it was; several at
once share the work. After each run RUNS/study.csv holds every figure and RUNS/study.md the table.
docs/studies.md says what the columns mean; `swbn report RUNS` draws the pictures.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.writing import markdown_text, output_file, write_output
from swbn_lightning.runs.study.cells import Cell, Experiment, grid, short_names
from swbn_lightning.runs.study.observations import Row, as_csv, as_table, observe
from swbn_lightning.runs.study.running import Busy, RunFailed, complete
from swbn_lightning.runs.study.table import markdown

NORMS = ("bn", "swbn-kl", "swbn-fro", "iternorm")  # the paper's four


def main(args: Sequence[str]) -> None:
    """Run what is not done, write after each run, print the table.

    Raises:
        InputError: input that cannot work; files that cannot be written.
        SystemExit: 1 if runs failed, 2 for words that are not understood, 130 after Ctrl-C.
    """
    options = _parser().parse_args(args)
    runs, folder = (
        output_file(Path(given, "study.csv"), what, "study.csv").parent
        for given, what in ((options.runs, "the runs"), (options.output or options.runs, "the table"))
    )
    study = Study(_cells(options, runs), options.reach, folder, args)
    try:
        study.run()
    except KeyboardInterrupt:
        _say("stopped; the same command goes on from here")
        sys.exit(130)  # as shells report Ctrl-C
    print(study.text())
    print(f"written: {study.folder / 'study.csv'}, {study.folder / 'study.md'}; pictures: swbn report {options.runs}")
    if study.failures:
        sys.exit(1)


class Study:
    """The cells of a grid, which write ``study.csv`` and ``study.md`` as they get done; ``words`` of the command."""

    def __init__(self, cells: list[Cell], reach: float | None, folder: Path, words: Sequence[str]) -> None:
        self.cells, self.reach, self.folder, self.words = cells, reach, folder, words
        names = short_names([cell.experiment.path for cell in cells])
        self._labels = [
            f"{names[cell.experiment.path]} · {cell.network.label} · {cell.norm.label} · seed {cell.seed}"
            for cell in cells
        ]
        self.failures: dict[str, str] = {}
        self._rows: dict[int, list[Row]] = {}  # by the cell's number, of those that are done

    def run(self) -> None:
        """Run every cell; those at which another process is at work come last."""
        numbers = range(len(self.cells))
        for number in [number for number in numbers if not self._complete(number, wait=False)]:
            self._complete(number, wait=True)
        self._write()  # where nothing was left to do, too

    def _complete(self, number: int, wait: bool) -> bool:
        cell = self.cells[number]
        place = f"[{number + 1}/{len(self.cells)}] {self._labels[number]}"
        _say(f"{place}: {cell.folder}")
        try:
            outcome = "done" if complete(cell, wait) else "was done"
        except Busy:
            _say(f"{place}: another process is at work on it")
            return False
        except (RunFailed, InputError) as error:
            self.failures[self._labels[number]] = outcome = str(error)
        try:
            self._observe(number)
        except InputError as error:  # a file of a run that is not what a run writes
            self.failures[self._labels[number]] = outcome = str(error)
        rows = self._rows.get(number, [])
        figures = [f"{row['setting'] or row['metric']} {100 * row['value']:.2f} %" for row in rows]
        _say(", ".join([f"{place}: {outcome}", *figures]))
        if outcome != "was done":
            self._write()
        return True

    def _observe(self, number: int) -> None:
        if rows := observe(self.cells[number], self.reach):
            self._rows[number] = rows

    def text(self) -> str:
        """The Markdown page."""
        parts = [markdown(self._table(), seeds=len({cell.seed for cell in self.cells}))]
        if self.failures:
            reasons = [f"- {label}: {markdown_text(why.splitlines()[0])}" for label, why in self.failures.items()]
            parts.append("\n".join(["Not finished:\n", *reasons, ""]))
        parts += [f"`swbn study {shlex.join(self.words)}`\n"]
        parts += dict.fromkeys(row["environment"] for rows in self._rows.values() for row in rows)
        return "\n".join(parts)

    def _table(self) -> pd.DataFrame:
        return as_table([row for number in sorted(self._rows) for row in self._rows[number]])

    def _write(self) -> None:
        for number in set(range(len(self.cells))) - set(self._rows):  # what another process has done
            with suppress(InputError):
                self._observe(number)
        write_output(self.folder / "study.csv", as_csv(self._table()))
        write_output(self.folder / "study.md", self.text() + "\n")


def _cells(options: argparse.Namespace, runs: Path) -> list[Cell]:
    if options.reach is not None and not 0 < options.reach <= 1:
        raise InputError(f"--reach is a fraction in (0, 1], as 0.6, got {options.reach}.")
    experiments = [Experiment.read(path) for path in options.configs]
    seeds = _seeds(options.seeds)
    return grid(experiments, options.networks, options.norms, seeds, options.shots, options.set, options.root, runs)


def _say(message: str) -> None:
    """Also what the files and the output of runs say, which must not steer the terminal."""
    print("\n".join(map(printable, message.splitlines())), file=sys.stderr, flush=True)


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds takes numbers with commas, as 0,1,2, got {text!r}.") from None


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="swbn study", description=__doc__, formatter_class=raw)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="each is an experiment by itself")
    parser.add_argument(
        "--networks", nargs="+", default=[], help="as resnet20 or resnet20:shortcut=identity; the configuration's own"
    )
    usual = " ".join(NORMS)
    parser.add_argument(
        "--norms", nargs="+", default=list(NORMS), help=f"as swbn-kl or swbn-kl:step_size=1e-4; default: {usual}"
    )
    parser.add_argument("--seeds", default="0", help="as 0,1,2; default: 0")
    parser.add_argument("--shots", nargs="+", type=int, default=[], help="few-shot: each is a test of one training")
    parser.add_argument("--root", help="folder of the data set's files")
    parser.add_argument("--runs", default="runs", help="folder of all runs; default: %(default)s")
    parser.add_argument("--output", help="folder of study.csv and study.md; RUNS by default")
    parser.add_argument("--reach", type=float, help="count epochs to this accuracy, a fraction, as 0.6")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="as trainer.max_epochs=2"
    )
    return parser
