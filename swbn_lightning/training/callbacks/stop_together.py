"""SIGTERM: all processes of a training stop at the same step, and the program ends with 143 wherever it is."""

from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from swbn_lightning.training.lightning_internals import (
    answer_sigterm,
    answer_sigterm_as_usual,
    in_the_midst_of_a_step,
    stop_at_next_step,
)


class StopTogether(pl.Callback):
    """Has all processes of a distributed training stop at the same step as soon as one of them gets SIGTERM.

    Lightning 2.6 starts a collective inside its signal handler, among those of a training step, and both fail or wait
    for ever; a process that is the only one to get the signal leaves while the others wait for it. Here the handler
    takes a note. After each batch the processes reduce their notes on the CPU, in a group of their own, and read the
    outcome after the next one, so that nobody waits for it; then all end as one process does.

    A step of the optimiser that takes several batches is finished first, and so is a validation (whose batches may be
    more on one process than on another): its time must fit into the time that the sender leaves. Does nothing in a
    single process, and nothing in ``validate`` and ``test``, which leave nothing to be saved.
    """

    def __init__(self) -> None:
        self._noted = False
        self._agreed = False
        self._group: Any = None  # a process group, while a training of several processes goes on
        self._notes = torch.zeros(1, dtype=torch.int32)
        self._reduction: dist.Work | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        self._group = dist.new_group(backend="gloo")
        self._noted = False
        answer_sigterm(trainer, self._note)

    def _note(self, signum: int, _: FrameType) -> None:
        self._noted = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._group is None:
            return
        if self._reduction is not None:
            self._reduction.wait()
            if self._notes.item() and not self._agreed:
                rank_zero_info("SIGTERM: the training stops after this step, on every process.")
            self._agreed |= bool(self._notes.item())
        self._notes.fill_(self._noted)
        self._reduction = dist.all_reduce(self._notes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._stop_between_steps(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._agreed:
            stop_at_next_step(trainer, False)  # Lightning would break it off after a batch

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_between_steps(trainer)

    def _stop_between_steps(self, trainer: pl.Trainer) -> None:
        if self._agreed and not in_the_midst_of_a_step(trainer):
            stop_at_next_step(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # After any but SIGTERM's a process may be alone: what is under way is not waited for.
        self._close(trainer, wait=isinstance(exception, SIGTERMException))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close(trainer)

    def _close(self, trainer: pl.Trainer, wait: bool = True) -> None:
        if self._group is not None and wait:
            if self._reduction is not None:
                self._reduction.wait()
            dist.destroy_process_group(self._group)
        answer_sigterm_as_usual(trainer)
        self._group = self._reduction = None
        self._notes = torch.zeros(1, dtype=torch.int32)
        self._noted = self._agreed = False
