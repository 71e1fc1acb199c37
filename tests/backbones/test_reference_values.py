"""Outputs beside torchvision's and timm's networks with the same weights, and beside the papers as literal loops."""

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.models.vgg import make_layers

from swbn_lightning.backbones import build_backbone
from swbn_lightning.backbones.resnet_cifar import ResNetCifar
from swbn_lightning.backbones.resnetv2 import ResNetV2Cifar
from swbn_lightning.backbones.wide_resnet import WideResNet
from swbn_lightning.norms import NormFactory
from tests.norms.networks import lived, relative_error

BN = NormFactory("bn")
UNITS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3)}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def take_over(backbone, reference, names):
    """Load a reference's state by a map of module names, ours to theirs; every one of ours must be in it."""
    theirs = reference.state_dict()
    ours = backbone.state_dict()
    state = {}
    for key in ours:
        module, _, leaf = key.rpartition(".")
        state[key] = theirs[f"{names[module]}.{leaf}"]
    backbone.load_state_dict(state, strict=True)
    return backbone.eval()


def v1_names(depth):
    names = {"stem.0": "conv1", "stem.1": "bn1"}
    number = 0
    for stage, count in enumerate(UNITS[depth], start=1):
        for unit in range(count):
            block, theirs = f"blocks.{number}", f"layer{stage}.{unit}"
            for k in (1, 2, 3):
                names[f"{block}.conv{k}"], names[f"{block}.norm{k}"] = f"{theirs}.conv{k}", f"{theirs}.bn{k}"
            names[f"{block}.shortcut.0"] = f"{theirs}.downsample.0"
            names[f"{block}.shortcut.1"] = f"{theirs}.downsample.1"
            number += 1
    return names


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("resnet50", torchvision.models.resnet50),
        ("resnext50_32x4d", torchvision.models.resnext50_32x4d),
        ("resnext101_32x4d", lambda: timm.create_model("resnext101_32x4d")),
    ],
)
def test_resnet_and_resnext_are_torchvisions_and_timms(name, maker):
    reference = lived(maker())
    reference.fc = nn.Identity()
    depth = "101" if "101" in name else "50"
    backbone = take_over(build_backbone(name), reference, v1_names(depth))
    with torch.no_grad():
        assert relative_error(backbone(IMAGES), reference(IMAGES)) < 1e-5
    if depth == "50":  # in training, too: values, and gradients of the first and the last convolution
        for network in (backbone, reference):
            network.double().train()(IMAGES.double()).sin().sum().backward()
        assert relative_error(backbone.stem[0].weight.grad, reference.conv1.weight.grad) < 1e-8
        assert relative_error(backbone.blocks[-1].conv3.weight.grad, reference.layer4[-1].conv3.weight.grad) < 1e-8


def test_resnetv2_is_timms():
    # timm has the first norm and ReLU behind the max-pooling, in the first unit; with gamma > 0 that is the same.
    reference = lived(timm.create_model("resnetv2_50", num_classes=0))
    names = {"stem.0": "stem.conv", "stem.1": "stages.0.blocks.0.norm1", "last.0": "norm"}
    number = 0
    for stage, count in enumerate(UNITS["50"]):
        for unit in range(count):
            block, theirs = f"blocks.{number}", f"stages.{stage}.blocks.{unit}"
            for k in (1, 2, 3):
                names[f"{block}.conv{k}"], names[f"{block}.norm{k}"] = f"{theirs}.conv{k}", f"{theirs}.norm{k}"
            names[f"{block}.shortcut"] = f"{theirs}.downsample.conv"
            number += 1
    backbone = take_over(build_backbone("resnetv2_50"), reference, names)
    with torch.no_grad():
        assert relative_error(backbone(IMAGES), reference(IMAGES)) < 1e-5


def test_vgg_is_torchvisions_layers_in_the_papers_order():
    # Appendix A's figure, read again; there the average pooling is 2x2 on the 2x2 map of a 32x32 image.
    plan = [64, 64, "M", 128, 128, "M", 256, 256, "M", 512, 512, "M", 512]
    reference = lived(nn.Sequential(make_layers(plan, batch_norm=True), nn.AvgPool2d(2), nn.Flatten()))
    for layer in reference[0]:
        if isinstance(layer, nn.Conv2d):
            nn.init.zeros_(layer.bias)  # ours has none
    names = {f"layers.{i}": f"0.{i}" for i in range(len(reference[0]))}
    backbone = take_over(build_backbone("vgg"), reference, names)
    images = IMAGES[:, :, :32, :32]
    with torch.no_grad():
        assert backbone(images).shape == (2, 512)
        assert relative_error(backbone(images), reference(images)) < 1e-5


