"""The tables of the report page."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swbn_lightning.files.reading import finite
from swbn_lightning.runs.intervals import mean_interval
from swbn_lightning.runs.page.folders import RunFolder
from swbn_lightning.runs.page.html import NONE, Html, Number, dotted, join, number, table, tag
from swbn_lightning.runs.page.nested import ABSENT, differences
from swbn_lightning.runs.page.trainings import (
    Training,
    TrainingGroup,
    accuracies,
    newest_tests,
    setting_names,
    setting_of,
)
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


def summary(trainings: Sequence[Training]) -> Html:
    """A line a training: what it was, how it ended, what its tests and its validation gave."""
    names = setting_names(trainings)
    settings = list(dict.fromkeys(key for t in trainings for key in _accuracies(t, names)))
    head = ["run", *(f"{setting}, %" for setting in settings), "network", "norm", "seed"]
    head += ["whiteness distance, start → end", "RMS correlation, start → end", "epochs", "training, s", "state"]
    rows = []
    for training in trainings:
        found = _accuracies(training, names)
        config = training.config
        rows.append(
            [
                dotted(training.label),
                *(found.get(setting, NONE) for setting in settings),
                text(config.get("model.init_args.backbone")),
                _norm(config),
                text(training.seed),
                _course(training, "distance", "{:.2f}"),
                _course(training, "rms", "{:.3f}"),
                _epochs(training),
                _fit_seconds(training),
                state(training),
            ]
        )
    return _without_empty(head, rows)


def over_seeds(groups: Sequence[TrainingGroup]) -> Html | None:
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


def setting_differences(groups: Sequence[TrainingGroup]) -> Html | None:
    """The settings in which the groups differ, side by side; None where there is one group or no difference."""
    groups = [group for group in groups if group.trainings[0].config]  # of the others nothing is known
    columns = differences([group.trainings[0].compared for group in groups])
    if not columns:
        return None
    shown = list(columns.items())[:_MOST_DIFFERENT]
    made = table(
        ["setting", *(dotted(group.label) for group in groups)],
        [[tag("code", dotted(key)), *(_setting(value) for value in values)] for key, values in shown],
    )
    if len(columns) == len(shown):
        return made
    return join([made, tag("p", f"The first {len(shown)} of {len(columns)} settings that differ.", class_="quiet")])


def results(run: RunFolder) -> Html | None:
    """Every row of a run's ``results.json``; None where it has none."""
    head = ["evaluated", "accuracy ± 95%, %", "top-5, %", *(name for _, name, _ in _RESULT_COLUMNS)]
    rows = [
        [
            setting_of(row),
            accuracy(row),
            number(row.get("top5"), "{:.2f}", 100),
            *(number(row.get(key), form) for key, _, form in _RESULT_COLUMNS),
        ]
        for row in run.rows
    ]
    return _without_empty(head, rows) if rows else None


def environment(run: RunFolder) -> Html | None:
    """What a run's ``environment.json`` says; None where there is none."""
    rows = [[name, _setting(value)] for name, value in run.environment.items()]
    return table(["", "when it started"], rows) if rows else None


def configuration(run: RunFolder) -> Html | None:
    """All settings that are not null; None where they are not known."""
    rows = [[tag("code", dotted(key)), _setting(value)] for key, value in run.config.items() if value is not None]
    return table(["setting", "value"], rows) if rows else None


def whiteness(rows: Sequence[Mapping[str, Any]]) -> Html:
    """Each layer's whiteness at the first and the last measurement."""
    epochs = sorted({row["epoch"] for row in rows})
    values = {(row["epoch"], row["layer"]): row for row in rows}
    names = list(dict.fromkeys(row["layer"] for row in rows if row["layer"] != MEAN))
    ends = list(dict.fromkeys((epochs[0], epochs[-1])))
    head = ["layer", *(f"{title}, {_when(epoch)}" for _, title, _ in _WHITENESS for epoch in ends)]
    lines = [
        [tag("code", dotted(layer)) if layer != MEAN else tag("strong", "mean of the layers")]
        + [number(values.get((epoch, layer), {}).get(key), form) for key, _, form in _WHITENESS for epoch in ends]
        for layer in [*names, MEAN]
    ]
    return table(head, lines)


