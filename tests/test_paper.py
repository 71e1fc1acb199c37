"""The paper's figures: all tables have all their cells, and a few cells of each are as printed."""

from collections import Counter

import pytest

from swbn_lightning import NormFactory
from swbn_lightning.errors import InputError
from swbn_lightning.runs.paper import find_paper_figure, paper_figures

CELLS = {"table_time": 12, "table_time_train": 12, "table_cifar10": 20, "table_cifar100": 16, "table:imagenet": 24,
         "table:fs_results": 48}  # fmt: skip
PRINTED = [
    ({"metric": "layer_time", "norm": "iternorm", "setting": "d=2048"}, 475.34, "ms"),
    ({"metric": "epoch_time", "network": "resnetv2_164", "norm": "swbn-fro"}, 125, "s"),
    ({"metric": "epoch_time", "network": "resnetv2_101", "norm": "iternorm"}, 184, "min"),
    ({"dataset": "cifar-10", "network": "resnetv2_164", "norm": "swbn-fro", "metric": "accuracy"}, 94.59, "%"),
    ({"dataset": "cifar-100", "network": "wrn_40_10", "norm": "swbn-fro"}, 81.78, "%"),
    ({"network": "resnext101_32x4d", "norm": "swbn-kl", "metric": "top5"}, 94.51, "%"),
    ({"dataset": "mini-imagenet", "method": "PN", "norm": "swbn-kl", "setting": "5W5S"}, 73.74, "%"),
    ({"dataset": "cifar-fs", "method": "PN", "norm": "bn", "setting": "5W5S"}, 73.47, "%"),
]


def test_every_table_has_its_cells_and_none_twice():
    figures = paper_figures()
    assert Counter(figure.table for figure in figures) == CELLS and len(figures) == 132
    keys = [(f.table, f.dataset, f.network, f.method, f.norm, f.metric, f.setting) for f in figures]
    assert len(set(keys)) == len(keys)
    missing = [figure for figure in figures if figure.value is None]
    assert len(missing) == 7 and all((figure.note == "N/A") == (figure in missing) for figure in figures)
    assert {figure.norm for figure in figures} < set(NormFactory.names())


@pytest.mark.parametrize(("columns", "value", "unit"), PRINTED)
def test_a_cell_is_as_printed(columns, value, unit):
    found = find_paper_figure(**columns)
    assert (found.value, found.unit) == (value, unit)


def test_what_is_no_cell_or_several():
    assert find_paper_figure(dataset="imagenet", network="resnext50_32x4d", norm="iternorm", metric="top1") is None
    assert find_paper_figure(dataset="glyphs") is None
    with pytest.raises(InputError, match="8 of the paper's figures"):
        find_paper_figure(dataset="cifar-fs", method="CAN")
