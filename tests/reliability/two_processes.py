"""What each of two processes, or a single one, does with the same batches; a program, started by test_two_processes."""

import json
import os
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.utilities.exceptions import SIGTERMException

from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from swbn_lightning.training.callbacks.check_ranks_agree import CheckRanksAgree
from swbn_lightning.training.callbacks.last_checkpoint import LastCheckpoint
from swbn_lightning.training.callbacks.random_streams import RandomStreams
from swbn_lightning.training.callbacks.stop_on_non_finite import StopOnNonFinite
from swbn_lightning.training.callbacks.stop_together import StopTogether
from tests.reliability.tiny_runs import QUIET, Kill, base_classes, classification, few_shot, fit

# Classification with each: ours, and one that is free of batch statistics. (Few-shot has swbn-kl.)
NORMS = ("swbn-fro", "iternorm", "dbn", "ln")
# At which batch of which kind a process gets SIGTERM, by its rank, and the trainer's options.
STOPS = {
    "process 1": ({1: (7, "train")}, {}),
    "both, one after the other": ({0: (8, "train"), 1: (7, "train")}, {}),
    "in a validation": ({1: (4, "validation")}, {}),
    "accumulating and validating": ({0: (5, "train")}, {"accumulate_grad_batches": 3, "val_check_interval": 2}),
    "at an epoch's end": ({0: (4, "train")}, {}),
    "in the last step": ({1: (14, "train")}, {}),
}


# Only process 0 has it, and reads metrics for it: the order of collectives must not depend on that.
WITH_BAR = {**QUIET, "enable_progress_bar": True}


def usual():
    """The callbacks that a run of the command has."""
    return RichProgressBar(), StopOnNonFinite(), StopTogether()


class Record(pl.Callback):
    """The loss and every W of each step, and the training classes or labels that this process saw."""

    def __init__(self):
        self.losses, self.matrices, self.seen = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.matrices.append([
            layer.whitening_matrix.clone() for layer in pl_module.modules() if isinstance(layer, WhiteningNorm)
        ])  # fmt: skip
        classes = getattr(batch, "classes", None)
        self.seen.append(batch.labels.tolist() if classes is None else classes.tolist())


class Drift(pl.Callback):
    """Process 1 alone changes one number of one W, as a fault would."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 2:
            layer = next(m for m in pl_module.modules() if isinstance(m, WhiteningNorm))
            layer.whitening_matrix[0, 1, 2] += 1e-7


def train(name, world, roots, folder):
    """Four epochs; what was recorded, the results, and the weights at the end."""
    torch.manual_seed(0)
    if name in NORMS:
        model, data = classification(roots[0], norm=name, batch_size=32 // world)
    elif name == "base classes":
        model, data = base_classes(roots[1], batch_size=32 // world)
    else:
        model, data = few_shot(roots[1], episodes_per_step=2 // world)
    record, last = Record(), LastCheckpoint()
    last.dirpath = str(folder / name)
    trainer = pl.Trainer(
        max_epochs=4, devices=world, strategy="ddp" if world > 1 else "auto", plugins=[WholeCheckpointIO()],
        callbacks=[RandomStreams(), *usual(), record, CheckRanksAgree(), last], **WITH_BAR,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {
        "losses": record.losses, "matrices": record.matrices, "seen": record.seen, "results": model.results,
        "logged": logged, "state": model.state_dict(),
    }  # fmt: skip


class NotFinite(pl.Callback):
    """Process 1 alone has a batch with a NaN in it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 2:
            batch.images[0] = float("nan")


def error_of(root, *callbacks):
    """What a training with these callbacks ends with."""
    model, data = classification(root, batch_size=16)
    trainer = pl.Trainer(
        max_epochs=1, devices=2, strategy="ddp", callbacks=[RichProgressBar(), *callbacks], enable_checkpointing=False,
        **WITH_BAR,
    )  # fmt: skip
    try:
        trainer.fit(model, datamodule=data)
    except ValueError as error:
        return str(error)
    return "nothing was noticed"


def stopped(name, root, folder):
    """A training that is stopped and goes on, beside one that is not; whether and after how many batches it ended."""
    kills, options = STOPS[name]
    own = kills.get(int(os.environ.get("LOCAL_RANK", 0)))
    ended = None

    def train(kind, *callbacks, resume=None):
        torch.manual_seed(0)
        model, data = classification(root, batch_size=16)
        callbacks = (*usual(), CheckRanksAgree(), *callbacks)
        two = {"devices": 2, "strategy": "ddp", "noise": False, "enable_progress_bar": True, **options}
        return fit(folder / "stops" / name / kind, model, data, *callbacks, resume=resume, **two)

    record = Record()
    train("whole")
    try:
        train("on", record, *([] if own is None else [Kill(own[0], where=own[1])]))
    except SIGTERMException:
        ended = len(record.losses)
        train("on", resume=folder / "stops" / name / "on" / "last.ckpt")
    return ended


def work(world, roots, folder):
    """All jobs, in this process's part."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pl.seed_everything(0, verbose=False)
    found = {name: train(name, world, roots, folder) for name in (*NORMS, "few-shot", "base classes")}
    if world > 1:
        found["drift"] = error_of(roots[0], Drift(), CheckRanksAgree())
        found["not finite"] = error_of(roots[0], NotFinite(), StopOnNonFinite())
        found["stops"] = {name: stopped(name, roots[0], folder) for name in STOPS}
    return found


if __name__ == "__main__":
    roots, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    found = work(2, roots, folder)
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")
