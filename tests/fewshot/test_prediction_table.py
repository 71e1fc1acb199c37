"""The table of ``predict`` names every image in full, however wide the screen is."""

from types import SimpleNamespace

import pytest
import torch
from rich.text import Text

from fewshot.prediction import PredictionData, PredictionTable
from swbn_lightning.data import ImageSet

FOLDER = "/data/of the year 2025/a folder with a long name/and another one below it/photographs_of_birds"
FILES = (f"{FOLDER}/{'0' * 40}1.png", f"{FOLDER}/{'0' * 40}2.png", "q\x1b]0;x\x07.png")
SHOWN = (*FILES[:2], r"q\x1b]0;x\x07.png")  # in letters that steer no terminal
CLASSES = ("Troglodytes_hiemalis_and_its_kin_1", "Troglodytes_hiemalis_and_its_kin_2")


def table(capsys):
    """What is printed for three images, without its colours, and the cells of its rows, each in one piece."""
    support = ImageSet(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), CLASSES, "support")
    data = PredictionData(support, FILES, torch.zeros(3, 1, 4, 4, dtype=torch.uint8))
    trainer = SimpleNamespace(datamodule=SimpleNamespace(prediction=data), loggers=[], log_dir=None)
    shown = PredictionTable()
    probabilities = torch.tensor([[0.75, 0.25], [0.125, 0.875], [0.5, 0.5]])
    shown.on_predict_batch_end(trainer, None, probabilities, SimpleNamespace(numbers=torch.arange(3)))
    shown.teardown(trainer, None, "predict")
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
