"""Whiteness: the metric against numpy, and a measurement that leaves no trace."""

import copy

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from swbn_lightning import SWBN2d, WhitenessMonitor
from swbn_lightning.whiteness import CorrelationDistance, FeatureMoments, measure_whiteness


def correlated_features(n=400, d=6, mean=5.0):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + mean


@pytest.mark.parametrize("sizes", [[400], [1, 1, 398], [100, 250, 50], [1] * 400])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_distance_equals_numpy_in_any_chunking(sizes, mean):
    x = correlated_features(mean=mean)
    correlation = np.corrcoef(x.T)
    distance, rms = CorrelationDistance(), CorrelationDistance(normalized=True)
    for part in np.split(x, np.cumsum(sizes)[:-1]):
        distance.update(torch.from_numpy(part))
        rms.update(torch.from_numpy(part))
    expected = np.linalg.norm(correlation - np.eye(6))
    assert distance.compute().item() == pytest.approx(expected, rel=1e-10 if mean == 0 else 1e-8)
    off_diagonal = correlation[~np.eye(6, dtype=bool)]
    assert rms.compute().item() == pytest.approx(np.sqrt((off_diagonal**2).mean()), rel=1e-8)
    assert distance.num_samples() == 400


def test_maps_count_every_position_as_a_sample():
    x = correlated_features().reshape(4, 10, 10, 6)
    metric = CorrelationDistance()
    metric.update(torch.from_numpy(np.moveaxis(x, -1, 1)))
    flat = CorrelationDistance()
    flat.update(torch.from_numpy(x.reshape(-1, 6)))
    assert metric.compute().item() == pytest.approx(flat.compute().item(), rel=1e-12)


def test_constant_channels_are_counted_and_kept_out():
    x = correlated_features()
    with_constants = np.concatenate([x, np.full((400, 2), 0.1)], axis=1)
    metric = CorrelationDistance()
    for part in np.split(with_constants, [130]):
        metric.update(torch.from_numpy(part).float())
    assert metric.num_constant() == 2
    expected = np.linalg.norm(np.corrcoef(x.astype(np.float32).T) - np.eye(6))
    assert metric.compute().item() == pytest.approx(expected, rel=1e-8)
    constant = CorrelationDistance()
    constant.update(torch.ones(10, 2))
    assert constant.compute().isnan()


def test_processes_states_merge():
    x = torch.from_numpy(correlated_features())
    whole, first, second = (FeatureMoments() for _ in range(3))
    whole.update(x), first.update(x[:90]), second.update(x[90:])
    for state in ("count", "mean", "scatter"):  # what torchmetrics does with dist_reduce_fx=None
        setattr(first, state, torch.stack([getattr(first, state), getattr(second, state)]))
    torch.testing.assert_close(first.compute(), whole.compute(), rtol=1e-12, atol=1e-12)


def test_metric_errors_and_reset():
    metric = CorrelationDistance()
    with pytest.raises(ValueError, match=r"\[N, C\].*got \[4\]"):
        metric.update(torch.randn(4))
    metric.update(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"\[N, 3\].*got \[4, 2\]"):
        metric.update(torch.randn(4, 2))
    metric.reset()
    assert metric.num_features == 0 and metric.num_samples() == 0
    x = torch.from_numpy(correlated_features())
    metric.update(x)
    fresh = CorrelationDistance()
    fresh.update(x)
    assert metric.compute() == fresh.compute()


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


def test_measuring_leaves_modes_state_and_random_streams():
    model = network(SWBN2d).train()
    model[5].eval()
    images = torch.randn(16, 3, 8, 8)
    modes = [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    hooks = [len(m._forward_hooks) for m in model.modules()]
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(3), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)

    def forward(x):
        torch.rand(7), np.random.rand(3)  # a network that draws numbers in evaluation too
        return model(x)

    measure_whiteness(model, images, forward)
    assert torch.equal(torch.rand(3), expected[0]) and np.random.rand() == expected[1]
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(m.weight is not None for m in (model[1], model[5]))


def test_layers_by_pattern_and_none_that_fits():
    model, images = network(), torch.randn(8, 3, 8, 8)
    assert set(measure_whiteness(model, images, layers=["5"])) == {"5"}
    with pytest.raises(ValueError, match=r"fits \['x\*'\]; the model's layers: 1, 5"):
        measure_whiteness(model, images, layers=["x*"])


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(network(SWBN2d), nn.Flatten(), nn.LazyLinear(3))
        self.net(torch.randn(2, 3, 6, 6))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(callbacks, epochs=2):
    torch.manual_seed(0)
    model = Classifier()
    data = torch.utils.data.TensorDataset(torch.randn(32, 3, 6, 6), torch.randint(3, (32,)))
    trainer = pl.Trainer(
        max_epochs=epochs, logger=False, callbacks=callbacks, enable_progress_bar=False, accelerator="cpu",
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    return model


def test_the_monitor_follows_any_lightning_module_and_changes_nothing():
    images = torch.randn(20, 3, 6, 6)
    monitor = WhitenessMonitor(images=images)
    watched, alone = fit([monitor]), fit([])
    for name, value in watched.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    assert [entry["epoch"] for entry in monitor.history] == [-1, 0, 1]
    again = measure_whiteness(watched, images)
    mean = np.mean([layer.distance for layer in again.values()])
    assert monitor.history[-1]["distance"] == pytest.approx(mean, rel=1e-6)
    other = WhitenessMonitor(images=images)
    other.load_state_dict(monitor.state_dict())
    assert other.history == monitor.history


class RejectsOne(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0][1].num_batches_rejected += 1


def test_the_monitor_warns_once_of_what_the_layers_have_met():
    monitor = WhitenessMonitor(images=torch.randn(20, 3, 6, 6))
    with pytest.warns(UserWarning) as caught:
        fit([monitor, RejectsOne()], epochs=3)
    told = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    assert len(told) == 1 and told[0].startswith("net.0.1: 1 training batches were not finite")


def test_the_monitor_without_images_says_what_would_work():
    with pytest.raises(ValueError, match="sample_images"):
        fit([WhitenessMonitor()])
    with pytest.raises(ValueError, match="num_images must be"):
        WhitenessMonitor(num_images=0)
