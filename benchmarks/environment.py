"""What a figure depends on besides the code, as one line under a table."""

from swbn_lightning.runs.environment import environment

__all__ = ["environment", "environment_line"]


def environment_line(*packages: str) -> str:
    """:func:`~swbn_lightning.runs.environment.environment` as one line under a table."""
    return ", ".join(f"{key} {value}" for key, value in environment(*packages).items())
