"""The networks of image classification: sizes as published, a step with each norm, the same start whatever the norm."""

import itertools
from functools import partial

import pytest
import timm
import torch
from torch import nn

from swbn_lightning import fuse_norms
from swbn_lightning.backbones import available_backbones, build_backbone
from swbn_lightning.backbones.resnet import ResNet
from swbn_lightning.backbones.resnet_cifar import ResNetCifar
from swbn_lightning.backbones.resnetv2 import ResNetV2, ResNetV2Cifar
from swbn_lightning.norms import NormFactory, named_norms
from swbn_lightning.norms.base import WhiteningNorm
from tests.norms.networks import lived, relative_error

LARGE = ("wrn_28_10", "wrn_40_10", "resnext50_32x4d", "resnext101_32x4d", "resnetv2_101")
IMAGENET = ("resnet50", "resnext50_32x4d", "resnext101_32x4d", "resnetv2_50", "resnetv2_101")
# Name, and a form of it, to (number of features, side of a quick image, last map at 32x32 or 224x224).
NETWORKS = {
    "mlp": (1024, 28, None),
    "vgg": (512, 16, (2, 2)),
    "resnet20": (64, 8, (8, 8)),
    "resnet32": (64, 8, (8, 8)),
    "resnetv2_56": (64, 8, (8, 8)),
    "resnetv2_164": (256, 8, (8, 8)),
    "wrn": (640, 8, (8, 8)),
    "wrn_28_10": (640, 8, (8, 8)),
    "wrn_40_10": (640, 8, (8, 8)),
    "conv4": (64, 16, (2, 2)),
    "resnet12": (512, 16, (2, 2)),
    "resnet12:metaoptnet": (640, 16, (2, 2)),
    **dict.fromkeys(IMAGENET, (2048, 64, (7, 7))),
}
BN = NormFactory("bn")


def build(name, *norm, **options):
    name, _, form = name.partition(":")
    return build_backbone(name, *norm, **({"form": form} if form else {}), **options)


def on_meta(name, **options):
    """Sizes without memory or time."""
    with torch.device("meta"):
        return build(name, **options)


def parameters(backbone, classes):
    """With the linear layer of so many classes, as the papers count."""
    return sum(p.numel() for p in backbone.parameters()) + (backbone.num_features + 1) * classes


def make(network, norm, options, **norm_args):
    """By name, or a class where the named networks are large."""
    if isinstance(network, str):
        return build_backbone(network, norm, norm_args, **options)
    return network(NormFactory(norm, **norm_args), **options)


def weights(backbone):
    return [m.weight for m in backbone.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def test_all_are_there():
    assert set(available_backbones()) == {name.partition(":")[0] for name in NETWORKS}


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_parameters_are_those_of_timm(name):
    with torch.device("meta"):
        reference = timm.create_model(name)
    assert parameters(on_meta(name), 1000) == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize(
    ("backbone", "classes", "millions"),
    [
        # Zagoruyko and Komodakis, BMVC 2016, tables 2 to 6 (10 classes).
        ({"name": "wrn", "depth": 40, "width": 1}, 10, 0.6),
        ({"name": "wrn", "depth": 28, "width": 12}, 10, 52.5),
        # He et al., ECCV 2016 (as in Zagoruyko and Komodakis, table 5).
        ({"name": "resnetv2_164"}, 10, 1.7),
    ],
)
def test_parameters_are_those_that_the_papers_print(backbone, classes, millions):
    count = parameters(on_meta(**backbone), classes) / 1e6
    digits = 0 if isinstance(millions, int) else 1
    # Cut or rounded: some print 35.7 for 35.75 and 25.5 for 25.56.
    assert millions in (round(count, digits), int(count * 10**digits) / 10**digits)


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (110, 1.7)])
def test_cifar_resnets_have_the_parameters_of_he_et_al(depth, millions):
    # CVPR 2016, table 6, with identity shortcuts.
    digits = len(str(millions).partition(".")[2])
    with torch.device("meta"):
        assert round(parameters(ResNetCifar(BN, depth, shortcut="identity"), 10) / 1e6, digits) == millions


