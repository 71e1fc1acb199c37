"""The one error for input that a user can mend, and the sentence it uses for a misspelt name."""

import difflib
from collections.abc import Iterable
from numbers import Integral


class InputError(ValueError):
    """Something given by the user cannot work; the message says what was given and what would.

    The command line prints the message alone. A ``ValueError``, so that code which uses the
    layers without the command needs to know nothing of this class.
    """


def unknown_name(kind: str, name: object, known: Iterable[str]) -> InputError:
    """An :class:`InputError` that names ``name``, the nearest known name and all known ones."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InputError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names) or 'none'}.")


def require_positive(kind: str, **values: int) -> None:
    """Raise :class:`InputError` for the first of ``values`` that is not an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise InputError(f"{kind}: {name} must be an integer of at least 1, got {value!r}.")
