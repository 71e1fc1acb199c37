"""Says so where a training ends without a step."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn


class NothingToTrain(pl.Callback):
    """Says so where ``fit`` ends without a step: Lightning ends as if it had trained."""

    def __init__(self) -> None:
        self._trained = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._trained = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._trained:
            rank_zero_warn(
                f"nothing was trained: {trainer.current_epoch} epochs and {trainer.global_step} steps are behind this "
                f"model, asked for were max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}, "
                f"limit_train_batches={trainer.limit_train_batches}. With larger ones it goes on."
            )
