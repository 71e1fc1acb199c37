"""Multinomial logistic regression on the support set, solved for many episodes at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from fewshot.heads.features import FittedHead
from swbn_lightning.errors import InputError, require_positive_number

_TOLERANCE = 1e-7  # of the weights, relative to their norm: that of float32, in which logits are computed
_MOST_STEPS, _MOST_HALVINGS = 50, 40
_ARMIJO = 1e-4  # the share of the predicted decrease that a step has to reach (Nocedal and Wright, section 3.1)
_ROUNDING = 1e-12  # of the objective in float64, below which a decrease cannot be seen


class LogisticRegressionHead(FittedHead):
    """Multinomial logistic regression fitted to the support set, as in RFS (Tian et al., ECCV 2020, section 3.1).

    The weights ``w_c`` and intercepts ``b_c`` minimise, as in scikit-learn,

        ``1/2 sum_c |w_c|^2 + C sum_i (log sum_c exp(w_c . x_i + b_c) - w_{y_i} . x_i - b_{y_i})``

    over the support images ``i``; the intercepts have no penalty. The logits are ``w_c . x + b_c``. The minimum is
    unique, up to a number added to all intercepts, and found in float64, the weights to 1e-7 of their norm or better.
    No gradient flows through it. Classes may have different numbers of images
    (:meth:`~fewshot.heads.EpisodeHead.uneven_logits`); every image counts the same, as with scikit-learn's
    ``class_weight=None``.

    Of two classes both have weights here. ``sklearn.linear_model.LogisticRegression`` has one vector for both, with
    another penalty: its ``C`` is twice this one for the same probabilities.

    Args:
        features: ``"l2"`` (RFS), ``"plain"`` or ``"cl2"`` (:class:`~fewshot.heads.features.FeatureHead`).
        C: inverse strength of the penalty, scikit-learn's ``C``. 1 is its default, and RFS's. (RFS's public code also
            adds four augmented copies of each support image, which this head does not.)

    Shape:
        support ``[E, W, K, C]``, query ``[E, M, C]`` with any M; logits ``[E, M, W]``.

    Raises:
        InputError: other features; a ``C`` that is not positive and finite; as
            :class:`~fewshot.heads.features.FeatureHead`; in ``forward``, episodes that cannot be solved in float64.
    """

    learns_from_episodes = False

    def __init__(self, features: str = "l2", C: float = 1.0) -> None:
        super().__init__(features)
        require_positive_number("logistic regression", C=C)
        self.C = C

    def extra_bytes(self, ways: int, shots: int, queries: int) -> int:
        return 4 * 8 * ways * (ways * shots) ** 2  # a factor and an inverse of each class, and what they are made of

    @torch.no_grad()
    def fitted_logits(self, rows: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        rows = rows.double()
        centre = rows.mean(dim=1, keepdim=True)  # which the intercepts take up, as they have no penalty
        rows = rows - centre
        dual, intercepts = solve(self.C * rows @ rows.mT, labels.expand(len(rows), -1, -1))
        weights = self.C * rows.mT @ dual  # [E, C, W]
        return (query - centre.to(query)) @ weights.to(query) + intercepts.unsqueeze(1).to(query)


class _Point(NamedTuple):
    """Where a solution stands, or the way from one such point to another."""

    dual: Tensor  # a, [E, N, W]
    shift: Tensor  # b, [E, W]
    outputs: Tensor  # f = K a + b, [E, N, W]

    def moved(self, length: Tensor, way: "_Point") -> "_Point":
        """``self + length * way``, with a length for each episode."""
        return _Point(*(x + length.view(-1, *[1] * (x.dim() - 1)) * by for x, by in zip(self, way, strict=True)))


def solve(kernel: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise ``1/2 sum_c a_c^T K a_c + sum_i (log sum_c exp f_ic - f_{i, y_i})`` with ``f = K a + b``.

    At the minimum ``a = labels - softmax(f)``, and every column of ``a`` sums to 0. Newton's method; a step that does
    not decrease the objective enough is halved. An episode that has arrived stays as it is, so its result does not
    depend on the others.

    Args:
        kernel: ``K``, ``[E, N, N]`` float64, positive semidefinite.
        labels: ``[E, N, W]``, one-hot.

    Returns:
        ``a`` ``[E, N, W]`` and ``b`` ``[E, W]``, which sums to 0.

    Raises:
        InputError: an episode that has not arrived after 50 steps.
    """
    at = _Point(torch.zeros_like(labels), torch.zeros_like(labels[:, 0]), torch.zeros_like(labels))
    given = kernel.isfinite().flatten(1).all(1)  # of features that are not finite, the logits will say so
    for _ in range(_MOST_STEPS):
        residual = labels - at.outputs.softmax(-1) - at.dual
        # The gradient by the weights is X^T residual, and bounds their error, for their penalty is strongly convex.
        gradient, size = (residual * (kernel @ residual)).sum((1, 2)), (at.dual * at.outputs).sum((1, 2))
        level = residual.sum(1).abs().amax(-1) <= _TOLERANCE
        moving = ~((gradient <= _TOLERANCE**2 * size) & level) & given
        if not moving.any():
            return at.dual, at.shift
        way = _newton_step(kernel, at, residual)
        at = at.moved(moving * _length(kernel, labels, at, way, residual), way)
    raise InputError(
        f"logistic regression: {int(moving.sum())} of {len(moving)} episodes are not solved after {_MOST_STEPS} steps; "
        "take a smaller C, or normalised features (l2 or cl2)."
    )


