"""Base of the heads that work on features of any trained network: how the features are made comparable first."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot.heads.base import EpisodeHead, accumulating
from swbn_lightning.errors import InputError, unknown_name

FEATURES = ("plain", "l2", "cl2")


class FeatureHead(EpisodeHead):
    """A head on feature vectors that are first centred, normalised, both or neither.

    Args:
        features: what is done to every support and query feature ``x`` (Wang et al., 2019, arXiv 1911.04623, section
            3): ``"plain"`` nothing; ``"l2"`` ``x / |x|``; ``"cl2"`` ``(x - m) / |x - m|`` with the mean ``m`` of all
            training features, which :meth:`set_base_mean` has to give. State dicts do not contain ``m``.

    Raises:
        InputError: another name; in ``forward``, ``"cl2"`` without ``m``.
    """

    base_mean: Tensor | None

    def __init__(self, features: str) -> None:
        super().__init__()
        if features not in FEATURES:
            raise unknown_name("features", features, FEATURES)
        self.features = features
        self.register_buffer("base_mean", None, persistent=False)
        self.features_held = 1 if features == "plain" else 2  # the normalised beside the given

    @property
    def needs_base_mean(self) -> bool:
        """Whether :meth:`set_base_mean` has to be called before the head is used."""
        return self.features == "cl2"

    def set_base_mean(self, mean: Tensor) -> None:
        """Set ``m`` for ``features="cl2"``: ``[C]``, the mean feature of all images of the base (training) classes."""
        if mean.dim() != 1:
            raise InputError(f"the mean feature of the base classes is one vector [C], got {list(mean.shape)}.")
        self.base_mean = mean.detach()

    def prepared(self, features: Tensor) -> Tensor:
        """Return features ``[..., C]``, centred and normalised as ``features`` says."""
        if self.features == "plain":
            return features
        if self.needs_base_mean:
            if self.base_mean is None:
                raise InputError(
                    "features 'cl2' subtract the mean feature of the base classes, which this head was not given: "
                    "call set_base_mean(training_features.mean(0)), or take features 'l2'."
                )
            features = features - self.base_mean.to(features)
        return F.normalize(features, dim=-1)


class FittedHead(FeatureHead):
    """A head that is fitted to the support images one by one, so that their classes may have any numbers of them.

    A subclass defines :meth:`fitted_logits`. Every image counts the same, so a strong penalty favours
    the larger classes.
    """

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        ways, shots = support.shape[1:3]
        labels = torch.eye(ways, dtype=torch.float64, device=support.device).repeat_interleave(shots, dim=0)
        return self.fitted_logits(support.flatten(1, 2), labels, query)

    def uneven_logits(self, support: Sequence[Tensor], query: Tensor) -> Tensor:
        ways = torch.eye(len(support), dtype=torch.float64, device=query.device)
        labels = torch.cat([one.expand(len(images), -1) for one, images in zip(ways, support, strict=True)])
        with torch.autocast(query.device.type, enabled=False):
            rows, query = (self.prepared(features) for features in accumulating(torch.cat(list(support)), query))
            return self.fitted_logits(rows[None], labels, query[None])[0]

    def fitted_logits(self, rows: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        """Return ``[E, M, W]`` for prepared rows ``[E, N, C]`` of one-hot labels ``[N, W]`` (float64) and queries.

        The queries are ``[E, M, C]``, float32 or wider as the rows are.
        """
        raise NotImplementedError
