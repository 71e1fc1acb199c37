"""Frozen layers evaluate, whatever mode is asked for, and learn nothing."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from swbn_lightning import (
    NormFactory,
    SWBN1d,
    SWBN2d,
    append_norm,
    check_norms,
    convert_norms,
    freeze_norms,
    fuse_norms,
    revert_norms,
    unfreeze_norms,
)
from tests.norms.networks import lived, same_state

NAMES = ["swbn-fro", "swbn-kl", "iternorm", "dbn", "bn"]


def network(name):
    options = {"step_size": 0.1} if name.startswith("swbn") else {}
    model = nn.Sequential(nn.Conv2d(3, 6, 3), NormFactory(name, **options)(6), nn.Dropout(0.5), nn.BatchNorm2d(6))
    return lived(model).train()


@pytest.mark.parametrize("name", NAMES)
def test_frozen_layers_keep_their_state_while_the_rest_trains(name):
    model = network(name)
    expected = copy.deepcopy(model).eval()
    assert freeze_norms(model) is model
    buffers = copy.deepcopy(dict(model.named_buffers()))
    x = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        assert model.train() is model and model.training and model[2].training
        assert not model[1].training and not model[3].training
        y = model[1](model[0](x))
        torch.testing.assert_close(y, expected[1](expected[0](x)))
        model(x).square().sum().backward()
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert model[1].weight.grad.abs().sum() > 0  # gamma and beta train on
    model[1](torch.full((4, 6, 3, 3), float("nan")))
    assert check_norms(model) == []

    assert unfreeze_norms(model) is model
    assert model[1].training and model[3].training
    model(x)
    assert all(not torch.equal(model[i].running_mean, expected[i].running_mean) for i in (1, 3))
    model.eval()
    assert not model[1].training
    freeze_norms(model)
    assert not unfreeze_norms(model)[1].training  # it takes the mode of what holds it
    assert "train" not in model[1].__dict__


@pytest.mark.parametrize("name", ["swbn-fro", "dbn"])
def test_copies_and_pickles_stay_frozen_by_themselves(name):
    model = freeze_norms(network(name))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.train()
        assert not other[1].training and other[1].train() is other[1]
        unfreeze_norms(other)
        assert other[1].training and not model.train()[1].training
    assert list(model.state_dict()) == list(network(name).state_dict())


def test_converting_and_reverting_keep_it():
    model = lived(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.BatchNorm2d(6))).train()
    freeze_norms(model[1])
    state = copy.deepcopy(model.state_dict())
    convert_norms(model, NormFactory("swbn-fro"))
    assert isinstance(model[1], SWBN2d)
    assert [m.training for m in model.train()] == [True, False, True]
    revert_norms(model)
    assert same_state(model, state) and type(model[1]) is nn.BatchNorm2d
    assert [m.training for m in model.train()] == [True, False, True]
    convert_norms(model, NormFactory("iternorm"))
    unfreeze_norms(model)
    revert_norms(model)
    assert [m.training for m in model.train()] == [True, True, True]  # as it is now, not as it was then
    convert_norms(model, NormFactory("iternorm"))
    freeze_norms(model)
    assert [m.training for m in revert_norms(model).train()] == [True, False, False]


class Wrapped(nn.Module):
    def __init__(self, num_features, **options):
        super().__init__()
        self.inner = SWBN2d(num_features, **options)

    def forward(self, x):
        return self.inner(x)


NormFactory.register("wrapped-for-freezing", {2: Wrapped})


def test_converting_to_layers_that_hold_others_or_learn_nothing():
    model = lived(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    freeze_norms(convert_norms(freeze_norms(model), NormFactory("wrapped-for-freezing")))
    model.train()(torch.randn(4, 3, 8, 8))
    assert not model[1].inner.training and model[1].inner.num_batches_tracked == 0
    assert not revert_norms(model).train()[1].training
    convert_norms(model, NormFactory("gn"))
    model.train()
    assert not revert_norms(model).train()[1].training
    unfreeze_norms(model)
    convert_norms(model, NormFactory("gn")).train()
    assert revert_norms(model)[1].training
    freeze_norms(model)
    with pytest.raises(ValueError, match="'1' .* keeps no running statistics"):
        convert_norms(model, NormFactory("swbn", track_running_stats=False))
    assert type(model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize("name", ["swbn", "iternorm"])
def test_a_mode_that_is_assigned_thaws_no_whitening_layer(name):
    model = freeze_norms(network(name))
    before = copy.deepcopy(model[1].state_dict())
    for module in model.modules():
        module.training = True
    model[:2](torch.randn(4, 3, 8, 8))
    assert same_state(model[1], before)


def test_a_compiled_layer_takes_its_mode_back():
    norm = SWBN2d(4)
    compiled = freeze_norms(torch.compile(norm, backend="eager"))
    assert not norm.training
    unfreeze_norms(compiled)
    assert norm.training and compiled.training


def test_lazy_layers():
    model = nn.Sequential(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d())
    freeze_norms(model).train()
    model(torch.randn(4, 3, 8, 8))
    assert isinstance(model[1], nn.BatchNorm2d) and not model.train()[1].training
    assert model[1].num_batches_tracked == 0 and model[1].train() is model[1]
    assert unfreeze_norms(model)[1].training


def test_layers_with_an_activation_inside():
    model = lived(timm.create_model("mobilenetv3_small_050", num_classes=4))
    model.train()
    freeze_norms(model)
    convert_norms(model, NormFactory("swbn"))
    norm = model.bn1
    assert not norm.norm.training and norm.training and norm.drop.training
    unfreeze_norms(model)
    assert norm.norm.training
    freeze_norms(model)
    revert_norms(model)
    old = model.train().bn1
    assert type(old).__name__ == "BatchNormAct2d" and not old.training and old.drop.training
    assert not model.eval().bn1.drop.training


def test_fusing_and_compiling():
    model = network("swbn-fro")
    append_norm(model, "0", NormFactory("swbn"))
    freeze_norms(model).train()
    model[2].p = 0.0
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(fuse_norms(model)(x), expected, rtol=1e-4, atol=1e-4)
    assert not model[1].training


def test_instance_norm_and_what_has_nothing_to_freeze():
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.InstanceNorm2d(3), nn.LayerNorm(4))
    freeze_norms(model).train()
    assert [m.training for m in model] == [False, True, True]
    for norm in (SWBN1d(4, track_running_stats=False), nn.BatchNorm1d(4, track_running_stats=False)):
        model = nn.Sequential(nn.BatchNorm1d(4), norm)
        with pytest.raises(ValueError, match=r"'1' \(\w+\) keeps no running statistics.*cannot be frozen"):
            freeze_norms(model)
        assert model.train()[0].training
    for call in (freeze_norms, unfreeze_norms):
        with pytest.raises(ValueError, match="Sequential has no normalisation layer that learns from batches"):
            call(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))
    norm = freeze_norms(SWBN1d(4))
    assert norm.train() is norm and not norm.training and unfreeze_norms(norm).training