def _newton_step(kernel: Tensor, at: _Point, residual: Tensor) -> _Point:
    """Return Newton's step for the stationary equations ``a = labels - softmax(f)`` and ``1^T a = 0``.

    With ``r`` the residual of the first and ``H`` the Hessian of the losses (``diag(p) - p p^T`` of each image), it
    solves ``(I + H K) da + H 1 db = r`` and ``1^T da = -1^T a``. The inverse ``Q = (K + H^-1)^-1`` needs only N x N
    systems, one for each class and one for their sum: ``Q = E - E R M^-1 R^T E``, where ``E`` has the blocks
    ``E_c = (K + diag(1 / p_c))^-1``, ``R`` stacks identities and ``M`` is the sum of the ``E_c`` (Rasmussen and
    Williams, Gaussian Processes for Machine Learning, section 3.5 and algorithm 3.3).
    """
    probabilities = at.outputs.softmax(-1)
    root = probabilities.mT.sqrt().unsqueeze(-1)  # [E, W, N, 1]
    scaled = (root * kernel.unsqueeze(1)).mul_(root.mT)
    scaled.diagonal(dim1=-2, dim2=-1).add_(1)
    # The _ex forms do not look for errors, for which a GPU would have to be waited for.
    blocks = torch.cholesky_inverse(torch.linalg.cholesky_ex(scaled).L).mul_(root).mul_(root.mT)  # E_c, [E, W, N, N]
    factor = torch.linalg.cholesky_ex(blocks.sum(dim=1)).L

    def inverse(values: Tensor) -> Tensor:
        """``Q`` times ``[E, N, W]``."""
        of_class = (blocks @ values.mT.unsqueeze(-1)).squeeze(-1)  # [E, W, N]
        shared = torch.cholesky_solve(of_class.sum(dim=1).unsqueeze(-1), factor)
        return (of_class - (blocks @ shared.unsqueeze(1)).squeeze(-1)).mT

    sums = blocks.sum(dim=-1)  # E_c 1, [E, W, N]
    system = torch.diag_embed(sums.sum(dim=-1)) - sums @ torch.cholesky_solve(sums.mT, factor)  # 1^T Q 1
    # Singular in one direction, a number for all classes, which changes no probability: that number is 0.
    system = system + system.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
    turned = kernel @ residual
    missing = (residual - inverse(turned) + at.dual).sum(dim=1)
    shift = torch.linalg.solve_ex(system, missing.unsqueeze(-1)).result.squeeze(-1)
    dual = residual - inverse(turned + shift.unsqueeze(1))
    return _Point(dual, shift, kernel @ dual + shift.unsqueeze(1))


def _length(kernel: Tensor, labels: Tensor, at: _Point, way: _Point, residual: Tensor) -> Tensor:
    """Return the first of 1, 1/2, 1/4, … for each episode that decreases the objective by enough, ``[E]``."""
    turned = kernel @ way.dual
    linear, square = (at.dual * turned).sum((1, 2)), (way.dual * turned).sum((1, 2))

    def objective(length: Tensor) -> Tensor:  # without what is the same for every length
        outputs = at.outputs + length[:, None, None] * way.outputs
        losses = (outputs.logsumexp(-1) - (labels * outputs).sum(-1)).sum(-1)
        return losses + length * linear + length.square() / 2 * square

    length = torch.ones_like(linear)
    start = objective(torch.zeros_like(linear))
    decrease = (residual * turned).sum((1, 2)) + ((residual + at.dual).sum(1) * way.shift).sum(-1)  # at first
    for _ in range(_MOST_HALVINGS):
        most = start - _ARMIJO * length * decrease + _ROUNDING * (1 + start.abs())
        short = objective(length) > most
        if not short.any():
            break
        length = torch.where(short, length / 2, length)
    return length
