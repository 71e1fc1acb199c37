"""Checkpoints, of runs and exported ones: which one a path means, the best of several, what is taken out of one."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import read_json
from swbn_lightning.runs.checkpoint_content import plain_content
from swbn_lightning.runs.exported import WEIGHTS_FILE, is_exported, read_exported
from swbn_lightning.runs.folders import LAST_CHECKPOINT, RESULTS_FILE, run_versions
from swbn_lightning.runs.torch_files import read_torch_file


def find_checkpoint(path: str | Path, prefer: str = "best") -> Path:
    """The checkpoint that ``path`` means: a file, a run folder (``runs/name`` or one of its versions), or an export.

    Args:
        path: of a run's name the newest version with a checkpoint is taken.
        prefer: in a run's folder, ``"best"`` (by validation; of a run without validation the last) or ``"last"`` (to
            go on training).

    Raises:
        InputError: nothing there, a folder without a finished run, or a file that is not a checkpoint.
    """
    path = Path(path).expanduser()
    if path.is_file():
        read_checkpoint(path)
        return path
    if not path.exists():
        raise InputError(f"checkpoint {path} does not exist; give a .ckpt file or a run folder as runs/NAME.")
    if (path / WEIGHTS_FILE).exists():  # of `swbn export`
        read_checkpoint(path / WEIGHTS_FILE)
        return path / WEIGHTS_FILE
    for folder in [path, *reversed(run_versions(path))]:
        found = _checkpoint_of(folder, prefer)
        if found is not None:
            read_checkpoint(found)
            return found
    raise InputError(
        f"{path} holds no {prefer} checkpoint: looked for checkpoints/ and {RESULTS_FILE} there and in its "
        "version_* folders. Has `swbn fit` finished an epoch?"
    )


def load_backbone(backbone: nn.Module, path: str | Path, names: Mapping[str, str | None] | None = None) -> Path:
    """Load the backbone of a checkpoint, whatever it was trained for: weights and statistics of its norms.

    A BatchNorm's state also loads into a whitening layer in its place, which then starts from W the identity (or what
    stands for it).

    Args:
        backbone: in place.
        path: as :func:`find_checkpoint`; with ``names``, a file of weights.
        names: for weights that no model of this package wrote
            (:func:`~swbn_lightning.runs.foreign_weights.load_foreign`).

    Returns:
        The checkpoint file.

    Raises:
        InputError: as :func:`find_checkpoint`; a checkpoint without a backbone, or with another one.
    """
    if names is not None:
        from swbn_lightning.runs.foreign_weights import load_foreign  # Lightning, which `swbn compare` does without

        return load_foreign(backbone, path, names)
    file = find_checkpoint(path)
    content = read_checkpoint(file)
    prefix = "backbone."
    state = {key.removeprefix(prefix): v for key, v in content["state_dict"].items() if key.startswith(prefix)}
    if not state:
        raise InputError(
            f"{file} holds no backbone: none of its weights is named {prefix}…. Weights from elsewhere need "
            "--model.backbone_names, which says what stands for the beginnings of their names."
        )
    try:
        backbone.load_state_dict(state)
    except RuntimeError as error:  # lists all that does not fit
        settings = content.get("hyper_parameters", {})
        made = ", ".join(f"{key}={settings[key]!r}" for key in ("backbone", "norm", "backbone_args") if key in settings)
        reason = " ".join(str(error).split())
        raise InputError(
            f"the backbone in {file} ({made or 'its settings were not saved'}) is not this one: give "
            f"its settings. {reason[:300]}{'…' if len(reason) > 300 else ''}"
        ) from error
    return file


def read_checkpoint(path: str | Path, forget_files: bool = True, mmap: bool = True) -> dict[str, Any]:
    """What a checkpoint holds: tensors (on the CPU), plain values and containers of them.

    An export (:func:`~swbn_lightning.runs.exported.read_exported`) is a checkpoint without the state of its training.

    Args:
        path: of the file.
        forget_files: as :func:`~swbn_lightning.runs.checkpoint_content.plain_content`.
        mmap: as :func:`~swbn_lightning.runs.torch_files.read_torch_file`.

    Raises:
        InputError: not a regular file, not a checkpoint, packed (it could unpack to any size), or one that names code.
    """
    if is_exported(Path(path)):
        return plain_content(read_exported(Path(path)), str(path), forget_files)
    return plain_content(read_torch_file(path, mmap), str(path), forget_files)


def saved_score(path: Path) -> tuple[float, int]:
    """What was monitored when a checkpoint was saved (more is better; -inf for nothing), and the steps until then."""
    checkpoint = read_checkpoint(path, forget_files=False)
    callbacks, steps = checkpoint.get("callbacks"), checkpoint.get("global_step")
    score = -math.inf
    for key, state in callbacks.items() if isinstance(callbacks, dict) else ():
        scores = state.get("best_k_models") if isinstance(state, dict) else None
        for name, value in scores.items() if isinstance(scores, dict) else ():
            # By its name: the folder may have been moved.
            if isinstance(name, str) and Path(name).name == path.name and isinstance(value, Tensor):
                own = float(value) if value.numel() == 1 else math.nan
                score = max(score, -own if "'mode': 'min'" in str(key) else own)
    return score, steps if type(steps) is int else -1


def best_checkpoint(folder: Path) -> Path | None:
    """The best of the checkpoint files in a folder, by the score with which each was saved; of equals the newer.

    One without a score, as every epoch's last, is taken only where there is nothing else: then the most trained.
    """
    return _choose(folder, lambda score, steps: (score, steps))


def _choose(folder: Path, key: Callable[[float, int], Any]) -> Path | None:
    """The checkpoint file with the highest key of its score and its steps."""
    files = [path for path in folder.glob("*.ckpt") if path.is_file()]
    return max(files, key=lambda path: key(*saved_score(path)), default=None)


def _checkpoint_of(folder: Path, prefer: str) -> Path | None:
    checkpoints = folder / "checkpoints"
    last = checkpoints / LAST_CHECKPOINT
    if prefer == "last":
        # A full disk can have left the best one only.
        return last if last.is_file() else _choose(checkpoints, lambda score, steps: steps)
    if (folder / RESULTS_FILE).exists():
        best = read_json(folder / RESULTS_FILE).get("best_checkpoint")
        found = folder / best if isinstance(best, str) and best else None
        if found is not None and found.is_file() and found.resolve().is_relative_to(folder.resolve()):
            return found
    return best_checkpoint(checkpoints)  # a killed run, or its best one was lost
