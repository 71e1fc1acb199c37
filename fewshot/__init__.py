"""Few-shot learning: episodes, methods, data and evaluation."""

from fewshot.datamodule import EpisodicDataModule
from fewshot.episodes import Episodes, EpisodeSampler, EpisodeSettings, sample_episodes
from fewshot.evaluation import EpisodeResult, evaluate_episodes
from fewshot.heads import CrossAttentionHead, MatchingHead, PrototypicalHead
from fewshot.learn2learn import EpisodeTaskset, Learn2LearnDataModule
from fewshot.modules.cross_attention import CrossAttentionNetwork
from fewshot.modules.matching import MatchingNetwork
from fewshot.modules.prototypical import PrototypicalNetwork

__all__ = [
    "CrossAttentionHead",
    "CrossAttentionNetwork",
    "EpisodeResult",
    "EpisodeSampler",
    "EpisodeSettings",
    "EpisodeTaskset",
    "Episodes",
    "EpisodicDataModule",
    "Learn2LearnDataModule",
    "MatchingHead",
    "MatchingNetwork",
    "PrototypicalHead",
    "PrototypicalNetwork",
    "evaluate_episodes",
    "sample_episodes",
]
