"""The page as Chromium shows it, on a wide screen and on a narrow one, without a network."""

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


@pytest.mark.parametrize("width", [1200, 500])
def test_it_is_shown_and_nothing_breaks_its_policy(browser, width, tmp_path):
    for norm in ("bn", "swbn-fro"):
        fit = make_fit(tmp_path / "s" / norm / "version_0", norm)
        make_test(tmp_path / "s" / norm / "version_1", fit)
    shot, page = tmp_path / "shot.png", write_report([tmp_path / "s"])
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", f"--window-size={width},2400", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Content Security Policy" not in done.stderr, done.stderr
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape == (2400, width, 3)
    # Pictures in the colours of the two lines, and the summary above them.
    blue, orange = (np.abs(pixels - color).sum(2) < 12 for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)))
    assert blue.sum() > 200 and orange.sum() > 200
    assert (pixels[:300] < 100).all(2).sum() > 500  # letters
    assert (pixels[:, -8:] > 200).all()  # nothing runs out of the page to the right
