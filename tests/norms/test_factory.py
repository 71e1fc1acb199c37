"""Normalisation layers by name."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from swbn_lightning import SWBN2d, SWBN3d
from swbn_lightning.norms import NormFactory, named_norms, norm_layer_types


@pytest.mark.parametrize(
    ("name", "options", "attributes"),
    [
        ("swbn", {"criterion": "kl", "step_size": 1e-3}, {"criterion": "kl", "step_size": 1e-3}),
        ("swbn-kl", {}, {"criterion": "kl", "step_size": 1e-5}),
        ("swbn-fro", {"num_groups": 2}, {"criterion": "fro", "num_groups": 2}),
        ("iternorm", {"num_iterations": 7}, {"num_iterations": 7, "num_groups": 1}),
        ("dbn", {}, {"num_groups": 1}),
        ("bn", {"momentum": 0.2}, {"momentum": 0.2}),
        ("in", {}, {"affine": True, "track_running_stats": False}),
        ("gn", {}, {"num_groups": 8}),
        ("ln", {"affine": False}, {"num_groups": 1, "affine": False}),
    ],
)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_names_and_options(name, options, attributes, ndim):
    layer = NormFactory(name, **options)(8, ndim)
    families = {"iternorm": "IterNorm", "dbn": "DBN", "bn": "BatchNorm", "in": "InstanceNorm"}
    family = families.get(name, "SWBN")
    assert type(layer).__name__.lstrip("_") == ("GroupNorm" if name in ("gn", "ln") else f"{family}{ndim}d")
    for key, value in attributes.items():
        assert getattr(layer, key) == value
    assert layer(torch.randn(4, 8, *[3] * ndim)).shape == (4, 8, *[3] * ndim)


def test_fits_torchvision():
    model = resnet18(norm_layer=NormFactory("swbn-fro", step_size=1e-4), num_classes=3)
    assert sum(isinstance(m, SWBN2d) for m in model.modules()) == 20
    model(torch.randn(2, 3, 32, 32)).sum().backward()


def test_none_is_nothing():
    model = resnet18(norm_layer=NormFactory("none"), num_classes=3)
    assert not list(named_norms(model))
    x = torch.randn(2, 3)
    before = x.clone()
    y = NormFactory("none")(3, 1)(x)
    assert torch.equal(y, x)
    torch.relu_(y)
    assert torch.equal(x, before)  # as behind any norm


@pytest.mark.parametrize(("features", "groups"), [(16, 16), (48, 24), (320, 32), (37, 1)])
def test_group_norm_takes_the_largest_divisor_up_to_32(features, groups):
    assert NormFactory("gn")(features).num_groups == groups
    with pytest.raises(ValueError, match=f"gn: num_groups=33 does not divide num_features={features}"):
        NormFactory("gn", num_groups=33)(features)


def test_layer_norm_is_over_a_whole_sample():
    x = torch.randn(3, 4, 5, 6)
    torch.testing.assert_close(NormFactory("ln")(4)(x), nn.functional.layer_norm(x, x.shape[1:]))
    y = torch.randn(3, 4)
    torch.testing.assert_close(NormFactory("ln")(4, 1)(y), nn.functional.layer_norm(y, (4,)))


def test_instance_norm_does_not_take_a_vector_for_a_sample():
    # PyTorch's own reads [N, C] as one sample [C, L], silently where N = C.
    with pytest.raises(ValueError, match="expected 3D input"):
        NormFactory("in")(4, 1)(torch.randn(4, 4))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "swbn-frob",
            {},
            "unknown norm 'swbn-frob'; did you mean 'swbn-fro'.*bn, .*dbn, .*iternorm, .*ln, none.*swbn-fro",
        ),
        ("swbn", {"stepsize": 1}, "'stepsize'; did you mean 'step_size'.*momentum"),
        ("bn", {"step_size": 1}, "option of norm 'bn': 'step_size'.*momentum"),
        ("swbn-kl", {"criterion": "fro"}, "'swbn-kl' decides criterion='kl'"),
        ("none", {"eps": 1}, "'eps'.*Known: none"),
    ],
)
def test_errors_name_what_was_given_and_what_is_known(name, options, words):
    with pytest.raises(ValueError, match=words):
        NormFactory(name, **options)


def test_third_parties_register_their_own():
    class Scale(nn.Module):
        def __init__(self, num_features, factor=2.0):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    NormFactory.register("scale-test", {2: functools.partial(Scale)}, factor=3.0)
    assert "scale-test" in NormFactory.names()
    layer = NormFactory("scale-test")(4)
    assert layer.factor == 3.0 and isinstance(layer, norm_layer_types())
    with pytest.raises(ValueError, match="no layer for 3 spatial dimensions; it has: 2"):
        NormFactory("scale-test")(4, ndim=3)
    with pytest.raises(ValueError, match="registered already"):
        NormFactory.register("bn", {3: SWBN3d})
    with pytest.raises(ValueError, match="got keys"):
        NormFactory.register("empty", {})


def test_importing_the_layer_loads_neither_lightning_nor_matplotlib():
    code = (
        "import sys, swbn_lightning; swbn_lightning.SWBN2d(3); "
        "print([m for m in ('pytorch_lightning', 'lightning_fabric', 'matplotlib', 'torchvision', 'torchmetrics', "
        "'jsonargparse') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
