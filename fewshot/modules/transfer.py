"""A trained backbone with a head that needs no training on episodes, as a LightningModule."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from fewshot.datamodule import EpisodicDataModule
from fewshot.evaluation import evaluating
from fewshot.heads import FeatureHead, build_head
from fewshot.modules.base import EpisodicModule
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import WhiteningNorm
from swbn_lightning.norms import update_norms as compute_statistics
from swbn_lightning.norms.health import check_running_statistics
from swbn_lightning.norms.surgery.update import updated_norms


class TransferNetwork(EpisodicModule):
    """Classify features of a backbone that was trained elsewhere, by a head that needs no episodes to learn from.

    The backbone comes from ``backbone_checkpoint`` (with ``backbone_names`` weights of another program), from a
    library's pretrained weights (``backbone_args``), or from a checkpoint of this class. Checkpoints store neither the
    head nor its options, so one checkpoint can be tested with every head. Only what ``ridge`` has learnt they do store:
    a ``ridge`` with ``learn: true`` goes on from its penalty and scale, and all other heads leave them out. A message
    says which.

    ``ridge``, and ``nearest-centroid`` with ``features: plain`` or ``l2``, can also be trained on episodes.

    With ``features: cl2``, the start of an evaluation or prediction embeds the whole training split once, without
    augmentation and with evaluation statistics, and gives the mean to the head. Several processes share the work.

    Args:
        head: ``"nearest-centroid"`` (:class:`~fewshot.NearestCentroidHead`), ``"logistic-regression"``
            (:class:`~fewshot.LogisticRegressionHead`), ``"ridge"`` (:class:`~fewshot.RidgeHead`), ``"soft-kmeans"``
            (:class:`~fewshot.SoftKMeansHead`) or ``"laplacian-shot"`` (:class:`~fewshot.LaplacianShotHead`).
        head_args: options of the head, such as ``{features: l2}``; its class documents them.
        update_norms: what an evaluation or prediction normalises with. False for the running statistics as they are;
            true for statistics computed anew, by :func:`~swbn_lightning.update_norms`, from all images of the base
            (training) classes; or the number of batches of these images. Batches hold about ``eval_batch_size`` images
            in a fixed random order, without augmentation. Every process takes the same ones, so all of them have the
            statistics of a single process. After the evaluation the network is as it was.
        kwargs: backbone, norm, optimiser and schedule, as in :class:`~swbn_lightning.training.module.TrainingModule`.

    Raises:
        InputError: an unknown head or option; a ``fit`` with a head that cannot learn from episodes; with
            ``features: cl2`` or ``update_norms``, data without a training split, or norms that keep no running
            statistics.
    """

    head: FeatureHead
    not_in_checkpoint = (*EpisodicModule.not_in_checkpoint, "head", "head_args", "update_norms")
    head_needs_no_training = True

    def __init__(
        self,
        head: str = "nearest-centroid",
        head_args: dict[str, Any] | None = None,
        update_norms: bool | int = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.head = build_head(head, head_args)
        if not isinstance(update_norms, bool):
            require_positive("transfer", update_norms=update_norms)
        self.update_norms = update_norms
        options = {**(head_args or {}), **({"update_norms": update_norms} if update_norms else {})}
        self.head_label = head_words(head, options)
        self._before_update: list[tuple[Tensor, Tensor]] = []  # the norms' buffers, and what they held

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
        given = {name: x for name, x in state.items() if name.startswith("head.")}
        if given and set(given) == {f"head.{name}" for name, _ in self.head.named_parameters()}:
            numbers = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.shape == () and x.is_cpu}
            learnt = ", ".join(f"{name.removeprefix('head.log_')} {x.exp():.4g}" for name, x in numbers.items())
            rank_zero_info(f"head {self.head_label!r} goes on from what the checkpoint has learnt: {learnt}.")
        elif given or own:
            rank_zero_info(f"head {self.head_label!r} is as given: of the checkpoint only the backbone is used.")
            for name in given:
                del state[name]
            state |= own

    def on_validation_start(self) -> None:
        if self.trainer.state.fn != "fit":
            self.on_test_start()

    def on_test_start(self) -> None:
        self._update_norms()
        self._find_base_mean()

    def on_predict_start(self) -> None:
        self._update_norms()  # before the support images are embedded
        super().on_predict_start()
        self._find_base_mean()

    def on_test_end(self) -> None:
        """Put the statistics back that were there before the evaluation."""
        for buffer, value in self._before_update:
            buffer.copy_(value)
        self._before_update.clear()

    on_validation_end = on_predict_end = on_test_end

    def _update_norms(self) -> None:
        """Compute the statistics of the norms from the training split; every process from the same batches."""
        if not self.update_norms:
            return
        norms = updated_norms(self.backbone)
        data, images = self._training_images("update_norms", "leave out update_norms")
        batches = -(-len(images) // data.eval_batch_size)
        if self.update_norms is not True:
            batches = min(batches, self.update_norms)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        numbers = order[: batches * data.eval_batch_size]
        rank_zero_info(f"update_norms: statistics of {len(numbers)} training images, {batches} batches")
        self._before_update = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
        with _by_itself(norms):
            # Of equal size as nearly as can be: each counts the same, and a small one has a poor covariance.
            parts = numbers.tensor_split(batches)
            compute_statistics(parts, self.backbone, lambda own: self._embed_pixels(images[own]))

    def _training_images(self, purpose: str, instead: str) -> tuple[EpisodicDataModule, Tensor]:
        """The data module and its training images; of a probe one batch."""
        data = self.episodic_data()
        if not isinstance(data, EpisodicDataModule):
            raise InputError(
                f"{purpose} needs the images of a training split, which {type(data).__name__} hands out as tasks only; "
                f"{instead}, or take an EpisodicDataModule."
            )
        try:
            images = data.image_set("train").images
        except InputError as error:
            raise InputError(f"{purpose} needs the training split: {error} Or {instead}.") from error
        return data, images[: data.eval_batch_size] if self.is_probe() else images

    @torch.no_grad()
    def _find_base_mean(self) -> None:
        """Embed the training split, each process its share, and give the mean feature to the head."""
        if not self.head.needs_base_mean:
            return
        check_running_statistics(self)
        data, images = self._training_images(f"features 'cl2' of head {self.head_label!r}", "take features l2")
        rank_zero_info(f"features: cl2 needs the mean feature of {len(images)} training images, which are embedded now")
        own = torch.arange(self.trainer.global_rank, len(images), self.trainer.world_size)
        total = torch.zeros(self.backbone.num_features, dtype=torch.float64, device=self.device)
        with evaluating(self):
            for numbers in own.split(data.eval_batch_size):
                total += self._embed_pixels(images[numbers]).double().sum(0)
        total = self.trainer.strategy.reduce(total, reduce_op="sum")
        self.head.set_base_mean((total / len(images)).float())


@contextmanager
def _by_itself(norms: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let whitening layers take the statistics of their own process, for all processes have the same images."""
    synced = [norm for norm in norms if isinstance(norm, WhiteningNorm) and norm.sync]
    for norm in synced:
        norm.sync = False
    try:
        yield
    finally:
        for norm in synced:
            norm.sync = True


def head_words(head: str, head_args: Mapping[str, Any] | None) -> str:
    """Return a head's name with its options: ``logistic-regression, C=10``."""
    return ", ".join([head, *(f"{name}={value}" for name, value in sorted((head_args or {}).items()))])
