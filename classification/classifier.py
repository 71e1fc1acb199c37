"""Image classification as a LightningModule."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from classification.datamodules.base import ClassificationDataModule, LabelledBatch
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.runs.intervals import share_half_width
from swbn_lightning.training.module import TrainingModule


class ImageClassifier(TrainingModule):
    """Image classification with a backbone and a linear layer, trained by cross-entropy.

    Logs ``<split>/accuracy`` (top-1, a fraction), ``<split>/loss`` and, for more than five classes, ``<split>/top5``.

    Args:
        num_classes: outputs of the linear layer; must match the data.
        label_smoothing: share of the target spread over all classes, in [0, 1). 0 as in the paper, which uses no
            regularisation (section 4.1).
        kwargs: backbone, norm, optimiser and schedule, as in :class:`~swbn_lightning.training.module.TrainingModule`.

    Raises:
        InputError: a number out of range; data with a different number of classes.
    """

    def __init__(self, num_classes: int, label_smoothing: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_positive("ImageClassifier", num_classes=num_classes)
        if not 0 <= label_smoothing < 1:
            raise InputError(f"label_smoothing must be in [0, 1), got {label_smoothing}.")
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.head = nn.Linear(self.backbone.num_features, num_classes)
        self.eval_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.eval_top5 = MulticlassAccuracy(num_classes, average="micro", top_k=5) if num_classes > 5 else None
        self.eval_loss, self.eval_images = MeanMetric(), SumMetric()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.image_data()
        if not isinstance(data, ClassificationDataModule):
            raise InputError(f"ImageClassifier needs a classification data module, got {type(data).__name__}.")
        if data.num_classes != self.num_classes:
            raise InputError(f"the data have {data.num_classes} classes, but num_classes is {self.num_classes}.")

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[N, num_classes]`` of images ``[N, in_channels, H, W]``."""
        return self.head(self.embed(images))

    def training_loss(self, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        logits = self(batch.images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        return loss, (logits.argmax(-1) == batch.labels).float().mean()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self._validates_on() != "test":
            return
        watching = [*self.trainer.callbacks, *self.trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
        if found := next((own for own in watching if str(getattr(own, "monitor", "")).startswith("test/")), None):
            raise InputError(
                f"{type(found).__name__} watches {found.monitor}, but curve_split: test is for curves only: the test "
                "images must choose nothing. Watch train/loss, or hold out images with val_share."
            )

    def validation_step(self, batch: LabelledBatch, batch_idx: int) -> None:
        self._evaluation_step(batch, self._validates_on())

    def test_step(self, batch: LabelledBatch, batch_idx: int) -> None:
        self._evaluation_step(batch, "test")

    def on_validation_epoch_end(self) -> None:
        if self._validates_on() == "val":
            self._record("val")
        else:  # a point of a curve, and no result of the training
            self.stop_unless_finite(self._validates_on())
            self.eval_images.reset()

    def on_test_epoch_end(self) -> None:
        self._record("test")

    def _validates_on(self) -> str:
        data = self.image_data()
        return "val" if data.has_validation else getattr(data, "curve_split", None) or "val"

    def _evaluation_step(self, batch: LabelledBatch, split: str) -> None:
        logits = self.watch_finite(self(batch.images), batch.images)
        self.eval_accuracy.update(logits, batch.labels)
        self.eval_loss.update(F.cross_entropy(logits, batch.labels), weight=len(batch.labels))
        self.eval_images.update(len(batch.labels))
        self.log(f"{split}/accuracy", self.eval_accuracy, prog_bar=True)
        if self.eval_top5 is not None:
            self.eval_top5.update(logits, batch.labels)
            self.log(f"{split}/top5", self.eval_top5)
        self.log(f"{split}/loss", self.eval_loss)

    def _record(self, split: str) -> None:
        self.stop_unless_finite(split)
        accuracy = self.eval_accuracy.compute().item()
        images = int(self.eval_images.compute())
        self.eval_images.reset()
        self.results[split] = {
            "split": split,
            "classes": self.num_classes,
            "images": images,
            "accuracy": accuracy,
            "ci95": share_half_width(accuracy, images),
            "loss": self.eval_loss.compute().item(),
        }
        if self.eval_top5 is not None:
            self.results[split]["top5"] = self.eval_top5.compute().item()
