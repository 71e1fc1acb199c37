"""What a study makes of its runs: the paper's figures beside them, and the lines of the table."""

from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from swbn_lightning.runs.study.command import Study
from swbn_lightning.runs.study.observations import COLUMNS, as_csv, as_table, observe
from swbn_lightning.runs.study.running import RunFailed
from swbn_lightning.runs.study.table import difference_of, lines_of
from swbn_lightning.runs.study.table import markdown as markdown_of
from tests.made_runs import change, identify
from tests.study.tiny import cells_of


def finished(tmp_path, model, data, result, norm="swbn-fro", epoch_seconds=(3.0, 1.0, 2.0), metrics=""):
    """What is observed of a run with this outcome, made by hand."""
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
    return [SimpleNamespace(**row) for row in observe(cell, reach=0.5)]


IMAGES = {"split": "test", "images": 10_000, "accuracy": 0.75, "ci95": 0.008, "loss": 1.0}
EPISODES = {
    "split": "test",
    "episodes": 600,
    "ways": 5,
    "queries": 15,
    "seed": 0,
    "accuracy": 0.6,
    "ci95": 0.01,
    "loss": 1.0,
}


def test_cifar_with_the_papers_accuracy_and_time(tmp_path):
    model = {"class_path": "classification.ImageClassifier", "init_args": {"backbone": "resnetv2_164"}}
    (row,) = finished(tmp_path, model, {"class_path": "classification.CIFAR10DataModule"}, IMAGES)
    assert (row.dataset, row.setting, row.metric, row.value) == ("cifar-10", "", "accuracy", 0.75)
    assert row.paper == pytest.approx(0.9459) and row.paper_note == "mean of 10 runs" and row.paper_epoch_seconds == 125
    assert row.epoch_seconds == 2.0 and row.distance_start is None and row.tested == 10_000


def test_imagenet_with_both_accuracies_and_minutes(tmp_path):
    data = {"class_path": "ImageNetDataModule"}
    model = {"class_path": "ImageClassifier", "init_args": {"backbone": "resnext101_32x4d"}}
    top1, top5 = finished(tmp_path, model, data, {**IMAGES, "top5": 0.9}, norm="swbn-kl")
    assert (top1.metric, top1.paper, top1.ci95) == ("accuracy", pytest.approx(0.7939), 0.008)
    assert (top5.metric, top5.value, top5.paper, top5.ci95) == ("top5", 0.9, pytest.approx(0.9451), None)
    (tmp_path / "other").mkdir()
    model["init_args"]["backbone"] = "resnetv2_101"
    (row,) = finished(tmp_path / "other", model, data, IMAGES, norm="iternorm:num_iterations=3")
    assert row.paper is None and row.paper_note == "" and row.paper_epoch_seconds == 184 * 60
    assert row.norm == "iternorm:num_iterations=3" and row.norm_args == '{"num_iterations": 3}'


@pytest.mark.parametrize(("shots", "backbone", "paper"), [(1, "resnet12", 0.5544), (5, "resnet12", 0.7374),
                                                           (1, "resnet20", None), (3, "resnet12", None)])  # fmt: skip
def test_the_papers_few_shot_figure_is_that_of_method_network_ways_and_shots(tmp_path, shots, backbone, paper):
    model = {"class_path": "fewshot.PrototypicalNetwork", "init_args": {"backbone": backbone}}
    data = {"class_path": "fewshot.EpisodicDataModule", "init_args": {"dataset": "mini-imagenet"}}
    (row,) = finished(tmp_path, model, data, {**EPISODES, "shots": shots}, norm="swbn-kl")
    assert (row.method, row.setting, row.paper, row.tested) == ("PN", f"5W{shots}S", pytest.approx(paper), 600)


def test_what_a_failed_test_leaves_is_shown(tmp_path, monkeypatch):
    model, data = {"class_path": "ImageClassifier"}, {"class_path": "GlyphDataModule"}
    finished(tmp_path, model, data, IMAGES)
    cells = cells_of(tmp_path / "config.yaml", norms=["swbn-fro"], runs=tmp_path / "runs")

    def fail(cell, wait):
        raise RunFailed("ended with 1; see output.txt\nmore")

    monkeypatch.setattr("swbn_lightning.runs.study.command.complete", fail)
    study = Study(cells, None, tmp_path, ["config.yaml", "--set", "a=b c"])
    study.run()
    text = (tmp_path / "study.md").read_text()
    assert "| `swbn-fro` | 1 | 75.00 |" in text and (tmp_path / "study.csv").read_text().count("\n") == 2
    assert "- config · resnet12 · swbn-fro · seed 0: ended with 1; see output.txt\n\n" in text
    assert "`swbn study config.yaml --set 'a=b c'`" in text and text.endswith("torch 2\n")


