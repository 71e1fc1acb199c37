"""Many layers in a row, large steps, float16; and what gradient accumulation does."""

import pytest
import torch
from torch import nn

from swbn_lightning import SWBN1d, check_norms
from swbn_lightning.norms.finite import keep_in_range

LAYERS, FEATURES, BATCH = 50, 8, 32
# All layers alike, or each with a step size of its own between the two, large beside small.
MIXED = [10 ** (-6 * (7 * i % LAYERS) / (LAYERS - 1)) for i in range(LAYERS)]
STEP_SIZES = {"1": [1.0] * LAYERS, "mixed": MIXED}


def train(criterion, step_sizes, steps):
    """Train under float16 autocast as a trainer does; the first step that is not finite, and the network."""
    torch.manual_seed(0)
    layers = [SWBN1d(FEATURES, criterion=criterion, step_size=size) for size in STEP_SIZES[step_sizes]]
    model, head = nn.Sequential(*layers), nn.Linear(FEATURES, 4)
    mix = torch.randn(FEATURES, FEATURES) @ torch.diag(torch.logspace(-2, 1, FEATURES))  # correlated
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(steps):
        x = torch.randn(BATCH, FEATURES) @ mix + 5
        with torch.autocast("cpu", torch.float16):
            y = model(x.half())
            loss = nn.functional.cross_entropy(head(y).float(), (x[:, 0] > 5).long())
        assert y.dtype == torch.float16 and torch.isfinite(y).all(), step
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.isfinite(value).all() for layer in layers for value in layer.state_dict().values()), step
    return model


@pytest.mark.parametrize("steps", [20, pytest.param(800, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("criterion", "step_sizes"), [("kl", "1"), ("fro", "mixed")])
def test_fifty_layers_stay_finite(criterion, step_sizes, steps):
    model = train(criterion, step_sizes, steps)
    assert all(layer.num_batches_tracked > 0 for layer in model)
    if criterion == "kl":  # it has diverged, which is said and does no further harm
        assert {finding.kind for finding in check_norms(model)} >= {"rejected", "grown"}


@pytest.mark.parametrize("samples", [8, 512])
def test_output_is_kept_in_range_and_nothing_else_is_touched(samples):
    torch.manual_seed(0)
    xs = torch.randn(samples, 6, dtype=torch.float64)
    xs = (xs - xs.mean(0)) / xs.std(0)
    s = torch.stack([xs[:, :3].T @ xs[:, :3], xs[:, 3:].T @ xs[:, 3:]]) / samples
    w = torch.randn(2, 3, 3, dtype=torch.float64)
    gamma = torch.tensor([1, -3, 1, 1, 1, 1], dtype=torch.float64)
    limit = torch.finfo(torch.float16).max
    for factor in (1.0, 100.0):  # a standard deviation of a few hundred is still within
        assert torch.equal(keep_in_range(w * factor, s, samples, gamma, torch.float16), w * factor)
    for factor in (1e6, 1e200, 1e300):
        large = torch.stack([w[0] * factor, w[1]])
        kept = keep_in_range(large, s, samples, gamma, torch.float16)
        y = xs[:, :3] @ kept[0].T * gamma[:3]
        assert limit / samples**0.5 < y.abs().max() <= limit * (1 + 1e-12)
        torch.testing.assert_close(kept[0] / kept[0].norm(), w[0] / w[0].norm())  # the direction stays
        assert torch.equal(kept[1], w[1])
