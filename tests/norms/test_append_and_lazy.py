"""Norms that are put in front of a layer, and lazy layers that turn into others at their first input."""

import copy
import pickle

import pytest
import torch
from torch import nn

from swbn_lightning import NormFactory, SWBN2d, append_norm, convert_norms, revert_norms
from swbn_lightning.norms.surgery.wrappers import AppendedNorm
from tests.norms.networks import lived

SWBN = NormFactory("swbn-fro", step_size=1e-3)


@pytest.mark.parametrize("name", ["swbn", "iternorm", "gn", "none"])
def test_lazy_layers_turn_at_their_first_input(name):
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d(eps=0.5), nn.ReLU(), nn.LazyBatchNorm2d())
    convert_norms(model, NormFactory(name))
    weight, holder = model[1].weight, model[1]
    x = torch.randn(8, 3, 5, 5)
    first = model(x)
    made = NormFactory(name, **({} if name == "none" else {"eps": 0.5}))(4)
    assert type(model[1]) is type(made) and model[1] is holder
    if name != "none":
        assert model[1].weight is weight and model[1].eps == 0.5 and weight.shape == (4,)
    last = NormFactory(name, **({} if name == "none" else {"eps": 1e-5}))(4)
    expected = nn.Sequential(model[0], made, nn.ReLU(), last)
    torch.testing.assert_close(first, expected(x))  # also the first forward is the new layer's
    pickle.loads(pickle.dumps(model))(x)
    revert_norms(model)
    assert type(model[1]) is nn.BatchNorm2d and model[1].eps == 0.5
    model(x)


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_lazy_layers_with_a_checkpoint_or_without_any_state(when):
    given = lived(nn.Sequential(nn.BatchNorm2d(4)))
    lazy = nn.Sequential(nn.LazyBatchNorm2d(affine=when != "never", track_running_stats=when != "never")).eval()
    if when == "before":
        lazy.load_state_dict(given.state_dict())
    convert_norms(lazy, SWBN)
    if when == "after":
        lazy.load_state_dict(given.state_dict())
    x = torch.randn(2, 4, 5, 5)
    y = lazy(x)
    assert isinstance(lazy[0], SWBN2d) and lazy[0].num_features == 4
    if when != "never":
        torch.testing.assert_close(y, given(x))


def test_lazy_layers_revert_before_their_first_input():
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d())
    revert_norms(convert_norms(model, SWBN))
    assert type(model[1]) is nn.LazyBatchNorm2d
    model(torch.randn(2, 3, 4, 4))
    assert type(model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Linear(6, 2), (8, 6)),
    (nn.Conv1d(6, 2, 3), (8, 6, 5)),
    (nn.Conv2d(6, 2, 3), (8, 6, 5, 5)),
    (nn.ConvTranspose3d(6, 2, 3), (8, 6, 3, 3, 3)),
], ids=str)  # fmt: skip
def test_appending_in_front_of_each_kind_of_layer(layer, shape):
    model = append_norm(nn.Sequential(nn.Identity(), layer.double()), "1", SWBN)
    x = torch.randn(shape, dtype=torch.float64)
    norm = NormFactory("swbn-fro", step_size=1e-3)(6, max(len(shape) - 2, 1)).double()
    torch.testing.assert_close(model(x), layer(norm(x)))
    append_norm(model, "1.layer", SWBN)
    assert model.state_dict()["1.layer.norm.whitening_matrix"].dtype == torch.float64
    assert revert_norms(model)[1] is layer


def test_an_appended_norm_takes_vectors_alone_and_old_checkpoints():
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 2))
    state = copy.deepcopy(model.state_dict())
    append_norm(model, "1", SWBN)
    with pytest.raises(ValueError, match="expected 2D input"):
        model(torch.randn(3, 6, 6))  # [N, T, C] with T = C: dimension 1 is not the channels
    loaded = model.load_state_dict(state, strict=False)
    assert not loaded.unexpected_keys and all(key.startswith("1.norm.") for key in loaded.missing_keys)
    assert torch.equal(model[1].layer.weight, state["1.weight"])
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared})
    append_norm(model, "b", SWBN)
    assert isinstance(model["a"], AppendedNorm) and model["a"] is model["b"]


def test_appending_to_nothing_is_an_error():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"unknown layer 'fc'.*Known: 0"):
        append_norm(model, "fc", SWBN)
    for name, kind in (("1", "ReLU"), ("2", "LazyLinear")):
        with pytest.raises(ValueError, match=f"'{name}' is a {kind}; a norm can be put in front of a linear"):
            append_norm(model, name, SWBN)
