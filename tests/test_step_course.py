"""The course of the step size over a run, and W that starts from a whitening."""

import math

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from classification import GlyphDataModule, ImageClassifier
from swbn_lightning import SWBN1d, SWBN2d
from swbn_lightning.norms.swbn import SWBN
from swbn_lightning.step_course import COURSES, StepSizeCourse, WhitenedStart, whiten_layers


def model(**options):
    defaults = {
        "num_classes": 10, "backbone": "mlp", "backbone_args": {"hidden": [32, 32]}, "norm": "swbn-kl",
        "norm_args": {"step_size": 1e-3},
    }  # fmt: skip
    return ImageClassifier(**defaults | options)


def fit(module, *callbacks, ckpt_path=None, **options):
    trainer = pl.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0, callbacks=list(callbacks), **options,
    )  # fmt: skip
    data = GlyphDataModule(num_classes=10, images_per_class=16, batch_size=8)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


class Record(pl.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.steps.append(next(layer for layer in pl_module.modules() if isinstance(layer, SWBN)).step_size)


@pytest.mark.parametrize("name", list(COURSES))
def test_a_courses_mean_is_the_constant(name):
    times = (np.arange(10_000) + 0.5) / 10_000
    assert np.mean([COURSES[name](t) for t in times]) == pytest.approx(1, abs=1e-3)


def test_a_run_takes_the_course_and_goes_on_with_it(tmp_path):
    record, module = Record(), model()
    trainer = fit(module, StepSizeCourse("linear"), record, max_steps=20)
    assert record.steps == pytest.approx([1e-3 * 2 * (1 - k / 20) for k in range(20)])
    assert all(layer.step_size == 1e-3 for layer in module.modules() if isinstance(layer, SWBN))  # as before
    record = Record()
    trainer = fit(model(), StepSizeCourse("early"), record, max_steps=10, accumulate_grad_batches=2)
    assert record.steps == pytest.approx([5e-3] * 2 + [1e-3 * 5 / 9] * 18)

    trainer = fit(model(), max_steps=10)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    record = Record()
    fit(model(), StepSizeCourse("cosine"), record, max_steps=20, ckpt_path=tmp_path / "half.ckpt")
    expected = [1e-3 * (1 + math.cos(math.pi * k / 20)) for k in range(10, 20)]
    assert record.steps == pytest.approx(expected)


def test_where_a_course_cannot_be():
    cases = [
        (lambda: StepSizeCourse("lineal"), "'lineal'; did you mean 'linear'"),
        (lambda: fit(model(norm="bn", norm_args=None), StepSizeCourse(), max_steps=1), "this model has none"),
        (lambda: fit(model(), StepSizeCourse(), max_epochs=-1), "needs a run with an end"),
        (lambda: fit(model(compile=True), StepSizeCourse(), max_steps=1), "compile: true keeps the step size"),
        (lambda: fit(model(norm_args={"step_size": 0.01}), StepSizeCourse("early"), max_steps=1), "step size of 0.05"),
        (lambda: WhitenedStart(0), "num_images"),
        (lambda: WhitenedStart(floor=0), "floor must be positive"),
        (lambda: fit(model(norm="bn", norm_args=None), WhitenedStart(), max_steps=1), "this model has none"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()


def whitened_by_hand(x, groups, floor):
    """Per group: standardise (unbiased), then U max(lambda, floor)^(-1/2) U^T of the covariance divided by n."""
    n, channels = x.shape
    xs = (x - x.mean(0)) / np.sqrt(x.var(0, ddof=1) + 1e-8)
    size, out = channels // groups, np.empty_like(x)
    for block in np.split(np.arange(channels), groups):
        values, vectors = np.linalg.eigh(xs[:, block].T @ xs[:, block] / n)
        w = vectors @ np.diag(np.maximum(values, floor) ** -0.5) @ vectors.T
        out[:, block] = xs[:, block] @ w
    assert size * groups == channels
    return out


def test_layers_whiten_one_after_the_other():
    torch.manual_seed(0)
    x = torch.randn(200, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    network = nn.Sequential(
        SWBN1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), SWBN1d(8, num_groups=2), nn.Dropout(0.5)
    ).double()  # fmt: skip
    network[2].eval()
    before = {name: value.clone() for name, value in network[2].state_dict().items()}
    layers = [m for m in network.modules() if isinstance(m, SWBN)]
    whiten_layers(network, layers, lambda: network(x), floor=0.05)
    assert network.training and not network[2].training
    assert all(torch.equal(value, network[2].state_dict()[name]) for name, value in before.items())
    first = whitened_by_hand(x.numpy(), 1, 0.05)
    with torch.no_grad():
        linear = network[1](torch.from_numpy(first)).numpy()
    normal = (linear - linear.mean(0)) / np.sqrt(linear.var(0) + 1e-5)
    second = whitened_by_hand(np.maximum(normal, 0), 2, 0.05)
    network.eval()
    with torch.no_grad():
        np.testing.assert_allclose(network[0](x).numpy(), first, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(layers[1](torch.from_numpy(np.maximum(normal, 0))).numpy(), second, atol=1e-9)


def test_a_run_starts_white_unless_it_is_resumed(tmp_path):
    def distance(module):
        images = module.sample.to(torch.float32)
        layer, seen = module.backbone_layers[-1], []
        handle = layer.register_forward_hook(lambda m, inputs, output: seen.append(output.clone()))
        with torch.no_grad():
            module.eval().embed(images)
        handle.remove()
        correlation = np.corrcoef(seen[0].numpy().T)
        return np.linalg.norm(correlation - np.eye(len(correlation)))

    class Keep(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.sample = trainer.datamodule.sample_images(160, "train")
            pl_module.backbone_layers = [m for m in pl_module.modules() if isinstance(m, SWBN)]
            pl_module.found = distance(pl_module)
            pl_module.train()

    pl.seed_everything(0)
    plain, white = model(), model()
    fit(plain, Keep(), max_steps=1)
    trainer = fit(white, WhitenedStart(160, floor=1e-8), Keep(), max_steps=1)
    assert white.found < 0.01 * plain.found
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = model()
    fit(resumed, WhitenedStart(8), max_steps=1, ckpt_path=tmp_path / "a.ckpt")
    for name, value in white.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_in_a_convolutional_network():
    module = ImageClassifier(10, backbone="resnet20", backbone_args={"in_channels": 1}, norm="swbn-fro")
    start = next(m for m in module.modules() if isinstance(m, SWBN2d)).whitening_matrix.clone()
    images = torch.randn(8, 1, 28, 28)
    layers = [m for m in module.modules() if isinstance(m, SWBN)]
    whiten_layers(module.backbone, layers, lambda: module.embed(images))
    assert all(torch.isfinite(layer.whitening_matrix).all() for layer in layers) and len(layers) == 21
    assert not torch.equal(layers[0].whitening_matrix, start)
