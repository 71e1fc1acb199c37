"""Pictures of every kind become the same uint8 arrays; those that cannot are refused by name."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from swbn_lightning.data.decode import open_image, read_image, read_images


def saved(image, path, **options):
    image.save(path, **options)
    return path


def gray_ramp(height=4, width=5):
    return np.arange(height * width, dtype=np.uint8).reshape(height, width) * 10


def test_gray_one_bit_and_inks(tmp_path):
    ramp = gray_ramp()
    path = saved(Image.fromarray(ramp), tmp_path / "gray.png")
    assert np.array_equal(np.asarray(open_image(path, 1)), ramp)
    assert np.array_equal(np.asarray(open_image(path, 3)), np.stack([ramp] * 3, -1))
    bits = np.random.default_rng(0).random((6, 7)) > 0.5
    path = saved(Image.fromarray(bits), tmp_path / "bits.png")
    assert np.array_equal(np.asarray(open_image(path, 1)), bits * np.uint8(255))
    solid = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # magenta and yellow ink: red
    pixels = np.asarray(open_image(saved(solid, tmp_path / "inks.jpg", quality=100), 3), np.int64)
    assert np.abs(pixels - [255, 0, 0]).max() < 6


def test_transparency_is_laid_over_white(tmp_path):
    # out = alpha * colour + (1 - alpha) * 255, whatever colour lies hidden under the transparent pixels.
    rgba = np.array([[[200, 100, 50, 255], [200, 100, 50, 0], [200, 100, 50, 128]]], np.uint8)
    pixels = np.asarray(open_image(saved(Image.fromarray(rgba), tmp_path / "rgba.png"), 3), np.float64)
    alpha = rgba[..., 3:] / 255
    np.testing.assert_allclose(pixels, alpha * rgba[..., :3] + (1 - alpha) * 255, atol=1)
    gray = np.array([[[40, 255], [40, 0], [40, 51]]], np.uint8)
    pixels = np.asarray(open_image(saved(Image.fromarray(gray, "LA"), tmp_path / "la.png"), 1), np.float64)
    np.testing.assert_allclose(pixels, [[40, 255, 0.2 * 40 + 0.8 * 255]], atol=1)
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putdata([1, 0])
    path = saved(palette, tmp_path / "palette.png", transparency=1)
    assert np.asarray(open_image(path, 3)).tolist() == [[[255, 255, 255], [10, 20, 30]]]


def test_16_bits_become_8_and_other_ranges_are_refused(tmp_path):
    values = np.array([[0, 128, 129, 256, 32768, 65534, 65535]], np.uint16)
    for name in ("sixteen.png", "sixteen.tif"):
        pixels = np.asarray(open_image(saved(Image.fromarray(values), tmp_path / name), 1))
        assert pixels.tolist() == [[round(float(v) / 65535 * 255) for v in values[0]]], name
    for image, words in (
        (Image.fromarray(np.array([[70000]], np.int32)), "values from 70000 to 70000 do not fit 16 bits"),
        (Image.fromarray(np.array([[-1]], np.int32)), "values from -1 to -1"),
        (Image.fromarray(np.array([[0.5]], np.float32)), "values are floats"),
    ):
        with pytest.raises(ValueError, match=rf"wide.tif cannot be read as an image: .*{words}"):
            open_image(saved(image, tmp_path / "wide.tif"), 1)


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        # CIPA DC-008 (EXIF), tag 0x0112: where the 0th row and column of the stored picture belong.
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.T),
        (6, lambda a: a.T[:, ::-1]),
        (7, lambda a: a.T[::-1, ::-1]),
        (8, lambda a: a.T[::-1]),
    ],
)
def test_exif_orientation(tmp_path, orientation, upright):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(Image.fromarray(gray_ramp()), tmp_path / "camera.png", exif=exif)
    assert np.array_equal(np.asarray(open_image(path, 1)), upright(gray_ramp()))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_broken_exif_does_not_cost_the_pixels(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = exif.tobytes()
    options = {".jpg": {"quality": 95}, ".webp": {"lossless": True}}.get(suffix, {})
    plain = saved(Image.fromarray(gray_ramp()), tmp_path / f"plain{suffix}", **options)
    for broken in (whole[:-7], whole[:8], b"Exif\0\0" + b"\xff" * 40, whole[:10] + b"\xff\xff\xff\x7f" + whole[14:]):
        path = saved(Image.fromarray(gray_ramp()), tmp_path / f"broken{suffix}", exif=broken, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own, of corrupt EXIF
            found = np.asarray(open_image(path, 1))
        assert np.array_equal(found, np.asarray(open_image(plain, 1)))


def test_sizes_are_made_one_and_layout_is_channels_first(tmp_path):
    rng = np.random.default_rng(0)
    sizes = ((6, 6), (12, 6), (5, 30))
    pixels = [rng.integers(0, 256, (height, width, 3), np.uint8) for height, width in sizes]
    files = [saved(Image.fromarray(p), tmp_path / f"{n}.png") for n, p in enumerate(pixels)]
    images = read_images(files, 6, 3, "sizes")
    assert images.shape == (3, 3, 6, 6) and images.dtype == torch.uint8 and images.is_contiguous()
    assert np.array_equal(images[0].numpy(), pixels[0].transpose(2, 0, 1))
    assert np.array_equal(images[2].numpy(), read_image(files[2], 6, 3))
    # Halved by a triangle of four rows, 1-3-3-1 (bilinear with antialiasing), away from the border.
    rows = pixels[1].astype(np.float64)
    expected = (rows[3] + 3 * rows[4] + 3 * rows[5] + rows[6]) / 8
    np.testing.assert_allclose(images[1, :, 2].numpy().T, expected, atol=1)


def test_files_that_cannot_be_read(tmp_path):
    path = saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)), tmp_path / "a.png")
    whole = path.read_bytes()
    for content in (b"text", whole[:40], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.png cannot be read as an image"):
            read_images([path], 40, 3, "x")
    jpeg = saved(Image.new("RGB", (200, 200), "red"), tmp_path / "b.jpg")
    jpeg.write_bytes(jpeg.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"b.jpg cannot be read as an image: .*truncated"):
        read_images([jpeg], 40, 3, "x")
    with pytest.raises(ValueError, match=r"missing.png cannot be read as an image"):
        open_image(tmp_path / "missing.png", 3)
    with pytest.raises(ValueError, match=r"huge: 3 images of 10000000x10000000 need 900000.0 GB"):
        read_images([tmp_path] * 3, 10_000_000, 3, "huge")


def test_images_that_would_fill_the_memory_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    path = saved(Image.new("1", (11_000, 10_000)), tmp_path / "bomb.png")
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(Image.Image, "convert", lambda *args: pytest.fail("it was decoded"))
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(ValueError, match=r"bomb.png is too large to read \(11000x10000\): at most 100 megapixels"),
    ):
        open_image(path, 3)
    path = saved(Image.new("1", (20_000, 10_000)), tmp_path / "bomb.png")  # Pillow refuses this by itself
    with pytest.raises(ValueError, match=r"bomb.png is too large to read \(.*at most 100 megapixels"):
        open_image(path, 3)
