"""Names with options, as studies and benchmarks take them: ``swbn-fro``, ``swbn-fro:step_size=1e-4,num_groups=2``."""

import json
from dataclasses import dataclass
from typing import Any

from swbn_lightning.errors import InputError


@dataclass(frozen=True)
class Variant:
    """A norm or a network with options of its own.

    Args:
        label: as it was given.
        name: the part before the colon.
        options: the part after it; None where nothing was said.
    """

    label: str
    name: str
    options: dict[str, Any] | None

    @classmethod
    def parse(cls, label: str) -> "Variant":
        """``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``; values as JSON writes them, or words.

        Raises:
            InputError: an option without ``=``.
        """
        name, colon, given = label.partition(":")
        pairs = [item.partition("=") for item in given.split(",") if item]
        if any(not equals for _, equals, _ in pairs) or bool(colon) != bool(pairs):
            raise InputError(f"options of {name} are given as {name}:KEY=VALUE,KEY=VALUE, got {label!r}.")
        return cls(label, name, {key: _value(text) for key, _, text in pairs} if pairs else None)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a word, as in step_size=auto
