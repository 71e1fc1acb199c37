"""What convert_norms and revert_norms refuse, by name, with the model as it was."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from swbn_lightning import NormFactory, SWBN2d, convert_norms, revert_norms
from tests.norms.networks import WITHOUT

SWBN = NormFactory("swbn-fro", step_size=1e-3)


@pytest.mark.parametrize("family", WITHOUT)
def test_a_network_without_batchnorm_is_an_error(family):
    with pytest.raises(ValueError, match="has no BatchNorm layer to convert"):
        convert_norms(WITHOUT[family](), SWBN)


def test_a_subclass_with_a_forward_of_its_own_is_refused_by_name():
    class Clamped(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).clamp(-1, 1)

    class Renamed(nn.BatchNorm2d):
        pass

    model = nn.Sequential(Renamed(3), Clamped(3))
    with pytest.raises(ValueError, match=r"'1' is a .*Clamped that does something of its own.*exclude"):
        convert_norms(model, SWBN)
    assert type(model[0]) is Renamed  # nothing was done by halves
    convert_norms(model, SWBN, exclude=["1"])
    assert type(model[0]) is SWBN2d
    assert type(revert_norms(model)[0]) is Renamed


def test_a_process_group_of_its_own_is_refused():
    layer = nn.SyncBatchNorm(3, process_group=object())
    with pytest.raises(ValueError, match="process group of its own"):
        convert_norms(nn.Sequential(layer), SWBN)


def test_what_an_instance_or_subclass_does_besides_is_refused():
    class Frozen(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    patched, parametrized = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    patched.forward = lambda x: x * 0
    parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    for layer, words in (
        (Frozen(3), "forward or train"),
        (patched, "forward or train"),
        (parametrized, "parametrised"),
    ):
        model = nn.Sequential(nn.BatchNorm2d(3), layer)
        with pytest.raises(ValueError, match=rf"'1' .*{words}"):
            convert_norms(model, SWBN)
        assert type(model[0]) is nn.BatchNorm2d  # nothing was done by halves
    model = convert_norms(nn.Sequential(nn.BatchNorm2d(3)), SWBN)
    parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    with pytest.raises(ValueError, match="is parametrised; make that permanent before reverting"):
        revert_norms(model)


def test_what_a_layer_refuses_is_said_with_its_name():
    model = nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match=r"'1': SWBN2d: num_groups=3 does not divide num_features=4"):
        convert_norms(model, NormFactory("swbn", num_groups=3))
    assert type(model[0]) is nn.BatchNorm2d


def test_lazy_layers_need_one_forward_first():
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d(eps=0.5))
    with pytest.raises(ValueError, match=r"'1' \(LazyBatchNorm2d\) has seen no input yet; run one forward first"):
        convert_norms(model, SWBN)
    model(torch.randn(2, 3, 5, 5))
    convert_norms(model, SWBN)
    assert type(model[1]) is SWBN2d and model[1].eps == 0.5


def test_converting_twice_and_reverting_nothing_are_errors():
    model = convert_norms(nn.Sequential(nn.BatchNorm1d(3)), SWBN)
    with pytest.raises(ValueError, match="revert_norms first"):
        convert_norms(model, SWBN)
    with pytest.raises(ValueError, match="holds no layer that convert_norms or append_norm put there"):
        revert_norms(revert_norms(model))
