"""Stochastic Whitening Batch Normalization: the layers (CVPR 2021, Algorithms 1 and 3)."""

import math
from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional as F

from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms import functional as WF
from swbn_lightning.norms.base import WhiteningNorm, graph_may_hold_state
from swbn_lightning.norms.checkpointing import FirstRuns, first_run, is_recomputing
from swbn_lightning.norms.finite import all_finite, keep_in_range
from swbn_lightning.norms.frozen import is_frozen
from swbn_lightning.norms.passes import StandardizedBatch, choose
from swbn_lightning.norms.passes.rows import accumulation_dtype, whiten, without_autocast
from swbn_lightning.norms.torch_internals import outside_selective_checkpointing


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
    map. Without running statistics the batch's own are used in both modes; W learns only in training.

    A batch that is not finite, or whose step of W would not be, leaves the state as it was and is counted
    in ``num_batches_rejected``. In float16 a diverged W is scaled down for an output that could overflow.

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
        num_groups: whiten so many contiguous blocks of channels apart; None and 1 are the paper: all together.
        group_size: instead of ``num_groups``, as few equal blocks as have at most so many channels: one number for
            layers of all widths. IterNorm's released training scripts have 64.
        sync: in a distributed run, use the statistics of the whole batch over all processes. Two
            collectives a forward, one a backward.
        bias: with ``affine``, whether there is a beta, as BatchNorm has it in newer PyTorch.

    Shape:
        1d: ``[N, C]`` or ``[N, C, L]``; 2d: ``[N, C, H, W]``; 3d: ``[N, C, D, H, W]``. Output as input, in
        shape, dtype and memory layout.

    State: ``weight``, ``bias``, ``running_mean``, ``running_var`` of ``[C]``, ``whitening_matrix`` of
    ``[num_groups, C/num_groups, C/num_groups]``, ``num_batches_tracked``. All but weight and bias stay
    float32 under ``.half()``, ``.bfloat16()`` and autocast.

    Raises:
        ValueError: in the constructor for an unknown criterion, groups that do not divide ``num_features``
            equally, a step size that is not positive and finite; in ``forward`` for a wrong number
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
        num_groups: int | None = None,
        group_size: int | None = None,
        sync: bool = True,
        bias: bool = True,
    ) -> None:
        if criterion not in WF.CRITERIA:
            raise unknown_name("whitening criterion", criterion, WF.CRITERIA)
        number = isinstance(step_size, Real) and not isinstance(step_size, bool)  # numpy's scalars too
        if not (number and math.isfinite(step_size) and step_size > 0):
            raise InputError(f"step_size must be a positive and finite number, got {step_size!r}.")
        super().__init__(
            num_features, eps, momentum, affine, bias, track_running_stats, num_groups, group_size, sync, device, dtype
        )
        self.criterion = criterion
        self.step_size = float(step_size)
        self.first_runs = FirstRuns()

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        with without_autocast(x.device.type):
            training = self.training and not is_frozen(self)  # the mode may have been assigned
            return self._train(x) if training else self._evaluate(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, criterion={self.criterion}, step_size={self.step_size:g}"

    def _train(self, x: Tensor) -> Tensor:
        """Algorithm 1."""
        self._check_state()
        batch = choose.standardized(x, self)  # steps 1, 2 and 5
        if batch is None:
            return self._forward_empty(x)
        with torch.no_grad(), outside_selective_checkpointing():
            if again := is_recomputing():  # activation checkpointing runs this forward a second time
                w = self.first_runs.find(batch.mean, batch.variance)
            else:
                w = self._step(batch, x.dtype)  # steps 3, 4, 6, 7 and 8
        y = batch.output(w, self.weight, self.bias)  # steps 9 and 10
        if not again:
            self.first_runs.note(batch.mean, batch.variance, w, y)
        return y

    def _step(self, batch: StandardizedBatch, dtype: torch.dtype) -> Tensor:
        """What a batch changes, unless it or the step is not finite; returns its W, a tensor of its own.

        The graph keeps the returned tensor; the buffers are only copied into, so that a second forward before the
        backward cannot change what the first one saved. No branch on the host.
        """
        old = self.whitening_matrix
        s = batch.covariance().to(old.dtype)  # step 6
        w = choose.step_by_kernels(self, batch, s)
        if w is None:
            stepped = WF.whitening_update(old, s, self.step_size, self.criterion)  # steps 7 and 8
            accepted = all_finite(stepped, batch.mean, batch.variance)
            w = first_run(torch.where(accepted, stepped, old))
            old.copy_(w)
            self._update_running(accepted, batch.samples, running_mean=batch.mean, running_var=batch.variance)  # 3, 4
        return keep_in_range(w, s, batch.samples, self.weight, dtype) if dtype == torch.float16 else w

    def _evaluate(self, x: Tensor) -> Tensor:
        """Algorithm 3; with the batch's own mean and variance where there are no running ones."""
        mean, variance, w = self.running_mean, self.running_var, self.whitening_matrix
        if 0 in x.shape[2:]:
            return self._forward_empty(x)
        if graph_may_hold_state():
            # The graph must not hold the buffers: a training forward before the backward would change them.
            w = w.clone()
            mean, variance = (None if value is None else value.clone() for value in (mean, variance))
        if mean is None or variance is None:
            batch = choose.standardized(x, self, training=False)
            return self._forward_empty(x) if batch is None else batch.output(w, self.weight, self.bias)
        dtype = accumulation_dtype(x.dtype)
        xs = F.batch_norm(x, mean.to(dtype), variance.to(dtype), training=False, eps=self.eps)  # step 1
        return whiten(xs, w, self.weight, self.bias)  # step 2


class SWBN1d(SWBN):
    """:class:`SWBN` for ``[N, C]`` or ``[N, C, L]``; a drop-in for ``nn.BatchNorm1d``."""

    input_dims = (2, 3)


class SWBN2d(SWBN):
    """:class:`SWBN` for ``[N, C, H, W]``; a drop-in for ``nn.BatchNorm2d``."""

    input_dims = (4,)


class SWBN3d(SWBN):
    """:class:`SWBN` for ``[N, C, D, H, W]``; a drop-in for ``nn.BatchNorm3d``."""

    input_dims = (5,)
