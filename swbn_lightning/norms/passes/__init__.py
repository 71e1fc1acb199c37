"""How a pass over a batch is carried out, in one of several ways behind one interface.

:mod:`.choose` makes the batch; a layer sees nothing but :class:`Batch`.
"""

from typing import Protocol

from torch import Tensor


class Batch(Protocol):
    """A batch centred by its own mean (IterNorm, DBN), or standardised by its own mean and variance (SWBN)."""

    mean: Tensor
    """``[C]``; a constant."""

    @property
    def samples(self) -> int | Tensor:
        """``n``, the values a channel; ``[]`` if they are spread over several processes."""

    def covariance(self) -> Tensor:
        """``S``, ``[g, C/g, C/g]``, divided by ``n``; of a standardised batch a constant."""

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """``gamma * (W x) + beta`` in shape, dtype and layout of the batch, with its gradient; SWBN's not into W."""


class StandardizedBatch(Batch, Protocol):
    variance: Tensor
    """``[C]``, unbiased; a constant."""
