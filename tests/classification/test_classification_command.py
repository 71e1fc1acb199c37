"""Classification through the command: training on everything, data that cannot work."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cli import main
from swbn_lightning.runs.checkpoints import find_checkpoint
from swbn_lightning.runs.curves import Group, has_curves
from swbn_lightning.runs.measured import read_metrics


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def arguments(module="MNIST", *more):
    channels = 1 if "MNIST" in module else 3
    return [
        "--model=ImageClassifier", "--model.num_classes=10", "--model.backbone=resnet20", "--model.norm=swbn-fro",
        f"--model.backbone_args={{in_channels: {channels}}}", f"--data={module}DataModule", "--data.batch_size=64",
        "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--whiteness.num_images=16", "--run.name=run",
        "--trainer.enable_model_summary=false", "--trainer.enable_progress_bar=false", *more,
    ]  # fmt: skip


def results(version):
    return json.loads(Path(f"runs/run/version_{version}/results.json").read_text())


def rows_in(path):
    return list(csv.DictReader(io.StringIO(Path(path).read_text(encoding="utf-8"))))


def test_a_run_without_validation_keeps_the_last_epoch(tiny_mnist, capsys, recwarn):
    given = arguments("MNIST", f"--data.root={tiny_mnist}", "--data.val_share=0")
    main(["fit", *given])
    printed = capsys.readouterr().out
    assert "train (last, epoch 2)" in printed and "% while training" in printed
    assert "last checkpoint: runs/run/version_0/checkpoints/last.ckpt" in printed
    assert [path.name for path in Path("runs/run/version_0/checkpoints").glob("*.ckpt")] == ["last.ckpt"]
    content = results(0)
    (row,) = content["results"]
    assert content["best_checkpoint"] == "checkpoints/last.ckpt" and row["epoch"] == 1 and 0 <= row["accuracy"] <= 1
    assert len(row["distance"]) == 2 and [entry["epoch"] for entry in content["whiteness"]] == [-1, 0, 1]
    assert torch.load("runs/run/version_0/checkpoints/last.ckpt", weights_only=True)["epoch"] == 1
    assert not [w for w in recwarn if "could not find the monitored key" in str(w.message)]

    main(["test", *given, "--ckpt_path=runs/run"])
    (row,) = results(1)["results"]
    assert row["split"] == "test" and row["images"] == 41
    Path("runs/run/version_0/results.json").unlink()  # as of a killed run
    assert find_checkpoint("runs/run/version_0").name == "last.ckpt"
    with pytest.raises(SystemExit):
        main(["validate", *given, "--ckpt_path=runs/run"])
    assert "MNISTDataModule holds out no images for validation; set val_share above 0" in capsys.readouterr().err
    main(["fit", *given, "--run.name=other", "--checkpoint.monitor=train/loss", "--checkpoint.filename=least"])
    folder = Path("runs/other/version_0/checkpoints")
    assert {path.name for path in folder.glob("*.ckpt")} == {"last.ckpt", "least.ckpt"}


def test_with_validation_the_best_epoch_is_kept_and_the_test_is_on_other_images(tiny_mnist):
    given = arguments("FashionMNIST", f"--data.root={tiny_mnist}", "--trainer.max_epochs=1")
    main(["fit", *given])
    content = results(0)
    assert content["best_checkpoint"].startswith("checkpoints/step")
    assert content["results"][0]["images"] == 20
    main(["test", *given, "--ckpt_path=runs/run"])
    assert results(1)["results"][0]["images"] == 41


OPTIONS = {"batch_size", "eval_batch_size", "seed", "num_workers"}
FILES, AUGMENTED = {"root", "val_share", "split_seed"}, {"crop_padding", "crop_padding_mode", "flip", "erasing"}


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("CIFAR10", FILES | AUGMENTED | {"download"}),
        ("ImageFolder", FILES | AUGMENTED | {"image_size", "mean", "std", "test_share"}),
        ("ImageNet", FILES | {"image_size", "eval_resize"}),
        ("Glyph", AUGMENTED | {"num_classes", "image_size", "images_per_class"}),
    ],
)
def test_every_option_can_be_given(module, more, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *arguments(module), "--print_config"])
    assert stopped.value.code in (None, 0)
    options = capsys.readouterr().out.split("\ndata:")[1]
    found = {line.split(":")[0].strip() for line in options.split("init_args:")[1].splitlines() if ":" in line}
    assert OPTIONS | more <= found and not found & ({*AUGMENTED, "mean", "std", "download"} - more)


@pytest.mark.parametrize(
    ("module", "more", "words"),
    [
        ("MNIST", ["--data.root=nowhere"], "mnist: root nowhere does not exist. Expected nowhere/MNIST/raw/ with"),
        ("CIFAR100", [], "cifar100: give a root, as `--data.root DIR`"),
        ("ImageNet", ["--data.root=e"], "imagenet: e has no train/"),
        ("Glyph", ["--data.erasing=2"], "the probability of erasing must be in [0, 1], got 2"),
        ("Glyph", ["--data.images_per_class=1"], "the images have 1 channel(s), but the backbone takes 3"),
    ],
)
def test_data_that_cannot_work_are_met_before_training(module, more, words, capsys):
    Path("e").mkdir()
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *arguments(module, *more)])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert words in printed.err.replace("\n", " ") and "Traceback" not in printed.err and "Epoch 0" not in printed.out


def test_a_test_leaves_what_compares_it_and_its_training_names_images(tiny_mnist, capsys):
    given = arguments("MNIST", f"--data.root={tiny_mnist}", "--trainer.max_epochs=1", "--model.backbone=mlp")
    given += ["--model.backbone_args={hidden: [16], in_channels: 1, image_size: 28}"]
    main(["fit", *given])
    assert not Path("runs/run/version_0/images.csv").exists()  # its validation chooses, and is compared with nothing
    for command in ("test", "validate"):
        main([command, *given, "--ckpt_path=runs/run"])
    images = rows_in("runs/run/version_1/images.csv")
    (row,) = results(1)["results"]
    assert len(images) == 41 and row["accuracy"] == pytest.approx(
        sum(i["class"] == i["predicted"] for i in images) / 41
    )
    capsys.readouterr()
    main(["compare", "runs/run", "again=runs/run"])
    printed = capsys.readouterr().out
    assert "test, 10 classes, 41 images" in printed and "val, 10 classes, 20 images" in printed

    pixels = np.broadcast_to(np.arange(41, dtype=np.uint8)[:, None, None], (41, 28, 28))  # as in the data set
    Path("query").mkdir()
    for number in (3, 40, 7):
        Image.fromarray(pixels[number]).resize((30, 31)).save(f"query/{number:02}.png")
    # The training's data are not needed, nor where they were.
    given = [word for word in given if "data.root" not in word]
    main(["predict", *given, "--ckpt_path=runs/run", "--data.query=query", "--data.eval_batch_size=2"])
    named = rows_in("runs/run/version_3/predictions.csv")
    assert [Path(line["image"]).name for line in named] == ["03.png", "07.png", "40.png"]
    for line, image in zip(named, (images[3], images[7], images[40]), strict=True):
        assert line["class"] == image["predicted"]
        assert float(line["probability"]) == pytest.approx(float(image["probability"]), abs=1e-4)
        assert sum(float(line[name]) for name in "0123456789") == pytest.approx(1, abs=1e-4)
    assert "03.png" in capsys.readouterr().out
    Path("query/broken.png").write_bytes(b"no image")
    for words, message in (
        ([], "predict needs images to name: --data.query PATH"), (["--data.query=none"], "query none does not exist"),
        (["--data.query=query"], "swbn: error: query/broken.png cannot be read as an image"),
        (["--data.query=query", "--data.num_workers=1"], "swbn: error: query/broken.png cannot be read as an image"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["predict", *given, "--ckpt_path=runs/run", *words])
        assert message in capsys.readouterr().err


def test_a_test_curve_is_logged_and_chooses_nothing(tiny_mnist, capsys):
    given = arguments("MNIST", f"--data.root={tiny_mnist}", "--data.val_share=0", "--seed_everything=0")
    given += ["--data.batch_size=16"]
    given += ["--model.backbone=mlp", "--model.backbone_args={hidden: [16], in_channels: 1, image_size: 28}"]
    main(["fit", *given])
    main(["fit", *given, "--data.curve_split=test"])
    plain, curved = (read_metrics(Path(f"runs/run/version_{number}/metrics.csv"))["epoch"] for number in (0, 1))
    assert "test/loss" not in plain and plain["train/loss"] == curved["train/loss"]
    assert sorted(curved["test/loss"]) == sorted(curved["test/accuracy"]) == [1, 2] and "val/loss" not in curved
    last, same = (find_checkpoint(f"runs/run/version_{number}") for number in (0, 1))
    weights, others = (torch.load(path, weights_only=True)["state_dict"] for path in (last, same))
    assert last.name == same.name and all(torch.equal(others[key], value) for key, value in weights.items())
    assert not [row for row in results(1)["results"] if row["split"] == "test"]  # tests are of the test command
    main(["test", *given, f"--ckpt_path={same}"])
    (row,) = results(2)["results"]
    assert curved["test/accuracy"][2] == pytest.approx(row["accuracy"], abs=1e-6)
    assert curved["test/loss"][2] == pytest.approx(row["loss"], rel=1e-5)
    assert has_curves([Group("swbn-fro", [{"test/loss": curved["test/loss"]}])], "loss")
    for words, message in (
        (["--checkpoint.monitor=test/loss"], "the test images must choose nothing"),
        (["--data.val_share=0.2"], "curve_split: test is for trainings without validation"),
        (["--data.curve_split=train"], "curve_split must be 'test', or left out, got 'train'"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["fit", *given, "--data.curve_split=test", *words])
        assert message in " ".join(capsys.readouterr().err.split())
