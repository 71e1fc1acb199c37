"""Studies whose commands run in the test's own process."""

import pytest

from classification import GlyphDataModule
from cli import main as swbn
from swbn_lightning.runs.study import running as study_runs


@pytest.fixture
def in_process(monkeypatch, request):
    """Commands without a process of their own, which takes seconds to start; the calls that were made."""
    calls = []
    drawn = request.getfixturevalue("drawn")
    monkeypatch.setattr(GlyphDataModule, "load", lambda self, split: drawn(self, split))

    def run_command(cell, command, arguments, lock):
        calls.append((command, cell))
        try:
            swbn([command, *arguments])
        except SystemExit as error:
            raise study_runs.RunFailed(f"ended with {error.code}") from error

    monkeypatch.setattr(study_runs, "run_command", run_command)
    return calls


@pytest.fixture(scope="module")
def drawn():
    """Letters drawn once, whichever module asks for them."""
    load, kept = GlyphDataModule.load, {}

    def cached(module, split):
        key = (split, module.num_classes, module.images_per_class)
        if key not in kept:
            kept[key] = load(module, split)
        return kept[key]

    return cached
