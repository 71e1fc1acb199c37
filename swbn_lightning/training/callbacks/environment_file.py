"""What a figure depends on besides the code and the configuration; ``environment.json`` in a run's folder."""

import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from swbn_lightning.files.writing import write_whole
from swbn_lightning.runs.environment import ENVIRONMENT_FILE, environment

PACKAGES = ("torchvision", "pytorch-lightning", "torchmetrics", "numpy")


class EnvironmentFile(pl.Callback):
    """Writes ``environment.json`` into the run's folder when ``fit``, ``validate``, ``test`` or ``predict`` starts.

    In it: ``command`` (as on the command line), ``stage``, ``started`` (UTC), ``seed``, ``device`` (the one in use),
    ``processes``, ``threads`` (of torch, a process), ``precision``, ``platform``, ``Python`` and the versions of torch
    and :data:`PACKAGES`. Written at the start, so that a killed run has it too; nothing that names the user or the
    machine is added to what the command itself says.

    Args:
        command: what was called; None where nothing is known of it, as in a program of one's own.
    """

    def __init__(self, command: str | None = None) -> None:
        self.command = command

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # the processes agree on it here
        if not (trainer.is_global_zero and trainer.loggers and log_dir):
            return
        seed = os.environ.get("PL_GLOBAL_SEED")  # where seed_everything leaves it
        found: dict[str, Any] = {
            "command": self.command,
            "stage": stage,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": int(seed) if seed is not None else None,
            **environment(*PACKAGES),
            "device": _device(trainer.strategy.root_device),
            "processes": trainer.world_size,
            "threads": torch.get_num_threads(),
            "precision": str(trainer.precision),
            "platform": f"{platform.system()} {platform.machine()}",
        }
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        write_whole(Path(log_dir) / ENVIRONMENT_FILE, json.dumps(found, indent=2) + "\n")


def _device(device: torch.device) -> str:
    names: dict[str, Callable[[], str]] = {
        "cuda": lambda: torch.cuda.get_device_name(device),
        "cpu": lambda: f"CPU, {os.cpu_count()} cores",
    }
    return names.get(device.type, lambda: str(device))()
