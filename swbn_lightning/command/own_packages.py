"""``fewshot`` and ``classification`` are names that others use too: the command makes sure that it has its own."""

import sys
from importlib.util import find_spec
from pathlib import Path

import swbn_lightning
from swbn_lightning.files.reading import printable

_OWN = ("classification", "fewshot")


def check_own_packages() -> None:
    """Exit with a message where a foreign module would be imported in place of a package of this project.

    Raises:
        SystemExit: 2, after an error that names the foreign file.
    """
    home = Path(swbn_lightning.__file__).resolve().parents[1]
    for name in _OWN:
        found = _file(name)
        if found is None:
            wrong = f"the package {name!r} was not found. Install swbn_lightning again."
        elif found.resolve().parent != home / name:
            wrong = (
                f"{found} was found as the module {name!r}, which should be {home / name}. "
                "Rename that file or folder, or remove it from the Python path (PYTHONPATH, the current folder)."
            )
        else:
            continue
        print(f"swbn: error: {printable(wrong)}", file=sys.stderr)
        raise SystemExit(2)


def _file(name: str) -> Path | None:
    """What ``import name`` loads, or has loaded; a folder without ``__init__.py`` is a module too."""
    spec = find_spec(name)
    return None if spec is None else Path(spec.origin or next(iter(spec.submodule_search_locations or ["?"])))
