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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    for norm in ("bn", "swbn-fro"):
        for seed in (0, 1):
            folder = root / "s" / f"{norm}{seed}"
            fit = make_fit(folder / "version_0", norm, seed, rms=0.3 if norm == "bn" else 0.1)
            make_test(folder / "version_1", fit, 0.6 + 0.01 * seed)
    return write_report([root / "s"])


def run(browser, profile, *arguments):
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={profile}", *arguments]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("width", [1200, 500])
def test_it_is_shown(browser, page, width, tmp_path):
    shot = tmp_path / "shot.png"
    run(browser, tmp_path / "profile", f"--screenshot={shot}", f"--window-size={width},2400", page.as_uri())
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape == (2400, width, 3)
    # Pictures in the colours of the two lines, and the summary above them.
    blue, orange = (np.abs(pixels - color).sum(2) < 12 for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)))
    assert blue.sum() > 200 and orange.sum() > 200
    assert (pixels[:300] < 100).all(2).sum() > 500  # letters
    margin = pixels[:, -8:]  # nothing runs out of the page to the right
    assert (margin > 200).all()


def test_nothing_breaks_its_policy(browser, page, tmp_path):
    done = run(browser, tmp_path / "profile", "--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri())
    assert "<h1>Report: s</h1>" in done.stdout and "Content Security Policy" not in done.stderr
