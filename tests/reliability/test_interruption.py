"""A training that was stopped and went on is, bit for bit, the one that was not stopped."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException

from cli import main
from swbn_lightning.runs.checkpoints import find_checkpoint
from swbn_lightning.training.callbacks.random_streams import RandomStreams
from tests.reliability.tiny_runs import Kill, assert_same_training, classification, few_shot, fit, signals_of

MORE = {
    "plain": ({}, {}),
    "accumulating": ({"accumulate_grad_batches": 3}, {}),
    "accumulating and validating": ({"accumulate_grad_batches": 3, "val_check_interval": 2}, {}),
    "a worker": ({}, {"num_workers": 1}),
    "limited": ({"limit_train_batches": 4}, {}),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As many threads as the killed children have: sums over another number of them differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def make(tiny_mnist, tiny_cifar100):
    """Model, data and the trainer's options of a training."""

    def make(kind, more):
        options, data = MORE[more]
        builders = {"classification": (classification, tiny_mnist), "few-shot": (few_shot, tiny_cifar100)}
        build, root = builders[kind]
        torch.manual_seed(0)
        return build(root, **data), options

    return make


@pytest.fixture(scope="module")
def uninterrupted(make, tmp_path_factory):
    """The last checkpoint of a run that nothing stopped, made once for each kind."""
    made = {}

    def run(kind, more):
        if (kind, more) not in made:
            parts, options = make(kind, more)
            made[kind, more] = fit(tmp_path_factory.mktemp("whole"), *parts, **options)
        return made[kind, more]

    return run


@pytest.mark.parametrize(("kind", "more", "number", "where", "step"), [
    ("classification", "plain", 7, "train", 8),  # in the middle of the second epoch of five steps
    ("classification", "plain", 1, "validation", 5),
    ("classification", "plain", 1, "epoch", 10),
    ("classification", "accumulating", 8, "train", 3),  # in the middle of an optimiser step, after one batch of two
    # In the first validation of the second epoch, in the midst of an optimiser step.
    ("classification", "accumulating and validating", 10, "validation", 2),
    ("classification", "a worker", 7, "train", 8),
    ("classification", "limited", 5, "train", 6),
    ("few-shot", "plain", 7, "train", 8),
])  # fmt: skip
def test_sigterm_loses_no_step(kind, more, number, where, step, make, uninterrupted, tmp_path):
    parts, options = make(kind, more)
    with pytest.raises(SIGTERMException):
        fit(tmp_path, *parts, Kill(number, where=where), **options)
    first = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert first["global_step"] == step and ("accumulated_gradients" in first) == more.startswith("accumulating")
    parts, options = make(kind, more)
    last = fit(tmp_path, *parts, resume=tmp_path / "last.ckpt", **options)
    assert_same_training(last, uninterrupted(kind, more))


def test_stopped_twice_in_one_epoch(make, uninterrupted, tmp_path):
    for number, resume in ((6, None), (1, tmp_path / "last.ckpt")):
        with pytest.raises(SIGTERMException):
            fit(tmp_path, *make("classification", "plain")[0], Kill(number), resume=resume)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 9
    last = fit(tmp_path, *make("classification", "plain")[0], resume=tmp_path / "last.ckpt")
    assert_same_training(last, uninterrupted("classification", "plain"))


class Validations(pl.Callback):
    """What each validation of a training was made on."""

    def __init__(self):
        self.made = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.made.append((trainer.current_epoch, pl_module.results["val"]["images"]))


@pytest.mark.parametrize(("number", "where"), [(2, "validation"), (4, "train")])  # the last of the first epoch
def test_a_validation_that_was_broken_off_is_made_whole(number, where, make, tmp_path):
    with pytest.raises(SIGTERMException):
        fit(tmp_path, *make("classification", "plain")[0], Kill(number, where=where))
    seen = Validations()
    fit(tmp_path, *make("classification", "plain")[0], seen, resume=tmp_path / "last.ckpt")
    assert seen.made == [(0, 20), (1, 20), (2, 20)]


