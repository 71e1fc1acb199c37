"""The one error for input that a user can mend, and the sentence it uses for a misspelt name."""

import difflib
import itertools
import math
from collections.abc import Iterable
from numbers import Integral, Real


class InputError(ValueError):
    """Something given by the user cannot work; the message says what was given and what would.

    The command line prints only the message. A ``ValueError``, so that code which uses the
    layers without the command needs to know nothing of this class.
    """


def unknown_name(kind: str, name: object, known: Iterable[str]) -> InputError:
    """An :class:`InputError` that names ``name``, the nearest known name and all known ones."""
    names = sorted(known)
    given = str(name).lower()

    def nearness(candidate: str) -> tuple[float, int]:  # of two that are equally near, the one that begins alike
        ratio = difflib.SequenceMatcher(None, candidate, given).ratio()
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(candidate, given, strict=False))
        return ratio, len(list(alike))

    near = max(names, key=nearness, default="")
    hint = f"; did you mean {near!r}?" if near and nearness(near)[0] >= 0.5 else "."
    return InputError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names) or 'none'}.")


def require_not_negative(kind: str, **values: int | None) -> None:
    """Raise :class:`InputError` where one of ``values`` is below 0; None is one that is not given."""
    if any(value is not None and value < 0 for value in values.values()):
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise InputError(f"{kind}: {' and '.join(values)} must not be negative, got {shown}.")


def require_positive(kind: str, **values: int) -> None:
    """Raise :class:`InputError` for the first of ``values`` that is not an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise InputError(f"{kind}: {name} must be an integer of at least 1, got {value!r}.")


def require_positive_number(kind: str, **values: float) -> None:
    """Raise :class:`InputError` for the first of ``values`` that is not a positive and finite number."""
    for name, value in values.items():
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < math.inf:
            raise InputError(f"{name} of {kind} must be positive and finite, got {value!r}.")


def require_flag(kind: str, **values: bool) -> None:
    """Raise :class:`InputError` for the first of ``values`` that is neither true nor false."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InputError(f"{kind}: {name} must be true or false, got {value!r}.")
