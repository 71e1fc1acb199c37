"""The report page: summary first, then what differs, pictures, and each run's details."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swbn_lightning.curves import (
    MEASURES,
    UNITS,
    accuracy_csv,
    accuracy_intervals,
    curves,
    curves_csv,
    has_curves,
)
from swbn_lightning.errors import InputError
from swbn_lightning.report_page import tables
from swbn_lightning.report_page.folders import find_runs, read_run
from swbn_lightning.report_page.html import Html, dotted, download, join, page, picture, tag
from swbn_lightning.report_page.trainings import (
    Training,
    TrainingGroup,
    accuracies,
    as_groups,
    as_trainings,
    curve_groups,
)
from swbn_lightning.runs import output_file, write_output
from swbn_lightning.whiteness.plots import compare_whiteness, heatmap_pairs, whiteness_by_layer

REPORT_FILE = "report.html"
# So many have pictures of their own, and so many lines can be told apart in one: pages of a big study stay usable.
MOST_PICTURED, MOST_LINES = 8, 14
_FEW = 3  # folders that are named in a line


def write_report(paths: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page about runs.

    Args:
        paths: run folders, or folders with such folders below (:func:`~swbn_lightning.report_page.folders.find_runs`).
        output: the file; by default ``report.html`` in the folder that was given or, of several, in the working
            directory.

    Returns:
        The file.

    Raises:
        InputError: a path without a run; no run but of ``predict``; a file that cannot be written.
    """
    runs = [run for path in find_runs(paths) if not (run := read_run(path)).predicted]
    if not runs:
        raise InputError(
            f"{paths[0]} holds predictions alone, which have no results to show; see predictions.csv there."
        )
    if output is None:
        output = Path(paths[0]).expanduser() / REPORT_FILE if len(paths) == 1 else Path(REPORT_FILE)
    file = output_file(output, "the page", REPORT_FILE)
    return write_output(file, render(as_trainings(runs), _name(paths)))


def render(trainings: Sequence[Training], name: str) -> str:
    """The page about trainings and tests, as text."""
    groups = as_groups(trainings)
    numbers = _plural(len([t for t in trainings if t.folders]), "training")
    tests = _plural(sum(len(t.tests) for t in trainings), "test")
    title = f"Report: {name}"
    sections = [
        _section("Settings that differ", tables.setting_differences(groups)),
        _section("Accuracy", *_accuracy(groups)),
        _section("Curves", *_curves(groups)),
        _section("Whiteness", *_whiteness(trainings)),
        _section("Correlations before and after training", *_heatmaps(trainings)),
        _section("Each run", *(_details(training, alone=len(trainings) == 1) for training in trainings)),
    ]
    return page(
        title,
        tag("h1", title),
        tag("p", f"{numbers}, {tests}. Accuracies of tests are of the classes or images that training never saw; ± is ",
            "the half-width of the 95% interval of one test.", class_="quiet"),
        tables.summary(trainings),
        tables.over_seeds(groups),
        _repeated(groups),
        _problems(trainings),
        *sections,
    )  # fmt: skip


def _section(title: str, *content: Html | None) -> Html | None:
    """Nothing where there is nothing to show."""
    return join([tag("h2", title), *content]) if any(part is not None for part in content) else None


def _repeated(groups: Sequence[TrainingGroup]) -> Html | None:
    if not any(group.repeated for group in groups):
        return None
    words = (
        "Some trainings were repeated with the same settings and seed: means, curves and the CSV files have of each "
    )
    return tag("p", f"{words}seed the newest training, and of its tests the newest of each kind.", class_="quiet")


def _problems(trainings: Sequence[Training]) -> Html | None:
    places: dict[str, list[Html]] = {}
    for run in {id(run): run for training in trainings for run in training.everything}.values():
        for problem in run.problems:
            places.setdefault(problem, []).append(tag("code", dotted(str(run.path))))
    if not places:
        return None
    rows = [tag("li", f"{problem}: ", _listed(folders)) for problem, folders in places.items()]
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
    made: list[Html | None] = []
    for layer, signed in layers:
        columns = {t.label: t.heatmaps[layer] for t in trainings if layer in t.heatmaps and t.signed == signed}
        shown = dict(list(columns.items())[:MOST_PICTURED])
        figure = heatmap_pairs(shown, signed)
        caption = join([tag("code", layer), f". The numbers are in heatmap_{layer}.csv in each run's folder. ",
                        _left_out(len(columns), MOST_PICTURED)])  # fmt: skip
        made.append(_scrolling(picture(figure, f"Correlation matrices of {layer}", caption)))
    return made


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
    return ", ".join(names) if len(names) <= _FEW else f"{names[0]} and {len(names) - 1} more"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