def test_parameters_by_hand_where_nobody_prints_them():
    widths = [3, 64, 64, 128, 128, 256, 256, 512, 512, 512]  # appendix A
    vgg = sum(9 * i * o for i, o in itertools.pairwise(widths)) + 2 * sum(widths[1:])
    assert parameters(on_meta("vgg"), 10) == vgg + 512 * 10 + 10
    # Snell et al.'s code prints 113,088: with the biases of its four convolutions.
    conv4 = 9 * 3 * 64 + 3 * 9 * 64 * 64 + 4 * 2 * 64
    assert parameters(on_meta("conv4"), 0) == conv4 == 113_088 - 4 * 64
    flat = on_meta("conv4", flatten=True, image_size=84)
    assert flat.num_features == 64 * 5 * 5 == 1600 and parameters(flat, 0) == conv4
    mlp = 784 * 1024 + 2 * 1024**2 + 3 * 2 * 1024  # appendix E
    assert parameters(on_meta("mlp"), 10) == mlp + 1024 * 10 + 10
    # Projections, and appendix B's 1x1 convolutions: 5 units of each width.
    resnet = 464_154 + 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    assert parameters(on_meta("resnet32"), 10) == resnet
    smaller = 5 * 8 * (16**2 + 32**2 + 64**2)
    assert parameters(on_meta("resnet32", form="appendix"), 10) == resnet - smaller + 2 * 64


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("mlp", {}, 3), ("mlp", {"hidden": [8, 8]}, 2), ("vgg", {}, 9),
        ("resnet20", {}, 19 + 2), ("resnet32", {}, 31),  # and two BatchNorm
        ("resnet32", {"shortcut_norm": "given"}, 31 + 2), ("resnet32", {"form": "appendix"}, 31 + 1),
        ("resnetv2_56", {}, 27 * 2 + 1), ("resnetv2_56", {"block": "bottleneck"}, 18 * 3 + 1),
        ("resnetv2_164", {}, 54 * 3 + 1), ("wrn_28_10", {}, 12 * 2 + 1),
        ("resnet50", {}, 1 + 16 * 3 + 4), ("resnet50", {"placement": "imagenet"}, 2),  # and 52 BatchNorm
        ("resnetv2_50", {}, 1 + 16 * 3),
    ],
)  # fmt: skip
def test_norm_layers_are_as_many_as_the_architectures_have(name, options, count):
    backbone = on_meta(name, norm="swbn-kl", **options)
    norms = dict(named_norms(backbone))
    kept = [n for n, m in norms.items() if not isinstance(m, WhiteningNorm)]
    assert len(norms) - len(kept) == count
    if options.get("placement") == "imagenet":
        assert len(kept) == 52 and not {"stem.1", "pooled_norm"} & set(kept)
        assert norms["pooled_norm"].num_features == 2048
    elif name == "resnet32" and options.get("shortcut_norm") != "given":
        assert len(kept) == 2 and all(n.endswith("shortcut.1") for n in kept)
    else:
        assert not kept


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in LARGE])
def test_every_network_trains_a_step_with_each_norm_from_the_same_weights(name):
    width, size, _ = NETWORKS[name]
    channels = 1 if name == "mlp" else 3
    groups = {"num_groups": 8}  # to be quick; the large ones, which are deeper only, are in the slow test below
    start = None
    for norm, norm_args in (("bn", {}), ("swbn-fro", {"step_size": 1e-3, **groups}), ("iternorm", groups)):
        torch.manual_seed(3)
        backbone = build(name, norm, norm_args, **({"depth": 10} if name == "wrn" else {}))
        if start is None:
            start = [w.detach().clone() for w in weights(backbone)]
        assert all(torch.equal(a, b) for a, b in zip(weights(backbone), start, strict=True)), norm
        train_a_step(backbone, torch.randn(4, channels, size, size), width)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_trains_a_step_ungrouped(name):
    width, size, _ = NETWORKS[name]
    train_a_step(build(name, "swbn-fro"), torch.randn(8, 1 if name == "mlp" else 3, size, size), width)


def train_a_step(backbone, images, width):
    assert (backbone.num_features, backbone.in_channels) == (width, images.shape[1])
    optimizer = torch.optim.SGD(backbone.parameters(), lr=1e-3)
    before = [w.detach().clone() for w in weights(backbone)]
    features = backbone.train()(images)
    assert features.shape == (len(images), width)
    torch.nn.functional.cross_entropy(features[:, :10], torch.arange(len(images))).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(weights(backbone), before, strict=True))
    for layer in backbone.modules():
        if isinstance(layer, WhiteningNorm):
            identity = torch.eye(layer.whitening_matrix.shape[-1])
            assert layer.num_batches_tracked == 1 and not torch.equal(layer.whitening_matrix[0], identity)


