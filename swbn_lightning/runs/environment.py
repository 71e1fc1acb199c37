"""What a figure depends on besides the code and the configuration."""

import os
import platform
from importlib.metadata import version
from typing import Any

import torch


def environment(*packages: str) -> dict[str, Any]:
    """Device, Python and package versions, torch always among them."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {"device": device, "Python": platform.python_version(), **{p: version(p) for p in ("torch", *packages)}}