def test_mlp_is_matrix_products():
    backbone = lived(build_backbone("mlp", hidden=[20, 30], image_size=6, in_channels=2).double())
    images = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    state, x = backbone.state_dict(), images.flatten(1)
    for linear in (1, 4):
        mean, var, gamma, beta = (
            state[f"layers.{linear + 1}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        x = (x @ state[f"layers.{linear}.weight"].T - mean) / (var + 1e-5).sqrt() * gamma + beta
        x = x.clamp(min=0)
    torch.testing.assert_close(backbone(images), x)


class Literal:
    """A network's state, and the operations of the papers' tables on it."""

    def __init__(self, backbone):
        self.state = backbone.state_dict()
        self.used = set()

    def get(self, name):
        self.used.add(name)
        return self.state[name]

    def conv(self, x, name, stride=1):
        weight = self.get(f"{name}.weight")
        return F.conv2d(x, weight, stride=stride, padding=(weight.shape[-1] - 1) // 2)

    def norm(self, x, name):
        mean, var, gamma, beta = (
            self.get(f"{name}.{part}").view(1, -1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * gamma + beta

    def norm_relu(self, x, name):
        return self.norm(x, name).clamp(min=0)

    def check(self, backbone, features):
        with torch.no_grad():
            assert relative_error(backbone(self.images), features) < 1e-12
        counters = {name for name in self.state if name.endswith("num_batches_tracked")}
        assert self.used | counters == set(self.state)  # nothing in the network that the loops do without


def make(backbone):
    literal = Literal(lived(backbone.double()))
    literal.images = IMAGES[:, :, :16, :16].double()
    return literal


@pytest.mark.parametrize(("shortcut", "form"), [("projection", "he"), ("identity", "he"), ("projection", "appendix")])
def test_v1_is_he_et_als_and_the_appendixs_figures(shortcut, form):
    backbone = ResNetCifar(BN, 14, shortcut=shortcut, form=form)
    net = make(backbone)
    x = net.norm_relu(net.conv(net.images, "stem.0"), "stem.1")
    for unit, width in enumerate([16, 16, 32, 32, 64, 64]):
        block = f"blocks.{unit}"
        stride = width // x.shape[1]  # "(1, c) type two" where the width doubles
        out = net.norm_relu(net.conv(x, f"{block}.conv1", stride), f"{block}.norm1")
        second = net.get(f"{block}.conv2.weight")
        assert second.shape[2:] == ((3, 3) if form == "he" else (1, 1))
        out = net.norm(net.conv(out, f"{block}.conv2"), f"{block}.norm2")
        if stride == 2 and shortcut == "projection":
            x = net.norm(net.conv(x, f"{block}.shortcut.0", 2), f"{block}.shortcut.1")
        elif stride == 2:
            padded = torch.zeros_like(out)
            padded[:, width // 4 : 3 * width // 4] = x[:, :, ::2, ::2]
            x = padded
        x = (out + x).clamp(min=0)
    if form == "appendix":
        x = net.norm_relu(x, "blocks.6")
    net.check(backbone, x.mean((2, 3)))


@pytest.mark.parametrize("flatten", [False, True])
def test_conv4_is_snell_et_als(flatten):
    backbone = build_backbone("conv4", **({"flatten": True, "image_size": 47} if flatten else {}))
    net = make(backbone)
    x = net.images = IMAGES[:, :, :47, :47].double()  # 23, 11, 5, 2: a half pixel is left out
    for block in range(4):
        x = F.max_pool2d(net.norm_relu(net.conv(x, f"layers.{4 * block}"), f"layers.{4 * block + 1}"), 2)
    assert x.shape[1:] == (64, 2, 2)
    net.check(backbone, x.flatten(1) if flatten else x.mean((2, 3)))


def test_metaoptnets_resnet12_is_its_authors_code():
    def leaky(x):
        return torch.where(x > 0, x, 0.1 * x)

    backbone = build_backbone("resnet12", form="metaoptnet")
    net = make(backbone)
    x = net.images
    for number in range(4):
        block, out = f"blocks.{number}", x
        for k in (1, 2, 3):
            out = net.norm(net.conv(out, f"{block}.conv{k}"), f"{block}.norm{k}")
            out = leaky(out) if k < 3 else out
        x = F.max_pool2d(leaky(out + net.norm(net.conv(x, f"{block}.shortcut.0"), f"{block}.shortcut.1")), 2)
    net.check(backbone, x.mean((2, 3)))


def test_wide_resnet_is_the_authors_code():
    width = 2
    backbone = WideResNet(BN, depth=16, width=width)
    net = make(backbone)
    x = net.conv(net.images, "stem")
    for unit in range(6):
        block, out_channels = f"blocks.{unit}", 16 * width * 2 ** (unit // 2)
        stride = 2 if unit in (2, 4) else 1
        active = net.norm_relu(x, f"{block}.norm1")
        if x.shape[1] != out_channels:
            x = net.conv(active, f"{block}.shortcut", stride)
        out = net.conv(active, f"{block}.conv1", stride)
        x = x + net.conv(net.norm_relu(out, f"{block}.norm2"), f"{block}.conv2")
    net.check(backbone, net.norm_relu(x, "last.0").mean((2, 3)))


@pytest.mark.parametrize(("block", "depth"), [("basic", 14), ("bottleneck", 20)])
def test_resnetv2_is_he_et_als_for_cifar(block, depth):
    backbone = ResNetV2Cifar(BN, depth, block)
    net = make(backbone)
    x = net.conv(net.images, "stem")
    for unit in range(6):
        name, stride = f"blocks.{unit}", 2 if unit in (2, 4) else 1
        out_channels = 16 * 2 ** (unit // 2) * (1 if block == "basic" else 4)
        active = net.norm_relu(x, f"{name}.norm1")
        if x.shape[1] != out_channels:
            x = net.conv(active, f"{name}.shortcut", stride)
        elif unit == 0:
            x = active  # "right after conv1 and before splitting into two paths"
        out = net.conv(active, f"{name}.conv1", stride)
        out = net.conv(net.norm_relu(out, f"{name}.norm2"), f"{name}.conv2")
        if block == "bottleneck":
            out = net.conv(net.norm_relu(out, f"{name}.norm3"), f"{name}.conv3")
        x = x + out
    net.check(backbone, net.norm_relu(x, "last.0").mean((2, 3)))
