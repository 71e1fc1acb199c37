"""Studies whose commands run in the test's own process."""

import pytest

from cli import main as swbn
from swbn_lightning.runs.study import running as study_runs


@pytest.fixture
def in_process(monkeypatch):
    """Commands without a process of their own, which takes seconds to start; the calls that were made."""
    calls = []

    def run_command(cell, command, arguments, lock):
        calls.append((command, cell))
        try:
            swbn([command, *arguments])
        except SystemExit as error:
            raise study_runs.RunFailed(f"ended with {error.code}") from error

    monkeypatch.setattr(study_runs, "run_command", run_command)
    return calls
