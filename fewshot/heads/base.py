"""Base of the few-shot heads: features of support and query in, logits out."""

import functools

import torch
from torch import Tensor, nn


class EpisodeHead(nn.Module):
    """A few-shot method as a pure module.

    A head takes several episodes at once, with any numbers of ways, shots and queries, and keeps nothing between calls.
    In evaluation mode, no episode can change the result of another.

    Shape:
        support ``[E, W, K, ...]``, query ``[E, M, ...]`` (class after class), where ``...`` is ``C`` or ``C, h, w``;
        logits ``[E, M, W]``.
    """

    #: Whether the queries of an episode are classified together, each with the help of the others.
    transductive: bool = False
    #: About how many times the size of an episode's features it holds at once, without gradients.
    features_held: int = 1


def accumulating(*features: Tensor) -> tuple[Tensor, ...]:
    """Convert features to float32 or wider, because distances and cosines are differences of large numbers."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in features), torch.float32)
    return tuple(x.to(dtype) for x in features)
