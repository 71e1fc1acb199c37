"""The report page: summary first, then what differs, pictures, and each run's details."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.writing import output_file, write_output
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
from swbn_lightning.runs.page.folders import RunFolder, broken_studies, find_runs, read_run
from swbn_lightning.runs.page.html import Html, dotted, download, join, page, picture, tag
from swbn_lightning.runs.page.trainings import (
    Training,
    TrainingGroup,
    accuracies,
    as_groups,
    as_trainings,
    curve_groups,
)
from swbn_lightning.whiteness.plots import compare_whiteness, heatmap_pairs, whiteness_by_layer

REPORT_FILE = "report.html"
# So many have pictures of their own, and so many lines can be told apart in one: pages of a big study stay usable.
MOST_PICTURED, MOST_LINES, MOST_HEATMAPS = 8, 14, 24
_MOST_TESTS = 40  # kinds of tests: each is a column and a panel
_MOST_SETTINGS = 2_000  # names of settings, of all runs
_FEW = 3  # folders that are named in a line


def write_report(paths: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page about runs.

    Args:
        paths: run folders, or folders with such folders below (:func:`~swbn_lightning.runs.page.folders.find_runs`).
        output: the file; by default ``report.html`` in the folder that was given or, of several, in the working
            directory.

    Returns:
        The file.

    Raises:
        InputError: a path without a run; no run but of ``predict``; a file that cannot be written.
    """
    runs = [run for path in find_runs(paths) if not (run := read_run(path)).predicted]
    _limit(runs)
    if not runs:
        raise InputError(
            f"{paths[0]} holds predictions alone, which have no results to show; see predictions.csv there."
        )
    if output is None:
        output = Path(paths[0]).expanduser() / REPORT_FILE if len(paths) == 1 else Path(REPORT_FILE)
    file = output_file(output, "the page", REPORT_FILE)
    return write_output(file, render(as_trainings(runs), _name(paths), broken_studies(paths)))


def _limit(runs: Sequence[RunFolder]) -> None:
    """Leave out what no page of many runs can hold, and say so; a run's own files have far less."""
    kinds: set[tuple[str, ...]] = set()
    settings: set[str] = set()
    for run in runs:
        kept = [row for row in run.rows if _among(kinds, _kind(run, row), _MOST_TESTS)]
        if len(kept) < len(run.rows):
            run.problems.append(f"results of more than {_MOST_TESTS} kinds of tests are only in the folders")
            run.results["results"] = kept
        config = {key: value for key, value in run.config.items() if _among(settings, key, _MOST_SETTINGS)}
        if len(runs) > 1 and len(config) < len(run.config):
            run.problems.append(f"settings of more than {_MOST_SETTINGS} names are only in the folders")
            run.config = config


def _among(known: set[Any], value: Any, most: int) -> bool:
    if len(known) < most:
        known.add(value)
    return value in known


