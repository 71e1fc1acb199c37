"""Stop a training with non-finite numbers, say where they began, and keep the last good checkpoint."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.training.module import training_forward
from swbn_lightning.training.not_finite import any_process, first_not_finite, not_finite, state_of, tensors_in


class StopOnNonFinite(pl.Callback):
    """Stop a training at a loss, gradient or weight that is NaN or infinite.

    If every step is checked, a loss or gradient stops the run before the optimiser's step (not with ``cuda_graph``).
    Weights and buffers are checked before a validation, at the end of an epoch and before any checkpoint is written, so
    checkpoints contain only finite numbers (except with ``save_weights_only``, for which Lightning calls no callback).

    With ``precision: 16-mixed``, the loss scaler skips a non-finite step. Training continues, with a warning, until
    more than ``max_skipped`` losses in a row are not finite.

    The error says where it began: the first non-finite parameter or, from a second forward of the current batch, the
    first module with a non-finite output. A GPU must wait for each check, so there it runs at intervals and what it
    finds may be that old. To find the origin, resume from the last checkpoint with ``every_n_steps: 1``.

    Args:
        every_n_steps: batches between checks. None: 1 on a CPU, the trainer's ``log_every_n_steps`` on a GPU. 0: only
            at the end of epochs and before checkpoints.
        max_skipped: see above. The scale starts at 2**16 and halves each time, so after 20 it is below 1.

    Raises:
        InputError: a number is out of range; during training, as above.
    """

    def __init__(self, every_n_steps: int | None = None, max_skipped: int = 20) -> None:
        if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 0):
            raise InputError(f"StopOnNonFinite: every_n_steps must be an integer of at least 0, got {every_n_steps!r}.")
        require_positive("StopOnNonFinite", max_skipped=max_skipped)
        self.every_n_steps, self.max_skipped = every_n_steps, max_skipped
        self._batch: Any = None
        self._batches = 0  # seen since training started
        self._in_a_row: Tensor | None = None  # losses that were not finite, up to now, on the device
        self._most: Tensor | None = None  # in a row since the last look
        self._ignored: set[str] = set()  # names of what was not finite to begin with, such as a mask
        self._warned = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ignored = set(not_finite(state_of(pl_module)))
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=pl_module.device)
        self._most = self._in_a_row.clone()
        self._batches, self._warned = 0, False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch
        self._batches += 1

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert self._in_a_row is not None and self._most is not None
        bad = ~torch.isfinite(loss.detach())
        self._in_a_row = torch.where(bad, self._in_a_row + 1, 0)
        self._most = torch.maximum(self._most, self._in_a_row)
        if self._interval(trainer, pl_module) == 1:
            self._look_at_losses(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._interval(trainer, pl_module) != 1 or _scales_loss(trainer):
            return
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        if found := not_finite(gradients):
            # Backward runs from the last layer to the first: the last one is where it began.
            self._stop(trainer, f"the gradient of {found[-1]} is not finite, while the loss is", None)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        interval = self._interval(trainer, pl_module)
        if interval > 1 and self._batches % interval == 0:
            self._look_at_losses(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:  # an evaluation would stop with less to say
            self._look_at_state(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look_at_losses(trainer, pl_module)
        self._look_at_state(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self._look_at_state(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batch = None

    def _interval(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
        if self.every_n_steps is not None:
            return self.every_n_steps
        return 1 if pl_module.device.type == "cpu" else max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def _look_at_losses(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._most is not None
        most = int(self._most)
        self._most.zero_()
        allowed = self.max_skipped if _scales_loss(trainer) else 0
        # Every process must do the same, or the others would wait for it.
        if any_process(trainer, most > allowed):
            times = f"{most} losses in a row were" if allowed else "the loss is"
            self._stop(trainer, f"{times} not finite", self._origin(trainer, pl_module))
        elif most and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"A loss was not finite (global step {trainer.global_step}); the loss scaler left its step out and "
                f"training goes on. It stops after {self.max_skipped} in a row."
            )

    def _look_at_state(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = [name for name in not_finite(state_of(pl_module)) if name not in self._ignored]
        if any_process(trainer, bool(found)):
            named = f"{found[0]} is" if found else "in another process a weight is"
            self._stop(trainer, f"{named} not finite ({len(found)} parameters and buffers are)", None)

    def _origin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        """Say where it began, as far as a second forward of the current batch shows."""
        found = self._origin_at_sight(trainer, pl_module)
        # Synchronised layers wait for every process: all go through the second forward, or none does.
        if any_process(trainer, found is not None):
            return found or "it began in another process, whose message says where"
        try:
            with trainer.precision_plugin.forward_context():
                first = first_not_finite(pl_module, lambda: training_forward(pl_module, self._batch))
        except Exception as error:  # a module of the user's may take its batches in another way
            return f"the batch cannot be run again here ({type(error).__name__}: {error}), so it cannot be said where"
        if first is None:
            return "every layer's output is finite when the batch at hand runs again: it is the loss, or another batch"
        return f"it begins in {first}, whose output is the first that is not finite"

    def _origin_at_sight(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        """Name the parameter, or the value of this process's batch, that is not finite."""
        parameters: dict[str, Tensor] = dict(pl_module.named_parameters())
        if found := [name for name in not_finite(parameters) if name not in self._ignored]:
            if self._interval(trainer, pl_module) == 1:
                return f"{found[0]} is not finite either, since the last step"
            return (
                f"{found[0]} is not finite either, so a step since the last look went wrong. Go on from the last "
                "checkpoint with every_n_steps: 1 to be told which layer it begins in"
            )
        values = {f"value {number}": value for number, value in enumerate(tensors_in(self._batch))}
        if bad := not_finite(values):
            return f"the batch itself is not finite ({bad[0]} of it)"
        return None

    def _stop(self, trainer: pl.Trainer, what: str, origin: str | None) -> None:
        kept = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]  # type: ignore[attr-defined]
        last = next((c.best_model_path for c in reversed(kept) if c.best_model_path), None)
        begins = f": {origin}" if origin else ""
        raise InputError(
            f"training stopped in epoch {trainer.current_epoch} at global step {trainer.global_step}: {what}{begins}. "
            "Take a lower learning rate or gradient_clip_val, look for values in the data that are too large, or use "
            f"a wider precision (bf16-mixed, 32-true). Last good checkpoint: {last or 'none'}."
        )


def _scales_loss(trainer: pl.Trainer) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None