@pytest.mark.parametrize(("metrics", "split", "epochs"), [
    ("epoch,val/accuracy,train/accuracy\n0,0.4,0.9\n1,0.5,0.9\n2,0.6,0.9\n", "val", 2),
    ("epoch,train/accuracy\n0,0.1\n1,0.2\n2,0.6\n", "train", 3),
    ("epoch,val/accuracy,train/accuracy\n0,0.4,0.9\n", "val", None),
])  # fmt: skip
def test_epochs_are_counted_to_the_first_that_reaches(tmp_path, metrics, split, epochs):
    model, data = {"class_path": "ImageClassifier"}, {"class_path": "GlyphDataModule"}
    (row,) = finished(tmp_path, model, data, IMAGES, metrics=metrics)
    assert (row.reach, row.reach_split, row.epochs_to_reach) == (0.5, split, epochs)


def observation(norm, seed, value, **columns):
    usual = {"config": "a.yaml", "dataset": "cifar-10", "method": "ImageClassifier", "network": "wrn_28_10",
             "metric": "accuracy", "setting": "", "loss": 1.0, "episodes": (), "episode_set": ()}  # fmt: skip
    return {**usual, "norm": norm, "seed": seed, "value": value, **columns}


def groups(rows, seeds):
    return lines_of(as_table(rows))


def markdown(rows, seeds):
    return markdown_of(as_table(rows), seeds)


def cells_in(text):
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, _, *body = rows
    return [dict(zip(head, row, strict=True)) for row in body]


def test_differences_are_paired_by_seed():
    base, norm = {0: 0.60, 1: 0.64, 2: 0.58, 3: 0.9}, {1: 0.66, 0: 0.615, 2: 0.60, 7: 0.1}
    rows = [observation("bn", seed, value) for seed, value in base.items()]
    rows += [observation("swbn-kl", seed, value) for seed, value in norm.items()]
    first, second = groups(rows, seeds=4)
    assert difference_of(first).over_seeds is None
    found = difference_of(second).over_seeds
    expected = np.array([0.015, 0.02, 0.02])  # the seeds that both have
    assert found.mean == pytest.approx(expected.mean()) and found.number == 3
    assert found.half_width == pytest.approx(4.302653 * expected.std(ddof=1) / np.sqrt(3), rel=1e-6)
    line = cells_in(markdown(rows, seeds=5))[1]
    assert line["to `bn`, 95% over seeds"] == f"**+1.83 ± {100 * found.half_width:.2f}**"
    assert line["seeds"] == "4 of 5"
    values = 100 * np.array(list(norm.values()))
    assert line["mean ± std over seeds, %"] == f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"


def test_a_difference_that_may_be_nothing_is_not_bold_and_one_seed_has_no_interval():
    rows = [observation("bn", 0, 0.6), observation("bn", 1, 0.6)]
    rows += [observation("iternorm", 0, 0.59), observation("iternorm", 1, 0.62), observation("dbn", 1, 0.55)]
    lines = {line["norm"]: line for line in cells_in(markdown(rows, seeds=2))}
    difference = lines["`iternorm`"]["to `bn`, 95% over seeds"]
    assert difference == f"+0.50 ± {12.7062 * 1.5 * 2**0.5 / 2**0.5:.2f}"
    assert lines["`dbn`"]["to `bn`, 95% over seeds"] == "-5.00" and lines["`dbn`"]["seeds"] == "1 of 2"
    assert lines["`dbn`"]["mean ± std over seeds, %"] == "55.00"


