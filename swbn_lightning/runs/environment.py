"""What a figure depends on besides the code and the configuration."""

import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
import pytorch_lightning as pl
import torch
from swbn_lightning.files.writing import write_whole


ENVIRONMENT_FILE = "environment.json"


def environment(*packages: str) -> dict[str, Any]:
    """Device, Python and package versions, torch always among them."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {"device": device, "Python": platform.python_version(), **{p: version(p) for p in ("torch", *packages)}}


