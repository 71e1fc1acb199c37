"""Run folders, ``<root>/<name>/version_<n>``: their names, and those of the files in them."""

import contextlib
import csv
import io
import itertools
import json
import math
import re
import secrets
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
import torch
from torch import Tensor, nn
from swbn_lightning.runs.checkpoint_content import plain_content
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import read_json
from swbn_lightning.files.writing import write_whole


RESULTS_FILE = "results.json"


CONFIG_FILE = "config.yaml"


# Beside the results of an evaluation: a copy of the configuration of the run whose checkpoint was evaluated.
TRAINING_FILE = "training.yaml"


# Beside the results of a test of episodes: a row an episode, with its accuracy.
EPISODES_FILE = "episodes.csv"


LAST_CHECKPOINT = "last.ckpt"  # of every epoch's end, whatever its accuracy


_VERSION = re.compile("version_[0-9]{1,9}")


def new_run_folder(root: str | Path, name: str) -> Path:
    """Make the next free ``version_<n>`` below ``root/name``, safe against a second run starting now."""
    base = Path(root) / name
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"no run folder can be made at {base}: {error.strerror or error}.") from error
    number = max((n for n, _ in _versions(base)), default=-1) + 1
    while True:
        folder = base / f"version_{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def run_versions(base: str | Path) -> list[Path]:
    """The ``version_<n>`` folders of a run's name, oldest first."""
    return [folder for _, folder in sorted(_versions(Path(base)))]


def write_results(folder: Path, results: dict[str, Any]) -> Path:
    """Write ``results.json`` whole or not at all."""
    return write_whole(folder / RESULTS_FILE, json.dumps(results, indent=2) + "\n")


def run_of(checkpoint: str | Path) -> Path | None:
    """``…/version_0`` of ``…/version_0/checkpoints/last.ckpt``; None for a file that lies elsewhere."""
    folder = Path(checkpoint).parent
    return folder.parent if folder.name == "checkpoints" else None


def _versions(base: Path) -> list[tuple[int, Path]]:
    # Other digits than these, as ², are no numbers, and of a very long one Python makes none.
    folders = (p for p in base.glob("version_*") if _VERSION.fullmatch(p.name) and p.is_dir())
    return [(int(p.name[8:]), p) for p in folders]


