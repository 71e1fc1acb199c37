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
    options = {"num_classes": 506, "backbone": "resnet20", "backbone_args": {"in_channels": 1}, **options}
    return ImageClassifier(**options)


def test_it_learns_letters_and_records_what_it_measured():
    pl.seed_everything(0)
    data = GlyphDataModule(images_per_class=4, batch_size=64, eval_batch_size=256)
    classifier = model(
        norm="swbn-fro",
        norm_args={"step_size": 0.01},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        warmup_steps=5,
    )
    run = trainer(max_epochs=3)
    run.fit(classifier, datamodule=data)
    row = classifier.results["val"]
    assert row["classes"] == 506 and row["images"] == 1012
    assert row["accuracy"] > 10 / 506  # far above chance after some ninety steps

    images, labels = data.image_set("val").images, data.image_set("val").labels
    with torch.no_grad():
        right = classifier.eval()(data.normalize(images)).argmax(-1) == labels
    p = right.float().mean().item()
    assert row["accuracy"] == pytest.approx(p, abs=2e-3)
    assert row["ci95"] == pytest.approx(1.96 * (p * (1 - p) / 1012) ** 0.5, rel=0.05)


def test_splits_are_other_drawings_of_the_same_letters():
    data = GlyphDataModule(images_per_class=2)
    train, val, test = (data.image_set(split) for split in ("train", "val", "test"))
    assert train.class_names == val.class_names == test.class_names
    assert len(train) == 2 * 506 and len(val) == len(test) == 506
    assert not torch.equal(val.images, test.images) and not torch.equal(train.images[::2], val.images)


def test_errors():
    with pytest.raises(ValueError, match="506 classes, but num_classes is 10"):
        trainer(fast_dev_run=True).fit(model(num_classes=10), datamodule=GlyphDataModule(images_per_class=1))
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\)"):
        model(label_smoothing=1.0)
    with pytest.raises(ValueError, match="batch_size must be"):
        GlyphDataModule(batch_size=0)
