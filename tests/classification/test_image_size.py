"""A network that cannot take the data's images is refused before training, by whichever way it came."""

import pytest
import pytorch_lightning as pl

from classification import GlyphDataModule, ImageClassifier


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
    model = ImageClassifier(num_classes=3, backbone=backbone, backbone_args={"in_channels": 1, **options})
    monkeypatch.setattr(ImageClassifier, "training_step", lambda *args: pytest.fail("it trains"))
    with pytest.raises(ValueError, match=words):
        pl.Trainer(fast_dev_run=True, accelerator="cpu", logger=False).fit(model, datamodule=data)
