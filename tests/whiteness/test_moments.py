"""The streaming state against numpy on the whole data: any chunking, any dtype, one process and two."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swbn_lightning.whiteness import FeatureMoments, whiteness_metrics
from swbn_lightning.whiteness import moments as module


def correlated(n=200, d=6, mean=5.0, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + mean


def assert_equals_numpy(metric, x, tolerance=1e-10):
    """Count, mean, covariance and correlation, relative to the size of the covariance."""
    expected = np.cov(x.T, bias=True)
    assert metric.num_samples() == len(x)
    np.testing.assert_allclose(metric.mean.numpy(), x.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(metric.covariance().numpy(), expected, atol=tolerance * np.abs(expected).max())
    np.testing.assert_allclose(metric.correlation().numpy(), np.corrcoef(x.T), atol=tolerance)


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), mean=st.sampled_from([0.0, 1e3]))
def test_any_chunking_equals_numpy_on_the_whole(sizes, mean):
    x = correlated(max(sum(sizes), 2), mean=mean)
    metric = FeatureMoments()
    for part in np.split(x, np.cumsum(sizes)):
        metric.update(torch.from_numpy(part))
    assert_equals_numpy(metric, x)


def test_a_batch_is_added_up_in_blocks(monkeypatch):
    x = correlated()
    monkeypatch.setattr(module, "_BLOCK", 50)  # eight rows of six channels
    metric = FeatureMoments()
    metric.update(torch.from_numpy(x))
    assert_equals_numpy(metric, x)


@pytest.mark.parametrize("shape", [(50, 4), (2, 5, 5, 4)])
def test_every_position_of_a_map_is_a_sample(shape):
    x = correlated()
    metric = FeatureMoments()
    metric.update(torch.from_numpy(np.moveaxis(x.reshape(*shape, 6), -1, 1)))
    assert_equals_numpy(metric, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_every_dtype_is_added_up_in_float64(dtype):
    x = torch.from_numpy(100 + 3 * correlated()).to(dtype)
    metric = FeatureMoments()
    torch.nn.Sequential(torch.nn.Linear(2, 2), metric).half()  # casting what holds it changes nothing
    with torch.autocast("cpu", torch.bfloat16):
        for part in x.split(13):
            metric.update(part)
    assert metric.moments.dtype == torch.float64
    assert_equals_numpy(metric, x.double().numpy())


def test_constant_channels_are_counted_and_kept_out():
    x = correlated()
    metric = FeatureMoments()
    with_constants = np.concatenate([x[:, :3], np.full((200, 2), 0.1), x[:, 3:]], 1).astype(np.float32)
    for part in np.split(with_constants, [13, 130]):
        metric.update(torch.from_numpy(part))
    assert metric.num_constant() == 2 and metric.num_features == 8
    expected = np.corrcoef(x.astype(np.float32).astype(np.float64).T)
    np.testing.assert_allclose(metric.compute().numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(metric.covariance(varying=True).diagonal().numpy(), x.var(0), rtol=1e-5)
    whole = metric.correlation(varying=False)
    assert whole[3:5].isnan().all() and whole[:, 3:5].isnan().all() and whole.isnan().sum() == 2 * 8 + 2 * 6


def test_what_is_not_finite_is_not_constant_and_shows():
    x = torch.from_numpy(correlated())
    x[3, 1], x[4, 2] = torch.nan, torch.inf
    metric = FeatureMoments()
    metric.update(x)
    assert metric.num_constant() == 0
    assert metric.correlation()[1].isnan().all() and metric.correlation()[2].isnan().all()


def test_reset_forward_and_copy():
    x = torch.from_numpy(correlated())
    whole = FeatureMoments()
    whole.update(x)
    metric = FeatureMoments()
    metric.update(torch.randn(3, 2))
    metric.reset()
    assert metric.num_features == 0 and metric.num_samples() == 0
    for part in (x[:90], x[90:]):
        of_the_part = FeatureMoments()
        of_the_part.update(part)
        torch.testing.assert_close(metric(part), of_the_part.compute())  # forward: this batch's value
    torch.testing.assert_close(metric.compute(), whole.compute(), rtol=1e-12, atol=1e-12)
    for copied in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), metric.clone()):
        torch.testing.assert_close(copied.moments, metric.moments)


def test_features_that_cannot_be_measured():
    for bad in (torch.randn(4), torch.randn(4, 0), torch.ones(4, 3) * 1j):
        with pytest.raises(ValueError, match=r"real features \[N, \w\] or \[N, \w, ...\], got"):
            FeatureMoments().update(bad)
    metric = FeatureMoments()
    metric.update(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"\[N, 3\] or \[N, 3, ...\], got \[4, 2\]"):
        metric.update(torch.randn(4, 2))


def test_on_a_device_without_float64_the_state_stays_on_the_cpu(monkeypatch):
    monkeypatch.setattr(module, "_NO_FLOAT64", ("meta",))
    metric = FeatureMoments().to("meta")
    metric.update(torch.randn(4, 3))
    assert metric.moments.device.type == "cpu" and metric.device.type == "cpu"
    holder = torch.nn.Sequential(torch.nn.Linear(2, 2), metric).to("meta")
    assert holder[0].weight.is_meta and metric.moments.device.type == "cpu"


def test_a_collection_adds_a_batch_up_once(monkeypatch):
    calls = []
    original = module._moments_of
    monkeypatch.setattr(module, "_moments_of", lambda rows: (calls.append(len(rows)), original(rows))[1])
    collection = whiteness_metrics("whiteness/")
    for size in (30, 20, 50):
        collection.update(torch.randn(size, 5))
    assert calls == [30, 20, 50]
    values = collection.compute()
    assert len(values) == 10 and all(name.startswith("whiteness/") for name in values)
    assert values["whiteness/num_samples"] == 100 and calls == [30, 20, 50]
    collection.reset()
    collection.update(torch.randn(7, 3))
    assert collection.compute()["whiteness/num_samples"] == 7 and calls[3:] == [7]
