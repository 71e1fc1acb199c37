"""Every measure against numpy, from the definitions, and where it has no bound or no value."""

import math

import numpy as np
import pytest
import torch

from swbn_lightning.whiteness import (
    CorrelationDistance,
    CovarianceDistance,
    EffectiveRank,
    LogConditionNumber,
    MeanAbsoluteCorrelation,
    NumConstant,
    NumSamples,
    RMSCorrelation,
    WhiteningLoss,
    whiteness_metrics,
)
from swbn_lightning.whiteness.measures import MEASURES

METRICS = {
    "distance": CorrelationDistance,
    "rms": RMSCorrelation,
    "mean_abs": MeanAbsoluteCorrelation,
    "covariance": CovarianceDistance,
    "effective_rank": EffectiveRank,
    "log10_condition": LogConditionNumber,
    "kl": lambda: WhiteningLoss("kl"),
    "fro": lambda: WhiteningLoss("fro"),
    "num_samples": NumSamples,
    "num_constant": NumConstant,
}


def in_numpy(x):
    """The definitions of the measures, one by one."""
    d = x.shape[1]
    correlation, covariance = np.corrcoef(x.T), np.cov(x.T, bias=True)
    off_diagonal = [abs(correlation[i, j]) for i in range(d) for j in range(d) if i != j]
    shares = np.linalg.svd(covariance, compute_uv=False) / np.trace(covariance)
    return {
        "distance": math.sqrt(sum(c**2 for c in off_diagonal)),
        "rms": math.sqrt(np.mean(np.square(off_diagonal))),
        "mean_abs": np.mean(off_diagonal),
        "covariance": math.sqrt(((covariance - np.eye(d)) ** 2).sum() / d),
        "effective_rank": math.exp(-sum(p * math.log(p) for p in shares)) / d,
        "log10_condition": math.log10(np.linalg.cond(covariance)),
        "kl": (np.trace(covariance) - math.log(np.linalg.det(covariance)) - d) / 2,
        "fro": np.linalg.norm(np.eye(d) - covariance) / 2,
        "num_samples": len(x),
        "num_constant": 0,
    }


def features(n=300, d=7, mean=3.0):
    rng = np.random.default_rng(1)
    return rng.normal(size=(n, d)) @ (np.eye(d) + 0.4 * rng.normal(size=(d, d))) + mean


def values_of(x):
    collection = whiteness_metrics()
    collection.update(torch.as_tensor(x))
    return {name: value.item() for name, value in collection.compute().items()}


@pytest.mark.parametrize("sizes", [[300], [1, 299]])
@pytest.mark.parametrize("name", METRICS)
def test_each_metric_equals_numpy_in_any_chunking(name, sizes):
    x = features()
    metric = METRICS[name]()
    for part in np.split(x, np.cumsum(sizes)[:-1]):
        metric.update(torch.from_numpy(part))
    value = metric.compute()
    assert value.dtype == torch.float64 and value.shape == ()
    assert value.item() == pytest.approx(in_numpy(x)[name], rel=1e-10)


@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_the_collection_holds_all_of_them(mean):
    x = features(mean=mean)
    assert values_of(x) == pytest.approx(in_numpy(x), rel=1e-9)
    assert {*MEASURES, "num_samples", "num_constant"} == set(METRICS) == set(values_of(x))


def test_constant_channels_change_nothing_but_their_number():
    x = features()
    with_constants = np.concatenate([np.ones((300, 2)), x, np.zeros((300, 1))], 1)
    assert values_of(with_constants) == pytest.approx({**in_numpy(x), "num_constant": 3}, rel=1e-10)


def test_white_features():
    n = 4  # the columns of a Hadamard matrix without the first are centred, of variance 1 and orthogonal
    hadamard = np.array([[1, 1, 1], [-1, 1, -1], [1, -1, -1], [-1, -1, 1]])
    found = values_of(hadamard.astype(float))
    zero = {"distance", "rms", "mean_abs", "covariance", "log10_condition", "kl", "fro", "num_constant"}
    assert found == pytest.approx({**dict.fromkeys(zero, 0), "effective_rank": 1, "num_samples": n}, abs=1e-12)


def test_a_single_direction():
    x = np.outer(np.random.default_rng(0).normal(size=50), [1.0, -2.0, 0.5])
    found = values_of(x)
    assert found["distance"] == pytest.approx(math.sqrt(6)) and found["rms"] == found["mean_abs"] == pytest.approx(1)
    assert found["effective_rank"] == pytest.approx(1 / 3)
    assert found["log10_condition"] == found["kl"] == math.inf  # whatever sign rounding gives the determinant


@pytest.mark.parametrize("n", [3, 7])
def test_as_few_samples_as_channels_are_singular(n):
    found = values_of(np.random.default_rng(0).normal(size=(n, 7)))
    assert found["log10_condition"] == found["kl"] == math.inf
    assert all(math.isfinite(value) for name, value in found.items() if name not in ("log10_condition", "kl"))


def test_a_large_condition_number_is_not_taken_for_singular():
    x = features(d=4)
    x[:, 3] = x[:, 0] + 1e-5 * x[:, 3]
    assert values_of(x)["log10_condition"] == pytest.approx(in_numpy(x)["log10_condition"], rel=1e-4)
    assert values_of(x)["kl"] == pytest.approx(in_numpy(x)["kl"], rel=1e-6)


def test_one_channel_and_none():
    found = values_of(features(d=1))
    expected = {"distance": 0, "rms": 0, "mean_abs": 0, "log10_condition": 0, "effective_rank": 1}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    nothing = values_of(np.ones((5, 3)))
    assert all(math.isnan(nothing[name]) for name in MEASURES) and nothing["num_constant"] == 3


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_what_is_not_finite_gives_nan_and_no_error():
    x = features()
    x[5, 2] = np.nan
    assert all(math.isnan(values_of(x)[name]) for name in MEASURES)
    assert all(math.isnan(float(METRICS[name]().compute())) for name in MEASURES)  # nor does no batch at all


def test_options():
    with pytest.raises(ValueError, match="unknown whitening criterion 'kll'; did you mean 'kl'"):
        WhiteningLoss("kll")
    assert EffectiveRank().higher_is_better and not RMSCorrelation().higher_is_better
