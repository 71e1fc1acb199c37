"""A screen that takes nothing, or not these letters, ends no run; one that is narrow hides no letter of a table."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_NARROWEST, _WIDEST = 40, 1_000_000  # letters a line of a table; with fewer some columns would have none


def table_console() -> "Console":
    """For tables whose columns fold: what is no terminal, as a file, has lines as long as a table needs."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, _NARROWEST) if console.is_terminal else _WIDEST
    return console


class Screen:
    """A text stream which is written to as far as it goes.

    Letters that its encoding lacks become question marks. After the first error (a reader that has gone, a full disk)
    what is written is dropped, and ``lost`` is that error.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.lost: OSError | ValueError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        self.lost = self.lost or error
        # What is still in its buffer goes nowhere, so that Python does not fail on it when it ends.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def forgiving_screen() -> Iterator[Screen]:
    """Standard output and error are :class:`Screen` within; gives that of the output, flushed at the end."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 (in place of a stream that was closed before Python began)
        output, errors = (Screen(stream or nowhere) for stream in before)
        sys.stdout, sys.stderr = output, errors
        try:
            yield output
        finally:
            output.flush()
            errors.flush()
            sys.stdout, sys.stderr = before