def test_differences_over_episodes_are_of_the_same_episodes():
    rng = np.random.default_rng(1)
    scores = {(norm, seed): rng.random(40) for norm in ("bn", "swbn-fro") for seed in (0, 1)}
    same = (0, 5, 1, 15)
    rows = [
        observation(norm, seed, values.mean(), episodes=tuple(values), episode_set=same)
        for (norm, seed), values in scores.items()
    ]
    base, group = groups(rows, seeds=2)
    found = difference_of(group).over_episodes
    by_episode = np.mean([scores["swbn-fro", seed] - scores["bn", seed] for seed in (0, 1)], axis=0)
    assert found.mean == pytest.approx(by_episode.mean()) and found.number == 40
    assert found.half_width == pytest.approx(2.022691 * by_episode.std(ddof=1) / np.sqrt(40), rel=1e-6)
    assert difference_of(base).over_episodes is None
    # Other episodes, fewer of them, or none saved: no pairs.
    for other in ({"episode_set": (1, 5, 1, 15)}, {"episodes": rows[3]["episodes"][:-1]}, {"episodes": ()}):
        changed = [*rows[:3], {**rows[3], **other}]
        assert difference_of(groups(changed, seeds=2)[1]).over_episodes is None


def test_lines_are_compared_with_batchnorm_in_their_own_place():
    rows = []
    for network, gain in (("wrn_28_10", 0.1), ("resnet12", 0.2)):
        for metric, more in (("accuracy", 0.0), ("top5", 0.05)):
            place = {"network": network, "metric": metric}
            rows.append(observation("swbn-fro:step_size=1e-3", 0, 0.5 + gain + more, **place))
            rows.append(observation("bn", 0, 0.5, **place))
    rows.append(observation("swbn-fro", 0, 0.9, network="resnet20"))
    rows.append(observation("swbn-fro", 0, 0.9, config="b.yaml"))
    text = markdown(rows, seeds=1)
    first, second = text.split("## b.yaml")
    gains = [line["to `bn`, 95% over seeds"] for line in cells_in(first)]
    assert gains == ["+10.00", "–", "+15.00", "–", "+20.00", "–", "+25.00", "–", "–"]
    assert [line["setting"] for line in cells_in(first)][:4] == ["–", "–", "top5", "top5"]
    assert "to `bn`" not in second and "setting" not in second  # nothing to say there


def test_epochs_and_times():
    times = {
        "epoch_seconds": 4.0,
        "paper_epoch_seconds": 123.0,
        "fit_seconds": 90.0,
        "reach": 0.6,
        "reach_split": "train",
    }
    rows = [observation("bn", seed, 0.5, epochs_to_reach=epochs, **times) for seed, epochs in ((0, 3), (1, 4))]
    rows += [observation("dbn", seed, 0.5, epochs_to_reach=epochs, **times) for seed, epochs in ((0, None), (1, 6))]
    rows += [observation("iternorm", seed, 0.5, **times) for seed in (0, 1)]
    lines = cells_in(markdown(rows, seeds=2))
    assert [line["epochs to 60 % (train)"] for line in lines] == ["3.5", "6.0 (1 of 2)", "not reached"]
    assert lines[0]["an epoch, s"] == "4" and lines[0]["paper's epoch, s"] == "123" and lines[0]["fit, s"] == "90"


def test_the_file_has_a_column_for_everything_but_the_episodes():
    text = as_csv(as_table([observation("bn", 3, 0.25, episodes=(0.5, 0.0))]))
    head, line = text.splitlines()
    assert head.split(",") == list(COLUMNS) and "episodes" not in COLUMNS
    cells = dict(zip(COLUMNS, line.split(","), strict=True))
    assert cells["value"] == "0.25" and cells["seed"] == "3" and cells["paper"] == ""


def test_several_comparisons_are_counted_and_seeds_with_episodes_are_taken_together():
    rng = np.random.default_rng(3)
    same, rows = (0, 5, 1, 15), []
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
        assert "**" not in line["to `bn`, 95% over seeds"] + line["to `bn`, 95% over episodes"]
    assert "4 comparisons in one table" in text and "at 98.75 % too" in text


def test_seeds_that_agree_are_not_bold():
    rows = [observation(norm, seed, 0.6 + gain) for norm, gain in (("bn", 0.0), ("dbn", 0.05)) for seed in (0, 1)]
    text = markdown(rows, seeds=2)
    assert cells_in(text)[1]["to `bn`, 95% over seeds"] == "+5.00" and "**" not in text
