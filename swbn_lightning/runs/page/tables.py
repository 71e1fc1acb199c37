"""The tables of the report page."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swbn_lightning.files.reading import finite
from swbn_lightning.runs.compare import Comparison
from swbn_lightning.runs.curves import MEASURES, SPLITS, UNITS, Group, course
from swbn_lightning.runs.intervals import mean_interval, percent
from swbn_lightning.runs.page.groups import (
    Line,
    LineGroup,
    accuracies,
    newest_tests,
    setting_names,
    setting_of,
)
from swbn_lightning.runs.page.render import NONE, Code, Name, Number, Part, Strong, number, table, text
from swbn_lightning.runs.read import Run, Training
from swbn_lightning.runs.settings import ABSENT, differences
from swbn_lightning.whiteness.records import MEAN

_WHILE_TRAINING = "while training"
_MOST_DIFFERENT = 200  # settings in the table of those that differ
_LONGEST = 300  # letters of a setting in a table
# Of a result: its key in the file, its column, and how it is shown.
_RESULT_COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("classes", "classes", "{:,}"),
    ("images", "images", "{:,}"),
    ("episodes", "episodes", "{:,}"),
    ("queries", "queries", "{:,}"),
    ("seed", "episodes' seed", "{}"),
)
_WHITENESS = (("distance", "distance", "{:.2f}"), ("rms", "RMS correlation", "{:.3f}"))


def summary(lines: Sequence[Line]) -> Part:
    """A line a training: what it was, how it ended, what its tests and its validation gave."""
    names = setting_names(lines)
    found = [_accuracies(line, names) for line in lines]
    settings = list(dict.fromkeys(key for own in found for key in own))
    rows = [
        {
            "run": Name(line.label),
            **{f"{setting}, %": own.get(setting, NONE) for setting in settings},
            "network": _text(line.training.settings.get("model.init_args.backbone")),
            "norm": _norm(line.training.settings),
            "seed": _text(line.training.seed if line.training.known else None),
            "whiteness distance, start → end": _course(line, "distance", "{:.2f}"),
            "RMS correlation, start → end": _course(line, "rms", "{:.3f}"),
            "epochs": _epochs(line),
            "training, s": _fit_seconds(line.training),
            "state": state(line.training),
        }
        for line, own in zip(lines, found, strict=True)
    ]
    return table(list(rows[0]), [list(row.values()) for row in rows], leave_out=True)


def over_seeds(groups: Sequence[LineGroup]) -> Part | None:
    """Means over the seeds with deviation and interval, where a group has several tests; None where none has."""
    rows = []
    found: dict[tuple[str, str], list[float]] = {}
    for row in accuracies(groups):
        found.setdefault((row.label, row.setting), []).append(100 * row.value)
    for (label, setting), values in found.items():
        if len(values) > 1:
            own = mean_interval(values)
            cells = [number(own.mean, "{:.2f}"), number(own.std, "{:.2f}"), number(own.half_width, "± {:.2f}")]
            rows.append([label, setting, Number(str(own.number)), *cells])
    head = ["runs", "test", "seeds", "mean, %", "standard deviation", "95% of the mean, over seeds"]
    return table(head, rows) if rows else None


def paired_differences(compared: Sequence[Sequence[Comparison]]) -> Part:
    """What each group is above the first that was tested on the same episodes or images.

    The interval is the deciding one, as in ``swbn compare``.
    """
    rows, most = [], max(lines[0].comparisons for lines in compared)
    for base, *others in compared:
        for line in others:
            found = line.difference.deciding if line.difference else None
            if line.difference is None or found is None:
                continue
            units = line.kind.units
            over = f"seeds and {units}" if line.difference.over_both else units
            exact = line.mcnemar.mcnemar_p if line.mcnemar else None
            cells = [Strong(percent(found.mean, found.half_width, "+")), over, number(exact, "{:.2g}")]
            cells += [_verdict(line.distinguishable)]
            cells += [_verdict(line.distinguishable_among_all)] if most > 1 else []
            rows.append([line.label, base.label, line.setting, Number(f"{line.tested:,} {units}"), *cells])
    head = ["runs", "compared with", "test", "tested on", "difference ± 95%, points", "interval over", "McNemar's p"]
    head += ["distinguishable", *([f"as one of {most}"] if most > 1 else [])]
    return table(head, rows, leave_out=True)


def few_points(groups: Sequence[Group], unit: str) -> Part:
    """What curves would show of trainings of a single epoch."""
    quantities = [f"{split}/{measure}" for measure in MEASURES for split in SPLITS]
    rows = []
    for group in groups:
        found = {name: points[0] for name in quantities if (points := course(group, name))}
        cells = []
        for name in quantities:
            times, form = (100, "{:.2f}") if name.endswith("accuracy") else (1, "{:.4f}")
            point = found.get(name)
            spread = f" ± {form.format(times * point.std)}" if point and point.std else ""
            cells.append(Number(number(point.mean, form, times) + spread) if point else NONE)
        trained = ", ".join(sorted({str(point.x) for point in found.values()}))
        rows.append([Name(group.label), Number(trained or NONE), *cells])
    titles = [f"{SPLITS[split]} {measure}{', %' * (measure == 'accuracy')}" for measure in MEASURES for split in SPLITS]
    return table(["runs", UNITS[unit], *titles], rows, leave_out=True)


def setting_differences(groups: Sequence[LineGroup]) -> list[Part]:
    """The settings in which the groups differ, side by side; nothing where there is one group or no difference."""
    groups = [group for group in groups if group.lines[0].training.settings]  # of the others nothing is known
    columns = differences([group.lines[0].training.settings for group in groups])
    if not columns:
        return []
    shown = list(columns.items())[:_MOST_DIFFERENT]
    rows = [[Code(key), *map(_setting, values)] for key, values in shown]
    made = [table(["setting", *(Name(group.label) for group in groups)], rows)]
    if len(columns) == len(shown):
        return made
    return [*made, text(f"The first {len(shown)} of {len(columns)} settings that differ.")]


def results(run: Run) -> Part | None:
    """Every row of a run's ``results.json``; None where it has none."""
    head = ["evaluated", "accuracy ± 95%, %", "top-5, %", "macro F1, %", *(name for _, name, _ in _RESULT_COLUMNS)]
    rows = [
        [
            setting_of(row),
            accuracy(row),
            *(number(row.get(key), "{:.2f}", 100) for key in ("top5", "macro_f1")),
            *(number(row.get(key), form) for key, _, form in _RESULT_COLUMNS),
        ]
        for row in run.rows
    ]
    return table(head, rows, leave_out=True) if rows else None


