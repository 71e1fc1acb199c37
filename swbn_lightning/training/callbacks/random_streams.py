"""Save random generator states in every checkpoint, so that a resumed training continues the same streams."""

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from swbn_lightning.errors import InputError

STREAMS = "random_streams"


class RandomStreams(pl.Callback):
    """Save the states of Python's, numpy's and torch's random generators in every checkpoint, and restore them.

    Each process restores its own state. If a training resumes with more processes than before, the extra ones keep
    their seeded state.
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
    """Return the states of this process's generators, as plain data."""
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
    """Restore the states from :func:`random_streams`."""
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
