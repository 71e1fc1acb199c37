"""Figures that are not drawn, for tests of what stands beside them."""

import io

import pytest
from PIL import Image


@pytest.fixture
def quick_pictures(request, monkeypatch):
    """Figures are made and not drawn, which takes a second each; but where a test asks for ``drawn``."""
    if "drawn" not in request.fixturenames:
        pixel = io.BytesIO()
        Image.new("RGB", (1, 1)).save(pixel, format="png")
        monkeypatch.setattr("swbn_lightning.runs.page.html.to_png", lambda figure: pixel.getvalue())


@pytest.fixture
def drawn():
    """Pictures are drawn, as they are outside of tests."""
