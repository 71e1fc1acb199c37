"""The rates that are used and logged, of every schedule, with a warm-up or without, against rates worked by hand."""

import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor, StochasticWeightAveraging
from pytorch_lightning.loggers.logger import DummyLogger
from torch.optim import lr_scheduler as torch_schedules
from torch.utils.data import DataLoader

from swbn_lightning.training.schedules import PiecewiseConstantLR
from tests.reliability.test_changed_settings import Tiny

pytestmark = pytest.mark.filterwarnings("ignore")
BASE, EPOCH, EPOCHS, WARM = 0.1, 5, 6, 7


def one_cycle(t):  # up to 0.4 within 7 steps, then down to 0.0004 at step 31, both along a line
    first, top, last = 0.04, 0.4, 0.0004
    return first + (top - first) * t / 7 if t <= 7 else top + (last - top) * (t - 7) / (31 - 7)


S = torch_schedules
# Of each: what makes it, and its rate after t of its steps.
SCHEDULES = {
    "none": (None, lambda t: BASE),
    "MultiStepLR": (lambda o: S.MultiStepLR(o, [2, 4], 0.1), lambda t: BASE * 0.1 ** ((t >= 2) + (t >= 4))),
    "ExponentialLR": (lambda o: S.ExponentialLR(o, 0.8), lambda t: BASE * 0.8**t),
    "CosineAnnealingLR": (
        lambda o: S.CosineAnnealingLR(o, 40, 0.01), lambda t: 0.01 + 0.09 * 0.5 * (1 + math.cos(math.pi * t / 40))
    ),
    "CyclicLR": (lambda o: S.CyclicLR(o, 0.01, 0.1, 4), lambda t: 0.01 + 0.09 * (1 - abs(t % 8 / 4 - 1))),
    "OneCycleLR": (
        lambda o: S.OneCycleLR(
            o, 0.4, total_steps=32, pct_start=0.25, anneal_strategy="linear", div_factor=10, final_div_factor=100
        ),
        one_cycle,
    ),
    "SequentialLR": (
        lambda o: S.SequentialLR(o, [S.ConstantLR(o, 0.5, 99), S.ExponentialLR(o, 0.9)], [3]),
        lambda t: BASE * (0.5 if t < 3 else 0.9 ** (t - 3)),
    ),
    "ChainedScheduler": (
        lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)], optimizer=o),
        lambda t: BASE * (0.5 if t < 3 else 1) * 0.9**t,
    ),
    "PiecewiseConstantLR": (
        lambda o: PiecewiseConstantLR(o, [2, 5], [0.03, 0.7]), lambda t: BASE if t < 2 else 0.03 if t < 5 else 0.7
    ),
}  # fmt: skip


class Rates(DummyLogger):
    """What :class:`LearningRateMonitor` says, and what the optimiser had when it made its steps."""

    def __init__(self):
        super().__init__()
        self.said, self.used = [], []

    def log_metrics(self, metrics, step=None):
        self.said += [value for name, value in metrics.items() if name == "lr-SGD"]


def train(schedule, interval, warmup_steps, folder, *callbacks, resume_at=None, accumulate=1, validate_every=1):
    images = DataLoader(torch.zeros(EPOCH * accumulate, 1), shuffle=False)
    logger, monitor = Rates(), LearningRateMonitor("step")

    def fit(epochs, checkpoint=None):
        model = Tiny(
            backbone="mlp", backbone_args={"hidden": [2]}, optimizer=lambda p: torch.optim.SGD(p, BASE, momentum=0.9),
            lr_scheduler=schedule, lr_interval=interval, warmup_steps=warmup_steps,
        )  # fmt: skip
        step = model.optimizer_step

        def noted(epoch, batch_idx, optimizer, closure=None):
            logger.used.append(optimizer.param_groups[0]["lr"])
            step(epoch, batch_idx, optimizer, closure)

        model.optimizer_step = noted
        trainer = pl.Trainer(
            max_epochs=epochs, logger=logger, callbacks=[monitor, *callbacks], log_every_n_steps=1, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accumulate_grad_batches=accumulate, check_val_every_n_epoch=validate_every,
        )  # fmt: skip
        trainer.fit(model, images, DataLoader(torch.zeros(1, 1)), ckpt_path=checkpoint, weights_only=True)
        return trainer

    if resume_at is not None:
        fit(resume_at).save_checkpoint(folder / "a.ckpt")
        fit(EPOCHS, folder / "a.ckpt")
    else:
        fit(EPOCHS)
    return logger


def by_hand(rate, interval, warmup_steps):
    steps = range(EPOCH * EPOCHS)
    return [min(1, (s + 1) / (warmup_steps + 1)) * rate(s if interval == "step" else s // EPOCH) for s in steps]


@pytest.mark.parametrize("warmup_steps", [0, WARM])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(name, interval, warmup_steps, tmp_path):
    schedule, rate = SCHEDULES[name]
    expected = by_hand(rate, interval, warmup_steps)
    found = train(schedule, interval, warmup_steps, tmp_path)
    assert found.used == pytest.approx(expected, rel=1e-6)
    if name != "none" or warmup_steps:
        assert found.said == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "interval"), [("ExponentialLR", "epoch"), ("OneCycleLR", "step")])
def test_going_on_within_the_warm_up(name, interval, tmp_path):
    schedule, rate = SCHEDULES[name]
    found = train(schedule, interval, WARM, tmp_path, resume_at=1)
    assert found.used == pytest.approx(by_hand(rate, interval, WARM), rel=1e-6)


def test_steps_of_several_batches_count_once(tmp_path):
    schedule, rate = SCHEDULES["ExponentialLR"]
    found = train(schedule, "epoch", WARM, tmp_path, accumulate=2)
    assert found.used == pytest.approx(by_hand(rate, "epoch", WARM), rel=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, WARM])
@pytest.mark.parametrize(("validate_every", "patience", "falls"), [(1, 1, (3, 5)), (2, 0, (4, 6))])
def test_a_plateau(validate_every, patience, falls, warmup_steps, tmp_path):
    """The loss never improves on the first: the rate ``falls`` after these epochs, in which it is measured."""
    made = partial(S.ReduceLROnPlateau, factor=0.5, patience=patience)
    found = train(made, "epoch", warmup_steps, tmp_path, validate_every=validate_every)
    expected = by_hand(lambda t: BASE * 0.5 ** sum(t >= epoch for epoch in falls), "epoch", warmup_steps)
    assert found.used == pytest.approx(expected, rel=1e-6)


def test_averaging_callbacks_that_want_a_single_schedule(tmp_path):
    averaging = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=3, annealing_epochs=1)
    found = train(SCHEDULES["ExponentialLR"][0], "epoch", WARM, tmp_path, averaging)
    assert found.used[: 3 * EPOCH] == pytest.approx(by_hand(SCHEDULES["ExponentialLR"][1], "epoch", WARM)[: 3 * EPOCH])
    assert found.used[-1] == pytest.approx(0.5)
