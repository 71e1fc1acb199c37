"""Passes in plain operators, whose derivatives of every kind are PyTorch's: for what transforms or traces a layer."""

import torch
from torch import Tensor

from swbn_lightning.norms.passes.rows import (
    accumulation_dtype,
    as_rows,
    batch_mean,
    gram,
    num_samples,
    per_channel,
    subtract,
    whiten,
)


class PlainStandardized:
    """A :class:`.StandardizedBatch`.

    In operators of one step each: the forward-mode derivative of BatchNorm's own operator is wrong when it is derived
    again in forward mode.
    """

    def __init__(self, x: Tensor, num_groups: int, eps: float) -> None:
        wide = x.to(accumulation_dtype(x.dtype))
        dims = [0, *range(2, x.dim())]
        mean = wide.mean(dims)
        centred = wide - per_channel(mean, x)
        variance = centred.square().sum(dims) / (num_samples(x) - 1)
        self._xs = (centred * per_channel(torch.rsqrt(variance + eps), x)).to(x.dtype)
        self._num_groups = num_groups
        self.samples = num_samples(x)
        self.mean, self.variance = mean.detach(), variance.detach()  # constants to derivatives of every kind

    def covariance(self) -> Tensor:
        rows = as_rows(self._xs).detach()
        return gram(rows, rows, self._num_groups) / self.samples

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return whiten(self._xs, w.detach(), weight, bias)  # detached: no_grad stops no forward-mode derivatives


class PlainCentred:
    """A :class:`.Batch` whose covariance and output have derivatives through mean, covariance and W."""

    def __init__(self, x: Tensor, num_groups: int, dtype: torch.dtype) -> None:
        mean = batch_mean(x)
        self._centred = subtract(x, mean)
        self._num_groups, self._dtype = num_groups, dtype
        self.samples = num_samples(x)
        self.mean = mean.detach()

    def covariance(self) -> Tensor:
        rows = as_rows(self._centred)
        return gram(rows, rows, self._num_groups, self._dtype) / self.samples

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return whiten(self._centred, w, weight, bias)
