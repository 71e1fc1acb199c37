"""What differs between the settings of several runs."""

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "(not there)"


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys that have not the same value everywhere, with their values side by side; :data:`ABSENT` for none."""
    keys = dict.fromkeys(key for own in settings for key in own)
    columns = {key: [own.get(key, ABSENT) for own in settings] for key in keys}
    # Nothing, where others have something below it: the lines of what is below say so.
    nothing = [key for key, values in columns.items() if all(v in (None, {}, ABSENT) for v in values)]
    above = {key[:place] for key in keys for place, letter in enumerate(key) if letter == "."}
    for key in above.intersection(nothing):
        del columns[key]
    # By type too: 1 and True, and 1 and 1.0, are equal in Python.
    return {key: values for key, values in columns.items() if len({(type(v), repr(v)) for v in values}) > 1}
