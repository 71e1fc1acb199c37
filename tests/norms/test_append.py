"""Norms that are put in front of a layer."""

import copy

import pytest
import torch
from torch import nn

from swbn_lightning import NormFactory, append_norm, revert_norms
from swbn_lightning.norms.surgery.wrappers import AppendedNorm

SWBN = NormFactory("swbn-fro", step_size=1e-3)


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
