"""``swbn compare``: two or more runs on the same test episodes or images, pair by pair.

    swbn compare runs/bn runs/swbn
    swbn compare BatchNorm=runs/bn SWBN=runs/swbn --output comparison.csv

The accuracies of two networks on one episode have the episode's luck in common: where its classes are hard, they are
hard for both. In the mean of the differences it cancels, so the interval of that mean is narrower than the two means'.
It is the same with the images of a classifier's test, on each of which the accuracy is 1 or 0.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.screen import table_console
from swbn_lightning.files.writing import csv_text, output_file, write_output
from swbn_lightning.runs.intervals import (
    CONFIDENCE,
    Difference,
    Interval,
    McNemar,
    corrected,
    difference,
    mcnemar,
    mean_interval,
    percent,
)
from swbn_lightning.runs.saved_tests import IMAGES, SavedTest, Unit, find_tests

_NONE = "–"
_NO_DIFFERENCE = Difference(None, None, None)
_Tests = dict[int | str, tuple[float, ...]]  # accuracies by a training's identity: its seed, if it has one


class Comparison(NamedTuple):
    """One run's line under one setting. Accuracies and differences are fractions."""

    setting: str
    label: str
    seeds: tuple[int | None, ...]  # one a training; None of one without a seed
    kind: Unit  # whether of episodes or images
    tested: int  # of these, that all runs of the table share
    accuracy: Interval  # over the episodes or images; of several seeds over the seeds
    difference: Difference | None = None  # to the first run; None for that one
    mcnemar: McNemar | None = None  # of images: that difference tested, of one training and one of the first run
    paired_seeds: tuple[int, ...] = ()  # that both have, of which the differences are
    comparisons: int = 1  # with the first run, in this table
    corrected: Interval | None = None  # the deciding interval, so wide that all of the table are right in 95% of cases

    @property
    def distinguishable(self) -> bool | None:
        """Whether the deciding interval leaves out zero; None for the first run, and where there is no interval."""
        found = self.difference.deciding if self.difference else None
        return None if found is None else found.leaves_out_zero

    @property
    def distinguishable_among_all(self) -> bool | None:
        """The same, corrected for the number of comparisons in the table (Bonferroni)."""
        return None if self.corrected is None else self.corrected.leaves_out_zero


def main(args: Sequence[str]) -> None:
    """The command.

    Raises:
        SystemExit: 2 for words that are not understood.
        InputError: as :func:`compare`; a file that cannot be written.
    """
    options = _parser().parse_args(args)
    output = output_file(options.output, "the table", "comparison.csv") if options.output else None
    lines = compare(options.runs)
    path = write_output(output, as_csv(lines)) if output is not None else None
    console = table_console()
    for setting in dict.fromkeys(line.setting for line in lines):
        own = [line for line in lines if line.setting == setting]
        console.print(_table(setting, own))
        for note in notes(own):
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    if path is not None:
        console.print(f"written: {printable(path)}", highlight=False, markup=False, soft_wrap=True)


def compare(runs: Sequence[str]) -> list[Comparison]:
    """Compare runs with the first of them, setting by setting (ways, shots, …), on the episodes or images of all.

    Heads that were chosen for the test are part of the setting, unless the runs were tested with one each: then the
    heads are compared.

    Args:
        runs: two or more, each ``PATH`` or ``LABEL=PATH``: the folder of a test, a run (``runs/NAME``), or a folder of
            runs that differ in their seeds only. Of several tests of one seed the newest of the newest training
            counts. A training without a seed is paired with no other.

    Raises:
        InputError: fewer than two; no setting that all have; the same setting on other episodes or images; else as
            :func:`~swbn_lightning.runs.saved_tests.find_tests`.
    """
    if len(runs) < 2:
        raise InputError(f"compare needs at least two runs, as in swbn compare runs/A runs/B; got {len(runs)}.")
    contestants = [_labelled_tests(run) for run in runs]
    labels = [label for label, _ in contestants]
    if len(set(labels)) < len(labels):
        raise InputError(f"runs to compare need labels of their own, got {', '.join(labels)}; give LABEL=PATH.")
    found = "; ".join(f"{label}: {', '.join(tests)}" for label, tests in contestants)
    if not (shared := _shared(contestants)):
        contestants = [(label, _with_any_head(tests)) for label, tests in contestants]
        shared = _shared(contestants)
    if not shared:
        raise InputError(f"the runs have no test in common ({found}). Test them on the same data, ways and shots.")
    lines = []
    for setting in shared:
        of_runs = [(label, tests[setting]) for label, tests in contestants]
        _check_same_test(setting, of_runs)
        lines += _lines(setting, of_runs)
    return lines


