"""The ``swbn`` command, also as ``python -m swbn_lightning``, whatever else on the path is called ``cli``."""

import importlib.util
import sys
from pathlib import Path

from swbn_lightning.command.overview import answer


def console() -> None:
    """Run this package's ``cli.py``, which lies beside it in a checkout and where it is installed."""
    answer(sys.argv[1:])
    name = "swbn_lightning_cli"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "cli.py")
    assert spec is not None and spec.loader is not None
    cli = importlib.util.module_from_spec(spec)
    sys.modules[name] = cli
    spec.loader.exec_module(cli)
    cli.console()


if __name__ == "__main__":
    console()
