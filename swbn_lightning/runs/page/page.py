"""``swbn report RUN…``: summary first, then what differs, pictures, and each run's details."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.writing import output_file, write_output
from swbn_lightning.runs import read
from swbn_lightning.runs.compare import compare_tests, notes
from swbn_lightning.runs.curves import (
    MEASURES,
    MOST_POINTS,
    UNITS,
    accuracy_csv,
    accuracy_intervals,
    curves,
    curves_csv,
    has_curves,
)
from swbn_lightning.runs.page import tables
from swbn_lightning.runs.page.confused import confusion
from swbn_lightning.runs.page.groups import Line, LineGroup, accuracies, as_groups, as_lines, curve_groups, setting_of
from swbn_lightning.runs.page.render import (
    MOST_PICTURED,
    Code,
    Part,
    details,
    download,
    heading,
    left_out,
    notice,
    picture,
    render,
    text,
)
from swbn_lightning.runs.saved_tests import tests_of, unit_saved
from swbn_lightning.whiteness.plots import compare_whiteness, heatmap_pairs, whiteness_by_layer

REPORT_FILE = "report.html"
MOST_LINES, MOST_HEATMAPS = 14, 24  # lines that can be told apart in one picture; layers
MOST_COMPARED = 28  # lines with intervals in a picture, and in the table of paired differences
_MOST_ROWS = 100  # of one results.json
_MOST_TESTS = 40  # kinds of tests: each is a column and a panel
_MOST_SETTINGS = 2_000  # names of settings, of all runs
_NAME_FEWER = "name fewer to see the others"


def main(args: Sequence[str]) -> None:
    """Write the page and say where.

    Raises:
        InputError: runs that are not there, or a page that cannot be written.
        SystemExit: 2 for arguments that cannot be understood, 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="swbn report",
        description="One HTML page about runs: results with intervals, settings that differ, curves, whiteness, "
        "heatmaps and environment. It holds all it needs, and nothing of a run is run to read it.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="runs/NAME, one of its versions, or a study's folder: all runs below it"
    )
    parser.add_argument("--output", metavar="FILE", help="the page; report.html in the folder, or of several here")
    options = parser.parse_args(args)
    print(f"report: {printable(write_report(options.runs, options.output))}")


