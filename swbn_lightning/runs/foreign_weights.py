"""Weights of a network that was trained elsewhere: a file of tensors by names, which may be other names than ours."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from swbn_lightning.backbones.library import LibraryBackbone
from swbn_lightning.data.files import open_regular
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.runs.checkpoint_content import rebuilt
from swbn_lightning.runs.exported import is_exported, weights_in
from swbn_lightning.runs.torch_files import read_torch_file

Names = Mapping[str, str | None]
_MOST_SHOWN, _LONGEST = 3, 80  # names in a message, and letters of one
_MOST_PROPOSED = 8  # beginnings of names


@torch.no_grad()
def load_foreign(backbone: nn.Module, path: str | Path, names: Names) -> Path:
    """Load a state dict of another program into a backbone.

    Args:
        backbone: in place. A library's network has the library's own names.
        path: a file of ``torch.save`` (``.pt``, ``.pth``, …), read as every checkpoint is, or of safetensors. It holds
            tensors by name, or mappings of such as ``{"state_dict": …}``. Of several mappings the names begin with
            their keys: ``model.`` and ``model_ema.``.
        names: what stands for the beginning of a name: ``{"module.encoder.": ""}``. None leaves those weights out:
            ``{"fc.": None}``. The longest beginning that fits counts; a name that none fits stays as it is.

    Returns:
        The file.

    Raises:
        InputError: no such file, or none of weights; a beginning that no name has; weights that are missing, left over,
            or of another shape.
    """
    file = Path(path).expanduser()
    network = backbone.network if isinstance(backbone, LibraryBackbone) else backbone
    given = read_weights(file)
    for begin in names:
        if not any(name.startswith(begin) for name in given):
            problem = f"no name in it begins with {begin!r}, but {_some(given)} are there"
            raise _misfit(file, names, problem, _proposed(given, network))
    taken, left_out = _renamed(file, given, names)
    try:
        missing, foreign = network.load_state_dict(taken, strict=False)
    except RuntimeError as error:
        reason = printable(" ".join(str(error).split()))
        raise _misfit(file, names, f"{reason[:300]}{'…' if len(reason) > 300 else ''}", None) from error
    if missing or foreign:
        lacks = [f"lacks {_some(missing)}"] if missing else []
        more = [f"has {_some(foreign)}, which {type(network).__name__} does not know"] if foreign else []
        raise _misfit(file, names, f"it {' and '.join(lacks + more)}", _proposed(given, network))
    if left_out:
        rank_zero_info(f"{printable(file)}: backbone_names leave out {_some(left_out)}")
    return file


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors in a file by their names, on the CPU; as :func:`load_foreign`."""
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise InputError(f"{file} {problem}; with backbone_names give a .pt, .pth or .safetensors file.")
    if is_exported(file):
        with open_regular(file) as opened:
            return weights_in(opened.read(), file)
    content = rebuilt(read_torch_file(file), str(file))
    inner = {key: own for key, own in content.items() if _are_weights(own)} if isinstance(content, dict) else {}
    if not inner and isinstance(content, dict):
        inner = {"": {name: value for name, value in content.items() if isinstance(value, Tensor)}}
    single = len(inner) == 1
    found = {name if single else f"{key}.{name}": value for key, own in inner.items() for name, value in own.items()}
    if not _are_weights(found):
        raise InputError(f"{file} holds no weights: neither tensors by name, nor a mapping of them as 'state_dict'.")
    return found


def _are_weights(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(name, str) and isinstance(own, Tensor) for name, own in value.items())
    )


def _renamed(file: Path, given: Mapping[str, Tensor], names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """The weights by their new names, and the names of those that are left out."""
    taken: dict[str, Tensor] = {}
    left_out = []
    for name, value in given.items():
        begin = max((begin for begin in names if name.startswith(begin)), key=len, default="")
        stands = names.get(begin, "")
        if stands is None:
            left_out.append(name)
            continue
        new = stands + name.removeprefix(begin)
        if new in taken:
            raise _misfit(file, names, f"two of its weights would be {printable(new)[:_LONGEST]}", None)
        taken[new] = value
    return taken, left_out


def _proposed(given: Iterable[str], network: nn.Module) -> dict[str, str | None] | None:
    """Names that would fit, if all weights are there behind a common beginning; None if they are not."""
    wanted, there = [name for name, _ in network.named_parameters()], set(given)
    longest = max(wanted, key=len, default="")
    begins = sorted({name.removesuffix(longest) for name in there if name.endswith(longest)}, key=len)
    begin = next((begin for begin in begins if all(begin + name in there for name in wanted)), None)
    if begin is None:
        return None
    layers = {begin + name.rpartition(".")[0] for name in network.state_dict()}
    rest = sorted(name for name in there if name.rpartition(".")[0] not in layers)
    ours = {part for name in there - set(rest) for part in _beginnings(name)}
    found: dict[str, str | None] = {begin: ""} if begin else {}
    for name in rest:
        found.setdefault(next((part for part in _beginnings(name) if part not in ours), name), None)
    return found if len(found) <= _MOST_PROPOSED and max(map(len, found), default=0) <= _LONGEST else None


def _beginnings(name: str) -> Iterator[str]:
    """``a.`` and ``a.b.`` of ``a.b.weight``."""
    parts = name.split(".")
    return (".".join([*parts[:number], ""]) for number in range(1, len(parts)))


def _misfit(file: Path, names: Names, problem: str, proposed: Names | None) -> InputError:
    hint = "" if proposed is None else f" Its names fit with --model.backbone_names '{json.dumps(dict(proposed))}'."
    given = printable(json.dumps(dict(names)))
    return InputError(f"{printable(file)} does not fit with backbone_names {given}: {problem}.{printable(hint)}")


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many there are."""
    found = [printable(name)[:_LONGEST] for name in names]
    shown = ", ".join(found[:_MOST_SHOWN])
    return shown if len(found) <= _MOST_SHOWN else f"{shown}, … ({len(found)} in all)"