def shared_environment(runs: Sequence[Run]) -> dict[str, Any]:
    """What all runs have in common of device and versions."""
    first, *others = [run.environment for run in runs]
    shared = {key: value for key, value in first.items() if all(key in own and own[key] == value for own in others)}
    return {key: value for key, value in shared.items() if key != "seed"}


def environment(found: Mapping[str, Any], title: str) -> Part | None:
    """Device, versions and the like; None where nothing is known."""
    rows = [[name, _setting(value)] for name, value in found.items()]
    return table(["", title], rows) if rows else None


def own_environment(run: Run, shared: Mapping[str, Any]) -> Part | None:
    """When a run started, by which command, and where its device and versions are not those of all."""
    own = {"started": run.started and str(run.started), "command": run.command}
    own = {key: value for key, value in own.items() if value}
    own |= {key: value for key, value in run.environment.items() if key not in shared}
    return environment(own, "when it started")


def configuration(run: Run) -> Part | None:
    """All settings that are not null; None where they are not known."""
    rows = [[Code(key), _setting(value)] for key, value in run.settings.items() if value is not None]
    return table(["setting", "value"], rows) if rows else None


def whiteness(rows: Sequence[Mapping[str, Any]]) -> Part:
    """Each layer's whiteness at the first and the last measurement."""
    epochs = sorted({row["epoch"] for row in rows})
    values = {(row["epoch"], row["layer"]): row for row in rows}
    names = list(dict.fromkeys(row["layer"] for row in rows if row["layer"] != MEAN))
    ends = list(dict.fromkeys((epochs[0], epochs[-1])))
    head = ["layer", *(f"{title}, {_when(epoch)}" for _, title, _ in _WHITENESS for epoch in ends)]
    lines = [
        [Code(layer) if layer != MEAN else "mean of the layers"]
        + [number(values.get((epoch, layer), {}).get(key), form) for key, _, form in _WHITENESS for epoch in ends]
        for layer in [*names, MEAN]
    ]
    return table(head, lines)


