"""What a run that was stopped needs to go on as if it had not been."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from swbn_lightning.errors import InputError

_State = dict[str, Any]
GRADIENTS = "accumulated_gradients"


class LastCheckpoint(ModelCheckpoint):
    """``last.ckpt`` after every epoch and, when SIGTERM asks the process to end, in the middle of one.

    Lightning ends the training step under way first, so the state is that between two steps. (``save_last`` of another
    ``ModelCheckpoint`` writes with a new best alone.) Nothing is written after any other exception, Ctrl-C among them,
    since a step may be half done: then the last epoch's stays.

    Where a step of the optimiser takes several batches (``accumulate_grad_batches``) and not all of them have been,
    their gradients are kept as well; among several processes, whose gradients differ, nothing is written then
    (``StopTogether`` has them finish the step). What was stopped in the middle of a
    validation makes the whole of it when it goes on.
    """

    def __init__(self) -> None:
        super().__init__(
            filename="last", monitor=None, every_n_epochs=1, save_on_train_epoch_end=True, enable_version_counter=False
        )
        self._gradients: dict[str, Tensor] = {}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        _leave_out_the_batch_under_way(trainer, checkpoint)
        # `trainer.training` is false in a validation in the midst of an accumulated step.
        if trainer.world_size == 1 and trainer.state.fn == "fit" and trainer.fit_loop.epoch_loop._should_accumulate():
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
        if isinstance(exception, KeyboardInterrupt) and self._last_checkpoint_saved:
            rank_zero_info(f"Interrupted; go on from the last epoch with --ckpt_path {self._last_checkpoint_saved}")
        probing = trainer.sanity_checking or trainer.fast_dev_run  # type: ignore[attr-defined]
        if not isinstance(exception, SIGTERMException) or trainer.state.fn != "fit" or probing:
            return
        accumulating = trainer.fit_loop.epoch_loop._should_accumulate()
        if self._should_skip_saving_checkpoint(trainer) and not (accumulating and trainer.world_size == 1):
            return  # an epoch has just ended
        if trainer.world_size > 1 and accumulating:
            rank_zero_info("Stopped between two batches of one optimiser step: last.ckpt stays that of the last epoch.")
            return
        if trainer.validating:
            _begin_validation_anew(trainer)
        self._save_checkpoint(trainer, self.format_checkpoint_name(self._monitor_candidates(trainer)))
        rank_zero_info(f"Stopped by SIGTERM; go on with --ckpt_path {self._last_checkpoint_saved}")


def _leave_out_the_batch_under_way(trainer: pl.Trainer, checkpoint: _State) -> None:
    """A save from a signal handler (SLURM's SIGUSR1) comes in the middle of a step: its batch is to be had again."""
    processed = trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
    for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
        if "batches" in state:
            state["batches"] = min(state["batches"], processed)


def _begin_validation_anew(trainer: pl.Trainer) -> None:
    """Mark a validation that was broken off as one of which no batch has been: its results so far are not kept."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.reset()
    # What Lightning takes for a validation to be gone on with: one batch begun, none of this run done.
    progress.total.ready = progress.total.started = 1  # type: ignore[attr-defined]
