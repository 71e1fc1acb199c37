"""``fewshot`` and ``classification`` are common names: the command checks that Python finds those of this project."""

import sys
from importlib.util import find_spec
from pathlib import Path

import swbn_lightning
from swbn_lightning.files.reading import printable

_OWN = ("classification", "fewshot")


def check_own_packages() -> None:
    """Exit with a message if Python would import a foreign module instead of a package of this project.

    Raises:
        SystemExit: 2, after an error that names the foreign file.
    """
    home = Path(swbn_lightning.__file__).resolve().parents[1]
    for name in _OWN:
        found = _file(name)
        if found is None:
            wrong = f"`import {name}` finds nothing. Install swbn_lightning again."
        elif found.resolve().parent != home / name:
            wrong = (
                f"`import {name}` finds {found}, but {home / name} is needed. Rename that file or folder, or take "
                "the folder that holds it off the Python path (PYTHONPATH, the current folder)."
            )
        else:
            continue
        print(f"swbn: error: {printable(wrong)}", file=sys.stderr)
        raise SystemExit(2)


def _file(name: str) -> Path | None:
    """Return what ``import name`` loads or has loaded: a file, or a folder without ``__init__.py``."""
    spec = find_spec(name)
    return None if spec is None else Path(spec.origin or next(iter(spec.submodule_search_locations or ["?"])))
