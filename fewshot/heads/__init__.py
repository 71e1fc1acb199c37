"""Few-shot methods as pure modules."""

from fewshot.heads.base import EpisodeHead
from fewshot.heads.cross_attention import CrossAttentionHead
from fewshot.heads.matching import MatchingHead
from fewshot.heads.prototypical import PrototypicalHead

__all__ = ["CrossAttentionHead", "EpisodeHead", "MatchingHead", "PrototypicalHead"]
