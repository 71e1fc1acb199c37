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
    check_norms,
    convert_norms,
    freeze_norms,
    revert_norms,
    unfreeze_norms,
)
from tests.norms.networks import lived, same_state

NAMES = ["swbn-fro", "online", "iternorm", "bn"]


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


def test_copies_pickles_and_compiled_networks_stay_frozen_by_themselves():
    model = freeze_norms(network("swbn-fro"))
    for module in model.modules():  # a mode that is assigned thaws no whitening layer
        module.training = True
    compiled = freeze_norms(torch.compile(model, backend="aot_eager", fullgraph=True).train())
    compiled(torch.randn(2, 3, 8, 8))
    assert model[1].num_batches_tracked == 7
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.train()
        assert not other[1].training and other[1].train() is other[1]
        unfreeze_norms(other)
        assert other[1].training and not model.train()[1].training
    assert list(model.state_dict()) == list(network("swbn-fro").state_dict())


def test_converting_and_reverting_keep_it():
    model = lived(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.BatchNorm2d(6))).train()
    freeze_norms(model[1])
    state = copy.deepcopy(model.state_dict())
    convert_norms(model, NormFactory("swbn-fro"))
    assert [m.training for m in model.train()] == [True, False, True]
    revert_norms(model)
    assert same_state(model, state) and [m.training for m in model.train()] == [True, False, True]
    unfreeze_norms(convert_norms(model, NormFactory("iternorm")))
    assert [m.training for m in revert_norms(model).train()] == [True, True, True]  # as it is now, not as it was then


def test_converting_to_layers_that_learn_nothing():
    model = freeze_norms(lived(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))))
    convert_norms(model, NormFactory("gn")).train()
    assert not revert_norms(model).train()[1].training
    with pytest.raises(ValueError, match="'1' .* keeps no running statistics"):
        convert_norms(model, NormFactory("swbn", track_running_stats=False))
    assert type(model[1]) is nn.BatchNorm2d


def test_layers_with_an_activation_inside():
    model = freeze_norms(lived(timm.create_model("mobilenetv3_small_050", num_classes=4)).train())
    norm = convert_norms(model, NormFactory("swbn")).bn1
    assert not norm.norm.training and norm.training and norm.drop.training
    old = revert_norms(model).train().bn1
    assert type(old).__name__ == "BatchNormAct2d" and not old.training and old.drop.training


def test_instance_norm_and_what_has_nothing_to_freeze():
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.InstanceNorm2d(3), nn.LayerNorm(4))
    freeze_norms(model).train()
    assert [m.training for m in model] == [False, True, True]
    model = nn.Sequential(nn.BatchNorm1d(4), SWBN1d(4, track_running_stats=False))
    with pytest.raises(ValueError, match=r"'1' \(\w+\) keeps no running statistics.*cannot be frozen"):
        freeze_norms(model)
    assert model.train()[0].training
    for call in (freeze_norms, unfreeze_norms):
        with pytest.raises(ValueError, match="Sequential has no normalisation layer that learns from batches"):
            call(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))
