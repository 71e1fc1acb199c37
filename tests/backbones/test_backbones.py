"""ResNet-12 and ResNet-20: parameters, DropBlock, errors."""

import pytest
import torch

from swbn_lightning.backbones import build_backbone


def test_parameters_are_those_of_the_architectures():
    # Convolutions by hand: k*k*in*out of each, from the papers' tables; norms add 2 a channel.
    def resnet12(widths, stem):
        convolutions, norms, previous = stem, 0, 64 if stem else 3
        for w in widths:
            convolutions += 9 * previous * w + 2 * 9 * w * w + previous * w
            norms += 4 * w
            previous = w
        return convolutions, 2 * (norms + (64 if stem else 0))

    def count(b):
        return sum(p.numel() for p in b.parameters())

    can = resnet12((64, 128, 256, 512), stem=27 * 64)
    meta = resnet12((64, 160, 320, 640), stem=0)
    # Block after block 75,648 + 563,200 + 2,355,200 + 9,420,800, and norms of 4 * 2 * 1,184.
    assert sum(meta) == 12_424_320
    assert count(build_backbone("resnet12")) == sum(can) and round(sum(can) / 1e6, 1) == 8.0
    assert count(build_backbone("resnet12", form="metaoptnet")) == sum(meta)
    # He et al. print 0.27 million for ResNet-20, classifier (650) included.
    assert count(build_backbone("resnet20", shortcut="identity")) + 650 == 269_722
    assert round((count(build_backbone("resnet20")) + 650) / 1e6, 2) == 0.27


@pytest.mark.parametrize("size", [16, 32, 84])  # the last maps: 1x1, 2x2 and 5x5
def test_resnet12_drops_blocks_that_fit_its_maps_in_training_only(size):
    torch.manual_seed(0)
    backbone, images = build_backbone("resnet12", form="metaoptnet", drop_rate=0.5), torch.randn(4, 3, size, size)
    assert not torch.equal(backbone(images), backbone(images))
    dropped = backbone.forward_features(images) == 0
    assert 0.2 < dropped.float().mean() < 0.8
    backbone.eval()
    assert torch.equal(backbone(images), backbone(images))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet21", {}, "unknown backbone 'resnet21'; did you mean 'resnet20'.*resnet12, resnet20"),
        ("resnet20", {"norm": "bm"}, "unknown norm 'bm'; did you mean 'bn'"),
        ("resnet20", {"norm_args": {"step_size": 1}}, "option of norm 'bn'"),
        ("resnet20", {"in_chanels": 1}, "'in_chanels'; did you mean 'in_channels'"),
        ("resnet20", {"depth": 8}, "'depth'"),
        ("resnet20", {"in_channels": 0}, "in_channels must be an integer of at least 1, got 0"),
        ("resnet20", {"shortcut": "none"}, "'none'.*identity, projection"),
        ("resnet12", {"form": "cam"}, "'cam'; did you mean 'can'"),
        ("resnet12", {"drop_rate": 0.1}, "belongs to form 'metaoptnet'"),
        ("resnet12", {"form": "metaoptnet", "drop_rate": 1.0}, r"in \[0, 1\), got 1.0"),
        ("resnet12", {"form": "metaoptnet", "drop_rate": 0.1, "drop_block_size": 4}, "must be odd, got 4"),
    ],
)
def test_errors(name, options, words):
    with pytest.raises(ValueError, match=words):
        build_backbone(name, **options)
