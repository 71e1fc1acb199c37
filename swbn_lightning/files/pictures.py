"""What all pictures have in common: their colours, their texts, their way into a PNG file.

Figures are made by matplotlib's object interface: no ``pyplot``, no global state, no window. Colours can be told apart
with any colour vision: the lines' are those of Okabe and Ito (*Color Universal Design*, 2008).
"""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from PIL import Image

from swbn_lightning.files.writing import replacing

# Okabe and Ito's eight without yellow, which is too light for lines on white.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv<>"
_DPI = 150


def save(figure: Figure, path: Path) -> np.ndarray:
    """Write a PNG, whole or not at all; returns its pixels as :func:`to_array`."""
    pixels = to_array(figure)
    with replacing(path) as file:
        file.write(_encode(pixels))
    return pixels


def to_png(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    return _encode(to_array(figure))


def to_array(figure: Figure) -> np.ndarray:
    """The figure's pixels, uint8 ``[H, W, 3]``."""
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # the layout knows the size of texts after the first time
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, whose layout leaves room for all texts."""
    return Figure(figsize=(width, height), dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def plain_text(text: str, longest: int = 46) -> str:
    """A text that matplotlib shows as it stands: no formula, no label that legends leave out, not too long."""
    text = " ".join(text.split())
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}…{text[-half:]}"
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def short_names(names: Sequence[str], longest: int) -> list[str]:
    """Names that :func:`plain_text` made short; those that it made alike stand whole, on several lines."""
    short = [plain_text(name, longest) for name in names]
    return [
        text if short.count(text) == 1 else "\n".join(plain_text(line) for line in textwrap.wrap(name, longest))
        for name, text in zip(names, short, strict=True)
    ]


def whole_numbers(axes: Axes) -> None:
    """An x axis of counts: whole numbers alone, also around a single one."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    low, high = axes.dataLim.intervalx
    if low == high:
        axes.set_xlim(low - 1, high + 1)


def _encode(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png", dpi=(_DPI, _DPI), optimize=True)
    return file.getvalue()
