"""Numbers that go wrong stop a training or an evaluation, are named, and reach no checkpoint."""

import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from cli import main
from fewshot import PrototypicalHead, evaluate_episodes
from swbn_lightning.errors import InputError
from swbn_lightning.training.callbacks.stop_on_non_finite import StopOnNonFinite
from tests.reliability.tiny_runs import QUIET, classification, few_shot, fit


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


def test_a_bad_batch_stops_before_the_weights_are_touched(tiny_mnist, tmp_path):
    message, model = stopped(tiny_mnist, tmp_path, Spoil(7, value=math.inf))
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


def test_no_checkpoint_holds_it_however_seldom_one_looks(tiny_mnist, tmp_path):
    message, _ = stopped(tiny_mnist, tmp_path, Spoil(9, "head.weight"), every_n_steps=0)
    assert "epoch 1" in message and "not finite" in message
    assert_last_is_finite(tmp_path, 5)


class OfDicts(pl.LightningModule):
    """A user's, whose batches are dicts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, images):
        return self.layer(images)

    def training_step(self, batch, batch_idx):
        return self(batch["images"]).mean() * (math.nan if batch_idx == 2 else 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_batch_that_cannot_run_again_hides_nothing():
    trainer = pl.Trainer(max_epochs=1, callbacks=[StopOnNonFinite()], enable_checkpointing=False, **QUIET)
    loader = torch.utils.data.DataLoader([{"images": torch.ones(2)}] * 5)
    with pytest.raises(InputError, match=r"step 2: the loss is not finite: .*cannot be run again here \(TypeError: "):
        trainer.fit(OfDicts(), loader)


def test_what_was_not_finite_to_begin_with_is_no_fault(tiny_mnist, tmp_path):
    model, data = classification(tiny_mnist)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    fit(tmp_path, model, data, StopOnNonFinite(), max_epochs=1)


class Scaled(pl.plugins.MixedPrecision):
    """A loss scaler on the CPU, where Lightning has one for GPUs alone."""

    def __init__(self):
        super().__init__("bf16-mixed", "cpu")
        self.scaler = torch.amp.GradScaler("cpu")


class Always(Spoil):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch.images.fill_(math.nan)


def test_with_a_loss_scaler_steps_are_left_out_until_too_many_in_a_row(tiny_mnist, tmp_path, recwarn):
    def train(spoil):
        model, data = classification(tiny_mnist)
        callbacks = [StopOnNonFinite(max_skipped=2), spoil]
        trainer = pl.Trainer(max_epochs=2, callbacks=callbacks, plugins=[Scaled()], enable_checkpointing=False, **QUIET)
        trainer.fit(model, datamodule=data)
        return model

    assert all(torch.isfinite(value).all() for value in train(Spoil(3)).state_dict().values())
    assert any("the loss scaler left its step out" in str(said.message) for said in recwarn)
    with pytest.raises(ValueError, match="3 losses in a row were not finite: the batch itself"):
        train(Always(0))


def test_numbers_out_of_range():
    for options in ({"every_n_steps": -1}, {"max_skipped": 0}, {"every_n_steps": 1.5}):
        with pytest.raises(ValueError, match="must be an integer of at least [01]"):
            StopOnNonFinite(**options)


@pytest.mark.parametrize(("kind", "value", "expected"), [
    ("few-shot", math.nan, r"test: .*it begins in (backbone\.\S+) \(Linear\), for \1\.weight is not finite\).*earlier"),
    ("classification", 3e38, r"test: .*it begins in backbone\.\S+ \(\w+\)\), so no accuracy"),
])  # fmt: skip
def test_a_test_of_such_a_network_is_an_error(kind, value, expected, tiny_mnist, tiny_cifar100):
    model, data = classification(tiny_mnist) if kind == "classification" else few_shot(tiny_cifar100)
    last = [module for module in model.backbone.modules() if isinstance(module, nn.Linear)][-1]
    nn.init.constant_(last.weight, value)
    with pytest.raises(InputError, match=expected):
        pl.Trainer(**QUIET).test(model, datamodule=data, verbose=False)
    with pytest.raises(InputError, match="validate|val"):
        pl.Trainer(**QUIET).validate(model, datamodule=data, verbose=False)


def test_the_command_says_it(trained, tmp_path, capsys):
    content = torch.load(trained[0], weights_only=True)
    name = next(key for key, value in content["state_dict"].items() if value.is_floating_point() and value.dim() > 1)
    content["state_dict"][name].fill_(math.nan)
    torch.save(content, tmp_path / "nan.ckpt")
    with pytest.raises(SystemExit) as stopped:
        main(["test", *trained[1], "--ckpt_path", str(tmp_path / "nan.ckpt")])
    assert stopped.value.code == 2 and f"for {name} is not finite)" in capsys.readouterr().err


def test_cached_features_are_looked_at():
    features, labels = torch.randn(60, 4), torch.arange(6).repeat_interleave(10)
    settings = {"ways": 3, "shots": 1, "queries": 4, "num_episodes": 5, "seed": 0}
    features[7, 2] = math.inf
    features[9, 0] = math.nan
    with pytest.raises(InputError, match="2 of 60 features are not finite, the first of number 7"):
        evaluate_episodes(features, labels, PrototypicalHead(), **settings)
    with pytest.raises(InputError, match=r"5 of 5 logits are not finite"):
        evaluate_episodes(torch.randn(60, 4) * 1e30, labels, PrototypicalHead(), **settings)
