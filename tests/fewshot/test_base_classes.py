"""The first of two stages: a classifier of the training classes, and episodes that start from it."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from scipy.special import log_softmax

from cli import main
from fewshot import (
    BaseClassesDataModule,
    BaseClassifier,
    EpisodeSettings,
    EpisodicDataModule,
    PrototypicalHead,
    PrototypicalNetwork,
    evaluate_episodes,
)
from fewshot.base_classes import HELD_OUT
from swbn_lightning.runs.checkpoints import find_checkpoint
from swbn_lightning.runs.study.command import main as study
from tests.conftest import REPOSITORY
from tests.fewshot.conftest import QUIET

CONFIG = REPOSITORY / "configs" / "fewshot" / "cifar_fs_base_classes.yaml"
EPISODES = EpisodeSettings(ways=5, shots=1, queries=5, episodes=40)
MLP = {"backbone": "mlp", "backbone_args": {"hidden": [16], "in_channels": 3, "image_size": 32}}


def base_classes(root, **options):
    return BaseClassesDataModule(
        "cifar-fs", str(root), **{"batch_size": 64, "eval_batch_size": 50, "val": EPISODES, "test": EPISODES, **options}
    )


@pytest.mark.parametrize("share", [0.25, 0.0])
def test_held_out_images_are_a_share_of_every_class_and_never_train(share, tiny_cifar100):
    data = base_classes(tiny_cifar100, held_out_share=share)
    data.setup("fit")
    whole = EpisodicDataModule("cifar-fs", str(tiny_cifar100)).image_set("train")
    train = data.image_set("train")
    assert data.num_training_classes == 64 and train.class_names == whole.class_names
    pixels = [set(map(bytes, images.numpy())) for images in (whole.images, train.images)]
    loader, seen = data.train_dataloader(), []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        seen.append([image for batch in loader for image in map(bytes, batch.images.numpy())])
    assert all(set(images) == pixels[1] for images in seen) and seen[0] != seen[1]  # 18 or 24 whole batches, shuffled
    if not share:
        assert pixels[0] == pixels[1] and not isinstance(data.val_dataloader(), list)
        with pytest.raises(ValueError, match="held_out_share is 0"):
            data.image_set(HELD_OUT)
        return
    held = data.image_set(HELD_OUT)
    assert torch.bincount(held.labels).tolist() == [6] * 64 and torch.bincount(train.labels).tolist() == [18] * 64
    assert set(map(bytes, held.images.numpy())) == pixels[0] - pixels[1]
    again, other = (base_classes(tiny_cifar100, held_out_share=share, split_seed=seed) for seed in (0, 1))
    assert torch.equal(again.image_set(HELD_OUT).images, held.images)
    assert not torch.equal(other.image_set(HELD_OUT).images, held.images)


def test_pickles_are_read_too(tiny_mini_imagenet):
    data = BaseClassesDataModule("mini-imagenet", str(tiny_mini_imagenet), image_size=21, val=EPISODES)
    data.setup("fit")
    assert len(data.image_set("train")) == 64 * 14 and len(data.image_set(HELD_OUT)) == 64 * 2


@pytest.fixture(scope="module")
def trained(tiny_cifar100, tmp_path_factory):
    """A classifier after two epochs, its data and its best checkpoint."""
    pl.seed_everything(0)
    kept = ModelCheckpoint(dirpath=tmp_path_factory.mktemp("base"), monitor="val/accuracy", mode="max")
    model = BaseClassifier(**MLP, norm="swbn-fro", optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9))
    data = base_classes(tiny_cifar100)
    trainer = pl.Trainer(max_epochs=2, callbacks=[kept], **QUIET)
    trainer.fit(model, datamodule=data)
    return model, data, kept.best_model_path, trainer


def test_validation_measures_held_out_images_and_episodes_of_other_classes(trained):
    model, data, _, trainer = trained
    held, val = data.image_set(HELD_OUT), data.image_set("val")
    with torch.no_grad():
        model.eval()
        features, episodes = (model.embed(data.normalize(own.images)).double() for own in (held, val))
    weight, bias = (p.detach().double().numpy() for p in model.classifier.parameters())
    logits, labels = features.numpy() @ weight.T + bias, held.labels.numpy()
    share = np.mean(logits.argmax(1) == labels)
    row, logged = model.results["val"], trainer.callback_metrics
    assert row["held_out_images"] == len(labels) == 64 * 2 and share > 2 / 64
    assert row["held_out_accuracy"] == pytest.approx(share, abs=1e-6) == float(logged["val/held_out_accuracy"])
    expected = -log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean()
    assert row["held_out_loss"] == pytest.approx(expected, rel=1e-5) == float(logged["val/held_out_loss"])
    assert row["held_out_ci95"] == pytest.approx(1.9788 * (share * (1 - share) / 127) ** 0.5, rel=1e-4)  # t(127)
    result = evaluate_episodes(
        episodes, val.labels, PrototypicalHead("cosine"), ways=5, shots=1, queries=5, num_episodes=40, seed=0
    )
    assert row["accuracy"] == pytest.approx(result.mean, abs=1e-6) == float(logged["val/accuracy"])
    assert row["classes"] == 16 and row["episodes"] == 40


def test_without_held_out_images_a_validation_has_only_episodes(tiny_cifar100):
    model = BaseClassifier(**MLP)
    trainer = pl.Trainer(max_epochs=1, limit_train_batches=1, enable_checkpointing=False, **QUIET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*before the ``update`` method")
        trainer.fit(model, datamodule=base_classes(tiny_cifar100, held_out_share=0.0))
    assert model.results["val"]["episodes"] == 40 and "held_out_images" not in model.results["val"]


def test_the_loss_is_that_of_all_classes(trained):
    model, data, *_ = trained
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    model.eval()
    loss, accuracy = model.training_loss(batch)
    weight, bias = (p.detach().double().numpy() for p in model.classifier.parameters())
    logits = model.embed(batch.images).detach().double().numpy() @ weight.T + bias
    labels = batch.labels.numpy()
    assert float(loss.detach()) == pytest.approx(-log_softmax(logits, axis=1)[np.arange(64), labels].mean(), rel=1e-5)
    assert float(accuracy) == pytest.approx(np.mean(logits.argmax(1) == labels), abs=1e-6)
    with pytest.raises(ValueError, match="needs num_classes"):
        BaseClassifier(**MLP).training_loss(batch)


def test_a_checkpoint_is_tested_by_any_metric_and_starts_the_second_stage(trained):
    _, data, path, _ = trained
    rows = {}
    for metric in ("cosine", "euclidean"):
        again = BaseClassifier(**MLP, metric=metric, norm="swbn-fro")
        pl.Trainer(**QUIET).test(again, datamodule=data, ckpt_path=path, verbose=False)
        rows[metric] = again.results["test"]
        assert again.classifier.out_features == 64 and rows[metric]["classes"] == 20
    assert rows["cosine"]["accuracy"] != rows["euclidean"]["accuracy"]
    assert not any(key.startswith("held_out") for key in rows["cosine"])
    loaded = BaseClassifier.load_from_checkpoint(path)
    second = PrototypicalNetwork(**MLP, metric="cosine", norm="swbn-fro", backbone_checkpoint=path)
    for name, value in loaded.backbone.state_dict().items():
        assert torch.equal(second.backbone.state_dict()[name], value)
    # Its test before any training is the first stage's.
    episodic = EpisodicDataModule("cifar-fs", data.root, test=EPISODES)
    pl.Trainer(**QUIET).test(second, datamodule=episodic, verbose=False)
    assert second.results["test"] == rows["cosine"]


def test_what_does_not_go_together_is_said(tiny_cifar100, tmp_path):
    trainer, data = pl.Trainer(fast_dev_run=True, **QUIET), base_classes(tiny_cifar100)
    with pytest.raises(ValueError, match="PrototypicalNetwork trains with an EpisodicDataModule, got BaseClasses"):
        trainer.fit(PrototypicalNetwork(**MLP), datamodule=data)
    with pytest.raises(ValueError, match="BaseClassifier trains with a BaseClassesDataModule, got EpisodicData"):
        trainer.fit(BaseClassifier(**MLP), datamodule=EpisodicDataModule("cifar-fs", str(tiny_cifar100), val=EPISODES))
    with pytest.raises(ValueError, match="the classifier is for 5 training classes, but the data's training split"):
        trainer.fit(BaseClassifier(**MLP, num_classes=5), datamodule=data)
    for options, words in (
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"held_out_share": 1.0}, r"held_out_share must be in \[0, 1\)"),
        ({"held_out_share": 0.01}, "held_out_share=0.01 of 1536 images in 64 classes holds out none"),
        ({"batch_size": 1500}, "batch_size=1500 is more than the 1408 training images of each process"),
    ):
        with pytest.raises(ValueError, match=words):
            base_classes(tiny_cifar100, **options).setup("fit")
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\), got 1"):
        BaseClassifier(label_smoothing=1)


SHORT = [
    "trainer.max_epochs=1", "trainer.accelerator=cpu", "data.val.episodes=20", "data.test.episodes=30",
    "data.val.queries=5", "data.test.queries=5", "whiteness.num_images=8", "whiteness.pictures=false",
    "trainer.enable_model_summary=false", "trainer.enable_progress_bar=false", "trainer.limit_train_batches=3",
]  # fmt: skip


def test_a_study_compares_norms_at_both_shots(tiny_cifar100, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run_command(cell, command, arguments, lock):
        main([command, *arguments])

    monkeypatch.setattr("swbn_lightning.runs.study.running.run_command", run_command)
    network = "mlp:" + ",".join(["hidden=[16]", "image_size=32", "in_channels=3"])
    study([
        str(CONFIG), "--norms", "bn", "iternorm", "--shots", "1", "5", "--root", str(tiny_cifar100), "--networks",
        network, "--set", *SHORT,
    ])  # fmt: skip
    table = capsys.readouterr().out.rpartition("## ")[2]
    for words in ("`bn`", "`iternorm`", "5W1S", "5W5S", "BaseClassifier"):
        assert words in table
    cell = next(Path("runs").glob("cifar_fs_base_classes/mlp/bn/seed0-*"))
    (best, *_) = json.loads((cell / "version_0" / "results.json").read_text())["results"]
    assert f"accuracy{best['accuracy']:.4f}" in find_checkpoint(cell).name and best["held_out_images"] == 128
