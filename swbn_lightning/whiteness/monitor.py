"""The callback that follows whiteness through a training run."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import check_norms, named_norms
from swbn_lightning.whiteness.measure import LayerWhiteness, measure_whiteness


class WhitenessMonitor(pl.Callback):
    """Logs how white the normalisation layers' outputs are, before training and after each epoch.

    For every layer the correlation-to-identity distance ``norm_F(Corr - I)`` as ``whiteness/distance/<layer>``
    and its dimension-free form, the RMS off-diagonal correlation, as ``whiteness/rms/<layer>``; their means
    over the layers as ``whiteness/distance/mean`` and ``whiteness/rms/mean``. Measured in evaluation mode on a
    fixed sample of validation images; modes, state and random streams stay what they were. The history is
    part of the checkpoint.

    After each epoch it also warns of what :func:`swbn_lightning.check_norms` finds: batches that were not finite, too
    few samples, a whitening matrix that has grown; each once a layer and training.

    A network without normalisation layers is left alone.

    Args:
        num_images: validation images in the sample; 512 maps of 7x7 positions already are 25,000 samples a
            channel.
        layers: patterns of module names; all by default.
        every_n_epochs: measure after every so many epochs.
        images: ``[N, ...]``, another sample, for a model trained without one of this package's data modules.

    Raises:
        InputError: a number below 1; no ``images`` and a data module without ``sample_images``.
    """

    def __init__(
        self,
        num_images: int = 512,
        layers: Sequence[str] = ("*",),
        every_n_epochs: int = 1,
        images: Tensor | None = None,
    ) -> None:
        require_positive("WhitenessMonitor", num_images=num_images, every_n_epochs=every_n_epochs)
        self.num_images = num_images
        self.layers = tuple(layers)
        self.every_n_epochs = every_n_epochs
        self._images = images
        #: One entry a measurement: ``{"epoch", "step", "distance", "rms"}``, means over the layers; epoch -1 is
        #: before training.
        self.history: list[dict[str, float]] = []
        self._warned: set[tuple[str, str]] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.history:  # a resumed run has its start in the checkpoint
            self._measure(trainer, pl_module, epoch=-1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for finding in check_norms(pl_module):
            if (finding.name, finding.kind) not in self._warned:
                self._warned.add((finding.name, finding.kind))
                rank_zero_warn(str(finding))
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._measure(trainer, pl_module, epoch=trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"history": [dict(entry) for entry in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = [dict(entry) for entry in state_dict["history"]]

    def _measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> None:
        if next(named_norms(pl_module), None) is None:
            return
        images = self._sample(trainer).to(pl_module.device)
        with trainer.precision_plugin.forward_context():
            measured = measure_whiteness(pl_module, images, layers=self.layers)
        means = {key: _mean(measured, key) for key in ("distance", "rms")}
        self.history.append({"epoch": epoch, "step": trainer.global_step, **means})
        values = {f"whiteness/{key}/mean": value for key, value in means.items()}
        for name, layer in measured.items():
            values[f"whiteness/distance/{name}"] = layer.distance
            values[f"whiteness/rms/{name}"] = layer.rms
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _sample(self, trainer: pl.Trainer) -> Tensor:
        if self._images is None:
            sample = getattr(getattr(trainer, "datamodule", None), "sample_images", None)
            if sample is None:
                raise InputError(
                    "WhitenessMonitor has no images: train with a data module that has sample_images(count), "
                    "or give WhitenessMonitor(images=...)."
                )
            self._images = sample(self.num_images)
        return self._images[: self.num_images]


def _mean(measured: dict[str, LayerWhiteness], key: str) -> float:
    values = [getattr(layer, key) for layer in measured.values() if layer.num_constant < layer.num_features]
    return sum(values) / len(values) if values else float("nan")
