"""The paper's figures: every cell read a second time, from the paper's source where it is at hand."""

import re
from collections import Counter

import pytest

from swbn_lightning.errors import InputError
from swbn_lightning.runs.paper import find_paper_figure, paper_figures
from tests.conftest import REAL_DATA

SOURCE = REAL_DATA.parent / "paper" / "swbn-cvpr2021.tex"

ROWS = {"table_time": 12, "table_time_train": 12, "table_cifar10": 20, "table_cifar100": 16, "table:imagenet": 24,
        "table:fs_results": 48}  # fmt: skip
NORMS = {"BatchNorm": "bn", "BN Baseline": "bn", "BN": "bn", "DBN": "dbn", "IterNorm": "iternorm",
         "SWBN-KL": "swbn-kl", r"\skl": "swbn-kl", "SWBN-Fro": "swbn-fro", r"\sfro": "swbn-fro"}  # fmt: skip
NETWORKS = {"ResNetV2-56": "resnetv2_56", "ResNetV2-164": "resnetv2_164", "WRN-28-10": "wrn_28_10",
            "WRN-40-10": "wrn_40_10", "ResNetV2-50": "resnetv2_50", "ResNetV2-101": "resnetv2_101",
            "ResNet-50": "resnet50", "ResNeXt-50": "resnext50_32x4d", "ResNeXt-101": "resnext101_32x4d",
            "Resnet12": "resnet12", "Resnet20": "resnet20"}  # fmt: skip


def test_every_table_has_its_cells_and_none_twice():
    figures = paper_figures()
    assert Counter(figure.table for figure in figures) == ROWS and len(figures) == 132
    keys = [(f.table, f.dataset, f.network, f.method, f.norm, f.metric, f.setting) for f in figures]
    assert len(set(keys)) == len(keys)
    missing = [figure for figure in figures if figure.value is None]
    assert len(missing) == 7 and all((figure.note == "N/A") == (figure in missing) for figure in figures)
    assert {figure.norm for figure in figures} == set(NORMS.values())
    assert {figure.network for figure in figures} == {*NETWORKS.values(), ""}
    assert {figure.section for figure in figures} == {"4.1.4", "4.2.1", "4.2.2", "4.3"}


def test_the_reader():
    wide = find_paper_figure(dataset="cifar-100", network="wrn_40_10", norm="swbn-fro")
    assert (wide.value, wide.unit, wide.note) == (81.78, "%", "mean of 10 runs")
    few = find_paper_figure(dataset="cifar-fs", method="PN", norm="bn", setting="5W5S")
    assert (few.value, few.network, few.section) == (73.47, "resnet20", "4.3")
    assert find_paper_figure(dataset="imagenet", network="resnext50_32x4d", norm="iternorm", metric="top1") is None
    assert find_paper_figure(dataset="glyphs") is None
    with pytest.raises(InputError, match="8 of the paper's figures"):
        find_paper_figure(dataset="cifar-fs", method="CAN")


@pytest.fixture(scope="module")
def source():
    if not SOURCE.is_file():
        pytest.skip(f"the paper's source is not at {SOURCE}")
    return SOURCE.read_text(encoding="utf-8")


def tabular(source, label):
    """Rows of cells of the table that a label follows."""
    before = source[: source.index(rf"\label{{{label}}}")]
    body = before[before.rindex(r"\begin{tabular}") : before.rindex(r"\end{tabular}")]
    body = body[body.index("\n") :]  # the columns' alignment stands in the first line
    body = re.sub(r"\\hline|\\cline\{[^}]*\}", " ", body)
    # The one row that breaks inside a cell; backslashes there end no row.
    body = re.sub(r"\\shortstack\[c\]\{mini-\\\\ Imagenet\}", "mini-Imagenet", body)
    return [[" ".join(cell.split()) for cell in row.split("&")] for row in body.split(r"\\") if row.strip()]


def unwrapped(cell):
    """A cell without what spans and highlights it, and the key it cites."""
    cite = re.search(r"~\\cite\{(\w+)\}", cell)
    cell = re.sub(r"~\\cite\{\w+\}|\\small", "", cell).strip()
    for command in (r"\\multicolumn\{\d\}\{[^}]*\}", r"\\multirow\{\d\}\{\*\}", r"\\bf", r"\\textbf"):
        cell = re.sub(rf"^{command}\{{(.*)\}}$", r"\1", cell).strip()
    return re.sub(r"^\\bf\{([^}]*)\}", r"\1", cell), cite.group(1) if cite else ""


