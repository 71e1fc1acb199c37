"""A checkpoint that lacks a part of the state, or has an odd one, does not go on as if it were whole."""

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, StochasticWeightAveraging
from torch.optim import lr_scheduler as torch_schedules

from swbn_lightning.errors import InputError
from tests.reliability.test_changed_settings import change, cosine, saved, sgd, train


@pytest.mark.parametrize("part", ["optimizer_states", "loops", "lr_schedulers"])
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_what_a_training_cannot_do_without(part, how, tmp_path):
    path = saved(tmp_path, schedule=cosine(10))
    change(path, lambda c: c.pop(part) if how == "missing" else c[part].clear())
    with pytest.raises(
        InputError, match=f"a.ckpt holds no {part}, .*save_weights_only.*last.ckpt.*backbone_checkpoint"
    ):
        train(3, schedule=cosine(10), resume=path)


def test_a_checkpoint_of_weights(tmp_path):
    train(2).save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(InputError, match="holds no optimizer_states"):
        train(3, resume=tmp_path / "a.ckpt")


def odd_state(content, part):
    """Of another form than what this training has there."""
    inner = content["loops"]["fit_loop"] if part == "loops" else content[part][0]
    inner.update(dict.fromkeys(list(inner), "x"))


@pytest.mark.parametrize("part", ["optimizer_states", "loops"])
def test_a_state_of_another_form(part, tmp_path):
    path = change(saved(tmp_path, schedule=cosine(10)), lambda content: odd_state(content, part))
    with pytest.raises(InputError, match=f"a.ckpt: its {part} are not those of this training"):
        train(3, schedule=cosine(10), resume=path)


def test_fewer_parameters_than_the_checkpoint_has(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(InputError, match="optimizer_states are not those .*group"):
        train(3, lambda parameters: sgd()(list(parameters)[:1]), resume=path)


@pytest.mark.parametrize("part", ["callbacks", "random_streams"])
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_what_begins_anew_is_said(part, how, tmp_path):
    def go_on(path):
        said = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swbn_lightning.training.resumed_settings.rank_zero_warn", said.append)
            train(3, resume=path, callbacks=[EarlyStopping("val/loss", patience=9)])
        return said

    path = saved(tmp_path, callbacks=[EarlyStopping("val/loss", patience=9)])
    assert go_on(path) == []
    (said,) = go_on(change(path, lambda c: c.pop(part) if how == "missing" else c[part].clear()))
    assert f"a.ckpt holds no {part}" in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", [None, cosine(10)])
def test_weight_averaging_goes_on_with_its_own_schedule(schedule, tmp_path):
    def averaging():
        return [StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)]

    path = saved(tmp_path, schedule=schedule, callbacks=averaging())
    assert len(torch.load(path, weights_only=True)["lr_schedulers"]) == 1
    assert train(4, schedule=schedule, resume=path, callbacks=averaging()).current_epoch >= 4


def test_a_plateau_that_has_reduced_goes_on(tmp_path):
    def plateau(optimizer):
        return torch_schedules.ReduceLROnPlateau(optimizer, patience=0)

    trainer = train(4, sgd(), plateau)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.01
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert train(5, sgd(), plateau, resume=tmp_path / "a.ckpt").global_step == 15
