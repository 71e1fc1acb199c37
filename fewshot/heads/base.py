"""Base of the few-shot heads: features of support and query in, logits out."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swbn_lightning.errors import InputError


class EpisodeHead(nn.Module):
    """A few-shot method as a pure module.

    A head takes several episodes at once, with any numbers of ways, shots and queries, and keeps nothing between calls.
    In evaluation mode, no episode can change the result of another. The classes of these episodes have the same number
    of support images; a head that can do without overrides :meth:`uneven_logits`, which ``swbn predict`` needs for
    folders of different sizes.

    A subclass defines :meth:`logits`, or ``forward`` to do all of it in its own way.

    Shape:
        support ``[E, W, K, ...]``, query ``[E, M, ...]`` (class after class), where ``...`` is ``C`` or ``C, h, w``;
        logits ``[E, M, W]``.
    """

    #: Whether the queries of an episode are classified together, each with the help of the others.
    transductive: bool = False
    #: About how many times the size of an episode's features it holds at once, without gradients.
    features_held: int = 1
    #: Whether its loss on training episodes can train it, or the backbone through it.
    learns_from_episodes: bool = True

    def forward(self, support: Tensor, query: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return self.logits(*map(self.prepared, accumulating(support, query)))

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        """Return ``[E, M, W]`` for prepared support and query, float32 or wider."""
        raise NotImplementedError

    def prepared(self, features: Tensor) -> Tensor:
        """Return support or query features as :meth:`logits` takes them; here as they are."""
        return features

    def extra_bytes(self, ways: int, shots: int, queries: int) -> int:
        """About how many bytes an episode takes besides features, logits and what is of their size."""
        return 0

    def uneven_logits(self, support: Sequence[Tensor], query: Tensor) -> Tensor:
        """Compute the logits ``[M, W]`` of one episode whose classes have any numbers of support images.

        For equal numbers they are those of ``forward``.

        Args:
            support: features ``[K, ...]`` of each of the W classes, K of its own.
            query: features ``[M, ...]``.

        Raises:
            InputError: unless a head overrides it.
        """
        counts = ", ".join(str(len(images)) for images in support)
        raise InputError(
            f"{type(self).__name__} needs the same number of support images of every class; these have {counts}."
        )


def means_as_shots(support: Sequence[Tensor]) -> Tensor:
    """One shot for each class, the mean of its support features: ``W`` times ``[K, ...]`` to ``[1, W, 1, ...]``.

    For heads that use nothing of a class but this mean.
    """
    return torch.stack([accumulating(images)[0].mean(dim=0) for images in support])[None, :, None]


def accumulating(*features: Tensor) -> tuple[Tensor, ...]:
    """Convert features to float32 or wider, because distances and cosines are differences of large numbers."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in features), torch.float32)
    return tuple(x.to(dtype) for x in features)
