"""Nested settings as flat ones with dotted keys, and what differs between several."""

from collections.abc import Mapping, Sequence
from typing import Any

from swbn_lightning.errors import InputError

ABSENT = "(not there)"
# More than any configuration has: a small file can expand to billions by references to itself.
_DEEPEST = 40
_MOST = 20_000


def flatten(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; an empty mapping and a list of plain values stand as values.

    Raises:
        InputError: nested more deeply than 40 levels, or more than 20,000 values.
    """
    flat: dict[str, Any] = {}
    _flatten(settings, "", 0, flat)
    return flat


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys that have not the same value everywhere, with their values side by side; :data:`ABSENT` for none."""
    keys = dict.fromkeys(key for own in settings for key in own)
    columns = {key: [own.get(key, ABSENT) for own in settings] for key in keys}
    # Nothing, where others have something below it: the lines of what is below say so.
    nothing = [key for key, values in columns.items() if all(v in (None, {}, ABSENT) for v in values)]
    for key in nothing:
        if any(other.startswith(f"{key}.") for other in keys):
            del columns[key]
    # By type too: 1 and True, and 1 and 1.0, are equal in Python.
    return {key: values for key, values in columns.items() if len({(type(v), repr(v)) for v in values}) > 1}


def _flatten(value: Any, key: str, depth: int, flat: dict[str, Any]) -> None:
    if depth > _DEEPEST or len(flat) > _MOST:
        raise InputError(f"its settings are nested more than {_DEEPEST} deep or more than {_MOST} in number")
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            _flatten(part, f"{key}.{name}" if key else str(name), depth + 1, flat)
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        for number, part in enumerate(value):
            _flatten(part, f"{key}[{number}]", depth + 1, flat)
    else:
        flat[key] = value
