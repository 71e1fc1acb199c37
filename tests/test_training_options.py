"""Options of the training that both LightningModules have: step size for the run, decay, compilation."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from classification import GlyphDataModule, ImageClassifier
from swbn_lightning import SWBN1d
from swbn_lightning.training.step_size import auto_step_size


def model(**options):
    defaults = {"num_classes": 10, "backbone": "mlp", "backbone_args": {"hidden": [32, 32]}, "norm": "swbn-fro"}
    return ImageClassifier(**defaults | options)


def fit(module, **options):
    trainer = pl.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=GlyphDataModule(num_classes=10, images_per_class=4, batch_size=8))
    return trainer


def test_step_size_of_a_run():
    assert auto_step_size("kl", 5000) == pytest.approx(1e-4)
    assert auto_step_size("fro", 5000) == pytest.approx(1e-3)
    assert auto_step_size("fro", 5000, budget=1) == pytest.approx(2e-4)
    assert auto_step_size("kl", 10) == auto_step_size("fro", 10) == 1e-2
    for budget in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step_budget must be positive"):
            auto_step_size("kl", 10, budget)
    with pytest.raises(ValueError, match="give max_epochs or max_steps"):
        auto_step_size("kl", float("inf"))


@pytest.mark.parametrize(
    ("norm", "options", "trainer_options", "expected"),
    [
        ("swbn-kl", {"step_budget": 0.01}, {"max_epochs": 2}, 0.01 / 10),  # 40 images, batches of 8, two epochs
        ("swbn-fro", {"step_budget": 0.01}, {"max_epochs": 1, "accumulate_grad_batches": 5}, 0.01 / 5),
    ],
)
def test_auto_becomes_a_number_before_training(tmp_path, norm, options, trainer_options, expected):
    module = model(norm=norm, norm_args={"step_size": "auto"}, step_budget=options.get("step_budget"))
    trainer = fit(module, **trainer_options)
    layers = [layer for layer in module.modules() if isinstance(layer, SWBN1d)]
    assert layers and all(layer.step_size == pytest.approx(expected) for layer in layers)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert saved["norm_args"]["step_size"] == pytest.approx(expected)
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "a.ckpt")
    assert next(m for m in loaded.modules() if isinstance(m, SWBN1d)).step_size == pytest.approx(expected)


def test_auto_where_it_cannot_be():
    with pytest.raises(ValueError, match="this model has none"):
        model(norm="bn", norm_args={"step_size": "auto"})
    with pytest.raises(ValueError, match="step_budget must be positive"):
        model(norm_args={"step_size": "auto"}, step_budget=-1.0)
    with pytest.raises(ValueError, match="step_budget is for norm_args"):
        model(norm_args={"step_size": 0.1}, step_budget=1.0)
    with pytest.raises(ValueError, match="give max_epochs or max_steps"):
        fit(model(norm_args={"step_size": "auto"}), max_epochs=-1)


def test_weight_decay_can_spare_norms_and_biases():
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    module = model(optimizer=optimizer, spare_norms_and_biases=True)
    (made,), _ = module.configure_optimizers()
    decay = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert set(decay) == {id(p) for p in module.parameters()}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            spared = name == "bias" or isinstance(layer, SWBN1d)
            assert decay[id(parameter)] == (0.0 if spared else 0.5), (layer, name)


def test_a_compiled_backbone_trains_as_the_plain_one(monkeypatch):
    compiled = []
    original = torch.compile

    def compile_without_inductor(function, **options):
        compiled.append(function)
        return original(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_without_inductor)
    states = []
    for compile in (False, True):
        pl.seed_everything(0)
        module = model(norm_args={"step_size": 0.01}, compile=compile)
        fit(module, max_steps=2)
        states.append(module.state_dict())
    assert len(compiled) == 1
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(
            states[1][name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_five_best_guesses():
    module, data = model(), GlyphDataModule(num_classes=10, images_per_class=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    pl.Trainer(**quiet).validate(module, datamodule=data, verbose=False)
    images, labels = data.image_set("val").images, data.image_set("val").labels
    with torch.no_grad():
        logits = module.eval()(data.normalize(images))
    right = (logits.argsort(dim=1, descending=True)[:, :5] == labels[:, None]).any(1).float().mean()
    assert module.results["val"]["top5"] == pytest.approx(right.item())
    few = model(num_classes=5)
    pl.Trainer(**quiet).validate(few, datamodule=GlyphDataModule(num_classes=5, images_per_class=4), verbose=False)
    assert "top5" not in few.results["val"]  # of five classes all are among the best five
    assert isinstance(module.head, nn.Linear)
