"""The command, as a user meets it: every configuration, a whole run, and input that cannot work."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli import main
from swbn_lightning.runs.checkpoints import find_checkpoint

REPOSITORY = Path(__file__).parents[1]
# Those of the paper need other data (tests/classification, tests/fewshot), those of scaling more machines.
CONFIGS = sorted(p for p in (REPOSITORY / "configs").rglob("*.yaml") if not {"paper", "scaling"} & set(p.parts))
CIFAR_FS = REPOSITORY / "configs" / "fewshot" / "cifar_fs_prototypical.yaml"
SHORT = [
    "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--data.train.ways=5", "--data.train.shots=1",
    "--data.train.episodes=3", "--data.val.episodes=50", "--data.test.episodes=50", "--data.val.queries=5",
    "--data.test.queries=5", "--whiteness.num_images=64",
]  # fmt: skip
SMALL = ["--model.backbone=mlp", "--model.backbone_args={hidden: [16, 16], in_channels: 3, image_size: 32}"]


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(REPOSITORY / "configs")))
def test_every_configuration_runs_a_step(config, tiny_data):
    arguments = ["--config", str(config), "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"]
    arguments += ["--whiteness.num_images=64", *tiny_data(config)]
    main(["fit", *arguments])
    main(["test", *arguments])
    assert not list(Path().iterdir())  # no logs, no checkpoints


@pytest.fixture(scope="module")
def run(tiny_cifar100, tmp_path_factory):
    """A short training on tiny data: its folder, and the arguments that made it."""
    root = tmp_path_factory.mktemp("work")
    arguments = ["--config", str(CIFAR_FS), "--data.root", str(tiny_cifar100), "--run.root", str(root / "runs"), *SHORT]
    arguments += SMALL
    main(["train", *arguments])  # the alias of fit
    return root / "runs" / "cifar_fs_prototypical", [*arguments, "--whiteness.pictures=false"]  # seconds a run


def results(folder):
    return json.loads((folder / "results.json").read_text())


def newest(folder):
    return max(folder.glob("version_*"), key=lambda path: int(path.name[8:]))


def test_a_run_leaves_what_one_needs(run):
    folder = run[0] / "version_0"
    told = results(folder)
    assert (folder / "config.yaml").is_file()
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert (folder / told["best_checkpoint"]).is_file()
    (best, *_) = told["results"]
    assert best["classes"] == 16 and best["images"] == 16 * 24 and best["episodes"] == 50
    assert 0.2 < best["accuracy"] <= 1 and 0 < best["ci95"] < 0.2
    assert [entry["epoch"] for entry in told["whiteness"]] == [-1, 0, 1]
    assert told["completed"] and len(told["epoch_seconds"]) == 2
    assert 0 < sum(told["epoch_seconds"]) < told["fit_seconds"]

    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    distances = [float(row["whiteness/distance/mean"]) for row in rows if row["whiteness/distance/mean"]]
    assert distances == pytest.approx([entry["distance"] for entry in told["whiteness"]], rel=1e-6)
    layers = [name for name in rows[0] if name.startswith("whiteness/rms/") and name != "whiteness/rms/mean"]
    assert len(layers) == 2 and all(name.startswith("whiteness/rms/backbone.") for name in layers)
    assert max(float(row["val/accuracy"] or 0) for row in rows) == pytest.approx(best["accuracy"], rel=1e-5)

    events = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    assert {"val/accuracy", "train/loss", "whiteness/distance/mean"} <= set(events)


def test_a_run_in_the_same_place_gets_a_folder_of_its_own_and_the_same_figures(run):
    folder, arguments = run
    main(["fit", *arguments])
    first, second = (results(folder / f"version_{n}") for n in (0, 1))
    assert first["results"] == second["results"] and first["whiteness"] == second["whiteness"]


def test_a_single_episode_of_other_shots_has_no_interval(run, capsys):
    folder, arguments = run
    other = ["--data.test.episodes=1", "--data.test.shots=5", "--data.test.ways=10"]
    main(["test", *arguments, *other, "--ckpt_path", str(folder / "version_0")])
    (row,) = results(newest(folder))["results"]
    assert (row["ways"], row["shots"], row["episodes"]) == (10, 5, 1) and row["std"] is None and row["ci95"] is None
    shown = f"{100 * row['accuracy']:.2f}"
    assert f"{shown} ± – %" in capsys.readouterr().out
    main(["report", str(newest(folder))])
    assert f">{shown}</td>" in (newest(folder) / "report.html").read_text(encoding="utf-8")


def accuracy_in_a_new_process(arguments):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "cli.py"), "test", *arguments], capture_output=True, text=True, check=True
    )
    (folder,) = re.findall(r"run folder: (.*)", done.stdout)
    return results(Path(folder))


@pytest.mark.slow  # three interpreters
def test_test_gives_the_same_digits_in_every_process(run, capsys):
    folder, arguments = run
    path = str(folder / "version_0")
    first = accuracy_in_a_new_process([*arguments, "--ckpt_path", path])
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.eval_batch_size=101"]
    second = accuracy_in_a_new_process([*arguments, "--ckpt_path", path, *two])
    (a,), (b,) = first["results"], second["results"]
    assert a["accuracy"] == b["accuracy"] and a["ci95"] == b["ci95"] and a["images"] == b["images"] == 20 * 24
    # The table of a test shows how white the trained layers became.
    whole = results(folder / "version_0")["whiteness"]
    assert first["whiteness"] == whole[: len(first["whiteness"])] and len(first["whiteness"]) >= 2  # to the best epoch


def test_a_test_leaves_the_accuracy_of_every_episode_and_class(run):
    folder, arguments = run
    found = []
    for extra in ("--data.eval_batch_size=37", "--data.test.episodes=20"):
        main(["test", *arguments, extra, "--ckpt_path", str(folder / "version_0")])
        (row,) = results(newest(folder))["results"]
        accuracies = [float(line["accuracy"]) for line in csv.DictReader((newest(folder) / "episodes.csv").open())]
        assert len(accuracies) == row["episodes"]
        assert np.mean(accuracies) == pytest.approx(row["accuracy"], abs=1e-12)
        assert np.std(accuracies, ddof=1) == pytest.approx(row["std"], abs=1e-12)
        found.append((row["episodes_id"], accuracies))
        classes = list(csv.DictReader((newest(folder) / "classes.csv").open()))
        assert len(classes) == 20 and len({line["name"] for line in classes}) == 20
    assert found[1] == (found[0][0], found[0][1][:20])
    # Every class is drawn about equally often, so the mean of theirs is near the episodes'.
    assert np.mean([float(line["accuracy"]) for line in classes]) == pytest.approx(np.mean(found[1][1]), abs=0.15)
    assert not (folder / "version_0" / "episodes.csv").exists()  # fit's validation chooses; it is compared with nothing


def test_the_table(run, capsys):
    folder, arguments = run
    main(["test", *arguments, "--ckpt_path", str(folder)])
    printed = capsys.readouterr().out
    for name, value in (("classes", "20"), ("images", "480"), ("episodes", "50"), ("ways", "5"), ("shots", "1")):
        assert re.search(rf"│ {name} +│ +{value} │", printed), name
    assert re.search(r"│ accuracy ± 95% interval +│ +\d+\.\d\d ± \d+\.\d\d % │", printed)
    assert re.search(r"│ macro F1 +│ +\d+\.\d\d % │", printed) and "val/macro_f1" not in printed
    assert re.search(r"│ whiteness distance, start → end │ +\d+\.\d\d → \d+\.\d\d │", printed)
    assert re.search(
        rf"checkpoint: {re.escape(str(folder))}/version_\d+/checkpoints/step\d+-accuracy0\.\d+\.ckpt", printed
    )


def test_the_checkpoints_hyperparameters_beat_the_given_ones_and_are_said(run, capsys):
    # Lightning issue 20801: otherwise silent.
    folder, arguments = run
    main(["test", *arguments, "--ckpt_path", str(folder), "--model.norm=bn", "--model.norm_args=null"])
    assert "the checkpoint's norm='swbn-fro' is used, not 'bn'" in capsys.readouterr().err


def test_resuming_goes_on(run):
    folder, arguments = run
    main(["fit", *arguments, "--trainer.max_epochs=3", "--ckpt_path", str(folder / "version_0")])
    told = results(newest(folder))
    assert [entry["epoch"] for entry in told["whiteness"]] == [-1, 0, 1, 2] and told["results"][-1]["epoch"] == 2
    checkpoint = torch.load(newest(folder) / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 2 and checkpoint["global_step"] == 9


def test_last_is_the_last_epoch_and_best_the_kept_one(run):
    # To keep the lowest epoch makes the first one the "best".
    folder, arguments = run
    lowest = ["--checkpoint.monitor=epoch", "--checkpoint.mode=min"]
    main(["fit", *arguments, *lowest, "--run.name=worse", "--trainer.max_epochs=3"])
    worse = folder.parent / "worse" / "version_0"
    told = results(worse)
    best, last = told["results"]
    assert best["epoch"] == 0 and last["epoch"] == 2 and "step000003" in told["best_checkpoint"]
    assert {p.name for p in (worse / "checkpoints").glob("*.ckpt")} == {Path(told["best_checkpoint"]).name, "last.ckpt"}
    assert torch.load(worse / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 2
    # The table's whiteness is that of the checkpoint named beside it.
    ends = {entry["epoch"]: entry["distance"] for entry in told["whiteness"]}
    assert best["distance"] == [ends[-1], ends[0]] and last["distance"] == [ends[-1], ends[2]]

    # A killed run has no results.json; its checkpoints are found nevertheless.
    (worse / "results.json").unlink()
    assert find_checkpoint(worse).name == Path(told["best_checkpoint"]).name
    assert find_checkpoint(worse, "last").name == "last.ckpt"


class Interrupt(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt


def test_an_interrupted_run_shows_what_it_had_reached_and_how_to_go_on(run, capsys, caplog):
    folder, arguments = run
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--run.name=stopped", "--trainer.callbacks=tests.test_cli.Interrupt"])
    stopped = folder.parent / "stopped" / "version_0"
    told = results(stopped)
    assert [row["epoch"] for row in told["results"]] == [0]
    assert not told["completed"] and len(told["epoch_seconds"]) == 1
    assert "accuracy ± 95%" in capsys.readouterr().out
    assert f"go on from the last epoch with --ckpt_path {stopped / 'checkpoints' / 'last.ckpt'}" in caplog.text
    main(["test", *arguments, "--ckpt_path", str(stopped)])


class Hours(pl.Callback):
    """An hour a training batch, a day a validation batch, a year between epochs."""

    now = 0.0

    def on_train_batch_start(self, *args):
        Hours.now += 1

    def on_validation_batch_start(self, *args):
        Hours.now += 24

    def on_train_epoch_end(self, *args):
        Hours.now += 8760


def test_an_epochs_time_is_that_of_its_training(run, monkeypatch):
    _, arguments = run
    monkeypatch.setattr(
        "swbn_lightning.training.callbacks.result_table.time", SimpleNamespace(perf_counter=lambda: Hours.now)
    )
    often = ["--trainer.val_check_interval=2", "--trainer.max_epochs=1", "--data.episodes_per_step=1"]
    often += ["--run.root=here"]
    main(["fit", *arguments, *often, "--trainer.callbacks=tests.test_cli.Hours"])
    (folder,) = Path("here").glob("*/version_0")
    assert results(folder)["epoch_seconds"] == [3] and results(folder)["fit_seconds"] > 8760


@pytest.mark.parametrize("off", ["logger", "enable_progress_bar", "enable_checkpointing"])
def test_parts_of_the_trainer_can_be_switched_off(off, run):
    _, arguments = run
    main(["fit", *arguments, "--run.root=here", f"--trainer.{off}=false", "--trainer.max_epochs=1"])
    assert bool(list(Path("here").glob("*/version_*"))) == (off != "logger")  # without, checkpoints alone lie there
    assert bool(list(Path().rglob("*.ckpt"))) == (off != "enable_checkpointing")


def test_test_needs_a_trained_model(run, capsys):
    with pytest.raises(SystemExit):
        main(["test", *run[1]])
    assert "test needs the weights of a trained model: --ckpt_path runs/NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16-true", "64-true"))]
)
def test_precisions(precision, run):
    # Few images: convolutions in 16 bit are slow on many a CPU.
    few = ["--data.eval_batch_size=16", "--whiteness.num_images=16", "--data.train.queries=2"]
    main(["fit", *run[1], f"--trainer.precision={precision}", "--trainer.fast_dev_run=true", *few])


def test_averaged_weights_with_their_own_statistics(run, capsys):
    _, arguments = run
    callbacks = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.5"]
    main(["fit", *arguments, "--run.name=averaged", *callbacks, "--trainer.callbacks+=UpdateNorms"])
    folder = find_checkpoint(run[0].parent / "averaged", "last").parent
    averaged, last = (
        torch.load(folder / name, weights_only=True)["state_dict"] for name in ("averaged.ckpt", "last.ckpt")
    )
    mean = next(key for key in last if key.endswith("running_mean"))
    weight = next(key for key in last if key.startswith("backbone") and key.endswith("weight"))
    assert torch.equal(averaged[weight], last[weight])  # Lightning's checkpoints hold the average too,
    assert not torch.equal(averaged[mean], last[mean])  # with other statistics
    main(["test", *arguments, "--ckpt_path", str(folder / "averaged.ckpt")])
    assert "accuracy ± 95%" in capsys.readouterr().out


def test_predict_names_images_from_a_support_folder(run, capsys):
    folder, arguments = run
    rng = np.random.default_rng(0)
    Path("query").mkdir()
    for index, name in enumerate(("red", "green", "blue")):
        (Path("support") / name).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 60, (40, 36, 3), dtype=np.uint8)
            pixels[..., index] += 180
            place = Path("query") if number == 3 else Path("support") / name
            Image.fromarray(pixels).save(place / f"{name}{number}.png")
    given = [*arguments, "--ckpt_path", str(folder), "--data.support=support"]
    main(["predict", *given, "--data.query=query", "--run.report=true"])
    rows = list(csv.DictReader((newest(folder) / "predictions.csv").open()))
    assert [Path(row["image"]).name for row in rows] == ["blue3.png", "green3.png", "red3.png"]
    assert [row["class"] for row in rows] == ["blue", "green", "red"]
    for row in rows:
        probabilities = [float(row[name]) for name in ("red", "green", "blue")]
        assert sum(probabilities) == pytest.approx(1, abs=1e-5) and max(probabilities) == float(row["probability"])
    assert "green3.png" in capsys.readouterr().out
    assert not (newest(folder) / "report.html").exists()  # there are no results
    (Path("support") / "red").rename(Path("support") / "[red]:x:")
    main(["predict", *given, "--data.query=query/red3.png"])
    assert "[red]:x:" in capsys.readouterr().out  # a name, no markup
    (Path("support") / "[red]:x:").rename(Path("support") / "red")

    (Path("support") / "red" / "red0.png").unlink()
    main(["predict", *given, "--data.query=query"])
    page = (newest(folder) / "predictions.html").read_text(encoding="utf-8")
    assert "3 images, 3 classes of 2 to 3 examples each" in page and page.count("<img") == 6
    (Path("single") / "one").mkdir(parents=True)
    (Path("query") / "red3.png").rename(Path("single") / "one" / "0.png")
    for more, words in (
        ([], "predict needs a support folder"),
        (["--data.query=nothing"], "query nothing does not exist"),
        (["--data.query=query", "--data.support=single"], "the support folder single holds one class, one; give two"),
    ):
        with pytest.raises(SystemExit):
            main(["predict", *given, *more])
        assert words in capsys.readouterr().err


def test_slurms_requeueing_finds_its_checkpoint_in_the_runs_folder(run, monkeypatch):
    folder, arguments = run
    seen = []
    monkeypatch.setattr(pl.Trainer, "fit", lambda trainer, *args, **kwargs: seen.append(trainer.default_root_dir))
    main(["fit", *arguments])
    main(["fit", *arguments, "--trainer.default_root_dir=elsewhere"])
    assert seen[0] == str(folder) and Path(seen[1]).name == "elsewhere"
