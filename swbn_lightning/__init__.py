"""Whitening normalisation layers for PyTorch, and what trains, measures and compares networks with them.

Importing this loads torch when a layer is first asked for, and neither Lightning nor matplotlib.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swbn_lightning.norms import (
        DBN1d,
        DBN2d,
        DBN3d,
        IterNorm1d,
        IterNorm2d,
        IterNorm3d,
        NormFactory,
        OnlineWhitening1d,
        OnlineWhitening2d,
        OnlineWhitening3d,
        SWBN1d,
        SWBN2d,
        SWBN3d,
        WhiteningNorm,
        append_norm,
        check_norms,
        convert_norms,
        freeze_norms,
        fuse_norms,
        norm_parameter_groups,
        revert_norms,
        unfreeze_norms,
        update_norms,
    )
    from swbn_lightning.whiteness import WhitenessMonitor

__version__ = "0.1.0"
__all__ = [
    "DBN1d",
    "DBN2d",
    "DBN3d",
    "IterNorm1d",
    "IterNorm2d",
    "IterNorm3d",
    "NormFactory",
    "OnlineWhitening1d",
    "OnlineWhitening2d",
    "OnlineWhitening3d",
    "SWBN1d",
    "SWBN2d",
    "SWBN3d",
    "WhitenessMonitor",
    "WhiteningNorm",
    "__version__",
    "append_norm",
    "check_norms",
    "convert_norms",
    "freeze_norms",
    "fuse_norms",
    "norm_parameter_groups",
    "revert_norms",
    "unfreeze_norms",
    "update_norms",
]


def __getattr__(name: str) -> Any:
    if name in ("norms", "errors"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{'whiteness' if name == 'WhitenessMonitor' else 'norms'}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
