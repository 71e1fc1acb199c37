"""A training that goes on has the settings and the whole state of its checkpoint, or it does not begin."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, StochasticWeightAveraging
from torch.optim import lr_scheduler as torch_schedules
from torch.utils.data import DataLoader

from cli import main
from swbn_lightning.errors import InputError
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from swbn_lightning.training.callbacks.random_streams import RandomStreams
from swbn_lightning.training.module import TrainingModule
from tests.reliability.tiny_runs import QUIET

S = torch_schedules
KEY = "training_settings"


class Tiny(TrainingModule):
    """A model of one layer, whose validation's loss never changes."""

    def setup(self, stage):
        pass

    def training_loss(self, batch):
        return sum((p * p).sum() for p in self.parameters()), batch.mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 1.0)


def sgd(lr=0.01, momentum=0.9):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def train(epochs, optimizer=None, schedule=None, resume=None, callbacks=(), plugins=(), **more):
    """Three steps an epoch."""
    optimizer = optimizer or sgd()
    module = Tiny(backbone="mlp", backbone_args={"hidden": [2]}, optimizer=optimizer, lr_scheduler=schedule, **more)
    trainer = pl.Trainer(
        max_epochs=epochs, plugins=[WholeCheckpointIO(), *plugins], enable_checkpointing=False,
        callbacks=[RandomStreams(), *callbacks], **QUIET,
    )  # fmt: skip
    images = DataLoader(torch.zeros(3, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, images, DataLoader(torch.zeros(1, 1)), ckpt_path=resume)
    return trainer


def saved(folder, **first):
    train(2, **first).save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def cosine(steps, eta_min=0.0):
    return lambda optimizer: S.CosineAnnealingLR(optimizer, steps, eta_min)


def in_turn(gamma):
    return lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.5, 99), S.ExponentialLR(o, gamma)], [3])


CHANGES = {
    "optimiser": (
        {}, {"optimizer": torch.optim.Adam}, "optimizer was torch.optim.sgd.SGD and is now torch.optim.adam.Adam"
    ),
    "schedule": (
        {"schedule": cosine(10)}, {"schedule": lambda o: S.ExponentialLR(o, 0.9)}, r"CosineAnnealingLR and is now .*Exp"
    ),
    "schedule removed": ({"schedule": cosine(10)}, {"schedule": None}, "lr_scheduler was .*Cosine.* and is now none"),
    "milestones": (
        {"schedule": lambda o: S.MultiStepLR(o, [1, 4])}, {"schedule": lambda o: S.MultiStepLR(o, [1, 5])},
        r"milestones was \[1, 4\] and is now \[1, 5\]",
    ),
    "the top, which is in the groups only": (
        {"schedule": lambda o: S.OneCycleLR(o, 0.4, total_steps=60, div_factor=8)},
        {"schedule": lambda o: S.OneCycleLR(o, 0.2, total_steps=60, div_factor=4)}, "max_lr was 0.4 and is now 0.2",
    ),
    "an inner schedule": ({"schedule": in_turn(0.9)}, {"schedule": in_turn(0.8)}, r"gamma was 0.9"),
    "a rate that is a tensor": (
        {"optimizer": sgd(lr=torch.tensor(0.01))}, {"optimizer": sgd(lr=torch.tensor(0.02))}, "optimizer.lr was 0.0"
    ),
    "several": (
        {"schedule": cosine(10)}, {"optimizer": sgd(0.5, 0.1), "schedule": cosine(20)},
        r"optimizer.lr was .*; optimizer.momentum was .*; lr_scheduler.T_max was",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_another_setting_is_refused_by_name(change, tmp_path):
    first, then, message = CHANGES[change]
    path = saved(tmp_path, warmup_steps=4, **first)
    with pytest.raises(
        InputError, match=f"a.ckpt restores settings .*{message}.* or start .*backbone_checkpoint"
    ) as told:
        train(3, resume=path, warmup_steps=4, **first | then)
    assert "base_lr" not in str(told.value)  # what follows from a setting is none


def test_one_group_of_several(tmp_path):
    def groups(*rates):
        return lambda parameters: torch.optim.SGD(
            [{"params": [p], "lr": rate} for p, rate in zip(list(parameters)[:2], rates, strict=True)], momentum=0.5
        )

    path = saved(tmp_path, optimizer=groups(0.1, 0.2))
    for optimizer, message in ((groups(0.1, 0.3), "optimizer.2.lr was 0.2 and is now 0.3"), (None, "groups was 2 and")):
        with pytest.raises(InputError, match=message):
            train(3, optimizer, resume=path)


SCHEDULES = {
    "none": None,
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=60),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 4, 4]),
    "SequentialLR": in_turn(0.9),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0),
    "eta_min of NaN": cosine(10, math.nan),
}


@pytest.mark.parametrize(("warmup_steps", "interval"), [(0, "epoch"), (4, "step")])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_settings_go_on_in_the_midst(name, warmup_steps, interval, tmp_path):
    """Twice, since a training that has gone on says what it was made with, too."""
    same = {"schedule": SCHEDULES[name], "warmup_steps": warmup_steps, "lr_interval": interval}
    train(3, **same).save_checkpoint(tmp_path / "a.ckpt")
    for epochs in (4, 5):
        now = train(epochs, resume=tmp_path / "a.ckpt", **same)
        assert now.global_step == 3 * epochs
        now.save_checkpoint(tmp_path / "a.ckpt")
    if name not in ("ReduceLROnPlateau", "eta_min of NaN"):  # the one misses the end of the epoch that it goes on from
        whole = train(5, **same).optimizers[0].param_groups[0]
        assert now.optimizers[0].param_groups[0]["lr"] == pytest.approx(whole["lr"], rel=1e-6)


