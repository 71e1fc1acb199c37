"""Matching networks as a LightningModule."""

from typing import Any

from fewshot.heads import MatchingHead
from fewshot.modules.base import EpisodicModule


class MatchingNetwork(EpisodicModule):
    """A backbone whose features are classified by attention over the support set (Vinyals et al., NeurIPS 2016).

    Args:
        temperature: factor of the cosine at the start (:class:`~fewshot.heads.MatchingHead`).
        learn_temperature: learn the factor.
        full_context: embed each image in the light of the whole support set
            (:class:`~fewshot.heads.matching.FullContext`).
        context_steps: reading steps of full context embeddings.
        kwargs: backbone, norm, optimiser and schedule, as :class:`~swbn_lightning.training.module.TrainingModule`.
    """

    def __init__(
        self,
        temperature: float = 10.0,
        learn_temperature: bool = True,
        full_context: bool = False,
        context_steps: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.head = MatchingHead(
            temperature, learn_temperature, full_context, self.backbone.num_features, context_steps
        )
