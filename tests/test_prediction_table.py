"""What ``predict`` shows: a table that names every image in full, however wide the screen is, and a page."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.text import Text

from fewshot import prediction
from fewshot.prediction import PAGE_FILE, PredictionData, prediction_page
from swbn_lightning.data import ImageSet
from swbn_lightning.training.callbacks.prediction_table import PredictionTable
from swbn_lightning.training.module import TrainingModule
from tests.report.page_reader import Page

FOLDER = "/data/of the year 2025/a folder with a long name/and another one below it/photographs_of_birds"
FILES = (f"{FOLDER}/{'0' * 40}1.png", f"{FOLDER}/{'0' * 40}2.png", "q\x1b]0;x\x07.png")
SHOWN = (*FILES[:2], r"q\x1b]0;x\x07.png")  # in letters that steer no terminal
CLASSES = ("Troglodytes_hiemalis_and_its_kin_1", "Troglodytes_hiemalis_and_its_kin_2")


class Naming(TrainingModule):
    """A model that gave three images probabilities, in two batches, and writes the page of nearest examples."""

    probabilities = torch.tensor([[0.75, 0.25], [0.125, 0.875], [0.5, 0.5]])

    def __init__(self, data):
        super().__init__(backbone="conv4")
        self.data, self.prediction_classes = data, data.support.class_names

    def prediction_files(self, numbers, probabilities):
        nearest = torch.tensor([0, 2, 1]), torch.tensor([0.9994, -0.25, 0.5])
        return {PAGE_FILE: prediction_page(self.data, numbers, probabilities, *nearest)}


def predicted(classes, files, channels=1, log_dir=None):
    """Print the table and write the files of three query and three support images, the last two of one class."""
    shades = torch.tensor([10, 90, 170, 250], dtype=torch.uint8).view(-1, 1, 1, 1).expand(4, channels, 4, 4)
    support = ImageSet(shades[1:], torch.tensor([0, 1, 1]), classes, "support")
    model = Naming(PredictionData(support, ("s/0.png", "s/1.png", "s/2.png"), shades[:3], files))
    trainer = SimpleNamespace(datamodule=SimpleNamespace(query_files=files), loggers=[log_dir], log_dir=log_dir)
    shown = PredictionTable()
    for own in (slice(0, 2), slice(2, 3)):
        batch = SimpleNamespace(numbers=torch.arange(3)[own])
        shown.on_predict_batch_end(trainer, model, model.probabilities[own], batch)
    shown.teardown(trainer, model, "predict")


def table(capsys):
    """What is printed for three images, without its colours, and the cells of its rows, each in one piece."""
    predicted(CLASSES, FILES)
    lines = Text.from_ansi(capsys.readouterr().out).plain.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return lines, rows


@pytest.mark.parametrize("columns", [None, "80"])
def test_in_a_file_a_row_is_a_line(columns, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    _, rows = table(capsys)
    assert rows == [
        [file, CLASSES[best], value]
        for file, best, value in zip(SHOWN, (0, 1, 0), ("0.750", "0.875", "0.500"), strict=True)
    ]


@pytest.mark.parametrize("columns", [1, 80, 300])
def test_in_a_terminal_names_are_folded(columns, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    lines, rows = table(capsys)
    assert max(map(len, lines)) <= max(columns, 40)
    images, classes, values = ("".join(cells).replace(" ", "") for cells in zip(*rows, strict=True))
    assert images == "".join(SHOWN).replace(" ", "")
    assert classes == "".join(CLASSES[number] for number in (0, 1, 0)) and values == "0.7500.8750.500"


HOSTILE = '"><script>alert(1)</script>&'


@pytest.mark.parametrize("channels", [1, 3])
def test_the_page_shows_every_image_with_its_classes_and_the_nearest_example(tmp_path, channels):
    predicted((HOSTILE, "dog"), ("q/a.png", f"q/{HOSTILE}".replace("/s", "s"), "q/\x1b.png"), channels, str(tmp_path))
    page = Page((tmp_path / "predictions.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags and "3 images, 2 classes of 1 to 2 examples each" in page.text
    rows = page.table("image")
    assert [row["image"] for row in rows] == ["a.png", HOSTILE.replace("/s", "s"), "\\x1b.png"]
    assert [row["class"] for row in rows] == [HOSTILE, "dog", HOSTILE]  # of equals the first, as in the table
    assert [row["probability"] for row in rows] == ["0.750", "0.875", "0.500"]
    assert [row["other classes"].replace("\xa0", " ") for row in rows] == ["dog 0.250", f"{HOSTILE} 0.125", "dog 0.500"]
    assert [row["nearest example"] for row in rows] == [f"{HOSTILE}/0.png", "dog/2.png", "dog/1.png"]
    assert [row["cosine"] for row in rows] == ["0.999", "-0.250", "0.500"]
    pictures = [np.asarray(Image.open(io.BytesIO(content))) for _, content in page.images]
    assert {picture.shape for picture in pictures} == {(96, 96) if channels == 1 else (96, 96, 3)}
    assert [int(picture.mean().round()) for picture in pictures] == pytest.approx([10, 90, 90, 250, 170, 170], abs=2)
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 4


def test_a_page_of_many_images_shows_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "_MOST_SHOWN", 2)
    predicted(CLASSES, FILES, log_dir=str(tmp_path))
    page = Page((tmp_path / "predictions.html").read_text(encoding="utf-8"))
    assert len(page.table("image")) == 2 and "The first 2 are shown; predictions.csv has all." in page.text


@pytest.mark.parametrize(("size", "shown"), [((20, 20), (80, 80)), ((96, 96), (96, 96)), ((300, 150), (96, 48))])
def test_pictures_are_made_small_or_whole_times_larger(size, shown):
    made = prediction.thumbnail(np.zeros((size[1], size[0], 3), dtype=np.uint8), "x")
    assert Image.open(io.BytesIO(base64.b64decode(made.data))).size == shown
