"""Matching networks as a LightningModule."""

from typing import Any

from fewshot.heads import MatchingHead
from fewshot.modules.base import EpisodicModule


class MatchingNetwork(EpisodicModule):
    """Classify features of a backbone by attention over the support set (Vinyals et al., NeurIPS 2016).

    Args:
        temperature: initial factor of the cosine (:class:`~fewshot.heads.MatchingHead`).
        learn_temperature: learn the factor.
        full_context: use full context embeddings, in which the embedding of an image depends on the whole support set
            (:class:`~fewshot.heads.matching.FullContext`).
        context_steps: reading steps of full context embeddings.
        kwargs: backbone, norm, optimiser and schedule, as in :class:`~swbn_lightning.training.module.TrainingModule`.
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
        self.head_needs_no_training = not full_context  # a temperature only