def accuracy(row: Mapping[str, Any]) -> Number:
    """In percent, with its 95% interval where it has one."""
    value, ci95 = (finite(row.get(key)) for key in ("accuracy", "ci95"))
    if value is None:
        return NONE
    return Number(f"{100 * value:.2f}" + (f" ± {100 * ci95:.2f}" if ci95 is not None else ""), strong=True)


def state(training: Training) -> str:
    """How a training ended, as far as its files tell."""
    if not training.folders:
        return "tested; its training is not among these runs"
    last = training.folders[-1].results
    if not last:
        return "no results.json: it was killed, or is still running"
    completed = last.get("completed")
    words = "finished or stopped"  # a run from before that was written
    if isinstance(completed, bool):
        words = "finished" if completed else "stopped before its end"
    return words + (f", in {len(training.folders)} parts" if len(training.folders) > 1 else "")


def text(value: Any) -> str:
    """A value in a table; a dash for none."""
    return "–" if value is None else str(value)


def _accuracies(training: Training, names: Callable[[Mapping[str, Any]], str]) -> dict[str, Number]:
    """By what was evaluated: tests, then the training's own validation, without its epoch in the column's name."""
    found = {setting: accuracy(test.row) for setting, test in newest_tests([training], names)}
    for row in training.kept.rows if training.kept else ():  # the part's own best, as it counts anew
        name = f"{_WHILE_TRAINING}: {str(row.get('split', '?')).partition(' ')[0]}"
        found.setdefault(name, accuracy(row))  # the best epoch, which stands first
    return found


def _norm(config: Mapping[str, Any]) -> str:
    prefix = "model.init_args.norm_args"
    options = {key.removeprefix(f"{prefix}."): v for key, v in config.items() if key.startswith(f"{prefix}.")}
    words = ", ".join(f"{key}={value}" for key, value in options.items())
    return text(config.get("model.init_args.norm")) + (f" ({words})" if words else "")


def _course(training: Training, key: str, form: str) -> Number:
    """The layers' mean before training and at the last measurement."""
    ends = [row for row in training.whiteness if row["layer"] == MEAN]
    if not ends:  # as an evaluation's results have it, or a run from before there was such a file
        history = training.last.results.get("whiteness")
        ends = [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []
    values = [number(row.get(key), form) for row in (ends[:1] + ends[-1:])]
    return Number(" → ".join(values)) if values and NONE not in values else NONE


def _epochs(training: Training) -> Number:
    trained = [x for series in training.quantities("epoch").values() for x in series]
    planned = training.config.get("trainer.max_epochs")
    if not trained:
        return NONE
    return Number(f"{max(trained)}" + (f" of {planned}" if type(planned) is int and planned > 0 else ""))


def _fit_seconds(training: Training) -> Number:
    known = [finite(folder.results.get("fit_seconds")) for folder in training.folders]
    return number(sum(v for v in known if v is not None), "{:.0f}") if known and None not in known else NONE


def _setting(value: Any) -> Html:
    if value == ABSENT:
        return tag("span", ABSENT, class_="quiet")
    words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return tag("code", words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…")


def _when(epoch: int) -> str:
    return "before training" if epoch < 0 else f"after epoch {epoch + 1}"


def _without_empty(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
    """A table without the columns in which nothing is known."""
    shown = [c for c in range(len(head)) if c == 0 or any(row[c] not in (NONE, "–") for row in rows)]
    return table([head[c] for c in shown], [[row[c] for c in shown] for row in rows]) if rows else join([])