def accuracy(row: Mapping[str, Any]) -> Number:
    """In percent, with its 95% interval where it has one."""
    value, ci95 = (finite(row.get(key)) for key in ("accuracy", "ci95"))
    return NONE if value is None else Strong(percent(value, ci95))


def state(training: Training) -> str:
    """How a training ended, as far as its files tell."""
    if not training.parts:
        return "tested; its training is not among these runs"
    last = training.last.results
    if not last:
        return "no results.json: it was killed, or is still running"
    words = "finished" if last.get("completed") is True else "stopped before its end"
    return words + (f", in {len(training.parts)} parts" if len(training.parts) > 1 else "")


def _accuracies(line: Line, names: Callable[[Mapping[str, Any]], str]) -> dict[str, Number]:
    """By what was evaluated: tests, then the training's own validation, without its epoch in the column's name.

    Validation is that of the last part that got as far as a checkpoint, which ``--ckpt_path`` of the run's name means.
    """
    found = {setting: accuracy(test.row) for setting, test in newest_tests([line], names)}
    left = (part for part in reversed(line.training.parts) if part.rows or any(part.folder.glob("checkpoints/*.ckpt")))
    part = next(left, None)
    for row in part.rows if part else ():  # the part's own best, as it counts anew
        name = f"{_WHILE_TRAINING}: {str(row.get('split', '?')).partition(' ')[0]}"
        found.setdefault(name, accuracy(row))  # the best epoch, which stands first
    return found


def _norm(settings: Mapping[str, Any]) -> str:
    prefix = "model.init_args.norm_args"
    options = {key.removeprefix(f"{prefix}."): v for key, v in settings.items() if key.startswith(f"{prefix}.")}
    words = ", ".join(f"{key}={value}" for key, value in options.items())
    return _text(settings.get("model.init_args.norm")) + (f" ({words})" if words else "")


def _course(line: Line, key: str, form: str) -> Number:
    """The layers' mean before training and at the last measurement."""
    ends = [row for row in line.measured.whiteness if row["layer"] == MEAN]
    if not ends:  # as an evaluation's results have it
        history = line.training.last.results.get("whiteness")
        ends = [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []
    values = [number(row.get(key), form) for row in (ends[:1] + ends[-1:])]
    return Number(" → ".join(values)) if values and NONE not in values else NONE


def _epochs(line: Line) -> Number:
    trained = [x for series in line.measured.logged["epoch"].values() for x in series]
    planned = line.training.settings.get("trainer.max_epochs")
    if not trained:
        return NONE
    return Number(f"{max(trained)}" + (f" of {planned}" if type(planned) is int and planned > 0 else ""))


def _fit_seconds(training: Training) -> Number:
    known = [finite(part.results.get("fit_seconds")) for part in training.parts]
    return number(sum(v for v in known if v is not None), "{:.0f}") if known and None not in known else NONE


def _setting(value: Any) -> str:
    if value == ABSENT:
        return ABSENT
    words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return Code(words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…")


def _verdict(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "–"}[value]


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _when(epoch: int) -> str:
    return "before training" if epoch < 0 else f"after epoch {epoch + 1}"
