"""A tree of runs says the same wherever it lies and whatever its folders are called: to compare and to the report."""

import shutil
from pathlib import Path

import pytest

from swbn_lightning.runs.compare import compare
from tests.made_runs import make_fit, make_test
from tests.report.page_reader import report
from tests.test_compare import episodes

pytestmark = pytest.mark.usefixtures("quick_pictures")


@pytest.fixture
def tree(tmp_path):
    """Two norms with two seeds: trainings that were stopped and went on, each tested twice; one older training."""
    root = tmp_path / "here" / "runs"
    for norm in ("bn", "swbn-fro"):
        old = make_fit(root / norm / "old" / "version_0", norm, 1)
        make_test(root / norm / "old" / "version_1", old, episodes=episodes(99))
        for seed in (1, 2):
            folder = root / norm / f"seed{seed}"
            first = make_fit(folder / "version_0", norm, seed, epochs=1, finished=False)
            second = make_fit(folder / "version_1", norm, seed, epochs=2, first=1, source=first)
            for number in (0, 1):
                values = episodes(100 * len(norm) + 10 * seed + number)
                make_test(folder / "test" / f"version_{number}", second, episodes=values)
    return root


def answers(root):
    """What compare says of the two norms, and what the report says of them together."""
    compared = [line._replace(label="") for line in compare([str(root / "bn"), str(root / "swbn-fro")])]
    page = report(root, output=root.parent / "page.html")
    means = [{key: value for key, value in row.items() if key != "runs"} for row in page.table("runs")]
    rows = [{key: value for key, value in row.items() if key != "run"} for row in page.table("run")]
    files = {name: [[v for k, v in row.items() if k not in ("line", "run")] for row in rows]
             for name, rows in page.links.items()}  # fmt: skip
    return compared, means, sorted(map(repr, rows)), files, page.tags.count("img")


def test_compare_and_report_agree(tree):
    (bn, swbn), means, rows, files, _ = answers(tree)
    assert bn.seeds == swbn.seeds == (1, 2) and len(rows) == 6
    assert [row["mean, %"] for row in means] == [f"{100 * line.accuracy.mean:.2f}" for line in (bn, swbn)]
    assert [row["95% of the mean, over seeds"] for row in means] == [
        f"± {100 * line.accuracy.half_width:.2f}" for line in (bn, swbn)
    ]
    assert sum("in 2 parts" in row for row in rows) == 4
    assert {row[-1] for row in files["curves.csv"]} == {"2"}


def move_all(root):
    return root.rename(root.parents[1] / "there")


def rename_a_training(root):
    (root / "bn" / "seed1").rename(root / "bn" / "zebra")


def move_a_part(root):
    shutil.move(root / "bn" / "seed1" / "version_1", root / "bn" / "apart")


def move_a_test(root):
    (root / "swbn-fro" / "seed2" / "test" / "version_1").rename(root / "swbn-fro" / "seed1" / "version_9")


def copy_a_training(root):
    shutil.copytree(root / "bn" / "seed1", root / "bn" / "copy")


def swap_names(root):
    (root / "bn" / "seed1").rename(root / "bn" / "x")
    (root / "bn" / "seed2").rename(root / "bn" / "seed1")
    (root / "bn" / "x").rename(root / "bn" / "seed2")


@pytest.mark.parametrize("change", [move_all, rename_a_training, move_a_part, move_a_test, copy_a_training, swap_names])
def test_moving_copying_and_renaming_change_no_answer(tree, change, monkeypatch, tmp_path):
    expected = answers(tree)
    root = change(tree) or tree
    monkeypatch.chdir(tmp_path)
    found = answers(root)
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


def test_one_label_a_path_is_as_given(tree):
    first, second = compare([str(tree / "bn" / "seed1"), f"ours={tree / 'bn' / 'seed2' / 'test'}"])
    assert (first.label, second.label) == (str(Path(tree / "bn" / "seed1")), "ours")
    assert second.seeds == (2,)