def _kind(run: RunFolder, row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a test's result from others; of a training's validation not the epoch."""
    if run.trained:
        return (str(row.get("split")).partition(" ")[0],)
    return (tables.setting_of(row), repr(row.get("queries")), repr(row.get("seed")))


def render(trainings: Sequence[Training], name: str, problems: Iterable[str] = ()) -> str:
    """The page about trainings and tests, as text.

    Args:
        trainings: with what their folders hold.
        name: of the page.
        problems: that are of no single run.
    """
    groups = as_groups(trainings)
    numbers = _plural(len([t for t in trainings if t.folders]), "training")
    tests = _plural(sum(len(t.tests) for t in trainings), "test")
    title = f"Report: {name}"
    alone = len(trainings) == 1
    summary = [
        _whole("The table of runs", lambda: tables.summary(trainings)),
        _whole("The table of means over seeds", lambda: tables.over_seeds(groups)),
        _repeated(groups),
    ]
    sections = [
        _section("Settings that differ", lambda: [tables.setting_differences(groups)]),
        _section("Accuracy", lambda: _accuracy(groups)),
        _section("Curves", lambda: _curves(groups)),
        _section("Whiteness", lambda: _whiteness(trainings)),
        _section("Correlations before and after training", lambda: _heatmaps(trainings)),
        _section("Each run", lambda: [_whole(t.label, partial(_details, t, alone)) for t in trainings]),
    ]
    return page(
        title,
        tag("h1", title),
        tag("p", f"{numbers}, {tests}. Accuracies of tests are of the classes or images that training never saw; ± is ",
            "the half-width of the 95% interval of one test.", class_="quiet"),
        *summary,
        _problems(trainings, problems),  # after what finds some
        *sections,
    )  # fmt: skip


def _section(title: str, make: Callable[[], Sequence[Html | None]]) -> Html | None:
    """Nothing where there is nothing to show."""

    def made() -> Html | None:
        content = make()
        return join([tag("h2", title), *content]) if any(part is not None for part in content) else None

    return _whole(title, made)


def _whole(title: str, make: Callable[[], Html | None]) -> Html | None:
    """A part of the page or, if it cannot be made for whatever reason, why: the other parts are shown."""
    try:
        return make()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        return tag("p", tag("strong", title), f" cannot be shown ({reason}).", class_="notice", role="alert")


def _repeated(groups: Sequence[TrainingGroup]) -> Html | None:
    if not any(group.repeated for group in groups):
        return None
    words = (
        "Some trainings were repeated with the same settings and seed: means, curves and the CSV files have of each "
    )
    return tag("p", f"{words}seed the newest training, and of its tests the newest of each kind.", class_="quiet")


def _problems(trainings: Sequence[Training], others: Iterable[str]) -> Html | None:
    places: dict[str, list[Html]] = {problem: [] for problem in others}
    for run in {id(run): run for training in trainings for run in training.everything}.values():
        for problem in run.problems:
            places.setdefault(problem, []).append(tag("code", dotted(str(run.path))))
    if not places:
        return None
    rows = [tag("li", f"{problem}: " if folders else problem, _listed(folders)) for problem, folders in places.items()]
    words = "What is missing, and so not on this page:"
    return tag("div", tag("strong", words), tag("ul", *rows), class_="notice", role="note")


def _listed(folders: Sequence[Html]) -> Html:
    if len(folders) <= _FEW:
        return join(part for folder in folders for part in (folder, " "))
    return tag("details", tag("summary", f"in {len(folders)} folders"), *(tag("div", folder) for folder in folders))


def _accuracy(groups: Sequence[TrainingGroup]) -> list[Html | None]:
    rows = accuracies(groups)
    if len(rows) < 2 or len(groups) > 2 * MOST_LINES:
        return []
    caption = join(["Tests with their 95% intervals. ", download("accuracy.csv", accuracy_csv(rows), "accuracy.csv")])
    return [picture(accuracy_intervals(rows), "Test accuracies with their intervals", caption)]


def _curves(groups: Sequence[TrainingGroup]) -> list[Html | None]:
    lines, unit = curve_groups(groups)
    shown, left_out = lines[:MOST_LINES], max(0, len(lines) - MOST_LINES)
    drawn = [measure for measure in MEASURES if has_curves(shown, measure)]
    if not lines:
        return []
    if not drawn:
        return [tag("p", "No loss or accuracy is known: no epoch had ended when the last line was logged.")]
    words = "Solid: validation; dashed: training."
    if any(len(group.runs) > 1 for group in shown):
        words += " Of several runs the mean, with a band of one standard deviation to each side."
    if left_out:
        words += f" {left_out} further lines are in the file alone."
    if any(len(series) > MOST_POINTS for group in lines for run in group.runs for series in run.values()):
        words += f" Of longer lines {MOST_POINTS:,} points are shown and in the file; all are in metrics.csv."
    file = download("curves.csv", curves_csv({"": lines}, unit), "curves.csv")
    caption = tag("p", f"{words} Every number: ", file, class_="quiet")
    pictures = [picture(curves(shown, measure, unit), f"{measure} by {UNITS[unit]}") for measure in drawn]
    return [caption, tag("div", *pictures, class_="pictures")]


def _whiteness(trainings: Sequence[Training]) -> list[Html | None]:
    known = {training.label: training.whiteness for training in trainings if training.whiteness}
    if not known:
        return []
    words = tag(
        "p",
        "RMS correlation of each normalisation layer's output before gamma and beta, on a fixed sample of validation "
        "images: 0 is white. The numbers are in whiteness.csv in each run's folder.",
        class_="quiet",
    )
    if len(known) == 1:
        return [words, _scrolling(picture(whiteness_by_layer(next(iter(known.values()))), "Whiteness by layer"))]
    shown = dict(list(known.items())[:MOST_LINES])
    left_out = _left_out(len(known), MOST_LINES)
    return [words, _scrolling(picture(compare_whiteness(shown), "Whiteness of the runs", left_out))]


def _heatmaps(trainings: Sequence[Training]) -> list[Html | None]:
    """One picture a layer, with a column for each run, signed if its runs asked for that."""
    layers = dict.fromkeys((layer, t.signed) for t in trainings for layer in t.heatmaps)
    made = [
        _whole(f"Correlations of {layer}", partial(_heatmap, trainings, layer, signed))
        for layer, signed in list(layers)[:MOST_HEATMAPS]
    ]
    if len(layers) > MOST_HEATMAPS:
        made.append(tag("p", f"The first {MOST_HEATMAPS} of {len(layers)} layers.", class_="quiet"))
    return made


def _heatmap(trainings: Sequence[Training], layer: str, signed: bool) -> Html:
    columns = {t.label: t.heatmaps[layer] for t in trainings if layer in t.heatmaps and t.signed == signed}
    figure = heatmap_pairs(dict(list(columns.items())[:MOST_PICTURED]), signed)
    caption = join([tag("code", layer), f". The numbers are in heatmap_{layer}.csv in each run's folder. ",
                    _left_out(len(columns), MOST_PICTURED)])  # fmt: skip
    return _scrolling(picture(figure, f"Correlation matrices of {layer}", caption))


def _details(training: Training, alone: bool) -> Html:
    parts: list[Any] = []
    for run in training.everything:
        parts.append(
            tag("h3", "Training" if run in training.folders else "Evaluation", ": ", tag("code", str(run.path)))
        )
        parts += [tables.results(run), tables.environment(run)]
        settings = tables.configuration(run)
        if settings is not None:
            parts.append(tag("details", tag("summary", "All settings"), settings))
    rows = training.whiteness
    if rows:
        parts.append(tag("details", tag("summary", "Whiteness of every layer"), tables.whiteness(rows)))
    attributes = {"open": "open"} if alone else {}
    return tag("details", tag("summary", dotted(training.label)), *parts, **attributes)


def _scrolling(content: Html) -> Html:
    """On a narrow screen a wide picture keeps a size at which its letters can be read."""
    return tag("div", content, class_="scroll wide")


def _left_out(number: int, most: int) -> str | None:
    return f"The first {most} of {number} runs; name fewer to see the others." if number > most else None


def _name(paths: Sequence[str | Path]) -> str:
    """What was given, in a few words."""
    parts = [Path(path).expanduser().resolve() for path in paths]
    names = ["/".join(p.parts[-2:]) if p.name.startswith("version_") else p.name or str(p) for p in parts]
    return printable(", ".join(names) if len(names) <= _FEW else f"{names[0]} and {len(names) - 1} more")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
