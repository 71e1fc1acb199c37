"""Few-shot learning: episodes, methods, data and evaluation."""

from fewshot.datamodule import EpisodeSettings, EpisodicDataModule
from fewshot.episodes import Episodes, EpisodeSampler, sample_episodes
from fewshot.evaluation import EpisodeResult, evaluate_episodes
from fewshot.heads import PrototypicalHead
from fewshot.prototypical import PrototypicalNetwork

__all__ = [
    "EpisodeResult",
    "EpisodeSampler",
    "EpisodeSettings",
    "Episodes",
    "EpisodicDataModule",
    "PrototypicalHead",
    "PrototypicalNetwork",
    "evaluate_episodes",
    "sample_episodes",
]
