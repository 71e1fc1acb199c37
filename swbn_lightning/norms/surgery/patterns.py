"""Choose layers by shell patterns of their names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from swbn_lightning.errors import InputError

_Layer = TypeVar("_Layer")


def fits(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether one of a layer's ``names`` matches one of ``patterns`` (``"layer1.*"``)."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def chosen(
    kind: str, layers: Mapping[_Layer, Sequence[str]], include: str | Sequence[str], exclude: str | Sequence[str]
) -> dict[_Layer, str]:
    """Return the layers that one of ``include`` matches and none of ``exclude``, each with its first name.

    Args:
        kind: of the layers, for messages.
        layers: maps a layer to all of its names.
        include: a pattern or several; a layer must match one with one of its names.
        exclude: a pattern or several of layers to leave out.

    Raises:
        InputError: a pattern matches no layer, or no layer is left.
    """
    include, exclude = as_patterns(include), as_patterns(exclude)
    check_patterns(kind, [name for names in layers.values() for name in names], [*include, *exclude])
    found = {m: names[0] for m, names in layers.items() if fits(names, include) and not fits(names, exclude)}
    if not found:
        raise InputError(f"{list(include)} without {list(exclude)} leaves no {kind}.")
    return found


def as_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def check_patterns(kind: str, names: Collection[str], patterns: Iterable[str]) -> None:
    """Raise :class:`InputError` for a pattern that matches none of ``names``; ``kind`` names the kind of layer."""
    for pattern in patterns:
        if not fits(names, [pattern]):
            raise InputError(f"no {kind} fits {pattern!r}; the model's: {', '.join(names) or 'none'}.")
