"""A classifier of the training classes as a LightningModule: the first of two stages."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, SumMetric

from classification.datamodules.base import LabelledBatch, NumberedBatch
from fewshot.heads import PrototypicalHead
from fewshot.learn2learn import TaskBatch
from fewshot.modules.base import EpisodicModule
from swbn_lightning.data.image_data import ImageBatch
from swbn_lightning.errors import InputError
from swbn_lightning.runs.intervals import share_half_width


class BaseClassifier(EpisodicModule):
    """Train a backbone by classifying all training classes; evaluate its features on episodes by nearest class mean.

    This is the Classifier-Baseline of Chen et al., "Meta-Baseline" (ICCV 2021), and the embedding of Tian et al.,
    "Rethinking few-shot image classification" (RFS, ECCV 2020; without distillation). ``backbone_checkpoint`` of a
    few-shot method starts the second stage from it.

    Each validation measures two things:

    - ``val/accuracy`` and ``val/loss``: episodes of the validation classes. **This selects the checkpoint**, because
      the features are for classes that never trained. Chen et al. show that what is better on base classes can be worse
      on novel ones.
    - ``val/held_out_accuracy`` and ``val/held_out_loss``: images of the training classes that did not train. They show
      whether the classifier itself still learns.

    Test and ``predict`` work by nearest class mean too; the linear classifier has no part in them.

    Args:
        metric: of the nearest class mean: ``"cosine"`` as in Meta-Baseline, or ``"euclidean"``. Checkpoints do not
            store it, so the same checkpoint can be tested either way.
        label_smoothing: share of the target spread over all classes, in [0, 1); 0 as in both papers.
        num_classes: number of training classes; None to take it from the data when training starts, and from the
            weights when a checkpoint is loaded.
        kwargs: backbone, norm, optimiser and schedule, as in :class:`~swbn_lightning.training.module.TrainingModule`.

    Raises:
        InputError: an unknown metric; a number out of range; to train, other data than
            :class:`~fewshot.BaseClassesDataModule`, or data with another number of training classes.
    """

    trains_on_images = True
    not_in_checkpoint = (*EpisodicModule.not_in_checkpoint, "metric")

    def __init__(
        self, metric: str = "cosine", label_smoothing: float = 0.0, num_classes: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= label_smoothing < 1:
            raise InputError(f"label_smoothing must be in [0, 1), got {label_smoothing}.")
        self.label_smoothing = label_smoothing
        self.head = PrototypicalHead(metric)
        self.register_module("classifier", None)
        if num_classes is not None:
            self._make_classifier(num_classes, f"num_classes={num_classes}")
        self.held_out_accuracy, self.held_out_loss, self.held_out_images = MeanMetric(), MeanMetric(), SumMetric()

    def configure_model(self) -> None:
        """Create the classifier of the data's classes; Lightning calls this before it creates the optimiser."""
        if self.trainer_or_none is not None and self.trainer.state.fn == "fit":
            data = self.episodic_data()
            self._make_classifier(data.num_training_classes, "the data's training split")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        weight = checkpoint["state_dict"].get("classifier.weight")
        if weight is not None and weight.dim() == 2:  # else loading says what is missing or wrong
            self._make_classifier(len(weight), "the checkpoint")

    def training_loss(self, batch: LabelledBatch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self._logits(batch.images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        return loss, (logits.argmax(-1) == batch.labels).float().mean()

    def validation_step(
        self, batch: ImageBatch | TaskBatch | NumberedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if isinstance(batch, ImageBatch | TaskBatch):
            super().validation_step(batch, batch_idx)
            return
        logits = self.watch_finite(self._logits(batch.images), batch.images)
        self.held_out_accuracy.update((logits.argmax(-1) == batch.labels).float())
        self.held_out_loss.update(F.cross_entropy(logits, batch.labels), weight=len(batch.labels))
        self.held_out_images.update(len(batch.labels))

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        for metric in (self.held_out_accuracy, self.held_out_loss, self.held_out_images):
            metric.reset()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if not self.held_out_images.update_called:  # the data hold none out
            return
        images = int(self.held_out_images.compute())
        accuracy, loss = self.held_out_accuracy.compute().item(), self.held_out_loss.compute().item()
        # Of all processes, which `compute` has brought together; `sync_dist` only tells Lightning that they agree.
        self.log("val/held_out_accuracy", accuracy, sync_dist=True)
        self.log("val/held_out_loss", loss, sync_dist=True)
        if "val" in self.results:  # not after a probe that held no episode
            self.results["val"] |= {
                "held_out_images": images,
                "held_out_accuracy": accuracy,
                "held_out_ci95": share_half_width(accuracy, images),
                "held_out_loss": loss,
            }

    def _logits(self, images: Tensor) -> Tensor:
        if self.classifier is None:
            raise InputError("training a base classifier without a trainer needs num_classes.")
        return self.classifier(self.embed(images)).float()
