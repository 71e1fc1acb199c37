"""Cross attention networks as a LightningModule."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot.evaluation import evaluating, query_targets
from fewshot.heads import CrossAttentionHead
from fewshot.modules.base import EpisodicModule
from swbn_lightning.backbones import Backbone
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import NormFactory
from swbn_lightning.training.module import without_auto
from swbn_lightning.training.step_size import set_step_size

# The episodic loss's share in the public code: loss = global + 0.5 * episodic.
_EPISODIC_WEIGHT = 0.5


class CrossAttentionNetwork(EpisodicModule):
    """Classify by cross attention between feature maps of a backbone (Hou et al., NeurIPS 2019).

    The loss is ``global + 0.5 * episodic``, two cross-entropies averaged over queries and positions (section 5 of the
    paper). The global part comes from a linear classifier of all training classes, applied to the query map that its
    true class attended. The episodic part comes from the cosine of every query position with the pooled class vectors.
    Evaluation needs only the head.

    The head depends on the size of the maps, the classifier on the number of training classes. Both are taken from the
    data when training starts, and from the weights when a checkpoint is loaded.

    Args:
        temperature: temperature of the attention (:class:`~fewshot.heads.CrossAttentionHead`).
        scale: factor of the cosines.
        reduction: reduction of the meta-fusion, ``m -> m // reduction -> m``.
        fusion_norm: norm of the fusion, a name from :meth:`~swbn_lightning.NormFactory.names`. ``norm`` sets the
            backbone's norm.
        fusion_norm_args: options of that norm. ``step_size: auto`` is resolved as in ``norm_args``; a training step
            runs the fusion twice, once in each direction.
        transductive: classify the queries of an evaluation episode together. Checkpoints do not store it, so the same
            checkpoint can be tested either way.
        image_size: side of the images in pixels; creates the head without data.
        num_classes: number of training classes; creates the classifier without data.
        kwargs: backbone, norm, optimiser and schedule, as in :class:`~swbn_lightning.training.module.TrainingModule`.

    Raises:
        InputError: as the head; data or a checkpoint with maps of another size or another number of training classes.
    """

    head: CrossAttentionHead | None  # type: ignore[assignment]  # None until the maps' size is known
    embeds_maps = True
    not_in_checkpoint = (*EpisodicModule.not_in_checkpoint, "transductive")
    norm_arguments = (*EpisodicModule.norm_arguments, "fusion_norm_args")

    def __init__(
        self,
        temperature: float = 0.025,
        scale: float = 7.0,
        reduction: int = 6,
        fusion_norm: str = "bn",
        fusion_norm_args: dict[str, Any] | None = None,
        transductive: bool = False,
        image_size: int | None = None,
        num_classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._head_options: dict[str, Any] = {
            "temperature": temperature,
            "scale": scale,
            "reduction": reduction,
            "norm": fusion_norm,
            "norm_args": without_auto(fusion_norm_args),
            "transductive": transductive,
        }
        if "fusion_norm_args" in self._auto_step_sizes:  # its errors now; the number before training
            set_step_size(NormFactory(fusion_norm, **self._head_options["norm_args"])(1, ndim=1), 1, self._step_budget)
        self.register_module("head", None)
        self.register_module("classifier", None)
        if image_size is not None:
            self._make_head(map_positions(self.backbone, image_size), f"images of {image_size} pixels")
        if num_classes is not None:
            self._make_classifier(num_classes, f"num_classes={num_classes}")

    def configure_model(self) -> None:
        """Create what depends on the data; Lightning calls this before it creates the optimiser."""
        if self.trainer_or_none is None:  # loaded from a checkpoint, whose weights tell the sizes
            return
        data = self.episodic_data()
        self._make_head(map_positions(self.backbone, data.image_size), f"the data's images of {data.image_size} pixels")
        if self.trainer.state.fn == "fit":
            assert self.head is not None
            self.resolve_step_size("fusion_norm_args", self.head, forwards_per_batch=2)
            self._make_classifier(data.num_training_classes, "the data's training split")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        shapes = {name: tensor.shape for name, tensor in checkpoint["state_dict"].items()}
        if {"head.fusion.squeeze.weight", "classifier.weight"} <= set(shapes):  # else loading says what is missing
            self._make_head(shapes["head.fusion.squeeze.weight"][1], "the checkpoint")
            self._make_classifier(shapes["classifier.weight"][0], "the checkpoint")

    def episode_loss(self, support: Tensor, query: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        if self.head is None or self.classifier is None:
            raise InputError("training cross attention without a trainer needs image_size and num_classes.")
        target = query_targets(support, query)
        logits = self.head.position_logits(support, query)
        positions = logits.episodic.shape[-1]
        of_episode = target[:, None].expand(len(classes), -1, positions)
        episodic = F.cross_entropy(logits.episodic.transpose(1, 2), of_episode)
        attended = logits.attended
        of_all = self.classifier(attended.to(self.classifier.weight.dtype)).to(attended.dtype).movedim(-1, 1)
        overall = F.cross_entropy(of_all, classes[:, target].unsqueeze(-1).expand_as(of_episode))
        return overall + _EPISODIC_WEIGHT * episodic, (logits.pooled.argmax(-1) == target).float().mean()

    def _make_head(self, positions: int, source: str) -> None:
        if self.head is None:
            with torch.device("cpu"):  # the same random numbers whatever the device
                self.head = CrossAttentionHead(positions, **self._head_options)
        elif self.head.num_positions != positions:
            raise InputError(
                f"cross attention was made for maps of {self.head.num_positions} positions, but {source} means "
                f"{positions}: use images of the size it was trained with, or train anew."
            )


def map_positions(backbone: Backbone, image_size: int) -> int:
    """Number of positions ``m = h * w`` of the backbone's maps for square images, measured on one image."""
    require_positive("images", image_size=image_size)
    like = next(backbone.parameters())
    image = torch.zeros(1, backbone.in_channels, image_size, image_size, device=like.device, dtype=like.dtype)
    with evaluating(backbone), torch.no_grad():
        return backbone.forward_features(image).shape[2:].numel()
