"""A checkpoint that lacks a part of the state, or has an odd one, does not go on as if it were whole."""

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, StochasticWeightAveraging
from torch.optim import lr_scheduler as torch_schedules

from swbn_lightning.data.order import ResumableLoader
from swbn_lightning.errors import InputError
from tests.reliability.test_changed_settings import change, cosine, in_turn, saved, sgd, train

ADAM = torch.optim.Adam


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


@pytest.mark.parametrize("part", ["optimizer_states", "lr_schedulers"])
def test_another_number(part, tmp_path):
    path = change(saved(tmp_path, schedule=cosine(10)), lambda c: c[part].append(c[part][0]))
    with pytest.raises(InputError, match=f"a.ckpt: its {part} are not those of this training .*of 2 .*not 1"):
        train(3, schedule=cosine(10), resume=path)


def warned(path, **settings):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swbn_lightning.resumed_state.rank_zero_warn", said.append)
        train(3, resume=path, **settings)
    return said


@pytest.mark.parametrize("how", ["missing", "empty", "odd"])
def test_random_streams(how, tmp_path):
    edits = {
        "missing": lambda c: c.pop("random_streams"),
        "empty": lambda c: c["random_streams"].clear(),
        "odd": lambda c: c.update(random_streams=5),
    }
    assert warned(saved(tmp_path)) == []
    (said,) = warned(change(saved(tmp_path), edits[how]))
    assert "a.ckpt holds random_streams for 0 of 1 process" in said


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_states_of_callbacks(how, tmp_path):
    def stopping():
        return [EarlyStopping("val/loss", patience=9)]

    path = saved(tmp_path, callbacks=stopping())
    assert warned(path, callbacks=stopping()) == []
    change(path, lambda c: c.pop("callbacks") if how == "missing" else c["callbacks"].clear())
    (said,) = warned(path, callbacks=stopping())
    assert said.endswith("a.ckpt holds no state of EarlyStopping, which begins anew.")


@pytest.mark.parametrize("odd", [5, {}, {"wait_count": "x"}, {"patience": [1]}, {"best_score": torch.zeros(3)}])
def test_odd_states_of_callbacks(odd, tmp_path):
    def edit(content):
        (key,) = content["callbacks"]
        content["callbacks"][key] = {**content["callbacks"][key], **odd} if isinstance(odd, dict) and odd else odd

    path = change(saved(tmp_path, callbacks=[EarlyStopping("val/loss", patience=9)]), edit)
    with pytest.raises(InputError, match="a.ckpt: its callbacks are not those of this training"):
        train(3, resume=path, callbacks=[EarlyStopping("val/loss", patience=9)])


OPTIMISER = {
    "no mapping": lambda s, one: s.__setitem__(0, 5),
    "no groups": lambda s, one: s[0].pop("param_groups"),
    "no state": lambda s, one: s[0]["state"].clear(),
    "a state that is none": lambda s, one: s[0].update(state=[1]),
    "another number of groups": lambda s, one: s[0]["param_groups"].append(s[0]["param_groups"][0]),
    "a group that is none": lambda s, one: s[0]["param_groups"].__setitem__(0, 5),
    "other parameters": lambda s, one: s[0]["param_groups"][0]["params"].pop(),
    "parameters of no numbers": lambda s, one: s[0]["param_groups"][0]["params"].__setitem__(0, "x"),
    "a rate that is none": lambda s, one: s[0]["param_groups"][0].update(lr="x"),
    "a rate of several": lambda s, one: s[0]["param_groups"][0].update(lr=torch.zeros(3)),
    "no rate": lambda s, one: s[0]["param_groups"][0].pop("lr"),
    "one beta": lambda s, one: s[0]["param_groups"][0].update(betas=[0.9]),
    "a tensor": lambda s, one: s[0]["state"].__setitem__(0, torch.zeros(3)),
    "another shape": lambda s, one: one.update(exp_avg=torch.zeros(3, 7)),
    "one element": lambda s, one: one.update(exp_avg=torch.zeros(1)),
    "no tensor": lambda s, one: one.update(exp_avg="x"),
    "no moment": lambda s, one: one.pop("exp_avg_sq"),
    "no step": lambda s, one: one.pop("step"),
    "an odd step": lambda s, one: one.update(step=torch.zeros(4)),
}


@pytest.fixture(scope="module")
def with_adam(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("adam"), optimizer=ADAM).read_bytes()