def test_slurms_signal_saves_and_puts_the_job_into_the_queue_again(make, tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\n")
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    job = {"NTASKS": "1", "NTASKS_PER_NODE": "1", "JOB_ID": "1234", "JOB_NAME": "train"}
    for name, value in {**job, "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    options = {"default_root_dir": tmp_path, "devices": 1}
    fit(tmp_path / "first", *make("classification", "plain")[0], Kill(7, "SIGUSR1"), **options)
    assert (tmp_path / "asked").read_text() == "requeue 1234\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == 7
    seen = Validations()
    last = fit(tmp_path / "second", *make("classification", "plain")[0], seen, **options)  # nothing is told to resume
    assert torch.load(last, weights_only=True)["global_step"] == 15 and seen.made == [(1, 20), (2, 20)]


def test_sigkill_loses_the_epoch_under_way_alone(make, uninterrupted, tiny_mnist, tmp_path):
    assert signals_of([["train", str(tiny_mnist), str(tmp_path / "first"), 8]]) == [signal.SIGKILL]
    last = tmp_path / "first" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 5
    last = fit(tmp_path / "second", *make("classification", "plain")[0], resume=last)
    assert_same_training(last, uninterrupted("classification", "plain"))


def test_another_exception_leaves_the_last_epochs_checkpoint(make, tmp_path):
    class Fails(Kill):
        def act(self):
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        fit(tmp_path, *make("classification", "plain")[0], Fails(7))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5


@pytest.mark.parametrize("middle", [True, False])
def test_what_a_loader_draws_when_it_is_made_counts_once(middle):
    """In the middle of an epoch its loader had drawn already when the states were kept; at its end it had not."""
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), global_rank=0, world_size=1,
        fit_loop=SimpleNamespace(restarted_mid_epoch=middle),
    )  # fmt: skip
    checkpoint, streams = {}, RandomStreams()
    streams.on_save_checkpoint(trainer, None, checkpoint)
    expected = [torch.rand(()).item(), torch.rand(()).item()][0 if middle else 1]
    streams.on_load_checkpoint(trainer, None, checkpoint)
    torch.rand(())  # as DataLoader does when it is iterated
    streams.on_train_start(trainer, None)
    assert torch.rand(()).item() == expected


def test_the_command_ends_with_143_and_goes_on(tiny_mnist, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    given = [
        "fit", "--model=ImageClassifier", "--model.num_classes=10", "--model.backbone=mlp", "--model.norm=swbn-fro",
        "--model.backbone_args={hidden: [16]}", "--data=MNISTDataModule", f"--data.root={tiny_mnist}",
        "--data.batch_size=32", "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--run.name=run",
        "--whiteness.num_images=64", "--whiteness.pictures=false", "--trainer.enable_model_summary=false",
        "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        main([*given, "--trainer.callbacks=tests.reliability.tiny_runs.Kill", "--trainer.callbacks.number=7"])
    assert stopped.value.code == 143
    last = find_checkpoint("runs/run", "last")
    assert torch.load(last, weights_only=True)["global_step"] == 8
    assert f"Stopped by SIGTERM; go on with --ckpt_path {last}" in caplog.text.replace(str(Path.cwd()) + "/", "")
    main([*given, "--ckpt_path=runs/run"])
    content = torch.load(find_checkpoint("runs/run", "last"), weights_only=True)
    assert content["global_step"] == 10 and "random_streams" in content


@pytest.mark.parametrize(
    ("rank", "elastic", "code"), [(None, False, 143), ("0", False, 143), ("1", False, 0), ("1", True, 143)]
)
def test_what_lightning_started_beside_the_command_ends_well_after_sigterm(rank, elastic, code, monkeypatch):
    """Its observer kills the command at any other code of theirs; torchrun and SLURM want to see it."""
    for name, value in (("LOCAL_RANK", rank), ("TORCHELASTIC_RUN_ID", "x" if elastic else None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    def stopped(*args, **kwargs):
        raise SIGTERMException

    monkeypatch.setattr("swbn_lightning.command.main.SwbnCLI", stopped)
    with pytest.raises(SystemExit) as ended:
        main(["fit"])
    assert ended.value.code == code
