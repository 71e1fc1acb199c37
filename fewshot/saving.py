"""Files that an evaluation of episodes writes beside ``results.json``: accuracies per episode and per class."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from fewshot.episodes import EpisodeSettings, in_words
from fewshot.evaluation import EpisodeResult
from swbn_lightning.files.writing import csv_text, write_whole
from swbn_lightning.runs.folders import EPISODES_FILE

CLASSES_FILE = "classes.csv"


class EpisodeFiles(pl.Callback):
    """Write ``episodes.csv`` and ``classes.csv`` to the folder of a ``test`` or ``validate``.

    ``episodes.csv`` has one row per episode (``episode,accuracy``); ``swbn compare`` pairs it with that of another run.
    ``classes.csv`` has one row per class (``class,name,accuracy``): the share of the class's queries that were
    classified correctly, empty for a class that no episode drew.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # the processes agree on it here, in a collective
        self._folder = Path(log_dir) if trainer.loggers and log_dir else None

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._write(trainer, pl_module, "val")

    def _write(self, trainer: pl.Trainer, pl_module: Any, split: str) -> None:
        result: EpisodeResult | None = getattr(pl_module, "episode_results", {}).get(split)
        folder = self._folder
        if result is None or folder is None or not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        names = pl_module.class_names(split)
        # repr gives the shortest digits that read back as the same number.
        episodes = [(number, repr(value)) for number, value in enumerate(result.accuracies.tolist())]
        write_whole(folder / EPISODES_FILE, csv_text(("episode", "accuracy"), episodes))
        pairs = zip(result.classes.tolist(), result.class_accuracies.tolist(), strict=True)
        classes = [(label, names[label], "" if value != value else repr(value)) for label, value in pairs]
        write_whole(folder / CLASSES_FILE, csv_text(("class", "name", "accuracy"), classes))


def episodes_identity(labels: Tensor, class_names: Sequence[str], settings: EpisodeSettings, seed: int) -> str:
    """Identifier of a set of episodes, equal if every episode ``i`` uses the same images.

    It is computed from the settings, the labels and the class names. Pixels are not part of it, so runs with other
    image sizes, or on copies of other quality, can be compared.
    """
    shape = f"{in_words(settings.ways)} {in_words(settings.shots)} {settings.queries}"
    digest = hashlib.sha256(f"{shape} {seed}\n".encode())
    digest.update("\n".join(class_names).encode())
    digest.update(labels.cpu().long().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
