"""A captured training step does what eager training does.

Without a GPU the recording is played by a stand-in that runs the step again on the same tensors: everything but the
capture itself. With one, the same tests capture for real.
"""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from classification import GlyphDataModule, ImageClassifier
from swbn_lightning import NormFactory, SWBN2d
from swbn_lightning.backbones import Backbone
from swbn_lightning.training import captured_step
from swbn_lightning.training.captured_step import CapturedStep, check_graph_can_be_captured

GPU = torch.cuda.is_available()
STEPS = 20


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    if not GPU:
        monkeypatch.setattr(captured_step, "on_side_stream", lambda step: step())
        monkeypatch.setattr(captured_step, "record", lambda step: step)
        monkeypatch.setattr(captured_step, "check_graph_can_be_captured", lambda trainer: None)
        adam = importlib.import_module("torch.optim.adam")
        monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *args, **kwargs: ["cpu"])


class Losses(pl.Callback):
    def __init__(self):
        self.values, self.rates, self.steps = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.steps.append(trainer.global_step)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}


class TwoLayers(Backbone):
    """Small; without biases before the norm, whose gradient is rounding alone."""

    def __init__(self, norm):
        super().__init__()
        self.in_channels, self.num_features = 1, 16
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=3, bias=False), NormFactory(norm)(16), nn.ReLU(), nn.Conv2d(16, 16, 3)
        )

    def forward_features(self, x):
        return self.layers(x)


def fit(cuda_graph, optimizer="sgd", norm="swbn-fro", steps=STEPS, callbacks=(), **options):
    pl.seed_everything(0)
    module = ImageClassifier(
        num_classes=10,
        backbone=TwoLayers(norm),
        optimizer=OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=30),
        lr_interval="step",
        warmup_steps=3,
        cuda_graph=cuda_graph,
    )
    losses = Losses()
    trainer = pl.Trainer(
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="gpu" if GPU else "cpu", devices=1, num_sanity_val_steps=0,
        callbacks=[losses, *callbacks], **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=GlyphDataModule(num_classes=10, images_per_class=16, batch_size=16))
    return module, losses, trainer


@pytest.mark.parametrize(("optimizer", "norm"), [("sgd", "swbn-fro"), ("adam", "online")])
def test_twenty_steps_are_those_of_eager_training(optimizer, norm):
    eager, expected, _ = fit(False, optimizer, norm)
    module, found, trainer = fit(True, optimizer, norm)
    assert found.steps == list(range(1, STEPS + 1))
    assert found.rates == expected.rates and len(set(found.rates)) > 10  # the schedule goes on outside
    torch.testing.assert_close(found.values, expected.values, rtol=2e-3, atol=2e-3)
    for (name, mine), theirs in zip(module.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3, msg=lambda m, name=name: f"{name}: {m}")
    assert trainer.callback_metrics["train/loss"] > 0


def small_problem(optimizer):
    torch.manual_seed(0)
    device = "cuda" if GPU else "cpu"
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), SWBN2d(4, step_size=0.01), nn.Flatten(), nn.Linear(4 * 36, 3)
    ).to(device)
    batches = [(torch.randn(6, 1, 8, 8, device=device), torch.randint(3, (6,), device=device)) for _ in range(8)]

    def loss(batch):
        logits = module(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    return module, loss, OPTIMIZERS[optimizer](module.parameters()), batches


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_parameters_follow_a_loop_written_out(optimizer):
    module, loss, optim, batches = small_problem(optimizer)
    for batch in batches:
        optim.zero_grad()
        loss(batch)[0].backward()
        optim.param_groups[0]["lr"] *= 0.8
        optim.step()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    module, loss, optim, batches = small_problem(optimizer)
    step = CapturedStep(module, loss, optim)
    for batch in batches:
        optim.param_groups[0]["lr"] *= 0.8
        _, logits = step(batch)
        assert logits.shape == (6, 3) and not logits.requires_grad
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    # A checkpoint of it is that of an optimiser as it was made.
    group, made = optim.state_dict()["param_groups"][0], OPTIMIZERS[optimizer](module.parameters()).param_groups[0]
    assert all(group[key] == value for key, value in made.items() if key not in ("params", "lr"))


def test_a_checkpoint_of_eager_training_goes_on():
    _, loss, optim, batches = small_problem("adam")
    loss(batches[0])[0].backward()
    optim.step()
    state = optim.state_dict()
    again, loss, optim, batches = small_problem("adam")
    optim.load_state_dict(state)
    step = CapturedStep(again, loss, optim)
    for batch in batches:
        step(batch)
    assert {int(state["step"]) for state in optim.state.values()} == {9}


def test_what_the_graph_does_not_know_is_refused():
    module, loss, optim, batches = small_problem("sgd")
    step = CapturedStep(module, loss, optim)
    for batch in batches[:5]:
        step(batch)
    images, labels = batches[0]
    for other in ((images[:3], labels[:3]), (images.double(), labels), [images, labels]):
        with pytest.raises(ValueError, match="captured for a batch of"):
            step(other)
    optim.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="momentum of the optimiser changed"):
        step(batches[5])


def test_what_changes_between_epochs_is_captured_anew(monkeypatch):
    recordings = itertools.count()
    original = captured_step.record
    monkeypatch.setattr(captured_step, "record", lambda step: (next(recordings), original(step))[1])
    module, loss, optim, batches = small_problem("sgd")
    step = CapturedStep(module, loss, optim)
    for change in (lambda: None, lambda: module[0].weight.requires_grad_(False), lambda: module[1].eval()):
        change()
        step.check_state()
        before = module[0].weight.clone()
        for batch in batches:
            step(batch)
    assert next(recordings) == 3
    torch.testing.assert_close(module[0].weight, before)  # frozen since the second epoch


def test_what_needs_the_host_is_said(monkeypatch):
    def fails(step):
        raise RuntimeError("operation not permitted when stream is capturing.")

    monkeypatch.setattr(captured_step, "record", fails)
    with pytest.raises(ValueError, match="cannot be captured: operation not permitted.*cuda_graph: false"):
        fit(True)


def test_without_a_gpu_it_is_refused_before_training(monkeypatch):
    monkeypatch.undo()
    if GPU:
        pytest.skip("says what is wrong without a GPU")
    with pytest.raises(ValueError, match="needs a GPU, the device is cpu; or train with cuda_graph: false"):
        fit(True)


@pytest.mark.parametrize(("options", "message"), [
    ({"world_size": 2}, "works in one process, there are 2"),
    ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
    ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
    ({"precision": "16-mixed"}, "use bf16-mixed"),
])  # fmt: skip
def test_what_a_captured_step_cannot_do_is_said(options, message):
    works = {
        "strategy": SimpleNamespace(root_device=torch.device("cuda")), "world_size": 1, "gradient_clip_val": None,
        "accumulate_grad_batches": 1, "precision": "bf16-mixed",
    }  # fmt: skip
    check_graph_can_be_captured(SimpleNamespace(**works))
    with pytest.raises(ValueError, match=message):
        check_graph_can_be_captured(SimpleNamespace(**works | options))


def test_what_is_refused_when_training_starts():
    with pytest.raises(ValueError, match="LBFGS cannot be captured; use SGD, Adam"):
        fit(True, lambda p: torch.optim.LBFGS(p))
    with pytest.raises(ValueError, match="detect_anomaly looks at every value"):
        fit(True, detect_anomaly=True)
