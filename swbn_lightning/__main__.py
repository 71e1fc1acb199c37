"""The ``swbn`` command, also as ``python -m swbn_lightning``. PyTorch and Lightning are loaded by what needs them."""

import sys
from collections.abc import Sequence

from swbn_lightning.command.overview import answer
from swbn_lightning.command.own_packages import check_own_packages
from swbn_lightning.command.signals import sigterm_is_143


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; ``args`` as on the command line, ``sys.argv`` by default.

    Raises:
        SystemExit: 2 for input that cannot work, after a message that says what would; 143 when SIGTERM ended it.
    """
    words = list(sys.argv[1:] if args is None else args)
    answer(words)
    check_own_packages()
    from swbn_lightning.command.main import run

    run(words)


def console() -> None:
    """The entry point of the ``swbn`` command. Ctrl-C ends it with 130, or as Lightning ends what it runs."""
    try:
        with sigterm_is_143():
            main()
    except KeyboardInterrupt:
        print("swbn: stopped by Ctrl-C.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    console()
