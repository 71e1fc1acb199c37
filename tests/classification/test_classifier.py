"""Many-shot classification on letters."""

import pytest
import pytorch_lightning as pl
import torch

from classification import GlyphDataModule, ImageClassifier


def trainer(**options):
    return pl.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", num_sanity_val_steps=0, **options,
    )  # fmt: skip


def model(**options):
    options = {"num_classes": 10, "backbone": "resnet20", "backbone_args": {"in_channels": 1}, **options}
    return ImageClassifier(**options)


@pytest.mark.slow
def test_it_learns_letters():
    pl.seed_everything(0)
    data = GlyphDataModule(num_classes=10, images_per_class=48, batch_size=32, eval_batch_size=50)
    classifier = model(
        norm="swbn-fro",
        norm_args={"step_size": 0.01},
        optimizer=lambda p: torch.optim.Adam(p, lr=0.003),
        warmup_steps=5,
    )
    trainer(max_epochs=6).fit(classifier, datamodule=data)
    row = classifier.results["val"]
    assert row["classes"] == 10 and row["images"] == 120
    assert row["accuracy"] > 0.3  # chance is 0.1; 90 steps end anywhere from 0.4 to 0.8, as rounding has it


def test_splits_are_other_drawings_of_the_same_letters():
    data = GlyphDataModule(num_classes=30, images_per_class=8)
    train, val, test = (data.image_set(split) for split in ("train", "val", "test"))
    assert train.class_names == val.class_names == test.class_names
    assert len(train) == 30 * 8 and len(val) == len(test) == 30 * 2
    assert not torch.equal(val.images, test.images) and not torch.equal(train.images[::4], val.images)


def test_errors():
    with pytest.raises(ValueError, match="100 classes.* of the model is 10: give --model.num_classes 100"):
        trainer(fast_dev_run=True).fit(model(), datamodule=GlyphDataModule(images_per_class=2))
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\)"):
        model(label_smoothing=1.0)
    with pytest.raises(ValueError, match="506 classes, got num_classes=507"):
        GlyphDataModule(num_classes=507).setup("test")
    with pytest.raises(ValueError, match="must not be negative, got seed=-1"):
        GlyphDataModule(seed=-1)


@pytest.mark.parametrize(
    ("backbone", "options", "words"),
    [
        ("resnet50", {}, "ResNet needs images of at least 32x32 pixels, got 28x28"),
        ("mlp", {"image_size": 32}, "made for images of 32x32 pixels, got 28x28: set backbone_args: {image_size: 28}"),
        ("torchvision/alexnet", {}, "torchvision/alexnet cannot take images of 28x28 pixels"),
    ],
)
def test_images_of_the_wrong_size_are_an_error_before_training(backbone, options, words, monkeypatch):
    data = GlyphDataModule(num_classes=3, images_per_class=2, batch_size=2)
    network = model(num_classes=3, backbone=backbone, backbone_args={"in_channels": 1, **options})
    monkeypatch.setattr(ImageClassifier, "training_step", lambda *args: pytest.fail("it trains"))
    with pytest.raises(ValueError, match=words):
        trainer(fast_dev_run=True).fit(network, datamodule=data)
