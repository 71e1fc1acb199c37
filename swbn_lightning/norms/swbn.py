"""SWBN layers: Stochastic Whitening Batch Normalization (CVPR 2021, Algorithms 1 and 3)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from swbn_lightning.errors import require_positive_number
from swbn_lightning.norms import functional as WF
from swbn_lightning.norms.base import WhiteningNorm, graph_may_hold_state
from swbn_lightning.norms.checkpointing import FirstRuns, first_run, is_recomputing
from swbn_lightning.norms.finite import all_finite, keep_in_range
from swbn_lightning.norms.frozen import is_frozen
from swbn_lightning.norms.passes import StandardizedBatch, choose
from swbn_lightning.norms.passes.rows import accumulation_dtype, whiten, without_autocast
from swbn_lightning.norms.torch_internals import outside_selective_checkpointing


class SWBN(WhiteningNorm):
    """Standardise a batch, then multiply it by a whitening matrix W that is updated once per batch.

    Training, for ``n`` samples of ``d`` channels (Zhang et al., CVPR 2021, Algorithm 1)::

        xs = (x - mean) / sqrt(var + eps)           var unbiased
        S  = xs^T xs / n
        W <- W - step_size * dW(W, S);  W <- (W + W^T) / 2
        y  = gamma * (W xs) + beta                  with the updated W

    The running mean and variance follow ``running <- (1 - momentum) * running + momentum * batch``. The gradient flows
    through the batch mean and variance, as in BatchNorm, but not through W.

    Evaluation (Algorithm 3) uses the running mean, the running variance and the stored W. It updates nothing, so the
    layer is a fixed affine map. Without running statistics, both modes use those of the batch; W still learns in
    training.

    A non-finite batch, or one whose step of W would be non-finite, leaves the state unchanged and is counted in
    ``num_batches_rejected``. For float16 input, a diverged W is scaled down where the output could overflow.

    Args:
        num_features: number of channels, ``d``.
        eps: added to the variance. The default is the paper's tolerance, 1e-8 (BatchNorm's is 1e-5).
        momentum: share of the new batch in the running statistics (PyTorch's convention). The default is 0.05 because
            the paper keeps eta = 0.95 of the old value. None: plain average over all batches.
        affine: learn gamma and beta.
        track_running_stats: keep a running mean and variance for evaluation.
        device: as in BatchNorm.
        dtype: dtype of gamma and beta. Statistics and W are float32 or better.
        criterion: ``"fro"`` (default, less sensitive to the step size, section 3.4) or ``"kl"``.
        step_size: step size of W, the paper's alpha. The default is the paper's 1e-5, for about 58,000 steps. What
            counts is ``step_size`` times the number of steps, so a run of 1,000 steps needs a larger value.
        num_groups: number of contiguous channel groups, each whitened separately. None means 1, as in the paper: all
            channels together.
        group_size: instead of ``num_groups``, the largest number of channels per group. The number of groups is
            ``num_features / group_size``, rounded up. One value serves layers of different widths; IterNorm's released
            training scripts use 64.
        sync: in a distributed run, use the statistics of the whole batch over all processes. This costs one collective
            per forward and one per backward.
        bias: with ``affine``, learn beta too, as in BatchNorm of newer PyTorch.

    Shape:
        1d: ``[N, C]`` or ``[N, C, L]``; 2d: ``[N, C, H, W]``; 3d: ``[N, C, D, H, W]``. The output has the shape, dtype
        and memory layout of the input.

    State: ``weight``, ``bias``, ``running_mean`` and ``running_var`` are ``[C]``, ``whitening_matrix`` is
    ``[num_groups, C/num_groups, C/num_groups]``, and ``num_batches_tracked`` is a scalar. The statistics and W stay
    float32 under ``.half()``, ``.bfloat16()`` and autocast.

    Raises:
        ValueError: in the constructor, for an invalid argument, such as an unknown criterion, a number of groups that
            does not divide ``num_features``, or a step size that is not positive and finite. In ``forward``, for a
            wrong number of dimensions or, in training, only one value per channel.
        RuntimeError: in ``forward``, for a wrong number of channels, or if W was cast to 16 bits.
        NotImplementedError: in ``forward``, for input that is not floating point.
    """

    running_var: Tensor | None
    whitening_matrix: Tensor
    _statistics = ("running_mean", "running_var")
    _learnt = ("whitening_matrix",)

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
        WF.check_criterion(criterion)
        require_positive_number(type(self).__name__, step_size=step_size)
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
        """Run Algorithm 1."""
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
        """Update the state with a batch and return its W, in a tensor of its own.

        A non-finite batch or step changes nothing. The graph keeps the returned tensor. Buffers are only copied into,
        so a second forward before the backward cannot change what the first one saved. Nothing branches on the host.
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
        """Run Algorithm 3, with the batch's mean and variance if there are no running ones."""
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
    """:class:`SWBN` for ``[N, C]`` or ``[N, C, L]``; a drop-in replacement for ``nn.BatchNorm1d``."""

    input_dims = (2, 3)


class SWBN2d(SWBN):
    """:class:`SWBN` for ``[N, C, H, W]``; a drop-in replacement for ``nn.BatchNorm2d``."""

    input_dims = (4,)


class SWBN3d(SWBN):
    """:class:`SWBN` for ``[N, C, D, H, W]``; a drop-in replacement for ``nn.BatchNorm3d``."""

    input_dims = (5,)
