"""Base of IterNorm, DBN and OnlineWhitening: whiten by the batch's own covariance, with the gradient through it."""

from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.base import WhiteningNorm, graph_may_hold_state
from swbn_lightning.norms.checkpointing import first_run, is_recomputing
from swbn_lightning.norms.finite import all_finite
from swbn_lightning.norms.frozen import is_frozen
from swbn_lightning.norms.passes import Batch, choose
from swbn_lightning.norms.passes.rows import (
    accumulation_dtype,
    num_samples,
    subtract,
    whiten,
    without_autocast,
)
from swbn_lightning.norms.torch_internals import outside_selective_checkpointing


class BatchWhitening(WhiteningNorm):
    """Centre, whiten by a matrix computed from the batch's covariance, scale and shift.

    A family adds :meth:`_inverse_sqrt`. The running state is a mean and a whitening *matrix* (an average of the
    batches' matrices, as in the public code of both papers). There is no running variance.
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        with without_autocast(x.device.type):
            training = self.training and not is_frozen(self)  # the mode may have been assigned
            if training or self.running_mean is None or self.whitening_matrix is None:
                return self._forward_batch(x, training)
            return self._forward_evaluation(x, self.running_mean, self.whitening_matrix)

    def _forward_evaluation(self, x: Tensor, mean: Tensor, w: Tensor) -> Tensor:
        if 0 in x.shape[2:]:
            return self._forward_empty(x)
        if graph_may_hold_state():
            # The graph must not hold the buffers: a training forward before the backward would change them.
            mean, w = mean.clone(), w.clone()
        return whiten(subtract(x, mean.to(accumulation_dtype(x.dtype))), w, self.weight, self.bias)

    def _covariance_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which the covariance is summed and used."""
        return accumulation_dtype(x.dtype)

    def _inverse_sqrt(self, covariance: Tensor) -> Tensor:
        """Return ``S^(-1/2)`` of ``[g, d, d]``, with its gradient."""
        raise NotImplementedError

    def _forward_batch(self, x: Tensor, training: bool) -> Tensor:
        self._check_state()
        given, wide = x.dtype, self._covariance_dtype(x)
        if wide == torch.float64 and num_samples(x) <= self.num_features // self.num_groups + 1:
            # Directions without variance, whose gradient is a difference of values 1 / sqrt(eps) times as large.
            x = x.double()
        batch = choose.centred(x, self, wide, training)
        if batch is None:
            return self._forward_empty(x)
        s = batch.covariance()
        s = s + self.eps * torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
        return self._output(batch, s, training).to(given)

    def _output(self, batch: Batch, covariance: Tensor, training: bool) -> Tensor:
        w = self._inverse_sqrt(covariance)
        # Run again by checkpointing, the same batch gives the same W: all there is to do is not to count it twice.
        if training and not is_recomputing():
            self._learn(batch, w)
        return batch.output(w, self.weight, self.bias)

    @torch.no_grad()
    def _learn(self, batch: Batch, w: Tensor, **kept: Tensor) -> None:
        """Mix mean and matrix into the running ones, and copy ``kept`` into buffers, unless something is not finite."""
        with outside_selective_checkpointing():
            w = w.detach()  # no_grad alone leaves the tangents of forward-mode derivatives
            mean = first_run(batch.mean)
            accepted = all_finite(w, mean, *kept.values())
            for name, value in kept.items():
                buffer = self.get_buffer(name)
                buffer.copy_(torch.where(accepted, value.detach().to(buffer.dtype), buffer))
            self._update_running(accepted, batch.samples, running_mean=mean, whitening_matrix=w)

    def running_variance(self, batchnorm_state: dict[str, Any]) -> Tensor:
        w = self.get_buffer("whitening_matrix")
        if torch.equal(w, self._matrix_for_batchnorm(batchnorm_state, "")):
            return batchnorm_state["running_var"]  # to the bit, while nothing was learnt
        # W = S^(-1/2) with S = cov + eps I, nearly: the matrices' average is not the root of the average.
        root = torch.linalg.inv(w.double())  # squared only after inverting: W's condition number is squared by it
        return ((root @ root.mT).diagonal(dim1=-2, dim2=-1) - self.eps).clamp(min=0).flatten().to(w.dtype)

    def _matrix_for_batchnorm(self, state_dict: dict[str, Any], prefix: str) -> Tensor:
        assert self.whitening_matrix is not None
        variance = state_dict[prefix + "running_var"].to(self.whitening_matrix.dtype)
        return torch.diag_embed(torch.rsqrt(variance + self.eps).view(self.num_groups, -1))