def compare_tests(contestants: Iterable[tuple[str, Mapping[str, list[SavedTest]]]]) -> list[list[Comparison]]:
    """The same of labels and their tests by setting: a table of lines for those that share their episodes or images."""
    alike: dict[tuple[str, str], list[tuple[str, list[SavedTest]]]] = {}
    for label, tests in contestants:
        for setting, own in tests.items():
            alike.setdefault((setting, own[0].tested_id), []).append((label, own))
    return [_lines(setting, of_runs) for (setting, _), of_runs in alike.items() if len(of_runs) > 1]


def as_csv(lines: Sequence[Comparison]) -> str:
    """A line a run and setting; fractions, half-widths of 95% intervals. Columns are named for what was tested."""
    rows = []
    for line in lines:
        found, units = line.difference or _NO_DIFFERENCE, line.kind.units
        known = [seed for seed in line.seeds if seed is not None]
        seeds, paired = (" ".join(map(str, own)) for own in (known, line.paired_seeds))
        row: dict[str, Any] = {"setting": line.setting, "run": line.label, "seeds": seeds, "paired_seeds": paired}
        row[units] = line.tested
        intervals = {f"over_{units}": found.over_episodes, "over_seeds": found.over_seeds, "over_both": found.over_both}
        for name, own in {"accuracy": line.accuracy, **{f"difference_{k}": v for k, v in intervals.items()}}.items():
            row |= zip((name, f"{name}_std", f"{name}_ci95"), own[:3] if own else (None, None, None), strict=True)
        if line.kind is IMAGES:
            row |= line.mcnemar._asdict() if line.mcnemar else dict.fromkeys(McNemar._fields)
        row["distinguishable"], row["comparisons"] = line.distinguishable, line.comparisons
        rows.append({**row, "distinguishable_among_all": line.distinguishable_among_all})
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return csv_text(columns, [[row.get(column) for column in columns] for row in rows])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "swbn compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="PATH or LABEL=PATH: a tested run, or a folder of runs that differ in their seeds; the first is what the "
        "others are compared with",
    )
    parser.add_argument("--output", metavar="FILE", help="write every figure to this CSV file")
    return parser


def _labelled_tests(run: str) -> tuple[str, dict[str, list[SavedTest]]]:
    """The label that an argument gives, and its tests by setting, one a training seed."""
    label, given, path = run.partition("=")
    if not given or Path(run).exists():
        label, path = "", run
    return printable(label or path.rstrip("/")), find_tests(Path(path).expanduser())


def _shared(contestants: list[tuple[str, dict[str, list[SavedTest]]]]) -> list[str]:
    return [setting for setting in contestants[0][1] if all(setting in tests for _, tests in contestants)]


def _with_any_head(tests: dict[str, list[SavedTest]]) -> dict[str, list[SavedTest]]:
    """Tests by their settings without the head, where there is one head only."""
    names = [own[0].any_head for own in tests.values()]
    return {own[0].any_head: own for own in tests.values() if names.count(own[0].any_head) == 1}


def _check_same_test(setting: str, of_runs: list[tuple[str, list[SavedTest]]]) -> None:
    first_label, (first, *_) = of_runs[0]
    for label, tests in of_runs:
        for test in tests:
            if test.tested_id != first.tested_id:
                raise InputError(
                    f"{setting}: {test.run.folder} ({label}) and {first.run.folder} ({first_label}) were tested on "
                    f"other {test.kind.units}: {test.kind.chosen_by}."
                )


def _lines(setting: str, of_runs: list[tuple[str, list[SavedTest]]]) -> list[Comparison]:
    number = min(len(test.accuracies) for _, tests in of_runs for test in tests)  # a prefix is the shorter evaluation
    kind = of_runs[0][1][0].kind
    base = {test.training.identity: test.accuracies[:number] for test in of_runs[0][1]}
    lines = []
    for label, tests in of_runs:
        own = {test.training.identity: test.accuracies[:number] for test in tests}
        accuracy = mean_interval(_means(own.values()) if len(own) > 1 else next(iter(own.values())))
        seeds = tuple(test.training.seed for test in tests)
        line = Comparison(setting, label, seeds, kind, number, accuracy, comparisons=len(of_runs) - 1)
        lines.append(line if label == of_runs[0][0] else _compared(line, own, base))
    return lines