def figure(cell):
    """Value (None for N/A), unit and note of a cell, as the file should have them without the number of runs."""
    text, cite = unwrapped(cell)
    note = f"cited from {cite}" if cite else ""
    if text == "N/A":
        return None, "", "N/A"
    if starred := re.fullmatch(r"\$([\d.]+)\^\*\$", text):
        return float(starred.group(1)), "", "released code of huang2019iterative"
    number, unit = re.fullmatch(r"([\d.]+)(ms|min|s|)", text).groups()
    return float(number), unit, note


def layer_times(rows):
    head, *body = rows
    channels = [unwrapped(cell)[0] for cell in head[1:]]
    for norm, *cells in body:
        for setting, cell in zip(channels, cells, strict=True):
            yield ("", "", "", NORMS[norm], "layer_time", setting), figure(cell)


def epoch_times(rows):
    dataset = setting = norms = None
    for first, *cells in rows:
        if gpus := re.fullmatch(r"(.*) \((\d GPUs?)\)", first):
            dataset, setting = gpus.group(1).lower(), gpus.group(2)
            norms = [NORMS[cell] for cell in cells]
            continue
        for norm, cell in zip(norms, cells, strict=True):
            yield (dataset, NETWORKS[first], "", norm, "epoch_time", setting), figure(cell)


def cifar(dataset):
    def read(rows):
        head, *body = rows
        norms = [NORMS[unwrapped(cell)[0]] for cell in head[1:]]
        for network, *cells in body:
            for norm, cell in zip(norms, cells, strict=True):
                yield (dataset, NETWORKS[network], "", norm, "accuracy", ""), figure(cell)

    return read


def imagenet(rows):
    head, under, *body = rows
    norms = [NORMS[unwrapped(cell)[0]] for cell in head[1:]]
    columns = [(norms[number // 2], cell.replace("-", "")) for number, cell in enumerate(under[1:])]
    for network, *cells in body:
        for (norm, metric), cell in zip(columns, cells, strict=True):
            yield ("imagenet", NETWORKS[network], "", norm, metric, ""), figure(cell)


def few_shot(rows):
    head, under, *body = rows
    norms = [NORMS[unwrapped(cell)[0]] for cell in head[3:]]
    columns = [(norms[number // 2], cell) for number, cell in enumerate(under[3:])]
    dataset = network = ""
    for first, method, backbone, *cells in body:  # the first and the third cell span three rows
        dataset, network = unwrapped(first)[0].lower() or dataset, NETWORKS.get(unwrapped(backbone)[0], network)
        for (norm, setting), cell in zip(columns, cells, strict=True):
            yield (dataset, network, unwrapped(method)[0], norm, "accuracy", setting), figure(cell)


READERS = {"table_time": layer_times, "table_time_train": epoch_times, "table_cifar10": cifar("cifar-10"),
           "table_cifar100": cifar("cifar-100"), "table:imagenet": imagenet, "table:fs_results": few_shot}  # fmt: skip


@pytest.mark.parametrize("label", READERS)
def test_every_cell_is_the_papers(source, label):
    read = dict(READERS[label](tabular(source, label)))
    assert len(read) == ROWS[label]
    ours = {
        (f.dataset, f.network, f.method, f.norm, f.metric, f.setting): f for f in paper_figures() if f.table == label
    }
    assert set(ours) == set(read)
    for key, (value, unit, note) in read.items():
        assert ours[key].value == value, key
        assert ours[key].unit == (unit or "%"), key
        if note:
            assert ours[key].note.startswith(note), key
        else:
            assert not re.search("N/A|cited|released", ours[key].note), key


def test_the_numbers_of_runs_are_the_papers(source):
    texts = {
        "table_time": "averaged over $100$ runs", "table_time_train": "averaged over $3$ runs",
        "table_cifar10": r"All numbers for \ac{SWBN} models are averaged test accuracies (\%) of $10$ runs",
        "table_cifar100": r"All numbers for SWBN models are average test accuracies (\%) of $10$ runs",
        "table:imagenet": "Single run results",
    }  # fmt: skip
    for label, text in texts.items():
        before = source[: source.index(rf"\label{{{label}}}")]
        assert text in before[before.rindex(r"\caption{") :], label
        runs = re.sub(r"\D", "", text.replace(r"(\%)", "")) or "single"
        own = [f for f in paper_figures() if f.table == label and (f.norm.startswith("swbn") or "time" in label)]
        for found in own:
            assert found.note == (f"mean of {runs} runs" if runs != "single" else "single run"), found
    assert all(not found.note for found in paper_figures() if found.table == "table:fs_results")
    wide = [f for f in paper_figures() if f.dataset == "cifar-100" and f.network.startswith("wrn") and f.norm == "bn"]
    assert "are the best single run results" in source and len(wide) == 2
    assert all(found.note.endswith("; best single run") for found in wide)
