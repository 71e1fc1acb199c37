"""A measurement of a network's layers: of what it should be, and leaving no trace."""

import copy
import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from swbn_lightning import SWBN2d
from swbn_lightning.whiteness import CorrelationDistance, measure_whiteness, whiteness_metrics


def network(norm=nn.BatchNorm2d):
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 4, 1), norm(4))


def test_a_layers_features_are_read_before_gamma_and_beta():
    model = network().eval()
    images = torch.randn(40, 3, 8, 8)
    expected = measure_whiteness(model, images)["1"]
    plain = CorrelationDistance()
    plain.update(model[0](images))  # batch normalisation does not change correlations
    assert expected.distance == pytest.approx(plain.compute().item(), rel=1e-5)
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1, -2, 0, 3, 0.5, 1, 1, 1]))
        model[1].bias.uniform_()
    after = measure_whiteness(model, images)["1"]
    assert after.distance == pytest.approx(expected.distance, rel=1e-6) and after.num_constant == 0


def test_swbn_output_gets_white():
    torch.manual_seed(0)
    layer = SWBN2d(6, step_size=0.05)
    images = torch.einsum("dc,nchw->ndhw", torch.eye(6) + 0.4 * torch.rand(6, 6), torch.randn(64, 6, 6, 6))
    before = measure_whiteness(layer, images)[""]
    for step_size in (0.05, 0.005):  # a step of Fro circles the optimum at about its own length
        layer.step_size = step_size
        for _ in range(100):
            layer(images)
    after = measure_whiteness(layer, images)[""]
    assert before.rms > 0.2 and after.rms < 0.02


def test_all_measures_of_all_layers_in_batches_of_any_size():
    model = network(SWBN2d)
    for _ in range(3):
        model(torch.randn(16, 3, 8, 8))
    images = torch.randn(20, 3, 8, 8)
    for batch_size in (20, 7, 1):
        for name, layer in measure_whiteness(model, images, batch_size=batch_size).items():
            expected = whiteness_metrics()
            with torch.no_grad():  # gamma is 1 and beta 0
                expected.update(model.eval()[: int(name) + 1](images))
            values = {key: value.item() for key, value in expected.compute().items()}
            found = dataclasses.asdict(layer)
            assert found.pop("num_features") == {"1": 8, "5": 4}[name]
            assert found == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_networks(whole):
    torch._dynamo.reset()
    net, images = network(SWBN2d), torch.randn(16, 3, 8, 8)
    net(images)
    if whole:
        model = torch.compile(net, backend="eager")
    else:
        model = nn.Sequential(net)
        model.forward = torch.compile(model.forward, backend="eager")  # as Lightning has it
    with torch.no_grad():
        model.eval()(images)  # compiled code for evaluation, which knows of no hook
    model.train()
    measured, expected = measure_whiteness(model, images), measure_whiteness(net, images)
    prefix = "" if whole else "0."
    assert measured == {prefix + name: layer for name, layer in expected.items()} and len(expected) == 2
    assert net.training and model.training


class Merges(nn.Module):
    """Does something when its mode is set, as adapters that merge their weights do."""

    def train(self, mode=True):
        raise AssertionError("the mode is set by call")

    def forward(self, x):
        return x


def test_modes_are_assigned_so_that_no_code_of_the_model_runs():
    model = nn.Sequential(Merges(), network())
    assert len(measure_whiteness(model, torch.randn(4, 3, 8, 8))) == 2
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_modes_state_and_random_streams(fails):
    model = network(SWBN2d).train()
    model[5].eval()
    modes = [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(5), np.random.seed(5)
    expected = torch.rand(3), np.random.rand()
    torch.manual_seed(5), np.random.seed(5)

    def forward(x):
        torch.rand(7), np.random.rand(3)  # a network that draws numbers in evaluation too
        model(x)
        if fails:
            raise RuntimeError("stop")

    images = torch.randn(4, 3, 8, 8, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="stop") if fails else nullcontext():
        measure_whiteness(model, images, forward)
    assert torch.equal(torch.rand(3), expected[0]) and np.random.rand() == expected[1]
    assert [m.training for m in model.modules()] == modes and not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_layers_by_pattern_and_none_that_fits():
    model, images = network(), torch.randn(8, 3, 8, 8)
    assert set(measure_whiteness(model, images, layers=["5"])) == {"5"}
    assert set(measure_whiteness(model, images, layers="*", exclude="5")) == {"1"}
    assert set(measure_whiteness(model, images, exclude=["1"])) == {"5"}
    model.again = model[5]  # a layer of two names
    assert set(measure_whiteness(model, images, layers="again")) == {"5"}
    del model.again
    for bad in ({"layers": ["1", "x*"]}, {"exclude": "x*"}):
        with pytest.raises(ValueError, match=r"no normalisation layer fits 'x\*'; the model's: 1, 5\."):
            measure_whiteness(model, images, **bad)
    with pytest.raises(ValueError, match=r"\['\*'\] without \['\?'\] leaves no normalisation layer"):
        measure_whiteness(model, images, exclude="?")
    with pytest.raises(ValueError, match=r"the model's: none\."):
        measure_whiteness(nn.Linear(2, 2), torch.randn(2, 2))
