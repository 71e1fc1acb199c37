"""Update normalisation statistics after Lightning's weight averaging."""

import os
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import update_norms
from swbn_lightning.norms.surgery.update import updated_norms
from swbn_lightning.training.lightning_internals import averaged_copy, training_batches
from swbn_lightning.training.module import training_forward

CHECKPOINT = "averaged.ckpt"


class UpdateNorms(pl.Callback):
    """Run :func:`~swbn_lightning.update_norms` on training batches at the end of a run with averaged weights.

    Put it after Lightning's ``WeightAveraging``, ``EMAWeightAveraging`` or ``StochasticWeightAveraging``. These put the
    averaged weights into the model when training ends, but leave whitening layers with the statistics of other
    weights::

        Trainer(callbacks=[EMAWeightAveraging(), UpdateNorms()])

    The statistics become those of the averaged network over an epoch of training batches, augmented as in training and
    without dropout. Each W becomes an average too. The result is saved as ``averaged.ckpt`` beside the other
    checkpoints.

    Args:
        num_batches: number of training batches to use; None for a whole epoch.
        forward: ``forward(pl_module, batch)`` runs the network on a batch as it arrives in ``training_step``. By
            default, this package's modules compute their training loss; others run ``pl_module(batch)``, with only the
            first element of a list or tuple.

    Raises:
        InputError: the number is below 1; when training starts, an averaging callback comes after this one, or the
            model has no layer to update. An error at the end of training is only a warning, and the state stays
            unchanged; with several processes that holds only for an :class:`InputError`.
    """

    def __init__(
        self, num_batches: int | None = None, forward: Callable[[pl.LightningModule, Any], Any] | None = None
    ) -> None:
        if num_batches is not None:
            require_positive("UpdateNorms", num_batches=num_batches)
        self.num_batches = num_batches
        self.forward = forward or training_forward

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        updated_norms(pl_module)  # an error now, not after days of training
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for later in callbacks[callbacks.index(self) :]:
            if isinstance(later, WeightAveraging | StochasticWeightAveraging):
                raise InputError(
                    f"UpdateNorms must come after {type(later).__name__} in the trainer's callbacks: it works on the "
                    "weights that the other one puts into the model when training ends."
                )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def forward(batch: Any) -> None:
            with trainer.precision_plugin.forward_context():
                self.forward(pl_module, batch)

        try:
            update_norms(training_batches(trainer, self._number(trainer)), pl_module, forward)
        except Exception as error:  # what was trained shall not be lost for it; a forward may fail in any way
            if trainer.world_size > 1 and not isinstance(error, InputError):
                raise  # the other processes may be waiting for this one in a layer
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            rank_zero_warn(f"UpdateNorms has left the statistics as they were: {kind}{error}")
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # It goes on to validate and save its own copy of the average, which has the buffers from before.
            average = averaged_copy(callback) if isinstance(callback, WeightAveraging) else None
            if average is not None:
                average.load_state_dict(pl_module.state_dict())
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if folder is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = os.path.join(folder, CHECKPOINT)  # noqa: PTH118 (it may be the address of a bucket)
            trainer.save_checkpoint(path)
            rank_zero_info(f"Weights and normalisation statistics of the end of training: {path}")

    def _number(self, trainer: pl.Trainer) -> int | None:
        """Return the number of batches; None for all."""
        number = trainer.num_training_batches if self.num_batches is None else self.num_batches
        return None if number == float("inf") else int(number)
