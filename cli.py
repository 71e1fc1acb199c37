"""``python cli.py`` is ``swbn``, and ``cli.main()`` runs the command from Python.

``swbn`` itself does not need this file: a module of the same name may lie anywhere on the path.
"""

from swbn_lightning.__main__ import console, main

__all__ = ["console", "main"]

if __name__ == "__main__":
    console()