def write_report(paths: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page about runs.

    Args:
        paths: run folders, or folders with such folders below.
        output: the file; by default ``report.html`` in the folder that was given or, of several, in the working
            directory.

    Returns:
        The file.

    Raises:
        InputError: a path without a run; no run but of ``predict``; a file that cannot be written.
    """
    runs = [run for run in read.read_runs(read.find_runs(paths)) if run.kind != "predict"]
    _limit(runs)
    if not runs:
        raise InputError(
            f"{paths[0]} holds predictions only, which have no results to show; see predictions.csv there."
        )
    if output is None:
        output = Path(paths[0]).expanduser() / REPORT_FILE if len(paths) == 1 else Path(REPORT_FILE)
    file = output_file(output, "the page", REPORT_FILE)
    return write_output(file, render(f"Report: {_name(paths)}", _parts(as_lines(read.as_trainings(runs)))))


def _limit(runs: Sequence[read.Run]) -> None:
    """Leave out what no page of many runs can hold, and say so; a run's own files have far less."""
    kinds: set[tuple[str, ...]] = set()
    names: set[str] = set()
    for run in runs:
        if len(rows := run.rows) > _MOST_ROWS:
            run.problems.append(f"{len(rows) - _MOST_ROWS} further results are only in results.json")
        kept = [row for row in rows[:_MOST_ROWS] if _among(kinds, _kind(run, row), _MOST_TESTS)]
        if len(kept) < len(rows[:_MOST_ROWS]):
            run.problems.append(f"results of more than {_MOST_TESTS} kinds of tests are only in the folders")
        if len(kept) < len(rows):
            run.results["results"] = kept
        settings = {key: value for key, value in run.settings.items() if _among(names, key, _MOST_SETTINGS)}
        if len(runs) > 1 and len(settings) < len(run.settings):
            run.problems.append(f"settings of more than {_MOST_SETTINGS} names are only in the folders")
            run.settings = settings


def _among(known: set[Any], value: Any, most: int) -> bool:
    if len(known) < most:
        known.add(value)
    return value in known


def _kind(run: read.Run, row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a test's result from others; of a training's validation not the epoch."""
    if run.kind == "fit":
        return (str(row.get("split")).partition(" ")[0],)
    return (setting_of(row), repr(row.get("queries")), repr(row.get("seed")))


def _parts(lines: Sequence[Line]) -> list[Part]:
    """What stands on the page below its title."""
    groups = as_groups(lines)
    trainings = _plural(sum(bool(line.training.parts) for line in lines), "training")
    tests = _plural(sum(len(line.training.tests) for line in lines), "test")
    above = [
        text(f"{trainings}, {tests}. Accuracies of tests are of the classes or images that training never saw; ± is "
              "the half-width of the 95% interval of one test."),
        *_whole("The table of runs", lambda: [tables.summary(lines)]),
        *_whole("The table of means over seeds", lambda: [tables.over_seeds(groups)]),
        *_whole("The table of paired differences", lambda: _paired(groups)),
    ]  # fmt: skip
    if any(group.repeated for group in groups):
        above.append(
            text("Some trainings were repeated with the same settings and seed: means, curves and the CSV files have "
                  "of each seed the newest training, and of its tests the newest of each kind.")
        )  # fmt: skip
    shared = tables.shared_environment([run for line in lines for run in line.training.runs])
    sections: dict[str, Callable[[], Sequence[Part | None]]] = {
        "Settings that differ": lambda: tables.setting_differences(groups),
        "Accuracy": lambda: _accuracy(groups),
        "Confusion": lambda: confusion(lines),
        "Curves": lambda: _curves(groups),
        "Whiteness": lambda: _whiteness(lines),
        "Correlations before and after training": lambda: _heatmaps(lines),
        "Environment": lambda: [tables.environment(shared, "all runs")],
        "Each run": lambda: [
            p for own in lines for p in _whole(own.label, partial(_details, own, shared, len(lines) == 1))
        ],
    }
    below = []
    for title, make in sections.items():
        made = _whole(title, make)
        below += [heading(title), *made] if made else []
    return [*above, *_problems(lines), *below]  # after what finds some


def _whole(title: str, make: Callable[[], Sequence[Part | None]]) -> list[Part]:
    """A part of the page or, if it cannot be made for whatever reason, why: the other parts are shown."""
    try:
        return [part for part in make() if part is not None]
    except Exception as error:
        return [notice(title, f" cannot be shown ({f'{type(error).__name__}: {error}'[:300]}).")]


def _problems(lines: Sequence[Line]) -> list[Part]:
    places: dict[str, list[Code]] = {}
    for run in (run for line in lines for run in line.training.runs):
        for problem in dict.fromkeys(run.problems):
            places.setdefault(problem, []).append(Code(run.folder))
    return [notice("What is missing, and so not on this page:", lines=list(places.items()))] if places else []


def _paired(groups: Sequence[LineGroup]) -> list[Part | None]:
    """Differences of groups that were tested on the same episodes or images, as ``swbn compare`` makes them."""
    if len(groups) > MOST_COMPARED:
        runs = [run for group in groups for line in group.lines for run in line.training.tests]
        said = f"Paired differences of more than {MOST_COMPARED} lines are left out; name fewer, or use swbn compare."
        return [text(said)] if any(unit_saved(run.folder) for run in runs) else []
    tests = []
    for group in groups:
        last = group.lines[0].training.last
        try:
            tests.append((group.label, tests_of([line.training for line in group.lines], last.folder)))
        except InputError as error:
            last.problems.append(str(error))
    compared = compare_tests(tests)
    if not compared:
        return []
    words = [
        f"Differences on the same test {kind.units}, {kind.unit} by {kind.unit}: the {kind.unit}'s luck is in both and "
        "cancels."
        for kind in dict.fromkeys(lines[0].kind for lines in compared)
    ]
    words += dict.fromkeys(note for lines in compared for note in notes(lines))
    return [text(" ".join(words)), tables.paired_differences(compared)]


def _accuracy(groups: Sequence[LineGroup]) -> list[Part]:
    rows = accuracies(groups)
    if len(rows) < 2:
        return []
    labels = list(dict.fromkeys(row.label for row in rows))
    shown = [row for row in rows if row.label in labels[:MOST_COMPARED]]
    words = "Each test with its 95% interval."
    if any(len(group.lines) > 1 for group in groups):
        words += " Thick: the mean of several, with one standard deviation to each side."
    words = " ".join([words, *left_out(len(labels), MOST_COMPARED, "lines", "the others are in the file only"), ""])
    caption = [words, download("accuracy.csv", accuracy_csv(rows))]
    return [picture(accuracy_intervals(shown), "Test accuracies with their intervals", *caption, wide=True)]


def _curves(groups: Sequence[LineGroup]) -> list[Part]:
    lines, unit = curve_groups(groups)
    shown, left_out = lines[:MOST_LINES], max(0, len(lines) - MOST_LINES)
    drawn = [measure for measure in MEASURES if has_curves(shown, measure)]
    if not lines:
        return []
    if not drawn:
        return [text("No loss or accuracy is known: no epoch had ended when the last line was logged.")]
    longest = max(len(series) for group in lines for run in group.runs for series in run.values())
    words = ["Every number: ", download("curves.csv", curves_csv(lines, unit)), "."]
    if any(len(group.runs) > 1 for group in shown):
        words.append(" Of several runs the mean, with one standard deviation to each side.")
    if left_out:
        words.append(f" {left_out} further lines are in the file only.")
    if longest > MOST_POINTS:
        words.append(f" Of longer lines {MOST_POINTS:,} points are shown and in the file; all are in metrics.csv.")
    if longest == 1:
        return [text(*words), tables.few_points(shown, unit)]
    return [
        text(*words),
        {"kind": "together", "parts": [picture(curves(shown, m, unit), f"{m} by {UNITS[unit]}") for m in drawn]},
    ]


def _whiteness(lines: Sequence[Line]) -> list[Part]:
    known = {line.label: line.measured.whiteness for line in lines if line.measured.whiteness}
    if not known:
        return []
    words = text(
        "RMS correlation of each normalisation layer's output before gamma and beta, on a fixed sample of validation "
        "images: 0 is white. The numbers are in whiteness.csv in each run's folder."
    )
    if len(known) == 1:
        return [words, picture(whiteness_by_layer(next(iter(known.values()))), "Whiteness by layer", wide=True)]
    shown = dict(list(known.items())[:MOST_LINES])
    caption = left_out(len(known), MOST_LINES, "runs", _NAME_FEWER)
    return [words, picture(compare_whiteness(shown), "Whiteness of the runs", *caption, wide=True)]


def _heatmaps(lines: Sequence[Line]) -> list[Part]:
    """One picture a layer, with a column for each run."""
    layers = dict.fromkeys(layer for line in lines for layer in line.measured.heatmaps)
    made = [
        part
        for layer in list(layers)[:MOST_HEATMAPS]
        for part in _whole(f"Correlations of {layer}", partial(_heatmap, lines, layer))
    ]
    if len(layers) > MOST_HEATMAPS:
        made.append(text(f"The first {MOST_HEATMAPS} of {len(layers)} layers."))
    return made


def _heatmap(lines: Sequence[Line], layer: str) -> list[Part]:
    own = [line for line in lines if layer in line.measured.heatmaps]
    # A single one needs no title: the layer is named below.
    columns = {line.label if len(lines) > 1 else "": line.measured.heatmaps[layer] for line in own}
    signed = any(line.training.settings.get("whiteness.signed") is True for line in own)  # if one asked for it
    figure = heatmap_pairs(dict(list(columns.items())[:MOST_PICTURED]), signed)
    caption = [Code(layer), f". The numbers are in heatmap_{layer}.csv in each run's folder. "]
    caption += left_out(len(columns), MOST_PICTURED, "runs", _NAME_FEWER)
    return [picture(figure, f"Correlation matrices of {layer}", *caption, wide=True)]


def _details(line: Line, shared: Mapping[str, Any], alone: bool) -> list[Part]:
    parts: list[Part | None] = []
    for run in line.training.runs:
        title = "Training: " if run.kind == "fit" else "Evaluation: "
        parts += [heading(title, Code(run.folder), level=3), tables.results(run)]
        parts.append(tables.own_environment(run, shared))
        settings = tables.configuration(run)
        parts += [details("All settings", [settings])] if settings else []
    if rows := line.measured.whiteness:
        parts.append(details("Whiteness of every layer", [tables.whiteness(rows)]))
    where = f" ({line.folder})" if line.folder != line.label else ""
    return [details(f"{line.label}{where}", parts, alone)]


def _name(paths: Sequence[str | Path]) -> str:
    parts = [Path(path).expanduser().resolve() for path in paths]
    names = ["/".join(p.parts[-2:]) if p.name.startswith("version_") else p.name or str(p) for p in parts]
    return printable(", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
