"""The ``swbn`` command, also as ``python -m swbn_lightning``. Lightning is loaded by the commands that need it."""

import sys
from collections.abc import Sequence

from swbn_lightning.command.overview import answer
from swbn_lightning.command.own_packages import check_own_packages


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; ``args`` as on the command line, ``sys.argv`` by default.

    Raises:
        SystemExit: 2 for input that cannot work, after a message that says what would; 143 when SIGTERM ended it.
    """
    answer(sys.argv[1:] if args is None else args)
    check_own_packages()
    from swbn_lightning.command.main import run

    run(args)


def console() -> None:
    """The entry point of the ``swbn`` command. Ctrl-C ends it with 130, or as Lightning ends what it runs."""
    try:
        answer(sys.argv[1:])
        check_own_packages()
        from swbn_lightning.command.main import run
        from swbn_lightning.command.signals import sigterm_is_143

        with sigterm_is_143():
            run(None)
    except KeyboardInterrupt:
        print("swbn: stopped by Ctrl-C.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    console()
