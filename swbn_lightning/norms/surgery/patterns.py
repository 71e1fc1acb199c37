"""Choose layers by shell patterns of their names."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from swbn_lightning.errors import InputError


def fits(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether one of a layer's ``names`` matches one of ``patterns`` (``"layer1.*"``)."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def as_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def check_patterns(kind: str, names: Collection[str], patterns: Iterable[str]) -> None:
    """Raise :class:`InputError` for a pattern that matches none of ``names``; ``kind`` names the kind of layer."""
    for pattern in patterns:
        if not fits(names, [pattern]):
            raise InputError(f"no {kind} fits {pattern!r}; the model's: {', '.join(names) or 'none'}.")
