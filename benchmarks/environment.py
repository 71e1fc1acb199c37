"""What a figure depends on besides the code, as one line under a table."""

from typing import Any

from swbn_lightning.runs.environment import environment

__all__ = ["as_line", "environment", "environment_line"]


def environment_line(*packages: str) -> str:
    """:func:`~swbn_lightning.runs.environment.environment` as one line under a table."""
    return as_line(environment(*packages))


def as_line(found: dict[str, Any]) -> str:
    """What :func:`~swbn_lightning.runs.environment.environment` found, here or elsewhere, as one line."""
    return ", ".join(f"{key} {value}" for key, value in found.items())
