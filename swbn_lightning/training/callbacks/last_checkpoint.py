"""Save everything a stopped run needs to continue as if it had not been stopped."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from swbn_lightning.errors import InputError
from swbn_lightning.training.lightning_internals import (
    begin_validation_anew,
    in_the_midst_of_a_step,
    leave_out_the_batch_under_way,
)

GRADIENTS = "accumulated_gradients"


class LastCheckpoint(ModelCheckpoint):
    """Save ``last.ckpt`` after every epoch and, on SIGTERM, in the middle of one.

    On SIGTERM, Lightning first ends the training step under way. (``save_last`` of another ``ModelCheckpoint`` only
    writes with a new best.) No other exception writes a checkpoint, including Ctrl-C, because a step may be half done.

    In the middle of an accumulated step, the gradients are saved too. With several processes the gradients differ, so
    nothing is written then; ``StopTogether`` makes the processes finish the step. A run stopped during validation
    repeats the whole validation when it resumes.
    """

    def __init__(self) -> None:
        super().__init__(
            filename="last",
            monitor=None,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            save_on_exception=True,
            enable_version_counter=False,
        )
        self._gradients: dict[str, Tensor] = {}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        leave_out_the_batch_under_way(trainer, checkpoint)
        # `trainer.training` is false in a validation in the midst of an accumulated step.
        if trainer.world_size == 1 and trainer.state.fn == "fit" and in_the_midst_of_a_step(trainer):
            gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
            checkpoint[GRADIENTS] = gradients

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        gradients = checkpoint.get(GRADIENTS, {})
        shapes = {name: p.shape for name, p in pl_module.named_parameters()}
        if not isinstance(gradients, dict) or any(
            not isinstance(g, Tensor) or g.shape != shapes.get(name) for name, g in gradients.items()
        ):
            raise InputError(f"the checkpoint's {GRADIENTS} are not those of this model's parameters.")
        self._gradients = gradients

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        for name, parameter in pl_module.named_parameters():
            if name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter.device)
        self._gradients = {}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self.best_model_path:
            rank_zero_info(f"Interrupted; go on from the last epoch with --ckpt_path {self.best_model_path}")
        probing = trainer.sanity_checking or trainer.fast_dev_run  # type: ignore[attr-defined]
        if not isinstance(exception, SIGTERMException) or trainer.state.fn != "fit" or probing:
            return
        if trainer.world_size > 1 and in_the_midst_of_a_step(trainer):
            rank_zero_info("Stopped between two batches of one optimiser step: last.ckpt stays that of the last epoch.")
            return
        if trainer.validating:
            begin_validation_anew(trainer)
        path = self.format_checkpoint_name({})
        if in_the_midst_of_a_step(trainer):
            trainer.save_checkpoint(path)
        elif trainer.global_step:
            super().on_exception(trainer, pl_module, exception)  # unless the step's is there, after an epoch's end
        else:
            return
        rank_zero_info(f"Stopped by SIGTERM; go on with --ckpt_path {path}")