def _compared(line: Comparison, own: _Tests, base: _Tests) -> Comparison:
    """The line with its differences, of the seeds that both have; without any, of the means over each one's seeds."""
    common = [seed for seed in own if isinstance(seed, int) and seed in base]
    first, second = ([side[key] for key in common or side] for side in (own, base))
    means = (_means(first), _means(second)) if common else ([], [])
    found, wide = (
        difference(*means, (first, second), confidence) for confidence in (CONFIDENCE, corrected(line.comparisons))
    )
    single = line.kind is IMAGES and len(first) == len(second) == 1
    tested = mcnemar(first[0], second[0]) if single else None
    return line._replace(difference=found, mcnemar=tested, paired_seeds=tuple(common), corrected=wide.deciding)


def _means(tests: Iterable[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in tests]


def _table(setting: str, lines: list[Comparison]) -> Table:
    units = lines[0].kind.units
    table = Table(title=escape(f"{setting}, {lines[0].tested} {units}"), title_justify="left")
    several, many = any(line.difference and line.difference.over_both for line in lines), lines[0].comparisons > 1
    exact = any(line.mcnemar for line in lines)
    headings = ["run", "seeds", "accuracy ± 95%", f"difference, paired {units} ± 95%"]
    headings += ["paired seeds ± 95%", f"for other seeds and {units} ± 95%"] if several else []
    headings += ["McNemar's p"] if exact else []
    headings += ["distinguishable", *([f"as one of {lines[0].comparisons}"] if many else [])]
    for heading in headings:
        # Folded, not cut off, where the terminal is narrow: runs differ in the end of their paths.
        table.add_column(heading, justify="left" if heading == "run" else "right", overflow="fold")
    for line in lines:
        cells: list[str | Text] = [Text(line.label), str(len(line.seeds)), _percent(line.accuracy, "")]
        found = line.difference or _NO_DIFFERENCE
        cells.append(_percent(found.over_episodes, "+"))
        if several:
            cells += [_percent(found.over_seeds, "+"), _percent(found.over_both, "+")]
        if exact:
            cells.append(_NONE if line.mcnemar is None else f"{line.mcnemar.mcnemar_p:.2g}")
        verdicts = (line.distinguishable, *([line.distinguishable_among_all] if many else []))
        table.add_row(*cells, *({True: "yes", False: "no", None: _NONE}[verdict] for verdict in verdicts))
    return table


def _percent(found: Interval | None, sign: str) -> str:
    return _NONE if found is None else percent(found.mean, found.half_width, sign)


def notes(lines: Sequence[Comparison]) -> list[str]:
    """What has to be known to read the lines of one setting."""
    base, *others = lines
    units = base.kind.units
    said = []
    if any(len(line.seeds) == len(base.seeds) == 1 for line in others):
        said.append(
            f"Of one training seed the interval is over {units}: it says whether these trained networks differ, not "
            "whether another training seed would give the same."
        )
    for line in others:
        if line.paired_seeds and len(line.paired_seeds) < max(len(line.seeds), len(base.seeds)):
            seeds = ", ".join(map(str, line.paired_seeds))
            said.append(
                f"The difference of {line.label} is of the seeds that {base.label} has, too: {seeds}. Accuracies are "
                "of all seeds of each, so theirs is another difference."
            )
    if exact := [(line.label, line.mcnemar) for line in others if line.mcnemar]:
        found = "; ".join(f"{label} {own.only_this_right}, {base.label} {own.only_first_right}" for label, own in exact)
        said.append(
            f"Images that only one of two runs got right: {found}. McNemar's p says how often a split at least as "
            "uneven comes by chance if both runs err equally often. It is exact, and for one comparison."
        )
    if any(line.difference and line.difference.over_both for line in others):
        said.append(
            f"Seeds share their test {units}, so what decides is the interval for other seeds and other {units}: over "
            f"seeds only, the {units}' luck would not show, and over {units} only, the seeds' would not."
        )
    if base.comparisons > 1:
        chance = 1 - CONFIDENCE
        said.append(
            f"{base.comparisons} comparisons in one table: where nothing differs, {base.comparisons} times "
            f"{100 * chance:.0f} % of them are expected to look distinguishable. The last column is corrected for that "
            f"(Bonferroni: each at {100 * corrected(base.comparisons):.2f} %)."
        )
    if any(not line.paired_seeds for line in others):
        said.append(f"Runs without a training seed in common are paired by {units} only.")
    return said
