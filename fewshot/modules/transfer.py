"""A trained backbone with a head that needs no training on episodes, as a LightningModule."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from fewshot.datamodule import EpisodicDataModule
from fewshot.evaluation import evaluating
from fewshot.heads import FeatureHead, build_head
from fewshot.modules.base import EpisodicModule
from swbn_lightning.errors import InputError
from swbn_lightning.norms.health import check_running_statistics


class TransferNetwork(EpisodicModule):
    """Classify features of a backbone that was trained elsewhere, by a head that needs no episodes to learn from.

    The backbone comes from ``backbone_checkpoint``, from a library's pretrained weights (``backbone_args``), or from a
    checkpoint of this class. Checkpoints store neither the head nor its options, so one checkpoint can be tested with
    every head. Where they hold the parameters of another head (``ridge`` learns), these are left out, and a message
    says so.

    ``ridge``, and ``nearest-centroid`` with ``features: plain`` or ``l2``, can also be trained on episodes.

    With ``features: cl2``, the start of an evaluation or prediction embeds the whole training split once, without
    augmentation and with evaluation statistics, and gives the mean to the head. Several processes share the work.

    Args:
        head: ``"nearest-centroid"`` (:class:`~fewshot.NearestCentroidHead`), ``"logistic-regression"``
            (:class:`~fewshot.LogisticRegressionHead`), ``"ridge"`` (:class:`~fewshot.RidgeHead`), ``"soft-kmeans"``
            (:class:`~fewshot.SoftKMeansHead`) or ``"laplacian-shot"`` (:class:`~fewshot.LaplacianShotHead`).
        head_args: options of the head, such as ``{features: l2}``; its class documents them.
        kwargs: backbone, norm, optimiser and schedule, as in :class:`~swbn_lightning.training.module.TrainingModule`.

    Raises:
        InputError: an unknown head or option; a ``fit`` with a head that cannot learn from episodes; with
            ``features: cl2``, data without a training split, or a norm that keeps no running statistics.
    """

    head: FeatureHead
    not_in_checkpoint = (*EpisodicModule.not_in_checkpoint, "head", "head_args")
    head_needs_no_training = True

    def __init__(self, head: str = "nearest-centroid", head_args: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = build_head(head, head_args)
        self.head_label = head_words(head, head_args)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and not self.head.learns_from_episodes:
            raise InputError(
                f"head {self.head_label!r} learns nothing from episodes. Train the backbone with "
                "classification.ImageClassifier or another few-shot model, and test it with this head: "
                "--model.backbone_checkpoint runs/NAME."
            )
        if stage == "fit" and self.head.needs_base_mean:
            raise InputError(
                f"head {self.head_label!r} subtracts the mean feature of a trained backbone (features: cl2), so it "
                "cannot train one. Train with --model.head_args.features l2 or plain, and test with cl2."
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state, own = checkpoint["state_dict"], {f"head.{name}": x for name, x in self.head.state_dict().items()}
        given = {name for name in state if name.startswith("head.")}
        if given != set(own):
            rank_zero_info(
                f"the checkpoint was trained with another head than {self.head_label}: of its weights the backbone's "
                "are used."
            )
            for name in given:
                del state[name]
            state |= own

    def on_validation_start(self) -> None:
        if self.trainer.state.fn != "fit":
            self._find_base_mean()

    def on_test_start(self) -> None:
        self._find_base_mean()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._find_base_mean()

    @torch.no_grad()
    def _find_base_mean(self) -> None:
        """Embed the training split, each process its share, and give the mean feature to the head."""
        if not self.head.needs_base_mean:
            return
        check_running_statistics(self)
        data = self.episodic_data()
        if not isinstance(data, EpisodicDataModule):
            raise InputError(
                f"features 'cl2' of head {self.head_label!r} need the images of a training split, which "
                f"{type(data).__name__} hands out as tasks only; take features l2, or an EpisodicDataModule."
            )
        try:
            images = data.image_set("train").images
        except InputError as error:
            raise InputError(
                f"features 'cl2' of head {self.head_label!r} need the training split: {error} Or take features l2."
            ) from error
        if self.is_probe():
            images = images[: data.eval_batch_size]
        rank_zero_info(f"features: cl2 needs the mean feature of {len(images)} training images, which are embedded now")
        own = torch.arange(self.trainer.global_rank, len(images), self.trainer.world_size)
        total = torch.zeros(self.backbone.num_features, dtype=torch.float64, device=self.device)
        with evaluating(self), self.trainer.precision_plugin.forward_context():
            for numbers in own.split(data.eval_batch_size):
                features = self.embed(data.normalize(images[numbers].to(self.device)))
                total += features.double().sum(0)
        total = self.trainer.strategy.reduce(total, reduce_op="sum")
        self.head.set_base_mean((total / len(images)).float())


def head_words(head: str, head_args: Mapping[str, Any] | None) -> str:
    """Return a head's name with its options: ``logistic-regression, C=10``."""
    return ", ".join([head, *(f"{name}={value}" for name, value in sorted((head_args or {}).items()))])
