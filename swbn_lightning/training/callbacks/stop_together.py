"""On SIGTERM, stop all processes of a training at the same step, and end with exit code 143."""

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
    """Stop all processes of a distributed training at the same step as soon as one of them gets SIGTERM.

    Lightning 2.6 starts a collective inside its signal handler, among those of a training step. Both then fail or wait
    for ever. If only one process gets the signal, it leaves while the others wait for it. This handler only takes a
    note. After each batch the processes reduce their notes on the CPU, in a process group of their own. They read the
    result after the next batch, so that no process waits. Then all end as a single process does.

    An accumulated step of the optimiser is finished first, and so is a validation (processes may have different numbers
    of its batches). The sender of the signal must allow time for that. The callback does nothing in a single process,
    nor in ``validate`` and ``test``, which have nothing to save.
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
