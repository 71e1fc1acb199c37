"""Run folders, ``<root>/<name>/version_<n>``: their names, and those of the files in them."""

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.writing import write_output

RUN_FILE = "run.json"  # which run it is: docs/report.md
RESULTS_FILE = "results.json"
CONFIG_FILE = "config.yaml"  # for people, and for `--config`
METRICS_FILE = "metrics.csv"
EPISODES_FILE = "episodes.csv"  # of a test of episodes: a row an episode, with its accuracy
IMAGES_FILE = "images.csv"  # of a test of a classifier: a row an image, with its class and the predicted one
CLASSES_FILE = "classes.csv"  # of a test: a row a class, with its accuracy
CONFUSION_FILE = "confusion.csv"  # of a test: a row for each pair of a class and a predicted one that occurred
PREDICTIONS_FILE = "predictions.csv"  # of predict: a row an image
LAST_CHECKPOINT = "last.ckpt"  # of every epoch's end, whatever its accuracy
_VERSION = re.compile("version_[0-9]{1,9}")


def new_run_folder(root: str | Path, name: str) -> Path:
    """Make the next free ``version_<n>`` below ``root/name``, safe against a second run starting now."""
    base = Path(root) / name
    try:
        base.mkdir(parents=True, exist_ok=True)
        number = max((_number(folder) for folder in run_versions(base)), default=-1) + 1
        while True:
            folder = base / f"version_{number}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
            number += 1
    except OSError as error:
        raise InputError(f"no run folder can be made at {base}: {error.strerror or error}.") from error


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run's folder in whose ``checkpoints/`` a file lies; None for a file by itself."""
    path = checkpoint if checkpoint.parent.name else checkpoint.absolute()
    return path.parent.parent if path.parent.name == "checkpoints" else None


def run_versions(base: str | Path) -> list[Path]:
    """The ``version_<n>`` folders of a run's name, oldest first."""
    # Other digits than these, as ², are no numbers, and of a very long one Python makes none.
    folders = (p for p in Path(base).glob("version_*") if _VERSION.fullmatch(p.name) and p.is_dir())
    return sorted(folders, key=_number)


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write ``run.json`` or ``results.json`` whole or not at all, and make the run's folder."""
    return write_output(path, json.dumps(content, indent=2) + "\n")


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("version_"))
