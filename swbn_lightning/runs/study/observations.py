"""What the runs of a study measured, one row a training seed, test and metric."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import finite, has_file, reading
from swbn_lightning.files.writing import csv_text
from swbn_lightning.runs.episodes import read_episodes
from swbn_lightning.runs.folders import METRICS_FILE, RESULTS_FILE
from swbn_lightning.runs.measured import Series, joined, read_metrics
from swbn_lightning.runs.paper import PaperFigure, find_paper_figure
from swbn_lightning.runs.read import Run, Training
from swbn_lightning.runs.study.cells import Cell
from swbn_lightning.runs.study.running import chosen_checkpoint, finished_test, finished_training

# Of a test's results: the metric's name here, and in the paper's tables.
METRICS = {"accuracy": ("accuracy", ("accuracy", "top1")), "top5": ("top5", ("top5",))}
_WHOLE_OF_EPISODES = ("ways", "shots", "queries", "episodes", "seed")


@dataclass(frozen=True)
class Observation:
    """One figure of one test, with the settings it depends on and what its training told. Accuracies are fractions.

    ``docs/studies.md`` says what each column means.
    """

    config: str
    dataset: str
    method: str
    network: str
    network_args: str
    norm: str
    norm_args: str
    seed: int
    metric: str
    setting: str
    value: float
    ci95: float | None
    tested: int
    loss: float
    paper: float | None
    paper_note: str
    reach: float | None
    reach_split: str
    epochs_to_reach: int | None
    epoch_seconds: float | None
    paper_epoch_seconds: float | None
    fit_seconds: float | None
    continued: int
    distance_start: float | None
    distance_end: float | None
    rms_start: float | None
    rms_end: float | None
    run: str
    test: str
    checkpoint: str
    # Not in the file: the accuracy of every test episode, and which episodes they are.
    episodes: tuple[float, ...] = field(default=(), repr=False)
    episode_set: tuple[Any, ...] = ()


COLUMNS = tuple(f.name for f in dataclasses.fields(Observation) if f.name not in ("episodes", "episode_set"))


def observe(cell: Cell, reach: float | None) -> list[Observation]:
    """All figures of a cell's tests that are done.

    Args:
        cell: what.
        reach: the accuracy to which epochs are counted, a fraction; None for none.

    Raises:
        InputError: a file that is not what a run writes.
    """
    training = finished_training(cell)
    if training is None:
        return []
    with reading(training.last.folder / RESULTS_FILE):
        columns = _columns(cell, training, reach)
    rows = []
    for run in (finished_test(cell, test) for test in cell.tests):
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


def as_csv(rows: list[Observation]) -> str:
    """A header and a line an observation; None is an empty cell."""
    return csv_text(COLUMNS, ([getattr(row, name) for name in COLUMNS] for row in rows))


def _columns(cell: Cell, training: Training, reach: float | None) -> dict[str, Any]:
    """The columns that all tests of a training share."""
    told, logged = training.last.results, quantities(training)
    seconds = [value for value in map(finite, told["epoch_seconds"]) if value is not None]
    time = _paper_figure(cell, "epoch_time")
    split = "val" if logged.get("val/accuracy") else "train"
    accuracies = logged.get(f"{split}/accuracy", {})
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
        "paper_epoch_seconds": _seconds(time) if time else None,
        # Of a training in several parts the first ones are not known.
        "fit_seconds": finite(told["fit_seconds"]) if len(training.parts) == 1 else None,
        "continued": len(training.parts) - 1,
        "run": str(training.last.folder),
        "checkpoint": str(chosen_checkpoint(training)),
    }


def _rows_of_test(cell: Cell, run: Run, training: dict[str, Any]) -> list[Observation]:
    (result,) = run.results["results"]
    few_shot = "ways" in result
    _check(result, _WHOLE_OF_EPISODES if few_shot else ("images",))
    setting = f"{result['ways']}W{result['shots']}S" if few_shot else ""
    ends: dict[str, Any] = {
        f"{key}_{end}": finite(result[key][number]) if key in result else None
        for key in ("distance", "rms")
        for number, end in enumerate(("start", "end"))
    }
    rows = []
    for metric, (key, names) in METRICS.items():
        if key not in result:
            continue
        if finite(result[key]) is None:
            raise InputError(f"its {key} is {result[key]!r}, not a number")
        columns = {"setting": setting, "method": cell.experiment.method} if few_shot else {}
        found = [figure for name in names if (figure := _paper_figure(cell, name, **columns))]
        value = found[0].value if found else None
        rows.append(
            Observation(
                **training,
                **ends,
                metric=metric,
                setting=setting,
                value=result[key],
                ci95=result["ci95"] if metric == "accuracy" else None,
                tested=result["episodes"] if few_shot else result["images"],
                loss=result["loss"],
                paper=value / 100 if value is not None else None,
                paper_note=found[0].note if found else "",
                test=str(run.folder),
                episodes=read_episodes(run.folder) if few_shot and metric == "accuracy" else (),
                episode_set=tuple(result[name] for name in ("seed", "ways", "shots", "queries")) if few_shot else (),
            )
        )
    return rows


def _check(result: dict[str, Any], whole: Sequence[str]) -> None:
    """Refuse what cannot be computed with, or is text that would be shown."""
    for name in whole:
        if type(result[name]) is not int:
            raise InputError(f"its {name} is {result[name]!r}, not a whole number")
    for name in ("loss", "ci95"):
        value = result[name]
        if type(value) not in (int, float) and not (name == "ci95" and value is None):
            raise InputError(f"its {name} is {value!r}, not a number")


def _paper_figure(cell: Cell, metric: str, **columns: str) -> PaperFigure | None:
    place = {"dataset": cell.dataset, "network": cell.network.name, "norm": cell.norm.name}
    return find_paper_figure(metric=metric, **place, **columns)


def _seconds(figure: PaperFigure) -> float:
    return (figure.value or 0.0) * {"s": 1, "min": 60}[figure.unit]
