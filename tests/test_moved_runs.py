"""A tree of runs says the same to compare, report and study, wherever it lies and whatever its folders are called."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from swbn_lightning.runs.compare import compare
from swbn_lightning.runs.study.command import Study
from tests.made_runs import make_fit, make_test
from tests.report.page_reader import report
from tests.study.tiny import cells_of
from tests.test_compare import episodes

pytestmark = pytest.mark.usefixtures("quick_pictures")


CONFIG = {
    "model": {"class_path": "fewshot.PrototypicalNetwork", "init_args": {"backbone": "resnet20"}},
    "data": {"class_path": "fewshot.EpisodicDataModule", "init_args": {"dataset": "glyphs"}},
}
NETWORK = Path("c") / "resnet20"  # below the folder of runs


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A study of two norms with two seeds: trainings that were stopped and went on, each tested twice.

    Beside it one older training of a norm and seed. The folder with a folder a norm.
    """
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.setattr("swbn_lightning.runs.study.command.complete", lambda cell, wait: 0)
    cells = cells_of(tmp_path / "c.yaml", norms=["bn", "swbn-fro"], seeds=[1, 2], runs=tmp_path / "here" / "runs")
    for cell in cells:
        norm, seed = cell.norm.name, cell.seed
        if seed == 1:
            old = make_fit(cell.folder.parent / "old" / "version_0", norm, 1)
            make_test(cell.folder.parent / "old" / "version_1", old, episodes=episodes(99))
        first = make_fit(cell.folder / "version_0", norm, seed, epochs=1, finished=False)
        second = make_fit(cell.folder / "version_1", norm, seed, epochs=2, first=1, source=first)
        for number in (0, 1):
            values = episodes(100 * len(norm) + 10 * seed + number)
            test = make_test(cell.folder / cell.tests[0].name / f"version_{number}", second, episodes=values)
        cell.folder.joinpath("settings.json").write_text(json.dumps({"settings": cell.identity}, default=str))
        assert test.is_dir()
    return tmp_path / "here" / "runs" / NETWORK


def answers(root):
    """What compare says of the two norms, and what the report says of them together."""
    compared = [line._replace(label="") for line in compare([str(root / "bn"), str(root / "swbn-fro")])]
    page = report(root, output=root.parent / "page.html")
    means = [{key: value for key, value in row.items() if key != "runs"} for row in page.table("runs")]
    rows = [{key: value for key, value in row.items() if key != "run"} for row in page.table("run")]
    files = {name: [[v for k, v in row.items() if k not in ("line", "run")] for row in rows]
             for name, rows in page.links.items()}  # fmt: skip
    return compared, means, sorted(map(repr, rows)), files, page.tags.count("img")


def study_table(root, config):
    """The lines of the study's table."""
    runs = root.parents[len(NETWORK.parts) - 1]
    cells = cells_of(config, norms=["bn", "swbn-fro"], seeds=[1, 2], runs=runs)
    study = Study(cells, None, runs.parent / "out", [])
    study.run()
    assert not study.failures
    return [line.strip("| ").split(" | ") for line in study.text().splitlines() if line.startswith("| ")]


def test_compare_report_and_study_agree(tree, tmp_path):
    (bn, swbn), means, rows, files, _ = answers(tree)
    assert bn.seeds == swbn.seeds == (1, 2) and len(rows) == 6
    assert [row["mean, %"] for row in means] == [f"{100 * line.accuracy.mean:.2f}" for line in (bn, swbn)]
    assert [row["95% of the mean, over seeds"] for row in means] == [
        f"± {100 * line.accuracy.half_width:.2f}" for line in (bn, swbn)
    ]
    assert sum("in 2 parts" in row for row in rows) == 4
    assert {row[-1] for row in files["curves.csv"]} == {"2"}
    head, _, *lines = study_table(tree, tmp_path / "c.yaml")
    first, second = (dict(zip(head, line, strict=True)) for line in lines)
    for line, own in ((first, bn), (second, swbn)):
        assert line["mean ± std over seeds, %"] == f"{100 * own.accuracy.mean:.2f} ± {100 * own.accuracy.std:.2f}"
    for name in ("seeds", "episodes", "both"):
        own = getattr(swbn.difference, f"over_{name}")
        text = second[f"to `bn`, 95% over {name}"].strip("*† ")
        assert text == f"{100 * own.mean:+.2f} ± {100 * own.half_width:.2f}"


def seed_of(root, norm, seed):
    (folder,) = (root / norm).glob(f"seed{seed}-*")
    return folder


def rename_all(root):
    (seed_of(root, "bn", 1) / "version_1").rename(seed_of(root, "bn", 1) / "a_second_part")
    first, second, between = seed_of(root, "bn", 1), seed_of(root, "bn", 2), root / "bn" / "x"
    first.rename(between)  # they swap their names
    second.rename(first)
    between.rename(second)
    seed_of(root, "swbn-fro", 1).rename(root / "swbn-fro" / "zebra")
    runs = root.parents[len(NETWORK.parts) - 1]
    return runs.rename(runs.parents[1] / "there") / NETWORK


def copy_a_training(root):
    shutil.copytree(seed_of(root, "bn", 1), root / "bn" / "copy")
    return root


def move_parts_and_tests(root):
    shutil.move(seed_of(root, "bn", 1) / "version_1", root / "bn" / "apart")
    (test,) = seed_of(root, "swbn-fro", 2).glob("test-*/version_1")
    test.rename(seed_of(root, "swbn-fro", 1) / "version_9")
    return root


@pytest.mark.parametrize("change", [rename_all, copy_a_training, move_parts_and_tests])
def test_moving_copying_and_renaming_change_no_answer(tree, change, monkeypatch, tmp_path):
    expected, table = answers(tree), study_table(tree, tmp_path / "c.yaml")
    root = change(tree)
    monkeypatch.chdir(tmp_path)
    found = answers(root)
    if change is not move_parts_and_tests:  # a study's cells stay whole
        assert study_table(root, tmp_path / "c.yaml") == table
    for part, own in zip(found, expected, strict=True):
        if isinstance(own, dict):  # lines of files may stand in another order
            assert {name: sorted(map(repr, rows)) for name, rows in part.items()} == {
                name: sorted(map(repr, rows)) for name, rows in own.items()
            }
        else:
            assert part == own


def test_tests_stand_for_themselves_where_their_training_is_gone(tree):
    expected, means, *_ = answers(tree)
    for folder in tree.glob("*/seed*/version_*"):
        shutil.rmtree(folder)
    found, own, *_ = answers(tree)
    assert found == expected and own == means
