"""What the runs of a study measured, one row a training seed, test and metric."""

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import finite, has_file, reading
from swbn_lightning.files.writing import markdown_text
from swbn_lightning.runs.folders import METRICS_FILE, RESULTS_FILE
from swbn_lightning.runs.measured import Series, joined, read_metrics
from swbn_lightning.runs.paper import find_paper_figure
from swbn_lightning.runs.read import Run, Training
from swbn_lightning.runs.saved_tests import read_accuracies, unit_saved
from swbn_lightning.runs.study.cells import Cell
from swbn_lightning.runs.study.running import chosen_checkpoint, finished_test, finished_training

# Of a test's results; with their names in the paper's tables.
METRICS = {"accuracy": ("accuracy", "top1"), "top5": ("top5",)}
_WHOLE_OF_EPISODES = ("ways", "shots", "queries", "episodes", "seed")
_MAY_BE_RANGES = ("ways", "shots")  # as "5-20"
# Of study.csv: docs/studies.md says what they mean.
COLUMNS = [
    "config", "dataset", "method", "network", "network_args", "norm", "norm_args", "seed",
    "metric", "setting", "value", "ci95", "tested", "loss", "paper", "paper_note",
    "reach", "reach_split", "epochs_to_reach", "epoch_seconds", "fit_seconds", "continued",
    "distance_start", "distance_end", "rms_start", "rms_end", "run", "test", "checkpoint",
]  # fmt: skip
# Not in the file: the accuracy of each episode or image, which ones these are, and on what the network was trained.
HIDDEN = ["episodes", "episode_set", "environment"]
Row = dict[str, Any]


def as_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as :func:`observe` makes them; what is not known is missing, and counts stay whole numbers."""
    return pd.DataFrame(rows, columns=[*COLUMNS, *HIDDEN], dtype=object)


def observe(cell: Cell, reach: float | None) -> list[Row]:
    """All figures of a cell's tests that are done: one row a test and metric; ``reach`` is ``--reach``.

    Raises:
        InputError: a file that is not what a run writes.
    """
    training = finished_training(cell)
    if training is None:
        return []
    with reading(training.last.folder / RESULTS_FILE):
        columns = _columns(cell, training, reach)
    rows = []
    for run in (finished_test(training, test) for test in cell.tests):
        if run is not None:
            with reading(run.folder / RESULTS_FILE):
                rows += _rows_of_test(cell, run, columns)
    return rows


def quantities(training: Training) -> dict[str, Series]:
    """What a training logged by epochs trained, in all of its parts.

    Raises:
        InputError: a file that cannot be read.
    """
    found: dict[str, dict[str, Series]] = {}
    for part in training.parts:
        if has_file(part.folder, (METRICS_FILE,)):
            found = joined(found, read_metrics(part.folder / METRICS_FILE))
    return found.get("epoch", {})


def as_csv(observed: pd.DataFrame) -> str:
    """A header and a line an observation."""
    return observed[COLUMNS].to_csv(index=False, lineterminator="\n")


def _columns(cell: Cell, training: Training, reach: float | None) -> dict[str, Any]:
    """The columns that all tests of a training share."""
    told, logged = training.last.results, quantities(training)
    seconds = [value for value in map(finite, told["epoch_seconds"]) if value is not None]
    split = "val" if logged.get("val/accuracy") else "train"
    accuracies = logged.get(f"{split}/accuracy", {})
    environment = {key: value for key, value in training.parts[0].environment.items() if key != "seed"}
    reached = [epoch for epoch, accuracy in accuracies.items() if reach is not None and accuracy >= reach]
    return {
        "config": cell.experiment.path,
        "dataset": cell.dataset,
        "method": cell.experiment.method,
        "network": cell.network.label,
        "network_args": json.dumps(cell.network_args),
        "norm": cell.norm.label,
        "norm_args": json.dumps(cell.norm_args),
        "seed": cell.seed,
        "reach": reach,
        "reach_split": split if reach is not None else "",
        "epochs_to_reach": min(reached) if reached else None,
        "epoch_seconds": statistics.median(seconds) if seconds else None,
        # Of a training in several parts the first ones are not known.
        "fit_seconds": finite(told["fit_seconds"]) if len(training.parts) == 1 else None,
        "continued": len(training.parts) - 1,
        "run": str(training.last.folder),
        "checkpoint": str(chosen_checkpoint(training)),
        "environment": markdown_text(", ".join(f"{key} {value}" for key, value in environment.items())),
    }


def _rows_of_test(cell: Cell, run: Run, training: dict[str, Any]) -> list[Row]:
    (result,) = run.results["results"]
    few_shot, kind = "ways" in result, unit_saved(run.folder)
    tested_id = str(result.get(f"{kind.units}_id", "")) if kind else ""
    _check(result, _WHOLE_OF_EPISODES if few_shot else ("images",))
    setting = f"{result['ways']}W{result['shots']}S" if few_shot else ""
    ends: dict[str, Any] = {
        f"{key}_{end}": finite(result[key][number]) if key in result else None
        for key in ("distance", "rms")
        for number, end in enumerate(("start", "end"))
    }
    rows = []
    for metric, names in METRICS.items():
        if metric not in result:
            continue
        place = {"dataset": cell.dataset, "network": cell.network.name, "norm": cell.norm.name}
        if few_shot:
            place |= {"setting": setting, "method": cell.experiment.method}
        figures = [find_paper_figure(metric=name, **place) for name in names]
        paper = next((figure for figure in figures if figure), None)
        rows.append(
            dict(
                **training,
                **ends,
                metric=metric,
                setting=setting,
                value=result[metric],
                ci95=result["ci95"] if metric == "accuracy" else None,
                tested=result["episodes"] if few_shot else result["images"],
                loss=result["loss"],
                paper=paper.value / 100 if paper and paper.value is not None else None,
                paper_note=paper.note if paper else "",
                test=str(run.folder),
                episodes=read_accuracies(run.folder, kind) if kind and tested_id and metric == "accuracy" else (),
                episode_set=tested_id,
            )
        )
    return rows


def _check(result: dict[str, Any], whole: Sequence[str]) -> None:
    """Refuse what cannot be computed with, or is text that would be shown."""
    for name in whole:
        value = result[name]
        ranged = name in _MAY_BE_RANGES and isinstance(value, str) and re.fullmatch("[0-9]+-[0-9]+", value)
        if type(value) is not int and not ranged:
            raise InputError(f"its {name} is {value!r}, not a whole number")
    for name in ("loss", "ci95", *(metric for metric in METRICS if metric in result)):
        value = result[name]
        known = type(value) in (int, float) and (name not in METRICS or finite(value) is not None)
        if not known and not (name == "ci95" and value is None):
            raise InputError(f"its {name} is {value!r}, not a number")
