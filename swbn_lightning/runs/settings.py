"""Which settings make two trainings different ones: the one list, for all that compares runs."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ABSENT = "(not there)"
SEED = "seed_everything"
#: Settings, with all below them, in which trainings may differ and still be the same one with other seeds: where the
#: run and its files are, what it went on from or tested, what only a test uses, and what is only shown.
NEVER_DIFFERENT = (
    SEED, "run", "config", "trainer.default_root_dir", "trainer.logger", "data.init_args.root", "data.init_args.cache",
    "data.init_args.cache_dir", "ckpt_path", "weights_only", "data.init_args.test", "data.init_args.test_episodes",
    "trainer.enable_progress_bar", "trainer.enable_model_summary",
)  # fmt: skip
_FOLDERS = ("dirpath", "save_dir")  # of any callback or logger


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those by which a training is told from others; one that is null or ``{}`` is as one that is not there.

    Checkpoints and exports carry them. So of a whole path only the last part is named; a digest stands for the rest.
    """
    counting = {key: value for key, value in settings.items() if value is not None and value != {} and _counts(key)}
    return {key: _without_folders(value) if isinstance(value, str) else value for key, value in counting.items()}


def _without_folders(value: str) -> str:
    path = Path(value)
    if not (path.is_absolute() or value.startswith("~")):
        return value
    return f"…/{path.name} (folder {hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]})"


def group_key(settings: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Equal for settings between which there are no :func:`differences`."""
    return frozenset((key, f"{type(value).__name__} {value!r}") for key, value in compared(settings).items())


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that count and are not the same everywhere, with their values side by side.

    By type too: 1 and True, and 1 and 1.0, are equal in Python. Nothing is equal to nothing, and NaN to NaN.
    """
    columns = [compared(own) for own in settings]
    keys = dict.fromkeys(key for own in columns for key in own)
    found = {key: [own.get(key, ABSENT) for own in columns] for key in keys}
    return {key: values for key, values in found.items() if len({(type(v), repr(v)) for v in values}) > 1}


def _counts(key: str) -> bool:
    if key.rpartition(".")[2] in _FOLDERS:
        return False
    return not any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in NEVER_DIFFERENT)
