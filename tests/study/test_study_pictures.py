"""The pictures of a study, from metrics and observations made by hand."""

import csv

import numpy as np
from PIL import Image

from swbn_lightning.runs.study.cells import short_names
from swbn_lightning.runs.study.observations import as_table
from swbn_lightning.runs.study.pictures import accuracies, curve_groups, draw
from tests.made_runs import identify
from tests.study.tiny import GLYPHS, cells_of


def logged(cell, version, epochs):
    folder = cell.folder / f"version_{version}"
    identify(folder, source=cell.folder / "version_0" if version else None)
    (folder / "results.json").write_text('{"completed": true}')
    lines = [f"{epoch},{cell.seed + epoch / 8},0.5" for epoch in epochs]
    (folder / "metrics.csv").write_text("\n".join(["epoch,val/loss,val/accuracy", *lines, ""]))


def row(norm, seed, value, metric="accuracy", network="resnet20", config=str(GLYPHS)):
    return {"config": config, "network": network, "norm": norm, "seed": seed, "metric": metric, "setting": "",
            "value": value, "ci95": 0.01}  # fmt: skip


def test_what_is_drawn(tmp_path):
    cells = cells_of(GLYPHS, norms=["bn", "swbn-fro"], seeds=[0, 2], runs=tmp_path / "runs")
    for cell in cells:
        logged(cell, 0, [0, 1])
        logged(cell, 1, [1, 2])  # taken up again from its first epoch
    rows = [row("bn", 0, 0.5), row("bn", 2, 0.75), row("swbn-fro", 0, 0.5), row("bn", 0, 0.9, metric="top5")]
    assert draw(cells, as_table(rows), tmp_path) == [tmp_path / "curves.png", tmp_path / "accuracy.png"]
    with (tmp_path / "curves.csv").open() as file:
        curves = [line for line in csv.DictReader(file) if line["quantity"] == "val/loss"]
    assert [(line["part"], line["line"], line["epochs_trained"]) for line in curves] == [
        ("glyphs, resnet20", norm, str(epoch)) for norm in ("bn", "swbn-fro") for epoch in (1, 2, 3)
    ]
    for number, line in enumerate(curves[:3]):
        values = [0 + number / 8, 2 + number / 8]
        assert float(line["mean"]) == np.mean(values) and float(line["std"]) == np.std(values, ddof=1)
        assert line["runs"] == "2"
    with (tmp_path / "accuracy.csv").open() as file:
        written = [(line["line"], line["setting"], line["run"], line["value"]) for line in csv.DictReader(file)]
    assert written == [
        ("bn", "glyphs", "seed 0", "0.5"), ("bn", "glyphs", "seed 2", "0.75"), ("bn", "glyphs", "mean", "0.625"),
        ("swbn-fro", "glyphs", "seed 0", "0.5"),
    ]  # fmt: skip
    assert all(Image.open(tmp_path / f"{name}.png").width > 700 for name in ("curves", "accuracy"))


def test_configurations_of_one_file_name_are_told_apart(tmp_path):
    paths = []
    for folder in ("cifar10", "cifar100"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "wrn.yaml")
        paths[-1].write_text(GLYPHS.read_text())
    cells = [cell for path in paths for cell in cells_of(str(path), networks=["resnet20"], norms=["bn"], runs=tmp_path)]
    assert list(curve_groups(cells)) == ["cifar10/wrn, resnet20", "cifar100/wrn, resnet20"]
    rows = [row("bn", 0, 0.5, config=str(path)) for path in paths]
    assert [one.setting for one in accuracies(as_table(rows))] == ["cifar10/wrn", "cifar100/wrn"]
    assert short_names(["a/b/c.yaml", "c.yaml", "x/b/c.yaml", "d.yaml"]) == {
        "a/b/c.yaml": "a/b/c", "c.yaml": "c", "x/b/c.yaml": "x/b/c", "d.yaml": "d",
    }  # fmt: skip


def test_networks_are_named_where_there_are_several_and_nothing_is_drawn_of_nothing(tmp_path):
    cells = cells_of(GLYPHS, networks=["resnet20", "resnet32"], norms=["bn"], runs=tmp_path / "runs")
    assert list(curve_groups(cells)) == ["glyphs, resnet20", "glyphs, resnet32"]
    found = accuracies(as_table([row("bn", 0, 0.5), row("bn", 0, 0.5, network="resnet32")]))
    assert [one.label for one in found] == ["resnet20, bn", "resnet32, bn"]
    assert draw(cells, as_table([]), tmp_path) == [] and not list(tmp_path.glob("*.*"))
