"""Stochastic Whitening Batch Normalization: the layers (CVPR 2021, Algorithms 1 and 3)."""

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms import functional as WF
from swbn_lightning.norms import kernels
from swbn_lightning.norms.base import WhiteningNorm, all_finite, graph_may_hold_state, without_autocast
from swbn_lightning.norms.closed_form import is_transformed, laid_out_as, whiten_standardized
from swbn_lightning.norms.distributed import is_synchronized, merge_covariance, merge_moments
from swbn_lightning.norms.frozen import is_frozen
from swbn_lightning.norms.recompute import (
    FirstRuns,
    first_run,
    is_recomputing,
    may_run_again,
    outside_selective_checkpointing,
)


class SWBN(WhiteningNorm):
    r"""Standardise a batch, then multiply by a whitening matrix learnt online.

    In training, for ``n`` samples of ``d`` channels (Zhang et al., CVPR 2021, Algorithm 1)::

        xs = (x - mean) / sqrt(var + eps)           var unbiased
        S  = xs^T xs / n
        W <- W - step_size * dW(W, S);  W <- (W + W^T) / 2
        y  = gamma * (W xs) + beta                  with the W just updated

    and ``running <- (1 - momentum) * running + momentum * batch`` for mean and variance. W takes one step
    a training forward. To the task loss W is a constant; mean and variance are not, as in BatchNorm.

    In evaluation, running mean, running variance and the stored W, no update (Algorithm 3): one affine
    map. Without running statistics the batch's own mean and variance are used in both modes; W still
    learns in training alone.

    A batch that is not finite, or whose step of W would not be, leaves the state as it was and is counted
    in ``num_batches_rejected``. In float16 a W that has diverged is scaled down for the output, not in the
    state, where the output could overflow otherwise.

    Args:
        num_features: ``d``, the channels.
        eps: added to the variance; 1e-8 as the paper's tolerance (BatchNorm's is 1e-5).
        momentum: share of the new batch in the running statistics, PyTorch's convention; 0.05, since the
            paper keeps eta = 0.95. None for a plain average over all batches.
        affine: learnable gamma and beta.
        track_running_stats: keep running mean and variance for evaluation.
        criterion: ``"fro"`` (the default: less sensitive to the step size, section 3.4) or ``"kl"``.
        step_size: alpha of W's step; 1e-5 as in the paper, over about 58,000 steps. What counts is
            ``step_size`` times the number of steps: a run of 1,000 steps needs a larger one.
        num_groups: whiten so many contiguous blocks of channels apart; 1 is the paper.
        sync: in a distributed run, use the statistics of the whole batch over all processes, so that W
            is the same on all of them. Two collectives a forward, one a backward.
        bias: with ``affine``, whether there is a beta, as BatchNorm has it in newer PyTorch.

    Shape:
        1d: ``[N, C]`` or ``[N, C, L]``; 2d: ``[N, C, H, W]``; 3d: ``[N, C, D, H, W]``. Output as input, in
        shape, dtype and memory layout.

    State: ``weight``, ``bias``, ``running_mean``, ``running_var`` of ``[C]``, ``whitening_matrix`` of
    ``[num_groups, C/num_groups, C/num_groups]``, ``num_batches_tracked``. All but weight and bias stay
    float32 under ``.half()``, ``.bfloat16()`` and autocast.

    Raises:
        ValueError: in the constructor for an unknown criterion, a ``num_groups`` that does not divide
            ``num_features``, a step size that is not positive and finite; in ``forward`` for a wrong number
            of dimensions and for a single value a channel in training.
        RuntimeError: in ``forward`` for a wrong number of channels.
    """

    running_var: Tensor | None
    whitening_matrix: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-8,
        momentum: float | None = 0.05,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        criterion: str = "fro",
        step_size: float = 1e-5,
        num_groups: int = 1,
        sync: bool = True,
        bias: bool = True,
    ) -> None:
        if criterion not in WF.CRITERIA:
            raise unknown_name("whitening criterion", criterion, WF.CRITERIA)
        number = isinstance(step_size, Real) and not isinstance(step_size, bool)  # numpy's scalars too
        if not (number and math.isfinite(step_size) and step_size > 0):
            raise InputError(f"step_size must be a positive and finite number, got {step_size!r}.")
        super().__init__(
            num_features, eps, momentum, affine, bias, track_running_stats, num_groups, sync, device, dtype
        )
        self.criterion = criterion
        self.step_size = float(step_size)
        self._first_runs = FirstRuns()

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        with without_autocast(x.device.type):
            training = self.training and not is_frozen(self)  # the mode may have been assigned
            return laid_out_as(self._forward_training(x) if training else self._forward_evaluation(x), x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, criterion={self.criterion}, step_size={self.step_size:g}"

    def _forward_evaluation(self, x: Tensor) -> Tensor:
        mean, variance, w = self.running_mean, self.running_var, self.whitening_matrix
        if 0 in x.shape[2:]:
            return self._forward_empty(x)
        if graph_may_hold_state():
            # The graph must not hold the buffers: a training forward before the backward would change them.
            w = w.clone()
            mean, variance = (None if value is None else value.clone() for value in (mean, variance))
        if mean is None or variance is None:
            if self._check_batch(x, synchronized=False) == 0:
                return self._forward_empty(x)
            standardize = WF.standardize_plainly if is_transformed() else WF.standardize_batch
            xs, *_ = standardize(x, self.eps)
        else:
            xs = WF.standardize_fixed(x, mean, variance, self.eps)
        return WF.whiten(xs, w, self.weight, self.bias)

    def _forward_training(self, x: Tensor) -> Tensor:
        synchronized = is_synchronized(self.sync)
        count = self._check_batch(x, synchronized)
        if count == 0 and not synchronized:
            return self._forward_empty(x)
        if not synchronized and is_transformed():
            return self._forward_plain(x)
        if not synchronized and kernels.take_samples(x, self.whitening_matrix, self.weight, self.bias):
            return self._forward_by_kernels(x)
        total: Tensor | None = None
        grad_enabled = torch.is_grad_enabled()
        with torch.no_grad():
            rows = WF.as_rows(x)
            centred = not synchronized and WF.centers_first(rows)
            if centred:
                rows, mean, variance = WF.center_batch(rows)
                rstd = torch.rsqrt(variance + self.eps)
            elif synchronized:
                mean, variance, total = merge_moments(*WF.moments(rows), count)
                rows = WF.standardize(rows, mean, variance, self.eps)
                rstd = torch.rsqrt(variance + self.eps)
            else:
                rows, mean, variance, rstd = WF.standardize_batch(rows, self.eps)
            covariance = functools.partial(WF.covariance, scale=rstd) if centred else WF.covariance
            w = self._step_once(grad_enabled, mean, variance, rows, total, covariance)
        return whiten_standardized(x, rows, rstd, w, self.weight, self.bias, total, centred)

    def _forward_by_kernels(self, x: Tensor) -> Tensor:
        from swbn_lightning.norms.kernels import training  # loads Triton

        grad_enabled = torch.is_grad_enabled()
        with torch.no_grad():
            batch = training.Batch(x, self.eps)
            w = self._step_once(grad_enabled, batch.mean, batch.variance, batch.rows, None, batch.covariance)
        return training.whiten(x, batch, w, self.weight, self.bias)

    def _forward_plain(self, x: Tensor) -> Tensor:
        """A training forward without autograd functions of our own."""
        xs, mean, variance = WF.standardize_plainly(x, self.eps)
        with torch.no_grad():  # which does not stop forward-mode derivatives, for which W is a constant too
            w = self._step(mean, variance, WF.as_rows(xs).detach(), None).detach()
        return WF.whiten(xs, w, self.weight, self.bias)

    def _step_once(self, grad_enabled: bool, mean: Tensor, variance: Tensor, *args: Any) -> Tensor:
        """:meth:`_step`, unless this is the second run of a forward; then the W of the first.

        Args:
            grad_enabled: whether gradients were wanted when the forward began.
        """
        compiling = torch.compiler.is_compiling()
        if compiling:
            return self._step(mean, variance, *args)
        with outside_selective_checkpointing():
            if is_recomputing():
                return self._first_runs.find(mean, variance)
            w = self._step(mean, variance, *args)
            if may_run_again(grad_enabled):
                self._first_runs.note(mean, variance, w)
        return w

    def _step(
        self,
        mean: Tensor,
        variance: Tensor,
        rows: Tensor,
        total: Tensor | None,
        covariance: Callable[[Tensor, int], Tensor] = WF.covariance,
    ) -> Tensor:
        """What a training forward does to the state; returns its W.

        Args:
            rows: the samples, as ``covariance`` takes them: standardised for the one of stock operators.
            total: their number in all processes.
        """
        s = covariance(rows, self.num_groups)
        if total is not None:
            s = merge_covariance(s, len(rows), total)
        s = s.to(self.whitening_matrix.dtype)
        samples = len(rows) if total is None else total
        w = self._update_state(mean, variance, s, samples)
        if rows.dtype == torch.float16:  # whose range a W that has diverged soon exceeds
            w = WF.keep_in_range(w, s, samples, self.weight, rows.dtype)
        return w

    def _update_state(self, mean: Tensor, variance: Tensor, s: Tensor, samples: int | Tensor) -> Tensor:
        """Step W and the running statistics; returns the W of this forward, a tensor of its own.

        The graph keeps the returned tensor; the buffers are only copied into, so that a second forward
        before the backward cannot change what the first one saved. No branch on the host.
        """
        old = self.whitening_matrix
        if isinstance(samples, int) and kernels.take_step(old, mean, variance, self.running_mean, self.running_var):
            from swbn_lightning.norms.kernels import training

            return training.update_state(self, mean, variance, s, samples)
        stepped = WF.whitening_update(old, s, self.step_size, self.criterion)
        accepted = all_finite(stepped, mean, variance)
        w = torch.where(accepted, stepped, old)
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            w = first_run(w)
        old.copy_(w)
        self._update_running(accepted, samples, running_mean=mean, running_var=variance)
        return w


class SWBN1d(SWBN):
    """:class:`SWBN` for ``[N, C]`` or ``[N, C, L]``; a drop-in for ``nn.BatchNorm1d``."""

    input_dims = (2, 3)


class SWBN2d(SWBN):
    """:class:`SWBN` for ``[N, C, H, W]``; a drop-in for ``nn.BatchNorm2d``."""

    input_dims = (4,)


class SWBN3d(SWBN):
    """:class:`SWBN` for ``[N, C, D, H, W]``; a drop-in for ``nn.BatchNorm3d``."""

    input_dims = (5,)
