"""A tiny network and a tiny data set by names, for whole trainings."""

import pytest
import torch
from torch import nn

from fewshot import EpisodeSettings, EpisodicDataModule
from fewshot.datasets import registry
from swbn_lightning.backbones import Backbone
from swbn_lightning.backbones import registry as backbones
from swbn_lightning.backbones.base import conv
from swbn_lightning.data import ImageSet

CHANNELS = 12
QUIET = {
    "logger": False, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


class Tiny(Backbone):
    """Three convolutions; 16x16 gives 12x4x4."""

    def __init__(self, norm, in_channels=1, width=CHANNELS):
        super().__init__()
        self.in_channels, self.num_features = in_channels, width
        widths = (in_channels, 8, width, width)
        stages = [
            nn.Sequential(conv(before, after, 3, stride), norm(after), nn.ReLU())
            for before, after, stride in zip(widths, widths[1:], (1, 2, 2), strict=False)
        ]
        self.stages = nn.Sequential(*stages)

    def forward_features(self, x):
        return self.stages(x)


def load_shades(split, root, image_size):
    """Six gray classes, more in training."""
    classes = 9 if split == "train" else 6
    generator = torch.Generator().manual_seed(len(split))
    labels = torch.arange(classes).repeat_interleave(11)
    shade = 25 * labels.view(-1, 1, 1, 1)
    images = shade + torch.randint(50, (len(labels), 1, image_size, image_size), generator=generator)
    return ImageSet(images.to(torch.uint8), labels, tuple("abcdefghi"[:classes]), split)


def shades(**options):
    settings = {
        "train": EpisodeSettings(ways=4, shots=1, queries=2, episodes=4),
        "val": EpisodeSettings(ways=3, shots=2, queries=4, episodes=30),
        "test": EpisodeSettings(ways=3, shots=2, queries=4, episodes=30),
    }
    return EpisodicDataModule(dataset="shades", episodes_per_step=2, **{**settings, **options})


@pytest.fixture
def small_things(monkeypatch, tmp_path):
    """Backbone ``tiny`` and data set ``shades``; runs lie in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(backbones._BACKBONES, "tiny", Tiny)
    monkeypatch.setitem(registry._DATASETS, "shades", registry.FewShotDataset(load_shades, 16, (0.5,), (0.3,)))