class After(pl.strategies.SingleDeviceStrategy):
    """Loads when the optimiser is made already, as FSDP does."""

    restore_checkpoint_after_setup = True


def test_a_strategy_that_loads_late(tmp_path):
    path = saved(tmp_path, callbacks=[EarlyStopping("val/loss", patience=9)])

    def go_on(optimizer, patience):
        module = Tiny(backbone="mlp", backbone_args={"hidden": [2]}, optimizer=optimizer)
        trainer = pl.Trainer(
            max_epochs=3, strategy=After(accelerator=pl.accelerators.CPUAccelerator()), plugins=[WholeCheckpointIO()],
            enable_checkpointing=False, callbacks=[EarlyStopping("val/loss", patience=patience)],
            **{k: v for k, v in QUIET.items() if k != "accelerator"},
        )  # fmt: skip
        trainer.fit(module, DataLoader(torch.zeros(3, 1)), DataLoader(torch.zeros(1, 1)), ckpt_path=path)
        return trainer.global_step

    with pytest.raises(InputError, match="optimizer.lr was 0.01 and is now 0.5; patience of EarlyStopping was 9 and"):
        go_on(sgd(0.5), 2)
    assert go_on(sgd(), 9) == 9


def test_a_rate_may_be_a_tensor_or_a_number(tmp_path):
    path = saved(tmp_path, optimizer=sgd(torch.tensor(0.01)))
    assert train(3, sgd(0.01), resume=path).global_step == 9


def test_patience(tmp_path):
    path = saved(tmp_path, callbacks=[EarlyStopping("val/loss", patience=9)])
    with pytest.raises(InputError, match="patience of EarlyStopping was 9 and is now 3"):
        train(3, resume=path, callbacks=[EarlyStopping("val/loss", patience=3)])
    # What the state does not hold is as it is given.
    assert train(3, resume=path, callbacks=[EarlyStopping("val/loss", 0.5, patience=9)]).global_step == 9


def change(path, edit):
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)
    return path


@pytest.fixture
def warned(monkeypatch):
    said = []
    monkeypatch.setattr("swbn_lightning.training.resumed_settings.rank_zero_warn", said.append)
    return said


@pytest.mark.parametrize("odd", [None, [], {"optimizer": [5], 7: "x"}])
def test_settings_that_are_none_are_not_held(odd, tmp_path, warned):
    path = change(saved(tmp_path), lambda content: content.update({KEY: odd}))
    assert train(3, sgd(0.5), resume=path).optimizers[0].param_groups[0]["lr"] == 0.01
    assert "a.ckpt does not say with which settings" in warned[0]


@pytest.mark.parametrize("odd", ["\x1b[2J" * 900, 10**300])
def test_odd_settings_are_shown_shortly_and_act_on_nothing(odd, tmp_path):
    path = change(saved(tmp_path), lambda content: content[KEY].update({"optimizer.lr": odd}))
    with pytest.raises(InputError) as told:
        train(3, resume=path)
    assert str(told.value).isprintable() and len(str(told.value)) < 1000


@pytest.mark.parametrize("part", ["optimizer_states", "loops", "lr_schedulers"])
def test_a_part_that_is_missing_or_empty(part, tmp_path):
    path = saved(tmp_path, schedule=cosine(10))
    for edit in (lambda c: c[part].clear(), lambda c: c.pop(part)):
        change(path, edit)
        with pytest.raises(
            InputError, match=f"a.ckpt holds no {part}, .*save_weights_only.*last.ckpt.*backbone_checkpoint"
        ):
            train(3, schedule=cosine(10), resume=path)


def test_a_state_of_another_form(tmp_path):
    def spoil(content):
        loop = content["loops"]["fit_loop"]
        loop.update(dict.fromkeys(loop, "x"))

    path = saved(tmp_path)
    with pytest.raises(InputError, match="a.ckpt: its optimizer_states are not those of this training .*group"):
        train(3, lambda parameters: sgd()(list(parameters)[:1]), resume=path)
    with pytest.raises(InputError, match="a.ckpt: its loops are not those of this training"):
        train(3, resume=change(path, spoil))


@pytest.mark.parametrize("part", ["callbacks", "random_streams"])
def test_what_begins_anew_is_said(part, tmp_path, warned):
    stop = [EarlyStopping("val/loss", patience=9)]
    path = saved(tmp_path, callbacks=stop)
    train(3, resume=path, callbacks=stop)
    assert warned == []
    train(3, resume=change(path, lambda c: c[part].clear()), callbacks=stop)
    assert len(warned) == 1 and f"a.ckpt holds no {part}" in warned[0]


@pytest.mark.filterwarnings("ignore")
def test_weight_averaging_goes_on_with_its_own_schedule(tmp_path):
    def averaging():
        return [StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)]

    path = saved(tmp_path, callbacks=averaging())
    assert len(torch.load(path, weights_only=True)["lr_schedulers"]) == 1
    assert train(4, resume=path, callbacks=averaging()).current_epoch >= 4


def test_the_command(trained, tmp_path, capsys):
    last, arguments = trained
    given = ["fit", *arguments, f"--run.root={tmp_path}", "--trainer.max_epochs=2", "--ckpt_path", str(last)]
    with pytest.raises(SystemExit) as stopped:
        main([*given, "--model.optimizer=SGD", "--model.optimizer.lr=0.5"])
    assert stopped.value.code == 2 and "optimizer.lr was" in capsys.readouterr().err
    main(given)  # for one epoch more
    assert list(tmp_path.glob("quickstart/version_0/checkpoints/last.ckpt"))  # the refused one left no folder
