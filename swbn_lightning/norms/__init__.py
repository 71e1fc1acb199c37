"""Whitening normalisation layers and the factory that puts them into networks."""

from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.dbn import DBN1d, DBN2d, DBN3d
from swbn_lightning.norms.factory import NormFactory, named_norms, norm_layer_types
from swbn_lightning.norms.health import NormFinding, check_norms
from swbn_lightning.norms.iternorm import IterNorm1d, IterNorm2d, IterNorm3d
from swbn_lightning.norms.online import OnlineWhitening1d, OnlineWhitening2d, OnlineWhitening3d
from swbn_lightning.norms.passes.kernels import use_kernels
from swbn_lightning.norms.surgery.convert import append_norm, convert_norms, revert_norms
from swbn_lightning.norms.surgery.freeze import freeze_norms, unfreeze_norms
from swbn_lightning.norms.surgery.fuse import FusionReport, fuse_norms
from swbn_lightning.norms.surgery.parameters import norm_parameter_groups
from swbn_lightning.norms.surgery.update import update_norms
from swbn_lightning.norms.swbn import SWBN1d, SWBN2d, SWBN3d

__all__ = [
    "DBN1d",
    "DBN2d",
    "DBN3d",
    "FusionReport",
    "IterNorm1d",
    "IterNorm2d",
    "IterNorm3d",
    "NormFactory",
    "NormFinding",
    "OnlineWhitening1d",
    "OnlineWhitening2d",
    "OnlineWhitening3d",
    "SWBN1d",
    "SWBN2d",
    "SWBN3d",
    "WhiteningNorm",
    "append_norm",
    "check_norms",
    "convert_norms",
    "freeze_norms",
    "fuse_norms",
    "named_norms",
    "norm_layer_types",
    "norm_parameter_groups",
    "revert_norms",
    "unfreeze_norms",
    "update_norms",
    "use_kernels",
]
