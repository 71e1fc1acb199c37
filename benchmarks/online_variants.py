"""Variants of two layers, for the ablations on the page about online whitening: one part changed at a time.

    swbn study CONFIG --set imports=benchmarks.online_variants --norms online online-variant:keep=false

Run it in a clone of the repository. ``online-variant`` without options is ``online``, without checkpointing and by
autograd. ``iternorm-detached`` is IterNorm whose matrix is a constant to the loss.
"""

from typing import Any

import torch
from torch import Tensor

from swbn_lightning import NormFactory
from swbn_lightning.norms.iternorm import IterNorm
from swbn_lightning.norms.online import OnlineWhitening
from swbn_lightning.norms.passes import Batch

_RATE = 0.1  # of the kept matrix's step, as in OnlineWhitening


class OnlineVariant(OnlineWhitening):
    """Online whitening with switches.

    Args:
        iterations: iterations of IterNorm whose cap of the gain sets the shrinkage.
        symmetric: make the whitening matrix symmetric.
        keep: learn W online; without, the step starts from the identity in every batch.
        steps: Newton-Schulz steps from W.
        gradient: through the whitening matrix.
    """

    def __init__(
        self,
        num_features: int,
        *,
        iterations: int = 4,
        symmetric: bool = True,
        keep: bool = True,
        steps: int = 1,
        gradient: bool = True,
        num_groups: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, num_groups=num_groups, **options)
        width = num_features // self.num_groups
        self.shrinkage = width / (width + 1.5 ** (2 * iterations))
        self.symmetric, self.keep, self.steps, self.gradient = symmetric, keep, steps, gradient

    def _output(self, batch: Batch, covariance: Tensor, training: bool) -> Tensor:
        a, w = self._matrices_of(covariance if self.gradient else covariance.detach())
        if training:
            self._learn(batch, a, online_matrix=w)
        return batch.output(a, self.weight, self.bias)

    def _matrices_of(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whitening matrix, and W after this batch."""
        eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
        scale = torch.rsqrt(s.diagonal(dim1=-2, dim2=-1))
        r = (1 - self.shrinkage) * (scale.unsqueeze(-1) * s * scale.unsqueeze(-2)) + self.shrinkage * eye
        w = v = self.online_matrix.to(s.dtype).clone()
        for step in range(self.steps):
            m = v @ r @ v.mT
            bound = m.detach().abs().sum(-1).amax(-1)[:, None, None]
            if step == 0 and self.keep:
                k = (1 / (_RATE * bound)).clamp(max=1)
                stepped = k.sqrt() * ((1 + _RATE) * w - _RATE * k * m.detach() @ w)
                w = (stepped + stepped.mT) / 2
            c = (2 / bound).clamp(max=1)
            v = c.sqrt() * (3 * v - c * m @ v) / 2
        v = (v + v.mT) / 2 if self.symmetric else v
        return v * scale.unsqueeze(-2), w


class IterNormDetached(IterNorm):
    """IterNorm without the gradient through its matrix."""

    def _inverse_sqrt(self, covariance: Tensor) -> Tensor:
        return super()._inverse_sqrt(covariance.detach())


for name, layer in (("online-variant", OnlineVariant), ("iternorm-detached", IterNormDetached)):
    NormFactory.register(name, dict.fromkeys((1, 2, 3, None), layer))
