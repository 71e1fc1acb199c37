"""What a checkpoint file holds, rebuilt of plain containers before anybody looks into it."""

from collections import OrderedDict
from typing import Any

from packaging.version import InvalidVersion, Version

from swbn_lightning.errors import InputError

_KINDS: dict[str, type] = {
    "state_dict": dict,
    "hyper_parameters": dict,
    "callbacks": dict,
    "loops": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
}
# By these keys a ModelCheckpoint remembers files, which it would remove as better ones come.
_FILES = {"best_model_path", "best_k_models", "kth_best_model_path", "last_model_path"}


def plain_content(content: Any, source: str, forget_files: bool = True) -> dict[str, Any]:
    """The content of a checkpoint with exact dicts and lists in the place of all others.

    Even with ``weights_only`` a file can make an ``OrderedDict`` whose own attribute stands for ``items``, so that it
    shows other content to those who look by that than to those who do not.

    Args:
        content: as ``torch.load`` gave it.
        source: the file, for messages.
        forget_files: let no ``ModelCheckpoint`` remember a file, which it would remove as better ones come: the part of
            a training after an interruption counts its best anew.

    Raises:
        InputError: not a checkpoint, or one whose parts are of other kinds than Lightning's.
    """
    found = rebuilt(content, source)
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise InputError(
            f"{source} is not a checkpoint of this package: it has no 'state_dict'. Weights of a backbone from "
            "elsewhere come in by --model.backbone_checkpoint with --model.backbone_names."
        )
    for key, kind in _KINDS.items():
        if key in found and type(found[key]) is not kind:
            raise InputError(f"{source} is not a checkpoint: its {key!r} is a {type(found[key]).__name__}.")
    try:
        Version(found.get("pytorch-lightning_version", "2.6"))
    except InvalidVersion as error:
        raise InputError(f"{source} is not a checkpoint: its version of Lightning is none.") from error
    if any(type(name) is not str for name in found["state_dict"]):
        raise InputError(f"{source} is not a checkpoint: its 'state_dict' names a weight by no text.")
    found["state_dict"] = _with_versions(found["state_dict"], content["state_dict"])
    for key, state in found.get("callbacks", {}).items() if forget_files else ():
        if isinstance(state, dict) and _FILES & state.keys():
            others = {name: value for name, value in state.items() if name not in _FILES}  # a subclass may have some
            found["callbacks"][key] = {**others, "best_model_path": "", "best_model_score": None, "dirpath": ""}
    return found


def rebuilt(content: Any, source: str) -> Any:
    """What a file holds, with exact dicts and lists in the place of all others; as :func:`plain_content`."""
    try:
        return _rebuilt(content, {})
    except RecursionError as error:
        raise InputError(f"{source} is not a readable checkpoint (its content is nested too deeply).") from error


def _rebuilt(value: Any, made: dict[int, Any]) -> Any:
    """A copy of the containers; what was shared is shared again, so that a small file stays small."""
    if id(value) in made:
        return made[id(value)][0]
    if isinstance(value, dict):
        copy: Any = {}
        made[id(value)] = copy, value  # held, so that no other gets its id
        copy.update((_rebuilt(key, made), _rebuilt(inner, made)) for key, inner in dict.items(value))
        return copy
    if isinstance(value, list):
        copy = []
        made[id(value)] = copy, value
        copy.extend(_rebuilt(inner, made) for inner in list.__iter__(value))
        return copy
    if isinstance(value, tuple):
        copy = tuple(_rebuilt(inner, made) for inner in tuple.__iter__(value))
        made[id(value)] = copy, value
        return copy
    return value


def _with_versions(state: dict[str, Any], given: Any) -> dict[str, Any]:
    """The versions of the layers that wrote their state, which ``state_dict`` carries as an attribute."""
    versions = getattr(given, "__dict__", {}).get("_metadata")
    if not isinstance(versions, dict):
        return state
    ordered: OrderedDict[str, Any] = OrderedDict(state)
    ordered._metadata = _rebuilt(versions, {})  # type: ignore[attr-defined]
    return ordered
