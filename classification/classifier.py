"""Image classification as a LightningModule."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from classification.datamodules.base import ClassificationDataModule, LabelledBatch, NumberedBatch
from classification.evaluation import ImageResult, Rows, image_result, rows_of
from swbn_lightning.data.image_data import ImageBatch
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.files.reading import printable
from swbn_lightning.training.module import TrainingModule

CLASS_NAMES = "class_names"  # in a checkpoint


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
        self._seen: list[Rows] = []  # of this process's batches
        #: Names of the classes, by number: those of the data that trained it, which its checkpoints hold.
        self.class_names: tuple[str, ...] = ()
        #: What each image of the last evaluation of each split was named.
        self.image_results: dict[str, ImageResult] = {}

    def labelled_data(self) -> ClassificationDataModule:
        """The trainer's data module."""
        data = self.image_data()
        if not isinstance(data, ClassificationDataModule):
            raise InputError(f"ImageClassifier needs a classification data module, got {type(data).__name__}.")
        return data

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.labelled_data()
        if stage != "predict" and data.num_classes != self.num_classes:
            raise InputError(
                f"the data have {data.num_classes} classes, but num_classes of the model is {self.num_classes}: give "
                f"--model.num_classes {data.num_classes}."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[CLASS_NAMES] = list(self.class_names)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        names = checkpoint.get(CLASS_NAMES) or []
        if type(names) is not list or any(type(name) is not str for name in names):
            raise InputError(f"the checkpoint's {CLASS_NAMES} are no list of texts.")
        self.class_names = tuple(map(printable, names))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[N, num_classes]`` of images ``[N, in_channels, H, W]``."""
        return self.head(self.embed(images))

    def training_loss(self, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        logits = self(batch.images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        return loss, (logits.argmax(-1) == batch.labels).float().mean()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.class_names = self.labelled_data().class_names("train")  # whatever a checkpoint said that it goes on from
        if self._validates_on() != "test":
            return
        watching = [*self.trainer.callbacks, *self.trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
        if found := next((own for own in watching if str(getattr(own, "monitor", "")).startswith("test/")), None):
            raise InputError(
                f"{type(found).__name__} watches {found.monitor}, but curve_split: test is for curves only: the test "
                "images must choose nothing. Watch train/loss, or hold out images with val_share."
            )

    def on_validation_epoch_start(self) -> None:
        self._seen.clear()  # an evaluation that was broken off may have left some

    def validation_step(self, batch: NumberedBatch, batch_idx: int) -> None:
        if not isinstance(batch, NumberedBatch):
            raise InputError(
                "ImageClassifier has to know which images it evaluates: evaluation batches must be a NumberedBatch of "
                f"images, labels and each image's number in the split, got {type(batch).__name__}."
            )
        self._seen.append(rows_of(batch.numbers, batch.labels, self.watch_finite(self(batch.images), batch.images)))

    def on_validation_epoch_end(self) -> None:
        self._evaluate(self._validates_on())

    test_step, on_test_epoch_start = validation_step, on_validation_epoch_start

    def on_test_epoch_end(self) -> None:
        self._evaluate("test")

    def _validates_on(self) -> str:
        data = self.labelled_data()
        return "val" if data.has_validation else data.curve_split or "val"

    def _evaluate(self, split: str) -> None:
        self.stop_unless_finite(split)
        result = image_result(self._seen, self.num_classes, self.trainer.world_size)
        self._seen.clear()
        figures = {"accuracy": result.accuracy, "macro_f1": result.confusion.macro_f1, "loss": result.loss}
        if self.num_classes > 5:
            figures["top5"] = result.top5
        # Every process has the whole result; `sync_dist` only tells Lightning that they agree.
        for name, value in figures.items():
            self.log(f"{split}/{name}", value, prog_bar=name == "accuracy", sync_dist=True)
        if split == "test" and self.trainer.state.fn == "fit":
            return  # a point of a curve, and no result of the training
        data, self.image_results[split] = self.labelled_data(), result
        self.results[split] = {
            "split": split,
            "classes": self.num_classes,
            "images": len(result.numbers),
            "images_id": result.identity(data.class_names(split), data.chosen_by(split)),
            **figures,
            "ci95": result.ci95,
        }

    def on_predict_start(self) -> None:
        super().on_predict_start()
        # A checkpoint may hold none: saved without a training, or by an earlier version.
        self.prediction_classes = self.class_names or self.labelled_data().class_names("train")
        if len(self.prediction_classes) != self.num_classes:
            raise InputError(
                f"{len(self.prediction_classes)} class names are known, but num_classes is {self.num_classes}."
            )

    def predict_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Probabilities ``[B, num_classes]``."""
        logits = self.watch_finite(self(batch.images), batch.images)
        self.stop_unless_finite("predict")
        return logits.float().softmax(-1)

    def evaluation_files(self, split: str) -> dict[str, str]:
        found = self.image_results.get(split)
        return {} if found is None else found.files(self.labelled_data().class_names(split))
