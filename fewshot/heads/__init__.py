"""Few-shot methods as pure modules."""

import inspect
from collections.abc import Mapping
from typing import Any

from fewshot.heads.base import EpisodeHead
from fewshot.heads.cross_attention import CrossAttentionHead
from fewshot.heads.features import FeatureHead
from fewshot.heads.laplacian_shot import LaplacianShotHead
from fewshot.heads.logistic_regression import LogisticRegressionHead
from fewshot.heads.matching import MatchingHead
from fewshot.heads.nearest_centroid import NearestCentroidHead
from fewshot.heads.prototypical import PrototypicalHead
from fewshot.heads.ridge import RidgeHead
from fewshot.heads.soft_k_means import SoftKMeansHead
from swbn_lightning.errors import unknown_name

__all__ = [
    "CrossAttentionHead",
    "EpisodeHead",
    "FeatureHead",
    "LaplacianShotHead",
    "LogisticRegressionHead",
    "MatchingHead",
    "NearestCentroidHead",
    "PrototypicalHead",
    "RidgeHead",
    "SoftKMeansHead",
    "build_head",
]

_HEADS: dict[str, type[FeatureHead]] = {
    "nearest-centroid": NearestCentroidHead,
    "logistic-regression": LogisticRegressionHead,
    "ridge": RidgeHead,
    "soft-kmeans": SoftKMeansHead,
    "laplacian-shot": LaplacianShotHead,
}


def build_head(name: str, head_args: Mapping[str, Any] | None = None) -> FeatureHead:
    """Build a head for the features of a trained network.

    Args:
        name: ``"nearest-centroid"``, ``"logistic-regression"``, ``"ridge"``, ``"soft-kmeans"`` or ``"laplacian-shot"``.
        head_args: options of the head, such as ``{"features": "l2"}``.

    Raises:
        InputError: an unknown head or option; the message has the nearest known name and all of them.
    """
    if name not in _HEADS:
        raise unknown_name("head", name, _HEADS)
    known = inspect.signature(_HEADS[name]).parameters
    for option in head_args or {}:
        if option not in known:
            raise unknown_name(f"option of head {name!r}:", option, known)
    return _HEADS[name](**(head_args or {}))
