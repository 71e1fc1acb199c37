"""Few-shot learning: episodes, methods, data and evaluation."""

from fewshot.datamodule import EpisodeSettings, EpisodicDataModule
from fewshot.episodes import Episodes, EpisodeSampler, sample_episodes
from fewshot.evaluation import EpisodeResult, evaluate_episodes
from fewshot.heads import CrossAttentionHead, MatchingHead, PrototypicalHead
from fewshot.prototypical import PrototypicalNetwork

__all__ = [
    "CrossAttentionHead",
    "EpisodeResult",
    "EpisodeSampler",
    "EpisodeSettings",
    "Episodes",
    "EpisodicDataModule",
    "MatchingHead",
    "PrototypicalHead",
    "PrototypicalNetwork",
    "evaluate_episodes",
    "sample_episodes",
]