def test_imagenet_placement_trains_both_of_its_norms():
    backbone = build_backbone("resnet50", "swbn-fro", {"step_size": 1e-3, "num_groups": 8}, placement="imagenet")
    train_a_step(backbone, torch.randn(4, 3, 64, 64), 2048)
    backbone.eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        pooled = backbone.forward_features(images).mean((2, 3))
        torch.testing.assert_close(backbone(images), backbone.pooled_norm(pooled))
        assert relative_error(backbone(images), pooled) > 0.01


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "mlp" and n not in LARGE])
def test_maps_are_averaged_to_features(name):
    width, size, shape = NETWORKS[name]
    backbone = on_meta(name)
    full = 224 if name in IMAGENET else 32
    assert backbone.forward_features(torch.zeros(1, 3, full, full, device="meta")).shape == (1, width, *shape)
    if name in ("vgg", "resnet20", "resnetv2_56"):
        backbone, images = build_backbone(name).eval(), torch.randn(2, 3, 2 * size, 2 * size)
        torch.testing.assert_close(backbone(images), backbone.forward_features(images).mean((2, 3)))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("mlp", "fan_in"), ("vgg", "glorot"), ("resnet32", "fan_out"), ("resnetv2_56", "fan_out"),
        ("wrn", "fan_in"), ("resnetv2_50", "fan_out"), ("conv4", "fan_out"),
    ],
)  # fmt: skip
def test_initialisation_is_the_papers(name, mode):
    # He et al., ICCV 2015: variance 2 / n, n = k*k*channels in or out; Glorot and Bengio 2010: uniform, 2 / (in + out).
    small = {"depth": 10, "width": 2} if name == "wrn" else {}
    for weight in weights(build_backbone(name, **small)):
        kernel = weight[0, 0].numel()
        fan_in, fan_out = weight.shape[1] * kernel, weight.shape[0] * kernel
        variance = 2 / {"fan_in": fan_in, "fan_out": fan_out, "glorot": fan_in + fan_out}[mode]
        tolerance = 6 / weight.numel() ** 0.5
        assert weight.var().item() == pytest.approx(variance, rel=tolerance)
        assert abs(weight.mean().item()) < tolerance * variance**0.5
        bounded = weight.abs().max().item() < 1.001 * (3 * variance) ** 0.5
        assert bounded == (mode == "glorot")


@pytest.mark.parametrize(
    ("name", "options", "size", "folded", "convolutions"),
    [
        ("mlp", {"hidden": [32, 32, 16], "image_size": 8}, 8, 3, 0),
        ("vgg", {}, 16, 9, 0),
        ("conv4", {}, 20, 4, 0),
        ("conv4", {"flatten": True, "image_size": 32}, 32, 4, 0),
        ("resnet32", {"form": "appendix"}, 8, 33, 1),
        (partial(ResNet, layers=(1, 1, 1, 1)), {"placement": "imagenet"}, 32, 17, 1),
        # The norms that follow an addition stay: all but the second and third of each unit and the stem's.
        ("resnetv2_56", {}, 8, 27 + 1, 27),
        (partial(ResNetV2, layers=(2, 1, 1, 1)), {}, 32, 5 * 2 + 1, 5),
    ],
)
def test_fusing_leaves_no_norm_and_the_same_function(name, options, size, folded, convolutions):
    backbone = lived(make(name, "swbn-kl", options, num_groups=8).double())
    images = torch.randn(2, backbone.in_channels, size, size, dtype=torch.float64)
    fused = fuse_norms(backbone)
    with torch.no_grad():
        assert relative_error(fused(images), backbone(images)) < 1e-9
    report = fused.fusion_report
    assert (len(report.folded), len(report.convolutions), len(report.kept)) == (folded, convolutions, 0), str(report)
    assert report.untraced == () and next(named_norms(fused), None) is None


