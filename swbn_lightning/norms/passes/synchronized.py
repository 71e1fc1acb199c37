"""Passes over a batch that is spread over several processes: statistics of the whole batch, output of this part.

Two collectives a layer and step forward (statistics, covariance), one backward.
"""

import torch
from torch import Tensor

from swbn_lightning.norms.passes.processes import merge_covariance, merge_moments
from swbn_lightning.norms.passes.rows import accumulation_dtype, as_rows, gram
from swbn_lightning.norms.passes.stock import StockCentred, whiten_standardized


class SynchronizedStandardized:
    """A :class:`.StandardizedBatch`; this process's part may be empty."""

    def __init__(self, x: Tensor, num_groups: int, eps: float) -> None:
        self._x, self._num_groups = x, num_groups
        with torch.no_grad():
            rows = as_rows(x)
            wide = rows.to(accumulation_dtype(x.dtype))
            variance, mean = torch.var_mean(wide, 0, correction=1)
            self.mean, self.variance, self.samples = merge_moments(mean, variance, rows.shape[0])
            self._rstd = torch.rsqrt(self.variance + eps)
            self._rows = ((rows - self.mean) * self._rstd).to(x.dtype)

    def covariance(self) -> Tensor:
        rows = self._rows
        count = rows.shape[0]
        return merge_covariance(gram(rows, rows, self._num_groups) / max(count, 1), count, self.samples)

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return whiten_standardized(self._x, self._rows, self._rstd, w, weight, bias, self.samples)


class SynchronizedCentred(StockCentred):
    """A :class:`.Batch`; this process's part may be empty."""

    synchronized = True
