"""Settings as flat ones, and what differs."""

import pytest

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import flatten
from swbn_lightning.runs.settings import ABSENT, differences, group_key


def test_flat_settings():
    nested = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": [{"g": 3}, 4], "h": {}, 5: "x", "i": []}
    assert flatten(nested) == {
        "a.b": 1, "a.c.d": None, "e": [1, 2], "f[0].g": 3, "f[1]": 4, "h": {}, "5": "x", "i": []
    }  # fmt: skip
    deep = {}
    deep["a"] = deep
    with pytest.raises(InputError, match="more than 40 deep"):
        flatten(deep)


def test_what_differs():
    first = {"same": 1, "kind": 1, "list": [1], "only": 2, "options": None, "null": None}
    second = {"same": 1, "kind": True, "list": [1, 2], "options.step_size": 0.1, "null": None}
    assert (group_key(first) == group_key(second)) is False and group_key(first) == group_key({**first, "run.root": 1})
    assert differences([first, second]) == {
        "kind": [1, True],
        "list": [[1], [1, 2]],
        "only": [2, ABSENT],
        "options.step_size": [ABSENT, 0.1],
    }
    assert differences([first]) == differences([first, dict(first)]) == differences([]) == {}
    # Nothing against something is a difference; against nothing it is none.
    assert differences([{"a": None}, {"a": 1}]) == {"a": [ABSENT, 1]}
    assert differences([{"a": None}, {}, {"a": {}}]) == {} and group_key({"a": None}) == group_key({})