@pytest.mark.parametrize(
    ("name", "smallest"), [("vgg", 16), ("conv4", 16), ("resnet12", 16), ("wrn", 4), ("resnetv2_50", 32)]
)
def test_the_smallest_image_passes_and_a_smaller_one_is_refused(name, smallest):
    backbone = build_backbone(name).eval()
    assert backbone.min_image_size == smallest
    assert backbone.forward_features(torch.zeros(1, 3, smallest, smallest)).shape[2:] == (1, 1)
    for height, width in ((smallest - 1, smallest), (smallest, smallest - 1)):
        words = f"at least {smallest}x{smallest} pixels, got {height}x{width}"
        with pytest.raises(ValueError, match=words):
            backbone(torch.zeros(1, 3, height, width))
        with pytest.raises(ValueError, match=words):
            backbone.check_image_size(height, width)
    backbone.check_image_size(smallest, smallest)


def test_an_mlp_takes_its_own_size_alone_and_has_no_map():
    backbone = build_backbone("mlp", in_channels=3, image_size=8, hidden=(16,))
    assert backbone(torch.zeros(2, 3, 8, 8)).shape == (2, 16) and backbone.num_features == 16
    for shape in ((2, 3, 9, 8), (2, 3, 4, 16)):
        with pytest.raises(ValueError, match=r"8x8 pixels, got .*: set .* and make the images square"):
            backbone(torch.zeros(shape))
    for shape in ((2, 1, 8, 8), (2, 192)):
        with pytest.raises(ValueError, match=rf"images \[N, 3, H, W\], got \[{shape[0]}, {shape[1]}"):
            backbone(torch.zeros(shape))
    with pytest.raises(ValueError, match="8x8 pixels, got 32x32: set backbone_args: {image_size: 32}"):
        backbone.check_image_size(32, 32)
    backbone.check_image_size(8, 8)
    with pytest.raises(ValueError, match="no feature map"):
        backbone.forward_features(torch.zeros(2, 3, 8, 8))


def test_flattened_conv4_takes_its_own_size_alone_and_has_no_map():
    backbone = build_backbone("conv4", flatten=True, image_size=32).eval()
    images = torch.randn(2, 3, 32, 32)
    averaging = build_backbone("conv4").eval()
    averaging.load_state_dict(backbone.state_dict())
    maps = averaging.forward_features(images)
    assert torch.equal(backbone(images), maps.flatten(1)) and backbone.num_features == 256
    backbone.check_image_size(32, 32)
    for refused in (lambda: backbone.check_image_size(48, 48), lambda: backbone(torch.zeros(1, 3, 48, 48))):
        with pytest.raises(ValueError, match="of 32x32 pixels, got 48x48: set backbone_args: {image_size: 48}"):
            refused()
    with pytest.raises(ValueError, match="gives a vector, no feature map"):
        backbone.forward_features(images)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("conv4", {"flatten": True}, r"belong together.*got flatten=True, image_size=None"),
        ("conv4", {"image_size": 84}, r"belong together.*got flatten=False, image_size=84"),
        ("conv4", {"flatten": True, "image_size": 15}, "at least 16x16 pixels, got 15x15"),
        ("mlp", {"hidden": []}, "at least one width"),
        ("mlp", {"image_size": 0}, "image_size must be"),
        ("resnet32", {"form": "figure"}, "'figure'.*appendix, he"),
        ("resnetv2_56", {"block": "bottlenek"}, "did you mean 'bottleneck'"),
        ("wrn", {"depth": 27}, r"6n \+ 4 layers .*got depth=27"),
        ("wrn_28_10", {"drop_rate": 1.0}, r"in \[0, 1\), got 1.0"),
        ("resnet50", {"placement": "first"}, "'first'.*all, imagenet"),
        ("resnetv2_56", {"depth": 57}, "option of backbone 'resnetv2_56': 'depth'"),
    ],
)
def test_errors_of_options(name, options, words):
    with pytest.raises(ValueError, match=words):
        on_meta(name, **options)


def test_depths_that_do_not_exist():
    with pytest.raises(ValueError, match=r"basic blocks has 6n \+ 2 layers, got depth=57"):
        ResNetV2Cifar(BN, 57)


def test_wide_resnet_drops_between_the_convolutions_in_training_alone():
    images = torch.randn(2, 3, 8, 8)
    backbone = build_backbone("wrn", depth=10, width=1, drop_rate=0.5)
    dropped = [n for n, m in backbone.named_modules() if isinstance(m, nn.Dropout)]
    assert dropped == [f"blocks.{i}.dropout" for i in range(3)]
    assert not torch.equal(backbone(images), backbone(images))
    backbone.eval()
    assert torch.equal(backbone(images), backbone(images))
