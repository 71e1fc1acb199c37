"""What the layers tell of a training that goes wrong, and the parameter groups of an optimiser."""

import pytest
import torch
from torch import nn

from swbn_lightning import (
    DBN1d,
    IterNorm2d,
    NormFactory,
    SWBN1d,
    SWBN2d,
    check_norms,
    norm_parameter_groups,
)

NAMES = ["swbn-fro", "swbn-kl", "online", "iternorm", "dbn"]


def kinds(model):
    return [(finding.name, finding.kind) for finding in check_norms(model)]


@pytest.mark.parametrize("name", NAMES)
def test_rejected_batches_and_small_ones_are_counted_and_forgotten_on_reset(name):
    model = nn.Sequential(nn.Identity(), NormFactory(name, num_groups=2)(12, 1))
    model(torch.randn(6, 12))  # as many samples as channels in a group
    assert check_norms(model) == []
    model(torch.randn(5, 12))
    model(torch.full((8, 12), float("nan")))
    model.eval()(torch.full((2, 12), float("nan")))  # evaluation counts nothing
    found = {finding.kind: str(finding) for finding in check_norms(model)}
    assert found["rejected"].startswith("1: 1 training batches were not finite")
    assert found["few_samples"].startswith("1: 1 training batches had fewer samples a channel than the 6 channels")
    assert "step_size" in found["rejected"] and "num_groups" in found["few_samples"]
    assert len(found) == 2 and "num_batches_small" not in model.state_dict()
    model[1].reset_running_stats()
    assert check_norms(model) == []


def test_a_whitening_matrix_that_has_grown():
    norm = SWBN1d(4)
    with torch.no_grad():
        norm.whitening_matrix.mul_(99)
        assert check_norms(norm) == []
        norm.whitening_matrix.mul_(1.02)
    (finding,) = check_norms(norm)
    assert finding.kind == "grown" and str(finding).startswith("the layer: its whitening matrix is 101 times")
    # IterNorm's and DBN's is as large as the input is small: nothing wrong with that.
    for norm in (IterNorm2d(4), DBN1d(4)):
        norm.whitening_matrix.fill_(1e6)
        assert check_norms(norm) == []


def test_kl_grows_where_there_are_no_samples_and_says_so():
    torch.manual_seed(0)
    x = torch.randn(2, 64, 3, 3)
    # By 1.05 a step in the empty directions until, at about 60, rounding couples them to the others and W explodes.
    for criterion, found in (("kl", {"rejected", "few_samples", "grown"}), ("fro", {"few_samples"})):
        norm = SWBN2d(64, criterion=criterion, step_size=0.05)
        for _ in range(110):
            norm(x)
        assert {kind for _, kind in kinds(norm)} == found
        assert norm.whitening_matrix.isfinite().all()


def test_weights_decay_and_norms_and_biases_do_not():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), SWBN2d(8), nn.GroupNorm(2, 8), shared, shared, nn.Linear(8, 2))
    model[-1].bias.requires_grad_(False)
    decayed, spared = norm_parameter_groups(model, 5e-4)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (5e-4, 0.0)
    assert [p.dim() for p in decayed["params"]] == [4, 2, 2]
    assert all(p.dim() == 1 for p in spared["params"]) and len(spared["params"]) == 1 + 2 + 2 + 1
    decayed, spared = norm_parameter_groups(nn.LSTM(3, 2), 0.1)
    assert [p.dim() for p in decayed["params"] + spared["params"]] == [2, 2, 1, 1]
    with pytest.raises(ValueError, match="at least 0, got -1"):
        norm_parameter_groups(nn.Linear(2, 2), -1)
    with pytest.raises(ValueError, match="ReLU has no parameter that needs a gradient"):
        norm_parameter_groups(nn.ReLU(), 0.1)
