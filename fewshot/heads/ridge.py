"""Ridge regression onto the classes, in closed form."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot.heads.features import FittedHead
from swbn_lightning.errors import require_flag, require_positive_number


class RidgeHead(FittedHead):
    """Ridge regression onto one-hot labels: R2-D2 (Bertinetto et al., ICLR 2019). It can be trained on episodes.

    With the N support features and a column of ones as the rows of ``X [N, C + 1]``, and their one-hot labels
    ``Y [N, W]``, the weights are ``X^T (X X^T + penalty I)^-1 Y`` (the paper's equation 4; Woodbury's identity
    makes the system N x N, so its size does not depend on C). The logits are ``scale`` times the regression's outputs
    for the queries. Gradients flow through the solution, to the features, the penalty and the scale. Classes may have
    different numbers of images (:meth:`~fewshot.heads.EpisodeHead.uneven_logits`); every image counts the same.

    The column of ones is the bias, as in the public code. The paper also learns a number that is added to every logit.
    It cancels in the softmax and is left out.

    Args:
        features: ``"plain"`` (the paper's), ``"l2"`` or ``"cl2"`` (:class:`~fewshot.heads.features.FeatureHead`).
        penalty: lambda, or its start. 50 in the public codes of R2-D2 (there times N) and of MetaOptNet (as here).
        scale: factor of the outputs, or its start. The outputs lie around 0 and 1, so a factor of 1 would leave the
            softmax flat. The public code starts from 1e-4 or 10, by data set.
        learn: learn penalty and scale, as the paper does. The parameters are their logarithms, so both stay positive.

    Shape:
        support ``[E, W, K, C]``, query ``[E, M, C]`` with any M; logits ``[E, M, W]``.

    Raises:
        InputError: other features; a penalty or scale that is not positive and finite; as
            :class:`~fewshot.heads.features.FeatureHead`.
    """

    log_penalty: Tensor
    log_scale: Tensor

    def __init__(self, features: str = "plain", penalty: float = 50.0, scale: float = 10.0, learn: bool = True) -> None:
        super().__init__(features)
        require_positive_number("ridge", penalty=penalty, scale=scale)
        require_flag("ridge", learn=learn)
        for name, value in (("log_penalty", penalty), ("log_scale", scale)):
            logarithm = torch.tensor(float(value)).log()
            if learn:
                self.register_parameter(name, nn.Parameter(logarithm))
            else:
                self.register_buffer(name, logarithm)

    def extra_bytes(self, ways: int, shots: int, queries: int) -> int:
        return 3 * 8 * (ways * shots) ** 2

    def fitted_logits(self, rows: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        # The small system in float64: its condition is that of X X^T, the square of the features'.
        rows = F.pad(rows, (0, 1), value=1.0).double()
        identity = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        system = rows @ rows.mT + self.log_penalty.double().exp() * identity
        # Not torch.linalg.cholesky: on a GPU it would wait for the device to look for errors.
        factor = torch.linalg.cholesky_ex(system).L
        weights = rows.mT @ torch.cholesky_solve(labels.expand(len(rows), -1, -1), factor)
        outputs = query @ weights[:, :-1].to(query) + weights[:, -1:].to(query)
        return self.log_scale.to(query.dtype).exp() * outputs
