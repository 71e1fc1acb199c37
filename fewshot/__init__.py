"""Few-shot learning: episodes, methods, data and evaluation."""

from fewshot.base_classes import BaseClassesDataModule
from fewshot.datamodule import EpisodicDataModule
from fewshot.episodes import Episodes, EpisodeSampler, EpisodeSettings, sample_episodes
from fewshot.evaluation import EpisodeResult, evaluate_episodes
from fewshot.heads import (
    CrossAttentionHead,
    LaplacianShotHead,
    LogisticRegressionHead,
    MatchingHead,
    NearestCentroidHead,
    PrototypicalHead,
    RidgeHead,
    SoftKMeansHead,
)
from fewshot.learn2learn import EpisodeTaskset, Learn2LearnDataModule
from fewshot.modules.base_classifier import BaseClassifier
from fewshot.modules.cross_attention import CrossAttentionNetwork
from fewshot.modules.matching import MatchingNetwork
from fewshot.modules.prototypical import PrototypicalNetwork
from fewshot.modules.transfer import TransferNetwork

__all__ = [
    "BaseClassesDataModule",
    "BaseClassifier",
    "CrossAttentionHead",
    "CrossAttentionNetwork",
    "EpisodeResult",
    "EpisodeSampler",
    "EpisodeSettings",
    "EpisodeTaskset",
    "Episodes",
    "EpisodicDataModule",
    "LaplacianShotHead",
    "Learn2LearnDataModule",
    "LogisticRegressionHead",
    "MatchingHead",
    "MatchingNetwork",
    "NearestCentroidHead",
    "PrototypicalHead",
    "PrototypicalNetwork",
    "RidgeHead",
    "SoftKMeansHead",
    "TransferNetwork",
    "evaluate_episodes",
    "sample_episodes",
]
