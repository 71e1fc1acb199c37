"""What an evaluation of episodes leaves beside ``results.json``."""

import hashlib
from collections.abc import Sequence

from torch import Tensor

from fewshot.episodes import EpisodeSettings, in_words
from fewshot.evaluation import EpisodeResult
from swbn_lightning.files.writing import csv_text
from swbn_lightning.runs.confusion import class_files
from swbn_lightning.runs.folders import EPISODES_FILE


def episode_files(result: EpisodeResult, class_names: Sequence[str]) -> dict[str, str]:
    """Texts by the names of their files.

    ``episodes.csv`` has one row per episode (``episode,accuracy``); ``swbn compare`` pairs it with that of another run.
    ``classes.csv`` and ``confusion.csv`` are those of :func:`~swbn_lightning.runs.confusion.class_files`.
    """
    # repr gives the shortest digits that read back as the same number.
    episodes = [(number, repr(value)) for number, value in enumerate(result.accuracies.tolist())]
    return {EPISODES_FILE: csv_text(("episode", "accuracy"), episodes), **class_files(result.confusion, class_names)}


def episodes_identity(
    labels: Tensor, class_names: Sequence[str], settings: EpisodeSettings, seed: int, content_id: str = ""
) -> str:
    """Identifier of a set of episodes, equal if every episode ``i`` uses the same images.

    It is computed from the settings, the labels, the class names and, of data that these do not tell from others, their
    ``content_id``. Pixels are not part of it, so runs with other image sizes, or on copies of other quality, can be
    compared.
    """
    shape = f"{in_words(settings.ways)} {in_words(settings.shots)} {settings.queries}"
    digest = hashlib.sha256(f"{shape} {seed}\n".encode())
    digest.update("\n".join(class_names).encode())
    digest.update(labels.cpu().long().contiguous().numpy().tobytes())
    digest.update(content_id.encode())
    return digest.hexdigest()[:16]
