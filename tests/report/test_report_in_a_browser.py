"""The page as Chromium shows it, on a wide screen and on a narrow one, without a network."""

import itertools
import os
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from swbn_lightning.runs.page import write_report
from tests.made_runs import make_fit, make_test

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Its path; skips, saying so, where there is none, but fails where ``SWBN_TEST_BROWSER`` names one."""
    named = os.environ.get("SWBN_TEST_BROWSER")
    found = next((path for name in ([named] if named else NAMES) if (path := shutil.which(name))), None)
    if found is None:
        if named:
            pytest.fail(f"SWBN_TEST_BROWSER={named} is not there")
        pytest.skip(f"no browser: none of {', '.join(NAMES)} (SWBN_TEST_BROWSER names another)")
    return found


@pytest.fixture
def shot(browser, tmp_path):
    """A picture of a page about two runs, at a width and with further switches of the browser."""
    for norm in ("bn", "swbn-fro"):
        fit = make_fit(tmp_path / "s" / norm / "version_0", norm)
        make_test(tmp_path / "s" / norm / "version_1", fit)
    page, number = write_report([tmp_path / "s"]), itertools.count()

    def take(width, *more):
        frame, file = tmp_path / "frame.html", tmp_path / f"{next(number)}.png"
        # A window has no less than 500 pixels.
        frame.write_text(f"<body style='margin:0'><iframe src='{page.name}' width={width} height=2400 frameborder=0>")
        frame = frame.rename(page.parent / frame.name) if width < 500 else page
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={file}", f"--window-size={max(width, 500)},2400",
            *more, frame.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "Content Security Policy" not in done.stderr, done.stderr
        return np.asarray(Image.open(file).convert("RGB")).astype(int)[:, :width]

    return take


def near(pixels, color):
    return np.abs(pixels - color).sum(2) < 12


BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


@pytest.mark.parametrize("width", [1200, 500])
def test_it_is_shown_and_nothing_breaks_its_policy(width, shot):
    pixels = shot(width)
    assert pixels.shape == (2400, width, 3)
    # Pictures in the colours of the two lines, and the summary above them.
    assert near(pixels, BLUE).sum() > 100 and near(pixels, ORANGE).sum() > 100
    assert (pixels[:300] < 100).all(2).sum() > 500  # letters
    assert (pixels[:, -8:] > 200).all()  # nothing runs out of the page to the right
    if width == 1200:  # pictures as wide as the page
        columns = np.flatnonzero(near(pixels, BLUE).any(0) | near(pixels, ORANGE).any(0))
        assert columns[-1] > 1050


def test_it_is_dark_where_the_reader_is_and_pictures_stay_legible(shot):
    light, dark = shot(1200), shot(1200, "--force-dark-mode")
    assert (dark[5, 5] < 60).all() and (light[5, 5] > 250).all()
    assert (dark[:300] > 180).all(2).sum() > 500  # light letters
    assert near(dark, BLUE).sum() > 200 and near(dark, (255, 255, 255)).mean() > 0.1  # drawn on white, as they were


def test_a_narrow_screen_shows_that_a_table_goes_on(shot):
    """A shadow at the right edge of the summary, which has more columns than fit; at the left one there is none."""
    pixels = shot(390)
    for columns, shadow in ((slice(373, 377), True), (slice(13, 17), False)):
        dark = (pixels[:600, columns].mean(2) < 240).all(1)
        longest = max(len(list(rows)) for value, rows in itertools.groupby(dark) if value) if dark.any() else 0
        assert (longest > 30) == shadow  # no letter is as high
