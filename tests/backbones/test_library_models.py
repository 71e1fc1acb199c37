"""Networks of torchvision and timm by name: their own values, converted norms, one channel, maps, errors."""

import sys
import urllib.error

import pytest
import timm
import torch
import torchvision
from torch import nn

from swbn_lightning.backbones import build_backbone
from swbn_lightning.norms import named_norms
from swbn_lightning.norms.base import WhiteningNorm
from tests.norms.networks import relative_error


def whitening(model):
    return [name for name, layer in named_norms(model) if isinstance(layer, WhiteningNorm)]


@pytest.mark.parametrize(
    ("name", "norms", "width", "channels"),
    [
        ("torchvision/resnet18", 20, 512, 1),
        ("timm/resnet10t", 14, 512, 3),
    ],
)
def test_a_network_of_a_library_trains_a_step_from_the_same_weights(name, norms, width, channels):
    start = None
    for norm in ("bn", "swbn-fro"):
        torch.manual_seed(3)
        groups = None if norm == "bn" else {"num_groups": 8}
        backbone = build_backbone(name, norm, groups, in_channels=channels)
        weights = {n: p.detach().clone() for n, p in backbone.named_parameters() if p.dim() > 1}
        start = start or weights
        assert len(weights) == len(start) and all(torch.equal(weights[n], start[n]) for n in weights)
        assert len(whitening(backbone)) == (0 if norm == "bn" else norms)
        features = backbone(torch.randn(4, channels, 32, 32))
        assert features.shape == (4, backbone.num_features) == (4, width)
        features.square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


@pytest.mark.parametrize(
    "name",
    # All ways to end: fc, classifier of one or more layers, a convolution; pooling by a layer or a call; aux heads.
    ["resnet18", "alexnet", "densenet121", "mnasnet0_5", "squeezenet1_1", "googlenet"],
)  # fmt: skip
def test_torchvisions_features_are_what_its_last_layer_gets(name):
    backbone = build_backbone(f"torchvision/{name}").eval()
    images = torch.randn(1, 3, 64, 64)
    options = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    reference = torchvision.models.get_model(name, **options).eval()
    reference.load_state_dict(backbone.network.state_dict(), strict=False)
    heads = [m for m in reference.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    got = []
    heads[-1].register_forward_pre_hook(lambda module, args: got.append(args[0]))
    with torch.no_grad():
        reference(images)
        features = backbone(images)
        expected = got[0] if got[0].dim() == 2 else got[0].mean((2, 3))  # SqueezeNet's is a map
        torch.testing.assert_close(features, expected)
        assert features.shape == (1, backbone.num_features)
        if name == "alexnet":
            with pytest.raises(ValueError, match=r"no feature map \[N, 4096, h, w\]: it has layers between"):
                backbone.forward_features(images)
        else:
            torch.testing.assert_close(backbone.forward_features(images).mean((2, 3)), features)


def test_a_converted_network_keeps_its_map_and_a_transformer_has_none():
    backbone = build_backbone("torchvision/resnet18", "iternorm").eval()
    images = torch.randn(2, 3, 64, 64)
    assert backbone.forward_features(images).shape == (2, 512, 2, 2)
    torch.testing.assert_close(backbone.forward_features(images).mean((2, 3)), backbone(images))
    transformer = build_backbone("torchvision/vit_b_32", model_args={"image_size": 32}).eval()
    assert transformer(torch.zeros(1, 3, 32, 32)).shape == (1, 768)
    with pytest.raises(ValueError, match="no feature map .*: it averages none"):
        transformer.forward_features(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(("name", "width"), [("resnet10t", 512), ("mobilenetv3_small_050", 1024)])
def test_timms_features_are_its_own(name, width):
    torch.manual_seed(0)
    backbone = build_backbone(f"timm/{name}").eval()
    torch.manual_seed(0)
    reference = timm.create_model(name, num_classes=0).eval()
    images = torch.randn(2, 3, 64, 64)
    assert backbone.num_features == width and torch.equal(backbone(images), reference(images))
    if name.startswith("mobile"):
        with pytest.raises(ValueError, match="it has layers between its map"):
            backbone.forward_features(images)
    else:
        torch.testing.assert_close(backbone.forward_features(images).mean((2, 3)), backbone(images))


def test_timms_maps_with_channels_last_become_channels_first_and_tokens_are_none():
    images = torch.randn(1, 3, 32, 32)
    swin = build_backbone("timm/swin_tiny_patch4_window7_224", model_args={"img_size": 32, "window_size": 1}).eval()
    assert swin.network.forward_features(images).shape == (1, 1, 1, 768)
    assert swin.forward_features(images).shape == (1, 768, 1, 1)
    tokens = build_backbone("timm/vit_tiny_patch16_224", model_args={"img_size": 32}).eval()
    with pytest.raises(ValueError, match="no feature map .*tokens"):
        tokens.forward_features(images)


def test_one_channel_gives_what_the_colour_network_gives_for_gray():
    torch.manual_seed(0)
    colour = build_backbone("torchvision/resnet18").eval()
    torch.manual_seed(0)
    gray = build_backbone("torchvision/resnet18", in_channels=1).eval()
    images = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert relative_error(gray(images), colour(images.expand(-1, 3, -1, -1))) < 1e-5


def test_which_layers_are_converted_is_an_option():
    backbone = build_backbone("torchvision/resnet18", "swbn-kl", exclude="*downsample*")
    assert len(whitening(backbone)) == 17 and not any("downsample" in name for name in whitening(backbone))
    assert whitening(build_backbone("torchvision/resnet18", "swbn-kl", include=["bn1"])) == ["network.bn1"]
    with pytest.raises(ValueError, match="fits 'bn9'"):
        build_backbone("torchvision/resnet18", "bn", include="bn9")
    slow = build_backbone("torchvision/resnet18", "bn", {"momentum": 0.01})
    assert slow.network.bn1.momentum == 0.01


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("torchvision/resnet19", {}, "unknown torchvision model 'resnet19'; did you mean 'resnet18'"),
        ("timm/resnet27", {}, "unknown timm model 'resnet27'; did you mean.*'resnet26"),
        ("torchvison/resnet18", {}, "'torchvison/resnet18'; did you mean 'torchvision/<model>'.*vgg, wrn"),
        ("timm/", {}, "unknown backbone 'timm/'; did you mean 'timm/<model>'"),
        ("torchvision/resnet18", {"in_channels": 2}, "in_channels=2; 3 will do, and 1"),
        ("torchvision/resnet18", {"placement": "imagenet"}, "option of backbone 'torchvision/resnet18': 'placement'"),
        ("torchvision/resnet18", {"model_args": {"grups": 2}}, "with model_args {'grups': 2}: .*unexpected keyword"),
        ("timm/resnet10t", {"model_args": {"grups": 2}}, "with model_args {'grups': 2}: .*unexpected keyword"),
        ("timm/resnet10t.mine", {}, "timm/resnet10t.mine cannot be made: .*tag"),
        ("timm/resnet10t", {"model_args": {"num_classes": 5}}, "model_args must not have 'num_classes'"),
        ("torchvision/squeezenet1_1", {"norm": "swbn-fro"}, "SqueezeNet has no BatchNorm layer to convert"),
    ],
)
def test_errors_name_what_would_work(name, options, words):
    with pytest.raises(ValueError, match=words):
        build_backbone(name, **options)


