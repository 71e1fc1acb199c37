"""What a study makes of its runs: the paper's figures beside them, and the lines of the table."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from swbn_lightning.runs.study.command import Study
from swbn_lightning.runs.study.observations import as_table, observe
from swbn_lightning.runs.study.running import RunFailed
from swbn_lightning.runs.study.table import difference_of, lines_of
from swbn_lightning.runs.study.table import markdown as markdown_of
from tests.made_runs import change, identify, make_image_test
from tests.study.tiny import cells_of


def finished(tmp_path, model, data, result, norm="swbn-fro", epoch_seconds=(3.0, 1.0, 2.0), metrics=""):
    """What is observed of a run with this outcome, made by hand."""
    tmp_path.mkdir(exist_ok=True)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": model, "data": data}))
    (cell,) = cells_of(config, norms=[norm], runs=tmp_path / "runs")
    version, test = cell.folder / "version_0", cell.folder / cell.tests[0].name / "version_0"
    (version / "checkpoints").mkdir(parents=True)
    identify(version, "fit", environment={"torch": "2", "seed": 0})
    identify(test, "test", source=version)
    (version / "metrics.csv").write_text(metrics)
    checkpoint = version / "checkpoints" / "best.ckpt"
    checkpoint.write_bytes(b"")
    told = {"completed": True, "fit_seconds": 9.0, "epoch_seconds": list(epoch_seconds)}
    change(version / "results.json", **told, best_checkpoint="checkpoints/best.ckpt")
    change(test / "results.json", results=[result], tested_checkpoint=str(checkpoint))
    if "images_id" in result:
        make_image_test(test, version, [0, 1, 1, 0], [0, 1, 0, 0])
        change(test / "results.json", results=[result], tested_checkpoint=str(checkpoint))
    if "episodes_id" in result:
        (test / "episodes.csv").write_text("episode,accuracy\n0,0.5\n1,1\n")
    return [SimpleNamespace(**row) for row in observe(cell, reach=0.5)]


IMAGES = {"split": "test", "images": 10_000, "accuracy": 0.75, "ci95": 0.008, "loss": 1.0}
EPISODES = {**IMAGES, "episodes": 600, "ways": 5, "queries": 15, "seed": 0}
GLYPHS = {"class_path": "ImageClassifier"}, {"class_path": "GlyphDataModule"}


def test_the_papers_figures_stand_beside_the_networks(tmp_path):
    model = {"class_path": "classification.ImageClassifier", "init_args": {"backbone": "resnetv2_164"}}
    (row,) = finished(tmp_path / "a", model, {"class_path": "classification.CIFAR10DataModule"}, IMAGES)
    assert (row.dataset, row.setting, row.metric, row.value) == ("cifar-10", "", "accuracy", 0.75)
    assert row.paper == pytest.approx(0.9459) and row.paper_note == "mean of 10 runs"
    assert row.epoch_seconds == 2.0 and row.distance_start is None and row.tested == 10_000
    data = {"class_path": "ImageNetDataModule"}
    model = {"class_path": "ImageClassifier", "init_args": {"backbone": "resnext101_32x4d"}}
    top1, top5 = finished(tmp_path / "b", model, data, {**IMAGES, "top5": 0.9}, norm="swbn-kl")
    assert (top1.metric, top1.paper, top1.ci95) == ("accuracy", pytest.approx(0.7939), 0.008)
    assert (top5.metric, top5.value, top5.paper, top5.ci95) == ("top5", 0.9, pytest.approx(0.9451), None)
    (row,) = finished(tmp_path / "c", model, data, IMAGES, norm="dbn:num_groups=3")
    assert row.paper is None and row.paper_note == "" and row.norm_args == '{"num_groups": 3}'


def test_classifiers_are_paired_by_the_images_that_their_tests_saved(tmp_path):
    (row,) = finished(tmp_path / "a", *GLYPHS, {**IMAGES, "images_id": "one"})
    assert row.episodes == (1, 1, 0, 1) and row.episode_set == "one"
    (row,) = finished(tmp_path / "b", *GLYPHS, {**IMAGES, "images_id": ["odd"]})
    assert row.episode_set == "['odd']"
    (row,) = finished(tmp_path / "c", *GLYPHS, IMAGES)  # of a version that saved none
    assert row.episodes == ()


def test_few_shot_tests_are_paired_by_the_id_of_their_episodes(tmp_path):
    """As ``swbn compare`` does: of other classes or image files the same seed draws other episodes."""
    for given, episodes in (("one", (0.5, 1)), ("other", (0.5, 1)), ("", ())):
        (row,) = finished(tmp_path / (given or "none"), *GLYPHS, {**EPISODES, "shots": 1, "episodes_id": given})
        assert (row.episode_set, row.episodes) == (given, episodes)


@pytest.mark.parametrize(
    ("shots", "backbone", "paper"), [(5, "resnet12", 0.7374), (1, "resnet20", None), ("1-5", "resnet12", None)]
)
def test_the_papers_few_shot_figure_is_that_of_method_network_ways_and_shots(tmp_path, shots, backbone, paper):
    model = {"class_path": "fewshot.PrototypicalNetwork", "init_args": {"backbone": backbone}}
    data = {"class_path": "fewshot.EpisodicDataModule", "init_args": {"dataset": "mini-imagenet"}}
    (row,) = finished(tmp_path, model, data, {**EPISODES, "shots": shots}, norm="swbn-kl")
    assert (row.method, row.setting, row.paper, row.tested) == ("PN", f"5W{shots}S", pytest.approx(paper), 600)


def test_what_a_failed_test_leaves_is_shown(tmp_path, monkeypatch):
    finished(tmp_path, *GLYPHS, IMAGES)
    cells = cells_of(tmp_path / "config.yaml", norms=["swbn-fro"], runs=tmp_path / "runs")
    fail = Mock(side_effect=RunFailed("ended with 1; see output.txt\nmore"))
    monkeypatch.setattr("swbn_lightning.runs.study.command.complete", fail)
    study = Study(cells, None, tmp_path, ["config.yaml", "--set", "a=b c"])
    study.run()
    text = (tmp_path / "study.md").read_text()
    assert "| `swbn-fro` | 1 | 75.00 |" in text and (tmp_path / "study.csv").read_text().count("\n") == 2
    assert "- config · resnet12 · swbn-fro · seed 0: ended with 1; see output.txt\n\n" in text
    assert "`swbn study config.yaml --set 'a=b c'`" in text and text.endswith("torch 2\n")


@pytest.mark.parametrize(("metrics", "split", "epochs"), [
    ("epoch,val/accuracy,train/accuracy\n0,0.4,0.9\n1,0.5,0.9\n2,0.6,0.9\n", "val", 2),
    ("epoch,train/accuracy\n0,0.1\n1,0.2\n", "train", None),
])  # fmt: skip
def test_epochs_are_counted_to_the_first_that_reaches(tmp_path, metrics, split, epochs):
    (row,) = finished(tmp_path, *GLYPHS, IMAGES, metrics=metrics)
    assert (row.reach, row.reach_split, row.epochs_to_reach) == (0.5, split, epochs)


def observation(norm, seed, value, **columns):
    usual = {"config": "a.yaml", "dataset": "cifar-10", "method": "ImageClassifier", "network": "wrn_28_10",
             "metric": "accuracy", "setting": "", "loss": 1.0, "episodes": (), "episode_set": ""}  # fmt: skip
    return {**usual, "norm": norm, "seed": seed, "value": value, **columns}


def groups(rows):
    return lines_of(as_table(rows))


def markdown(rows, seeds):
    return markdown_of(as_table(rows), seeds)


def cells_in(text):
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, _, *body = rows
    return [dict(zip(head, row, strict=True)) for row in body]


def test_differences_are_paired_by_seed_and_bold_where_they_leave_out_zero():
    base, norm = {0: 0.60, 1: 0.64, 2: 0.58, 3: 0.9}, {1: 0.66, 0: 0.615, 2: 0.60, 7: 0.1}
    other = {0: 0.59, 1: 0.66}
    rows = [observation("bn", seed, value) for seed, value in base.items()]
    rows += [observation("swbn-kl", seed, value) for seed, value in norm.items()]
    rows += [observation("iternorm", seed, value) for seed, value in other.items()]
    rows += [observation("dbn", 1, 0.59)]
    first, second, *_ = groups(rows)
    assert difference_of(first).over_seeds is None
    found = difference_of(second).over_seeds
    expected = np.array([0.015, 0.02, 0.02])  # the seeds that both have
    assert found.mean == pytest.approx(expected.mean()) and found.number == 3
    assert found.half_width == pytest.approx(4.302653 * expected.std(ddof=1) / np.sqrt(3), rel=1e-6)
    _, kl, iternorm, dbn = cells_in(markdown(rows, seeds=5))
    assert kl["to `bn`, 95% over seeds"].startswith(f"**+1.83 ± {100 * found.half_width:.2f}**")
    values = 100 * np.array(list(norm.values()))
    assert kl["mean ± std over seeds, %"] == f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
    assert kl["seeds"] == "4 of 5" and dbn["seeds"] == "1 of 5"
    assert iternorm["to `bn`, 95% over seeds"] == f"+0.50 ± {12.7062 * 1.5:.2f}"
    assert dbn["to `bn`, 95% over seeds"] == "-5.00" and dbn["mean ± std over seeds, %"] == "59.00"


def test_differences_over_episodes_are_of_the_same_episodes():
    rng = np.random.default_rng(1)
    scores = {(norm, seed): rng.random(40) for norm in ("bn", "swbn-fro") for seed in (0, 1)}
    same = "these"
    rows = [
        observation(norm, seed, values.mean(), episodes=tuple(values), episode_set=same)
        for (norm, seed), values in scores.items()
    ]
    base, group = groups(rows)
    found = difference_of(group).over_episodes
    by_episode = np.mean([scores["swbn-fro", seed] - scores["bn", seed] for seed in (0, 1)], axis=0)
    assert found.mean == pytest.approx(by_episode.mean()) and found.number == 40
    assert found.half_width == pytest.approx(2.022691 * by_episode.std(ddof=1) / np.sqrt(40), rel=1e-6)
    assert difference_of(base).over_episodes is None
    # Other episodes, fewer of them, or none saved: no pairs.
    for other in ({"episode_set": "others"}, {"episodes": rows[3]["episodes"][:-1]}, {"episodes": ()}):
        changed = [*rows[:3], {**rows[3], **other}]
        assert difference_of(groups(changed)[1]).over_episodes is None


def test_lines_are_compared_with_batchnorm_in_their_own_place():
    rows = []
    for network, metric, gain in (("wrn", "accuracy", 0.1), ("wrn", "top5", 0.15), ("resnet12", "accuracy", 0.2)):
        place = {"network": network, "metric": metric}
        rows += [observation("swbn-fro:step_size=1e-3", 0, 0.5 + gain, **place), observation("bn", 0, 0.5, **place)]
    rows.append(observation("swbn-fro", 0, 0.9, network="resnet20"))
    rows.append(observation("swbn-fro", 0, 0.9, config="b.yaml"))
    first, second = markdown(rows, seeds=1).split("## b.yaml")
    gains = [line["to `bn`, 95% over seeds"] for line in cells_in(first)]
    assert gains == ["+10.00", "–", "+15.00", "–", "+20.00", "–", "–"]
    assert [line["setting"] for line in cells_in(first)][:4] == ["–", "–", "top5", "top5"]
    assert "to `bn`" not in second and "setting" not in second  # nothing to say there


def test_epochs_and_times():
    times = {"epoch_seconds": 4.0, "fit_seconds": 90.0, "reach": 0.6, "reach_split": "train"}
    rows = [observation("bn", seed, 0.5, epochs_to_reach=epochs, **times) for seed, epochs in ((0, 3), (1, 4))]
    rows += [observation("dbn", seed, 0.5, epochs_to_reach=epochs, **times) for seed, epochs in ((0, None), (1, 6))]
    rows += [observation("iternorm", seed, 0.5, **times) for seed in (0, 1)]
    lines = cells_in(markdown(rows, seeds=2))
    assert [line["epochs to 60 % (train)"] for line in lines] == ["3.5", "6.0 (1 of 2)", "not reached"]
    assert lines[0]["an epoch, s"] == "4" and lines[0]["fit, s"] == "90"


def test_several_comparisons_are_counted_and_seeds_with_episodes_are_taken_together():
    rng = np.random.default_rng(3)
    same, rows = "these", []
    for norm, gain in (("bn", 0.0), ("swbn-fro", 0.2), ("swbn-kl", 0.0), ("dbn", 0.0), ("iternorm", -0.2)):
        luck = rng.normal(0, 0.1, 400)
        for seed in (0, 1, 2):
            values = 0.5 + gain + luck + rng.normal(0, 0.02, 400)
            rows.append(observation(norm, seed, values.mean(), episodes=tuple(values), episode_set=same))
    text = markdown(rows, seeds=3)
    lines = {line["norm"].strip("`"): line for line in cells_in(text.partition("\n\nBold")[0])}
    for norm, line in lines.items():
        over_both = line["to `bn`, 95% over both"]
        assert over_both.endswith("** †") == (norm in ("swbn-fro", "iternorm"))
        assert "**" not in line["to `bn`, 95% over seeds"] + line["to `bn`, 95% over images"]
    assert "4 comparisons in one table" in text and "at 98.75 % too" in text