@pytest.mark.parametrize("odd", OPTIMISER)
def test_odd_states_of_an_optimiser(odd, with_adam, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(with_adam)
    path = change(
        tmp_path / "a.ckpt", lambda c: OPTIMISER[odd](c["optimizer_states"], c["optimizer_states"][0]["state"][0])
    )
    with pytest.raises(InputError, match=r"a.ckpt(: its| holds no) optimizer_states"):
        train(3, ADAM, resume=path)


@pytest.mark.parametrize("kind", [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
])  # fmt: skip
def test_torchs_optimisers_go_on(kind, tmp_path):
    def make(parameters):
        return getattr(torch.optim, kind)(parameters, lr=0.001)

    assert train(3, make, resume=saved(tmp_path, optimizer=make)).global_step == 9


SCHEDULE = {
    "no mapping": lambda s: s.__setitem__(0, 5),
    "nothing": lambda s: s[0].clear(),
    "no text": lambda s: s[0].update(_last_lr="x"),
    "a rate too many": lambda s: s[0].update(_last_lr=[1.0, 2.0]),
    "no number": lambda s: s[0].update(last_epoch="x"),
    "its optimiser": lambda s: s[0].update(optimizer=5),
    "its method": lambda s: s[0].update(get_lr=5),
    "an inner method": lambda s: s[0]["_schedulers"][0].update(step=5),
    "an inner number": lambda s: s[0]["_schedulers"][1].update(gamma=None),
    "no inner ones": lambda s: s[0].update(_schedulers=5),
}


@pytest.mark.parametrize("warmup_steps", [0, 9])
@pytest.mark.parametrize("odd", SCHEDULE)
def test_odd_states_of_a_schedule(odd, warmup_steps, tmp_path):
    def edit(content):
        states = content["lr_schedulers"]
        if warmup_steps and "mapping" not in odd:
            SCHEDULE[odd]([states[0]["schedule"]])
        else:
            SCHEDULE[odd](states)

    path = change(saved(tmp_path, schedule=in_turn(0.9), warmup_steps=warmup_steps), edit)
    with pytest.raises(InputError, match="a.ckpt: its lr_schedulers are not those of this training"):
        train(3, schedule=in_turn(0.9), resume=path, warmup_steps=warmup_steps)


LOOPS = {
    "a list": lambda loop: loop.update(epoch_progress=[]),
    "a text": lambda loop: loop["epoch_progress"]["total"].update(ready="x"),
    "below zero": lambda loop: loop["epoch_progress"]["current"].update(completed=-3),
    "a method": lambda loop: loop["epoch_progress"]["current"].update(reset=5),
    "nothing": lambda loop: loop.pop("epoch_loop.batch_progress"),
}


@pytest.mark.parametrize("odd", LOOPS)
def test_odd_loops(odd, tmp_path):
    path = change(saved(tmp_path), lambda content: LOOPS[odd](content["loops"]["fit_loop"]))
    with pytest.raises(InputError, match="a.ckpt: its loops are not those of this training"):
        train(3, resume=path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", [None, cosine(10)])
def test_weight_averaging_goes_on_with_its_own_schedule(schedule, tmp_path):
    def averaging():
        return [StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1)]

    path = saved(tmp_path, schedule=schedule, callbacks=averaging())
    assert len(torch.load(path, weights_only=True)["lr_schedulers"]) == 1
    assert train(4, schedule=schedule, resume=path, callbacks=averaging()).current_epoch >= 4


@pytest.mark.parametrize("odd", [5, [], {}, {"epoch": "x", "batches": 1}, {"epoch": 1, "batches": -1}, {"epoch": 1}])
def test_an_odd_state_of_a_loader(odd):
    with pytest.raises(InputError, match="the checkpoint's state of a data loader is none: its .* is no count"):
        ResumableLoader([1, 2]).load_state_dict(odd)


def test_a_captured_steps_optimiser_is_taken_as_it_was_made(tmp_path):
    """A captured step has its rate on the device, and its count of steps."""

    def edit(content):
        for one in content["optimizer_states"][0]["state"].values():
            one["step"] = one["step"].to(torch.float64)

    path = change(saved(tmp_path, optimizer=ADAM), edit)
    assert train(3, ADAM, resume=path).global_step == 9


def test_a_plateau_that_has_reduced_goes_on(tmp_path):
    def plateau(optimizer):
        return torch_schedules.ReduceLROnPlateau(optimizer, patience=0)

    trainer = train(4, sgd(), plateau)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.01
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert train(5, sgd(), plateau, resume=tmp_path / "a.ckpt").global_step == 15
