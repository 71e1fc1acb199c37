"""Image files that would start programs, wait for ever or take hours are refused with a message."""

import io
import os
import socket
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewshot.prediction import load_prediction_data
from swbn_lightning.data.decode import FORMATS, MAX_PASSES, open_image
from swbn_lightning.data.folders import IMAGE_SUFFIXES

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A program of the name that Pillow starts, which leaves a file; the path of the file."""
    from PIL import EpsImagePlugin

    (tmp_path / "bin").mkdir()
    program, ran = tmp_path / "bin" / "gs", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # so that it is looked for again
    return ran


def test_no_program_is_started(tmp_path, ghostscript):
    path = tmp_path / "picture.png"
    path.write_bytes(EPS)
    with pytest.raises(ValueError, match=r"picture.png cannot be read as an image: it is none of PNG, JPEG, .*PPM"):
        open_image(path, 3)
    assert not ghostscript.exists()
    with pytest.raises(Exception, match=".*"), Image.open(path) as image:  # what Pillow does if nobody stops it
        image.load()
    assert ghostscript.exists()


def test_what_every_suffix_stands_for_is_read(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    for suffix in IMAGE_SUFFIXES:
        image = Image.fromarray(pixels)
        path = tmp_path / f"picture{suffix}"
        (image.convert("L") if suffix == ".pgm" else image).save(path)
        assert open_image(path, 3).size == (8, 8)
        with Image.open(path) as opened:
            assert opened.format in FORMATS
    path = tmp_path / "phone.jpg"
    Image.fromarray(pixels).save(path, "MPO", save_all=True, append_images=[Image.fromarray(pixels)])
    with Image.open(path) as opened:
        assert opened.format == "MPO"
    assert open_image(path, 3).size == (8, 8)


@pytest.mark.parametrize("form", ["ICO", "PDF"])
def test_other_formats_are_not_tried(tmp_path, form):
    path = tmp_path / "picture.png"
    Image.new("RGB", (16, 16)).save(path, form)
    with pytest.raises(ValueError, match="picture.png cannot be read as an image: it is none of PNG"):
        open_image(path, 3)


def test_what_is_no_regular_file_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket.png")
    os.mkfifo("pipe.png")
    Path("zero.png").symlink_to("/dev/zero")
    Path("folder.png").mkdir()
    for name, kind in (("pipe", "named pipe"), ("zero", "device"), ("folder", "folder"), ("socket", "socket")):
        path = tmp_path / f"{name}.png"
        with pytest.raises(ValueError, match=rf"{path.name} cannot be read: it is a {kind}; give a regular file"):
            open_image(path, 3)
    listener.close()


def test_a_pipe_among_the_images_to_predict(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "support" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "support" / name / "1.png")
    os.mkfifo(tmp_path / "support" / "a" / "2.png")  # passed over, like other foreign files
    os.mkfifo(tmp_path / "query.png")
    with pytest.raises(ValueError, match=r"query.png cannot be read: it is a named pipe"):
        load_prediction_data(str(tmp_path / "support"), str(tmp_path / "query.png"), 8, 3, lambda images: images)
    latin = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    os.rename(tmp_path / "good.png", latin)  # noqa: PTH104
    with pytest.warns(UserWarning, match="passed over 1 that are neither .*2.png"):
        data = load_prediction_data(str(tmp_path / "support"), latin, 8, 3, lambda images: images)
    assert data.query_files == (f"{tmp_path}/caf\\xe9.png",)  # which can be printed
    os.rename(tmp_path / "support" / "b", os.fsdecode(os.fsencode(tmp_path) + b"/support/caf\xe9"))  # noqa: PTH104
    with pytest.raises(ValueError, match=r"class folder .*/support/caf.xe9 is not UTF-8; rename the folder") as caught:
        load_prediction_data(str(tmp_path / "support"), latin, 8, 3, lambda images: images)
    str(caught.value).encode()


def test_a_jpeg_does_not_go_over_its_pixels_for_ever(tmp_path):
    file = io.BytesIO()
    Image.new("L", (8000, 8000), 128).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    path = tmp_path / "picture.jpg"
    path.write_bytes(whole)
    assert open_image(path, 1).size == (8000, 8000)
    scan = whole[whole.rindex(b"\xff\xda") : -2]
    path.write_bytes(whole[:-2] + 20_000 * scan + whole[-2:])
    assert path.stat().st_size < 3e6
    start = time.process_time()
    with pytest.raises(ValueError, match=r"picture.jpg is too large to read: it goes \d+ times over its 64000000 pix"):
        open_image(path, 1)
    assert time.process_time() - start < 5
    assert whole.count(b"\xff\xda") < MAX_PASSES


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(*chunks, width=8, height=8):
    rows = zlib.compress(b"".join(b"\0" + bytes(8) for _ in range(8)))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def tiff(width, height):
    entries = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 64}
    content = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries))
    for tag, value in sorted(entries.items()):
        content += struct.pack("<HHII", tag, 4, 1, value)
    return content + struct.pack("<I", 8) + bytes(64)  # the next directory is this one, for ever


def gif(width, height):
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame * 1000 + b";"


BOMB = zlib.compress(bytes(200_000_000), 9)
CLAIMS = {
    "compressed text": png(chunk(b"zTXt", b"Comment\0\0" + BOMB)),
    "a compressed profile": png(chunk(b"iCCP", b"name\0\0" + BOMB)),
    "much text": png(*[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000)))] * 200),
    "a chunk of two gigabytes": png()[:8] + struct.pack(">I", 2**31 - 1) + b"IHDR",
    "a wide png": png(width=2**31 - 1, height=2**31 - 1),
    "a wide tiff": tiff(2**31, 2**31),
    "a tiff in itself": tiff(9000, 9000),
    "a gif of 30 megapixels and many frames": gif(6000, 5000),
    "a wide pgm": b"P5 99999999 99999999 255 " + bytes(9),
    "an endless number": b"P5 " + b"9" * 1_000_000,
    "a wide bmp": b"BM" + struct.pack("<IHHIIiiHHII", 99, 0, 0, 54, 40, 2**30, 2**30, 1, 24, 0, 0) + bytes(60),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("what", CLAIMS)
def test_absurd_claims(tmp_path, what):
    path = tmp_path / "picture.png"
    path.write_bytes(CLAIMS[what])
    assert path.stat().st_size < 2_000_000
    start = time.process_time()
    try:
        open_image(path, 3)  # some can be read, so far as they are there
    except ValueError as error:
        assert "picture.png cannot be read as an image" in str(error) or "is too large to read" in str(error)
    assert time.process_time() - start < 5
