"""Numbers that go wrong stop a training, are named, and reach no checkpoint."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from swbn_lightning.training.callbacks.stop_on_non_finite import StopOnNonFinite
from tests.reliability.tiny_runs import classification, fit


class Spoil(pl.Callback):
    """At a training batch, counted from 0, makes the images, a weight or a gradient not finite."""

    def __init__(self, number, what="images", value=math.nan):
        self.left, self.what, self.value = number, what, value

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.left -= 1
        if self.left == -1 and self.what == "images":
            batch.images[3, 0, 5, 5] = self.value
        if self.left == -1 and self.what in dict(pl_module.named_parameters()):
            with torch.no_grad():
                pl_module.get_parameter(self.what).view(-1)[0] = self.value

    def on_after_backward(self, trainer, pl_module):
        if self.left == -1 and self.what == "gradient":
            # As a backward would: from that layer down to the first.
            for parameter in pl_module.backbone.parameters():
                parameter.grad.fill_(self.value)


def stopped(tiny_mnist, folder, *callbacks, every_n_steps=None, **options):
    parts = classification(tiny_mnist)
    with pytest.raises(ValueError, match="training stopped") as error:
        fit(folder, *parts, *callbacks, StopOnNonFinite(every_n_steps), noise=False, **options)
    return str(error.value), parts[0]


def assert_last_is_finite(folder, step):
    content = torch.load(folder / "last.ckpt", weights_only=True)
    assert content["global_step"] == step
    for value in content["state_dict"].values():
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_stops_before_the_weights_are_touched(value, tiny_mnist, tmp_path):
    message, model = stopped(tiny_mnist, tmp_path, Spoil(7, value=value))
    assert "epoch 1 at global step 7: the loss is not finite: the batch itself is not finite" in message
    assert f"Last good checkpoint: {tmp_path / 'last.ckpt'}" in message
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_last_is_finite(tmp_path, 5)


def test_the_layer_where_it_begins_is_named(tiny_mnist, tmp_path):
    class Overflows(nn.ReLU):
        def forward(self, x):
            return super().forward(x) / 0

    model, data = classification(tiny_mnist)
    model.backbone.layers[3] = Overflows()
    with pytest.raises(ValueError, match=r"it begins in backbone\.layers\.3 \(Overflows\)"):
        fit(tmp_path, model, data, StopOnNonFinite())
    assert not list(tmp_path.iterdir())


def test_a_gradient_is_named_where_it_begins_and_the_step_is_not_made(tiny_mnist, tmp_path):
    message, model = stopped(tiny_mnist, tmp_path, Spoil(6, "gradient", math.inf))
    assert "the gradient of backbone.layers.5.bias is not finite, while the loss is" in message
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_last_is_finite(tmp_path, 5)


def test_between_two_looks_it_is_kept_on_the_device(tiny_mnist, tmp_path):
    """As on a GPU: batch 6 spoils the weights, the look is after batch 8."""
    message, _ = stopped(tiny_mnist, tmp_path, Spoil(6), every_n_steps=9)
    assert "at global step 9: the loss is not finite: backbone.layers.1.weight is not finite either" in message
    assert "every_n_steps: 1" in message
    assert_last_is_finite(tmp_path, 5)


@pytest.mark.parametrize("every_n_steps", [0, 1000])
def test_no_checkpoint_holds_it_however_seldom_one_looks(every_n_steps, tiny_mnist, tmp_path):
    message, _ = stopped(tiny_mnist, tmp_path, Spoil(9, "head.weight"), every_n_steps=every_n_steps)
    assert "epoch 1" in message and "not finite" in message
    assert_last_is_finite(tmp_path, 5)


def test_a_checkpoint_in_the_middle_of_an_epoch_is_guarded_too(tiny_mnist, tmp_path):
    often = pl.callbacks.ModelCheckpoint(tmp_path / "often", save_top_k=-1, every_n_train_steps=1)
    message, _ = stopped(tiny_mnist, tmp_path, Spoil(2, "backbone.layers.4.weight"), often, every_n_steps=1000)
    assert "backbone.layers.1.weight is not finite" in message
    assert len(list((tmp_path / "often").iterdir())) == 2 and not (tmp_path / "last.ckpt").exists()


def test_far_too_high_a_learning_rate(tiny_mnist, tmp_path):
    model, data = classification(tiny_mnist)
    model._optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e38, momentum=0.9)
    model._warmup_steps = 0
    with pytest.raises(ValueError, match="training stopped in epoch 0 at global step .* Take a lower learning rate"):
        fit(tmp_path, model, data, StopOnNonFinite(), noise=False)


def test_what_was_not_finite_to_begin_with_is_no_fault(tiny_mnist, tmp_path):
    model, data = classification(tiny_mnist)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    fit(tmp_path, model, data, StopOnNonFinite(), max_epochs=1)


class Scaled(pl.plugins.MixedPrecision):
    """A loss scaler on the CPU, where Lightning has one for GPUs alone."""

    def __init__(self):
        super().__init__("bf16-mixed", "cpu")
        self.scaler = torch.amp.GradScaler("cpu")


def test_with_a_loss_scaler_a_step_is_left_out_and_training_goes_on(tiny_mnist, tmp_path):
    model, data = classification(tiny_mnist)
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[StopOnNonFinite(max_skipped=2), Spoil(3)], plugins=[Scaled()], accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(model, datamodule=data)
    assert [str(w.message) for w in said if "the loss scaler left its step out" in str(w.message)]
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_with_a_loss_scaler_it_stops_after_so_many_in_a_row(tiny_mnist, tmp_path):
    class Always(Spoil):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batch.images.fill_(math.nan)

    model, data = classification(tiny_mnist)
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[StopOnNonFinite(max_skipped=2), Always(0)], plugins=[Scaled()], accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="3 losses in a row were not finite: the batch itself"):
        trainer.fit(model, datamodule=data)


def test_numbers_out_of_range():
    for options in ({"every_n_steps": -1}, {"max_skipped": 0}, {"every_n_steps": 1.5}):
        with pytest.raises(ValueError, match="must be an integer of at least [01]"):
            StopOnNonFinite(**options)
