"""What a run that was stopped needs to go on as if it had not been."""

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from swbn_lightning.errors import InputError

_State = dict[str, Any]
STREAMS = "random_streams"
GRADIENTS = "accumulated_gradients"


class RandomStreams(pl.Callback):
    """Keeps the states of Python's, numpy's and torch's generators in every checkpoint, and puts them back.

    Those of every process: the i-th goes on with the i-th's. A training that goes on in more processes than it was
    stopped with leaves the others as they were seeded.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = random_streams()
        every: list[Any] = [own]
        if trainer.world_size > 1 and dist.is_initialized():
            every = [None] * trainer.world_size
            dist.all_gather_object(every, own)
        checkpoint[STREAMS] = every

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get(STREAMS, [])
        if trainer.state.fn == "fit" and isinstance(states, list) and trainer.global_rank < len(states):
            self._loaded = states[trainer.global_rank]
            # Before loaders are made, which may draw as they do at the beginning of any epoch.
            try:
                set_random_streams(self._loaded)
            except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
                raise InputError(f"the checkpoint's {STREAMS} are no states of random generators: {error}.") from error

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # In the middle of an epoch they were made already when the states were taken.
        if self._loaded is not None and trainer.fit_loop.restarted_mid_epoch:
            set_random_streams(self._loaded)
        self._loaded = None


def random_streams() -> dict[str, Any]:
    """The states of this process's generators, as plain data."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002 (the global one is what others draw from)
    assert isinstance(of_numpy, dict)
    key = torch.from_numpy(of_numpy["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**of_numpy, "gauss": float(of_numpy["gauss"]), "state": {**of_numpy["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_streams(states: dict[str, Any]) -> None:
    """Go on from what :func:`random_streams` gave."""
    of_numpy = states["numpy"]
    inner = of_numpy["state"]
    # numpy does not look: from another place it would read foreign memory.
    if inner["key"].shape != (624,) or not 0 <= int(inner["pos"]) <= 624 or of_numpy["has_gauss"] not in (0, 1):
        raise ValueError("numpy's is none")
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    key = inner["key"].numpy().astype(np.uint32)
    np.random.set_state({**of_numpy, "state": {**inner, "key": key}})  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


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


class LastCheckpoint(ModelCheckpoint):
    """``last.ckpt`` after every epoch and, when SIGTERM asks the process to end, in the middle of one.

    Lightning ends the training step under way first, so the state is that between two steps. (``save_last`` of another
    ``ModelCheckpoint`` writes with a new best alone.) Nothing is written after any other exception, Ctrl-C among them,
    since a step may be half done: then the last epoch's stays.

    Where a step of the optimiser takes several batches (``accumulate_grad_batches``) and not all of them have been,
    their gradients are kept as well; among several processes, whose gradients differ, nothing is written then
    (:class:`~swbn_lightning.training.callbacks.stop_together.StopTogether` has them finish the step). What was stopped in the middle of a
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
