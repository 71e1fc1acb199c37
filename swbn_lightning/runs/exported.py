"""A published model: one folder with weights as safetensors, settings as plain JSON, and a card. Nothing in it runs."""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from swbn_lightning.data.files import open_regular
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import plain_mapping, printable, read_json
from swbn_lightning.files.writing import write_whole

WEIGHTS_FILE, SETTINGS_FILE = "model.safetensors", "config.json"
README_FILE = "README.md"  # what model hubs show
FORMAT = "swbn_lightning export 1"
_SUMS = "sha256"
#: What is taken over from a checkpoint beside its weights.
KEPT = ("model_class", "hyper_parameters", "data", "run", "epoch", "global_step")
_MOST = 1_000_000  # values in the settings, names of classes among them


def write_exported(checkpoint: Mapping[str, Any], card: str, folder: Path) -> None:
    """Write the three files of a checkpoint, each whole or not at all.

    Args:
        checkpoint: as :func:`~swbn_lightning.runs.checkpoints.read_checkpoint` gives it.
        card: the text of the card.
        folder: made if it is not there.

    Raises:
        InputError: a state that is more than tensors, settings that JSON cannot hold, or a file that cannot be written.
    """
    state = checkpoint["state_dict"]
    if other := next((name for name, value in state.items() if not isinstance(value, Tensor)), None):
        raise InputError(f"{printable(other)} of the state is no tensor, and an export holds tensors only.")
    # Copies: safetensors wants whole tensors, none of which shares memory with another.
    weights = safetensors.torch.save({name: value.contiguous().clone() for name, value in state.items()})
    try:
        settings = json.loads(json.dumps({key: checkpoint[key] for key in KEPT if key in checkpoint}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"the checkpoint's settings cannot be written as JSON: {error}.") from error
    settings = {"format": FORMAT, **settings}
    settings[_SUMS] = {WEIGHTS_FILE: hashlib.sha256(weights).hexdigest(), SETTINGS_FILE: _sum(settings)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / WEIGHTS_FILE, weights)
        write_whole(folder / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
        write_whole(folder / README_FILE, card)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}.") from error


def read_exported(weights: Path) -> dict[str, Any]:
    """What an export holds, as a checkpoint without the state of a training.

    Links are followed: hubs keep downloaded files behind them.

    Args:
        weights: path of the file with the weights; the settings are beside it.

    Raises:
        InputError: not an export, or one of whose files is not as it was written.
    """
    settings = read_json(weights.with_name(SETTINGS_FILE), _MOST, link=True)
    if settings.get("format") != FORMAT:
        raise InputError(
            f"{weights.parent} is not an export of this version: the 'format' in {SETTINGS_FILE} is "
            f"{printable(settings.get('format'))[:80]!r}, not {FORMAT!r}. `swbn export` writes one."
        )
    sums = settings.pop(_SUMS, None)
    with open_regular(weights) as file:
        content = file.read()
    found = {WEIGHTS_FILE: hashlib.sha256(content).hexdigest(), SETTINGS_FILE: _sum(settings)}
    for name in found:
        if not isinstance(sums, dict) or sums.get(name) != found[name]:
            raise InputError(f"{weights.with_name(name)} is not as it was exported: its checksum is another one.")
    state = weights_in(content, weights)
    kept = {key: settings[key] for key in KEPT if key in settings}
    return {"state_dict": state, "pytorch-lightning_version": version("pytorch-lightning"), **kept}


def weights_in(content: bytes, source: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by their names; :class:`InputError` naming the ``source`` if it is none."""
    try:
        return safetensors.torch.load(content)
    except Exception as error:  # the library's own, and torch's
        raise InputError(f"{source} holds no weights that can be read ({error}).") from error


def is_exported(path: Path) -> bool:
    """Whether a file is meant as the weights of an export."""
    return path.suffix == ".safetensors"


def _sum(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain_mapping(dict(settings), _MOST), sort_keys=True).encode()).hexdigest()
