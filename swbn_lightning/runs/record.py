"""The part of ``run.json`` that says which run it is, and that its checkpoints carry."""

import contextlib
import os
import platform
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import plain_mapping, read_json
from swbn_lightning.runs.checkpoints import read_checkpoint
from swbn_lightning.runs.folders import RUN_FILE, run_folder_of
from swbn_lightning.runs.settings import SEED, compared

KEY = "run"  # of a checkpoint
_ID = re.compile("[0-9a-f]{16}")
_MOST_SETTINGS, _LONGEST_NAME = 20_000, 1_000


@dataclass(frozen=True)
class Record:
    """Which training it was."""

    id: str  # made at random when the run began
    started: str | None
    settings: dict[str, Any]  # flat; those that count in a comparison, and the seed

    def plain(self) -> dict[str, Any]:
        """For a file."""
        return {"id": self.id, "started": self.started, "settings": self.settings}

    @classmethod
    def of(cls, content: Any) -> "Record | None":
        """What a file says, which may be anybody's; None where it has no id."""
        if not isinstance(content, Mapping) or (own := known_id(content.get("id"))) is None:
            return None
        return cls(own, _text(content.get("started")), plain_settings(content.get("settings")))


def new_id() -> str:
    """For a new run: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def known_id(value: Any) -> str | None:
    """An id, if it is one."""
    return value if isinstance(value, str) and _ID.fullmatch(value) else None


def now() -> str:
    """The time as runs write it down."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def moment(text: Any) -> datetime | None:
    """A time that a run wrote down; None for anything else."""
    with contextlib.suppress(TypeError, ValueError):
        found = datetime.fromisoformat(text)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    return None


def environment(*packages: str) -> dict[str, Any]:
    """What figures depend on besides code and settings: device, versions of Python, torch and the packages named."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {"device": device, "Python": platform.python_version(), **{p: version(p) for p in ("torch", *packages)}}


def plain_settings(content: Any) -> dict[str, Any]:
    """Flat settings out of a file; empty where they are none, or more than a run has."""
    if not isinstance(content, Mapping):
        return {}
    try:
        found = plain_mapping(dict(content), _MOST_SETTINGS)
    except InputError:
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str) and len(key) <= _LONGEST_NAME}


def to_keep(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run's checkpoints carry: without names of folders and files."""
    return {**({SEED: settings[SEED]} if SEED in settings else {}), **compared(settings)}


def record_of(checkpoint: str | Path) -> Record | None:
    """The run that made a checkpoint: as it says itself or, where it says nothing, the run in whose folder it lies."""
    path = Path(checkpoint)
    with contextlib.suppress(InputError):
        if found := Record.of(read_checkpoint(path).get(KEY)):
            return found
    with contextlib.suppress(InputError):  # of weights only, or in many files
        folder = run_folder_of(path)
        found = Record.of(read_json(folder / RUN_FILE)) if folder else None
        return Record(found.id, found.started, to_keep(found.settings)) if found else None
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and moment(value) else None
