"""Check that the processes of a distributed training hold the same numbers."""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm


class CheckRanksAgree(pl.Callback):
    """Stop a distributed training as soon as two processes hold different weights or whitening matrices.

    Use it on a new cluster, or if in doubt. It costs two small collectives and a pass over the weights per batch. It
    compares, bit for bit, every parameter and the buffers of whitening layers with ``sync=True`` and of
    ``SyncBatchNorm``. Buffers of plain BatchNorm differ by design. The comparison runs after the optimiser's step,
    before ``DistributedDataParallel`` overwrites the other processes' buffers with rank 0's, which would hide a
    difference. On the command line: ``--trainer.callbacks+=CheckRanksAgree``.

    Raises:
        InputError: when training starts, for a strategy that shards the parameters; during training, on every process,
            with the names of what differs.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        whole = isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
        if trainer.world_size > 1 and not whole:
            raise InputError(
                f"CheckRanksAgree compares whole parameters, but {type(trainer.strategy).__name__} may shard them; "
                "use strategy: ddp, or leave the callback out."
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.world_size == 1:
            return
        compared = dict(_compared(pl_module))
        sums = torch.stack([_checksum(value) for value in compared.values()])
        most, least = sums.clone(), sums.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        differ = [name for name, differs in zip(compared, (most != least).tolist(), strict=True) if differs]
        if differ:
            raise InputError(
                f"the processes disagree after batch {batch_idx} of epoch {trainer.current_epoch}: "
                f"{', '.join(differ[:5])}{', …' if len(differ) > 5 else ''} ({len(differ)} of {len(compared)} "
                "compared). Something on one of them is not done on the others: a hook or callback that changes "
                "weights, a random number, a layer with sync: false."
            )


def _compared(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, WhiteningNorm) and module.sync):
            persistent = module.state_dict(keep_vars=True)
            yield from ((f"{name}.{key}", value) for key, value in persistent.items() if not value.requires_grad)


def _checksum(value: Tensor) -> Tensor:
    """Return a 64-bit sum of the bytes, each weighted by its place, so that exchanged values differ too."""
    octets = value.detach().contiguous().flatten().view(torch.uint8).long()
    places = torch.arange(1, octets.numel() + 1, device=octets.device)
    return ((octets + 1) * (places * 0x9E3779B1 % 0x7FFFFFFF)).sum()  # odd, well mixed multiples; wraps around
