"""Prototypical networks as a LightningModule."""

from typing import Any

from fewshot.heads import PrototypicalHead
from fewshot.modules.base import EpisodicModule


class PrototypicalNetwork(EpisodicModule):
    """Classify features of a backbone by the nearest class mean (Snell et al., NeurIPS 2017).

    Args:
        metric: ``"euclidean"`` (squared distance, the paper's) or ``"cosine"``.
        scale: factor of the logits; None for the metric's default (:class:`~fewshot.heads.PrototypicalHead`).
        average_channels: divide the squared distance by the number of channels.
        kwargs: backbone, norm, optimiser and schedule, as in :class:`~swbn_lightning.training.module.TrainingModule`.
    """

    head_needs_no_training = True

    def __init__(
        self,
        metric: str = "euclidean",
        scale: float | None = None,
        average_channels: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.head = PrototypicalHead(metric, scale, average_channels)