def test_without_timm_its_networks_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="timm/resnet26 needs the package timm .*pip install timm"):
        build_backbone("timm/resnet26")


def test_pretrained_weights_come_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    weights = torchvision.models.get_model_weights("squeezenet1_1")["DEFAULT"]
    reference = torchvision.models.squeezenet1_1()
    (tmp_path / "checkpoints").mkdir()
    torch.save(reference.state_dict(), tmp_path / "checkpoints" / weights.url.rpartition("/")[2])
    for channels in (3, 1):
        backbone = build_backbone("torchvision/squeezenet1_1", in_channels=channels, pretrained=True)
        expected = reference.features[0].weight if channels == 3 else reference.features[0].weight.sum(1, keepdim=True)
        assert torch.equal(backbone.network.features[0].weight, expected)
        assert torch.equal(backbone.network.features[3].squeeze.weight, reference.features[3].squeeze.weight)


def test_pretrained_weights_without_a_network_say_where_to_put_them(monkeypatch, tmp_path):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", unreachable)
    with pytest.raises(ValueError, match=r"cannot be downloaded.*put https://\S*squeezenet1_1\S*pth at \S*checkpoints"):
        build_backbone("torchvision/squeezenet1_1", pretrained=True)
    assert not list(tmp_path.rglob("*.pth"))

    # timm's hub tries for a minute, so its answer is played here.
    def no_hub(*args, pretrained, **kwargs):
        assert pretrained
        raise OSError("cannot reach the Hub")

    monkeypatch.setattr(timm, "create_model", no_hub)
    with pytest.raises(ValueError, match="timm/resnet10t cannot be made with its pretrained weights: cannot reach"):
        build_backbone("timm/resnet10t", pretrained=True)


def test_an_image_that_the_network_cannot_take_is_refused_by_a_trial():
    backbone = build_backbone("torchvision/alexnet")
    backbone.network.features.eval()
    modes = [m.training for m in backbone.modules()]
    backbone.check_image_size(64, 64)
    with pytest.raises(ValueError, match="torchvision/alexnet cannot take images of 28x28 pixels: "):
        backbone.check_image_size(28, 28)
    assert [m.training for m in backbone.modules()] == modes
    norms = build_backbone("torchvision/resnet18", "swbn-fro", in_channels=1)
    before = {key: value.clone() for key, value in norms.state_dict().items()}
    norms.check_image_size(32, 32)
    assert all(torch.equal(value, before[key]) for key, value in norms.state_dict().items())


@pytest.mark.parametrize("argument", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"])
def test_no_argument_names_a_file_to_be_read(argument, tmp_path):
    with pytest.raises(ValueError, match=f"model_args must not have '{argument}'; .*Weights of one's own come in by"):
        build_backbone("timm/resnet10t", model_args={argument: str(tmp_path)})


@pytest.mark.parametrize("version", ["0.9.16", "1.0.25.dev0"])
def test_an_old_timm_would_run_what_a_pickle_says(version, monkeypatch):
    monkeypatch.setattr(timm, "__version__", version)
    with pytest.raises(ValueError, match=rf"timm {version} loads weights that may run code; .*timm>=1\.0\.26"):
        build_backbone("timm/resnet10t")
