"""What is read of every kind of normalisation layer: its output before gamma and beta, channels in dimension 1."""

import pytest
import timm
import torch
from torch import nn
from torchvision.models.convnext import LayerNorm2d

from swbn_lightning import IterNorm2d, NormFactory, SWBN2d
from swbn_lightning.whiteness import measure_whiteness
from swbn_lightning.whiteness.measure import features_before_affine


def trained(layer, x):
    """Statistics that are no start values, then another gamma (one 0, one negative) and beta."""
    for _ in range(3):
        layer.train()(x)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("weight", "bias"):
                parameter.uniform_(-2, 2)
        if getattr(layer, "weight", None) is not None:
            layer.weight[0] = 0
    return layer.eval()


def images(channels=6):
    mix = torch.eye(channels) + torch.randn(channels, channels) / 3
    return torch.einsum("dc,nchw->ndhw", mix, torch.randn(5, channels, 4, 3)) + 2


@pytest.mark.parametrize("make", [
    nn.BatchNorm2d, lambda c: nn.BatchNorm2d(c, track_running_stats=False), nn.SyncBatchNorm, SWBN2d, IterNorm2d,
    lambda c: SWBN2d(c, num_groups=2, step_size=0.1), lambda c: SWBN2d(c, bias=False), lambda c: nn.GroupNorm(3, c),
    lambda c: nn.GroupNorm(1, c), lambda c: nn.InstanceNorm2d(c, affine=True),
    lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True), LayerNorm2d,
])  # fmt: skip
def test_it_is_the_output_of_the_layer_without_its_affine_part(make):
    torch.manual_seed(0)
    x = images()
    layer = make(6)
    if isinstance(layer, nn.SyncBatchNorm):
        layer.eval().running_mean.uniform_(), layer.running_var.uniform_(0.5, 2)  # it trains on a GPU alone
    else:
        trained(layer, x)
    features = features_before_affine("layer", layer, x)
    assert features.shape == x.shape
    with torch.no_grad():
        weight = layer.weight.view(-1, 1, 1)
        bias = 0 if layer.bias is None else layer.bias.view(-1, 1, 1)
        torch.testing.assert_close(features * weight + bias, layer(x))
        # Where gamma is 0 the output says nothing.
        layer.weight.fill_(1)
        if layer.bias is not None:
            layer.bias.zero_()
        torch.testing.assert_close(features, layer(x))


def test_parameters_are_the_same_objects_afterwards_also_after_an_error():
    layer = trained(SWBN2d(6), images())
    weight, bias = layer.weight, layer.bias
    features_before_affine("layer", layer, images())
    assert layer.weight is weight and layer.bias is bias
    with pytest.raises(RuntimeError):
        features_before_affine("layer", layer, images(5))
    assert layer.weight is weight and layer.bias is bias


@pytest.mark.parametrize("shape", [(7, 6), (7, 6, 6), (2, 3, 4, 6)])
def test_layer_norm_has_its_channels_last(shape):
    x = torch.randn(shape) + 1
    layer = trained(nn.LayerNorm(6), x)
    features = features_before_affine("layer", layer, x)
    assert features.shape[1] == 6
    torch.testing.assert_close(features.movedim(1, -1) * layer.weight + layer.bias, layer(x))


def test_layer_norms_that_do_not_say_where_their_channels_are():
    message = r"block.norm: a LayerNorm over 2 dimensions, \[4, 6\].*exclude=\['block.norm'\]"
    with pytest.raises(ValueError, match=message):
        features_before_affine("block.norm", nn.LayerNorm([4, 6]), torch.randn(2, 4, 6))
    with pytest.raises(ValueError, match=r"the 6 channels of a LayerNorm2d with input \[2, 6, 5, 6\].*exclude="):
        features_before_affine("norm", LayerNorm2d(6), torch.randn(2, 6, 5, 6))


@pytest.mark.parametrize("name", ["BatchNormAct2d", "GroupNormAct", "LayerNormAct2d"])
def test_timms_layers_with_an_activation_are_read_before_it(name):
    x = images(8)
    options = {"num_groups": 2} if name == "GroupNormAct" else {}
    layer = trained(getattr(timm.layers, name)(8, **options), x)
    features = features_before_affine("layer", layer, x)
    with torch.no_grad():
        after = torch.relu(features * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1))
        torch.testing.assert_close(after, layer(x))
    assert (features < 0).any()


def test_networks_with_layer_norm_can_be_measured():
    model = timm.create_model("convnext_atto", num_classes=3, depths=(1, 1, 1, 1))
    assert len(measure_whiteness(model, torch.randn(3, 3, 32, 32))) >= 5


def test_a_registered_norm_with_a_buffer_called_bias():
    class Centre2d(nn.Module):
        def __init__(self, num_features):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(num_features))
            self.register_buffer("bias", torch.ones(num_features))  # no parameter: part of what it computes

        def forward(self, x):
            return (x - x.mean((0, 2, 3), keepdim=True)) * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)

    NormFactory.register("centre", {2: Centre2d})
    x = images()
    layer = trained(Centre2d(6), x)
    torch.testing.assert_close(features_before_affine("layer", layer, x), x - x.mean((0, 2, 3), keepdim=True) + 1)
    assert set(measure_whiteness(nn.Sequential(nn.Identity(), layer), x)) == {"1"}


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return self.norm(input=self.norm(input=x))


def test_inputs_by_keyword_and_several_uses_in_a_forward():
    (layer,) = measure_whiteness(ByKeyword(), images()).values()
    assert layer.num_samples == 2 * 5 * 4 * 3
