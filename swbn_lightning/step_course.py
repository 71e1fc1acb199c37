"""What may vary around a constant step size of W: its course over the run, and where W starts.

Callbacks for ``--trainer.callbacks``; docs/step-size.md tells what they did in experiments. The default is neither: the
paper's constant, from the identity.
"""

import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from swbn_lightning.errors import InputError, require_positive, unknown_name
from swbn_lightning.norms import functional as WF
from swbn_lightning.norms.inverse_sqrt import zca_inverse_sqrt
from swbn_lightning.norms.swbn import SWBN
from swbn_lightning.training.module import TrainingModule
from swbn_lightning.training.step_size import LARGEST

# Factor of the step size at the share t of the run, 0 <= t < 1; the mean of each over the run is 1, so that the budget
# (step size times steps) is that of the constant.
COURSES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 2 * (1 - t),
    "cosine": lambda t: 1 + math.cos(math.pi * t),
    "early": lambda t: 5.0 if t < 0.1 else 5 / 9,
}


class StepSizeCourse(pl.Callback):
    """Larger steps of W at first, smaller ones later, with the same mean over the run.

    The layers' own step size (``step_size: auto`` too) is what is multiplied; they have it again when training ends. A
    resumed run goes on where it was.

    Args:
        course: ``"linear"`` from twice the step size to zero, ``"cosine"`` likewise along a half wave, ``"early"`` five
            times as large in the first tenth and 5/9 after it.

    Raises:
        InputError: an unknown course; when training starts, no SWBN layer, a run without an end, a step size that would
            exceed what stays finite, or ``compile`` or ``cuda_graph``, which keep the first step size.
    """

    def __init__(self, course: str = "linear") -> None:
        if course not in COURSES:
            raise unknown_name("course of the step size", course, COURSES)
        self.course = course
        self._layers: list[tuple[SWBN, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        layers = _swbn_layers(pl_module, type(self).__name__)
        for option, attribute in (("compile", "compiled"), ("cuda_graph", "cuda_graph")):
            if getattr(pl_module, attribute, False):
                raise InputError(f"StepSizeCourse: {option}: true keeps the step size of its first step; leave it out.")
        if not math.isfinite(trainer.estimated_stepping_batches):
            raise InputError("StepSizeCourse needs a run with an end: give max_epochs or max_steps.")
        first = max(layer.step_size for layer in layers) * COURSES[self.course](0)
        if first > LARGEST:
            raise InputError(
                f"StepSizeCourse: {self.course!r} begins with a step size of {first:.3g}; above {LARGEST:g} W may "
                "diverge. Give a smaller step size, or another course."
            )
        self._layers = [(layer, layer.step_size) for layer in layers]

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        factor = COURSES[self.course](min(1.0, trainer.global_step / trainer.estimated_stepping_batches))
        for layer, step_size in self._layers:
            layer.step_size = factor * step_size

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for layer, step_size in self._layers:
            layer.step_size = step_size
        self._layers = []


class WhitenedStart(pl.Callback):
    """W starts from the whitening of a sample of training images instead of the identity, layer after layer.

    Each layer in the order of the forward: ``W = S^(-1/2)`` (ZCA) of the covariance of what reaches it, with the layers
    before it whitened already; its running statistics become those of the sample. Every process takes the same images.
    A resumed run is left as it was saved.

    Args:
        num_images: of the training images, not augmented; by seed 0. Far more values a channel than channels are
            needed: in the last maps of a ResNet at 32x32, 512 images are 32,768.
        floor: the smallest eigenvalue of a correlation matrix (their mean is 1) that is still scaled up to 1; smaller
            ones are scaled by ``1/sqrt(floor)``, for they may be noise.

    Raises:
        InputError: numbers that are not positive; when training starts, no SWBN layer, or another module or data than
            this package's.
    """

    def __init__(self, num_images: int = 512, floor: float = 1e-2) -> None:
        require_positive(type(self).__name__, num_images=num_images)
        if not 0 < floor < math.inf:
            raise InputError(f"WhitenedStart: floor must be positive and finite, got {floor!r}.")
        self.num_images, self.floor = num_images, floor

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(pl_module, TrainingModule):
            raise InputError(f"WhitenedStart needs one of this package's modules, got {type(pl_module).__name__}.")
        layers = _swbn_layers(pl_module, type(self).__name__)
        if trainer.ckpt_path:
            return
        images = pl_module.image_data().sample_images(self.num_images, "train").to(pl_module.device)
        whiten_layers(pl_module.backbone, layers, lambda: pl_module.embed(images), self.floor)
        rank_zero_info(f"W of {len(layers)} layers starts from the whitening of {len(images)} images")


@torch.no_grad()
def whiten_layers(network: nn.Module, layers: list[SWBN], forward: Callable[[], Any], floor: float = 1e-2) -> None:
    """Set W and the running statistics of ``layers`` to those that whiten what reaches each in ``forward()``.

    Other layers are as in evaluation, except batch normalisations that would not know their statistics yet: they use
    the batch's, and keep their own. Modes are as before when it returns.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    norms = [
        m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    kept = [(norm, {name: buffer.clone() for name, buffer in norm.named_buffers()}) for norm in norms]
    for norm in norms:
        norm.train()
    handles = [
        layer.register_forward_pre_hook(lambda m, inputs: _whiten_layer(m, inputs[0], floor)) for layer in layers
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
        for norm, state in kept:
            for name, buffer in norm.named_buffers():
                buffer.copy_(state[name])
        for module, mode in modes:
            module.training = mode


def _whiten_layer(layer: Any, x: Tensor, floor: float) -> None:
    xs, mean, variance, _ = WF.standardize_batch(x.to(layer.whitening_matrix.dtype), layer.eps)
    covariance = WF.covariance(WF.as_rows(xs), layer.num_groups)
    layer.whitening_matrix.copy_(zca_inverse_sqrt(covariance, floor))
    if layer.running_mean is not None:
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)


def _swbn_layers(module: pl.LightningModule, who: str) -> list[SWBN]:
    layers = [layer for layer in module.modules() if isinstance(layer, SWBN)]
    if not layers:
        raise InputError(f"{who} is for SWBN layers (norm: swbn-fro or swbn-kl); this model has none.")
    return layers
