"""What every few-shot head is: features of support and query in, logits out."""

import functools

import torch
from torch import Tensor, nn


class EpisodeHead(nn.Module):
    """A few-shot method as a pure module.

    A head takes several episodes at once, of any ways, shots and queries, and keeps nothing between calls: support
    ``[E, W, K, ...]`` and query ``[E, M, ...]`` (class after class), ``...`` being ``C`` or ``C, h, w``, to logits
    ``[E, M, W]``. In evaluation mode no episode can change another's result.
    """

    #: Whether the queries of an episode are classified together, each with the help of the others.
    transductive: bool = False
    #: About how many times the size of an episode's features it holds at once, without gradients.
    features_held: int = 1


def accumulating(*features: Tensor) -> tuple[Tensor, ...]:
    """Features in float32 at least: distances and cosines are differences of large numbers."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in features), torch.float32)
    return tuple(x.to(dtype) for x in features)
