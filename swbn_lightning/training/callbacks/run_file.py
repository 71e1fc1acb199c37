"""Write ``run.json`` into a run's folder: the run's id, origin, settings and environment."""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from swbn_lightning.runs.folders import RUN_FILE, write_json
from swbn_lightning.runs.record import KEY, Record, environment, new_id, now, record_of, to_keep
from swbn_lightning.training.module import tested_file

PACKAGES = ("torchvision", "pytorch-lightning", "torchmetrics", "numpy")


def run_folder(trainer: pl.Trainer) -> Path | None:
    """Return the run's folder; None without loggers. Every process calls it in ``setup``: later some may be gone."""
    log_dir = trainer.log_dir  # the processes agree on it here
    return Path(log_dir) if trainer.loggers and log_dir else None


class AtTheEnd(pl.Callback):
    """Work on a run's folder when a command ends or is interrupted; put it after the callbacks that write the files."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._folder is not None and trainer.is_global_zero and self._folder.is_dir():
            self.finish(trainer, self._folder)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):  # Lightning calls no teardown then
            self.teardown(trainer, pl_module, "")

    def finish(self, trainer: pl.Trainer, folder: Path) -> None:
        raise NotImplementedError


class RunFile(pl.Callback):
    """Give a run its id, and write ``run.json`` when ``fit``, ``validate``, ``test`` or ``predict`` starts.

    The file has:

    - ``id``, ``kind`` (which of the four), ``command`` and ``started`` (UTC);
    - ``from``: the id of the run whose checkpoint (or backbone, if there is no checkpoint) it resumes or evaluates;
    - ``trained``: for an evaluation, that run's id, start and settings;
    - ``settings``, flat, and ``environment``, which names neither user nor machine.

    Every checkpoint contains the id, the start and the settings.

    Args:
        command: the command that was called; None if unknown, as in a program of your own.
        settings: returns the settings, flat.
    """

    def __init__(self, command: str | None = None, settings: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.command, self._give_settings = command, settings
        self._folder: Path | None = None
        self._record: Record | None = None
        self._settings: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        self._folder = folder if trainer.is_global_zero else None
        self._settings = dict(self._give_settings())
        self._record = Record(new_id(), now(), to_keep(self._settings))
        self._write(trainer)

    # Once more: in `setup` it is not known yet from which checkpoint.
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._write(trainer)

    on_test_start = on_predict_start = on_train_start

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._record is not None:
            checkpoint[KEY] = self._record.plain()

    def _write(self, trainer: pl.Trainer) -> None:
        if self._folder is None or self._record is None:
            return
        kind = trainer.state.fn.value if trainer.state.fn else None
        file = trainer.ckpt_path if kind == "fit" else tested_file(trainer, trainer.lightning_module)
        source = record_of(file) if file else None
        write_json(self._folder / RUN_FILE, {
            "id": self._record.id,
            "kind": kind,
            "command": self.command,
            "started": self._record.started,
            "from": source.id if source else None,
            "trained": source.plain() if source and kind != "fit" else None,
            "settings": self._settings,
            "environment": _environment(trainer),
        })  # fmt: skip


def _environment(trainer: pl.Trainer) -> dict[str, Any]:
    seed = os.environ.get("PL_GLOBAL_SEED")  # where seed_everything leaves it
    root = trainer.strategy.root_device
    device = f"CPU, {os.cpu_count()} cores" if root.type == "cpu" else str(root)
    if root.type == "cuda":
        device = torch.cuda.get_device_name(root)
    return {
        "seed": int(seed) if seed is not None else None,
        **environment(*PACKAGES),
        "device": device,
        "processes": trainer.world_size,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "platform": f"{platform.system()} {platform.machine()}",
    }
