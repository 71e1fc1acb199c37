"""Heads on a trained backbone as a LightningModule, and through the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from classification import ImageClassifier
from cli import main
from fewshot import (
    CrossAttentionNetwork,
    EpisodeSettings,
    Learn2LearnDataModule,
    MatchingNetwork,
    PrototypicalNetwork,
    TransferNetwork,
    evaluate_episodes,
)
from fewshot.datasets import registry
from fewshot.heads import build_head
from swbn_lightning.errors import InputError
from tests.conftest import REPOSITORY
from tests.fewshot.conftest import QUIET, load_shades, shades

pytestmark = pytest.mark.usefixtures("small_things")
TEST = {"ways": 3, "shots": 2, "queries": 4, "num_episodes": 30, "seed": 0}


def fitted(model, tmp_path):
    """The checkpoint of a training of one epoch."""
    kept = ModelCheckpoint(dirpath=tmp_path)
    pl.Trainer(max_epochs=1, callbacks=[kept], **QUIET).fit(model, datamodule=shades())
    return kept.best_model_path


@pytest.mark.parametrize("head", ["nearest-centroid", "logistic-regression", "laplacian-shot"])
def test_a_test_is_the_head_on_features_with_the_training_splits_mean(head):
    model, data = TransferNetwork(head, {"features": "cl2"}, backbone="tiny"), shades(eval_batch_size=7)
    pl.Trainer(**QUIET).test(model, datamodule=data, verbose=False)

    backbone = model.backbone.eval()
    train, test = (load_shades(split, None, 16) for split in ("train", "test"))
    with torch.no_grad():
        base, features = (backbone((images.images / 255 - 0.5) / 0.3) for images in (train, test))
        expected_head = build_head(head, {"features": "cl2"})
        expected_head.set_base_mean(base.double().mean(0).float())
        expected = evaluate_episodes(features, test.labels, expected_head, **TEST)
    torch.testing.assert_close(model.head.base_mean, base.mean(0))
    assert model.results["test"]["accuracy"] == pytest.approx(expected.mean)
    assert model.results["test"]["loss"] == pytest.approx(expected.loss, rel=1e-4)
    assert model.results["test"]["head"] == f"{head}, features=cl2"
    assert model.results["test"].get("inference") == ("transductive" if head == "laplacian-shot" else None)

    model.backbone.stages[0][0].weight.data.mul_(-1)  # other weights have another mean
    pl.Trainer(**QUIET).validate(model, datamodule=data, verbose=False)
    assert (model.head.base_mean - base.mean(0)).abs().max() > 1e-3


def test_one_checkpoint_is_tested_with_every_head(tmp_path, caplog):
    model = TransferNetwork("ridge", {"penalty": 2.0}, backbone="tiny")
    start = model.head.log_penalty.item()
    path = fitted(model, tmp_path)
    assert model.head.log_penalty.item() != start and model.head.log_scale.item() != pytest.approx(2.302585)
    content = torch.load(path, weights_only=True)
    assert not {"head", "head_args"} & set(content["hyper_parameters"])

    again = TransferNetwork.load_from_checkpoint(path, head="ridge")
    assert again.head.log_penalty.item() == model.head.log_penalty.item()
    learnt = f"penalty {model.head.log_penalty.exp():.4g}, scale {model.head.log_scale.exp():.4g}."
    assert f"head 'ridge' goes on from what the checkpoint has learnt: {learnt}" in caplog.text
    fixed = TransferNetwork.load_from_checkpoint(path, head="ridge", head_args={"penalty": 10.0, "learn": False})
    assert fixed.head.log_penalty.exp().item() == pytest.approx(10)
    assert "head 'ridge, learn=False, penalty=10.0' is as given: of the checkpoint only the backbone" in caplog.text
    for head in ("nearest-centroid", "soft-kmeans", "logistic-regression"):
        other = TransferNetwork(head, backbone="tiny")
        pl.Trainer(**QUIET).test(other, datamodule=shades(), ckpt_path=path, verbose=False)
        assert torch.equal(other.backbone.stages[0][0].weight, model.backbone.stages[0][0].weight)
    assert "head 'soft-kmeans' is as given: of the checkpoint only the backbone is used" in caplog.text
    without = fitted(TransferNetwork("nearest-centroid", {"features": "l2"}, backbone="tiny"), tmp_path / "second")
    assert TransferNetwork.load_from_checkpoint(without, head="ridge").head.log_penalty.exp().item() == pytest.approx(
        50
    )
    with pytest.raises(InputError, match="restores settings|optimizer_states are not those of this training"):
        resumed = TransferNetwork("nearest-centroid", {"features": "l2"}, backbone="tiny")
        pl.Trainer(max_epochs=2, **QUIET).fit(resumed, datamodule=shades(), ckpt_path=path)


def test_heads_that_learn_nothing_from_episodes_are_not_trained():
    trainer = pl.Trainer(fast_dev_run=True, **QUIET)
    for head in ("logistic-regression", "soft-kmeans", "laplacian-shot"):
        with pytest.raises(InputError, match=rf"{head}' learns nothing from episodes.*backbone_checkpoint runs/NAME"):
            trainer.fit(TransferNetwork(head, backbone="tiny"), datamodule=shades())
    for head in ("nearest-centroid", "ridge"):
        with pytest.raises(InputError, match="features=cl2' subtracts.*cannot train one.*features l2 or plain"):
            trainer.fit(TransferNetwork(head, {"features": "cl2"}, backbone="tiny"), datamodule=shades())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_in_16_bits(precision):
    model = TransferNetwork("ridge", {"features": "l2"}, backbone="tiny")
    pl.Trainer(fast_dev_run=True, precision=precision, **QUIET).fit(model, datamodule=shades())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    model = TransferNetwork("logistic-regression", {"features": "cl2"}, backbone="tiny")
    pl.Trainer(precision=precision, **QUIET).test(model, datamodule=shades(), verbose=False)
    assert model.results["test"]["accuracy"] > 0.4 and model.head.base_mean.dtype == torch.float32


def only_test_classes(split, root, image_size):
    if split == "train":
        raise InputError("there is no folder train.")
    return load_shades(split, root, image_size)


def test_a_mean_that_cannot_be_had_is_one_error(monkeypatch):
    trainer, centred = pl.Trainer(**QUIET), TransferNetwork(backbone="tiny")
    by_batch = TransferNetwork(backbone="tiny", norm_args={"track_running_stats": False})
    with pytest.raises(InputError, match="keeps no running statistics"), pytest.warns(UserWarning):
        trainer.test(by_batch, datamodule=shades(), verbose=False)
    given = registry.FewShotDataset(only_test_classes, 16, (0.5,), (0.3,))
    monkeypatch.setitem(registry._DATASETS, "shades", given)
    with pytest.raises(InputError, match=r"'cl2' .* needs the training split: there is no folder train. Or take"):
        trainer.test(centred, datamodule=shades(), verbose=False)
    trainer.test(TransferNetwork(head_args={"features": "l2"}, backbone="tiny"), datamodule=shades(), verbose=False)
    pytest.importorskip("learn2learn")
    images = TensorDataset(torch.rand(60, 1, 16, 16), torch.arange(6).repeat_interleave(10))
    tasks = Learn2LearnDataModule(test=images, test_episodes=EpisodeSettings(3, 1, 2, 4))
    with pytest.raises(InputError, match="which Learn2LearnDataModule hands out as tasks only; take features l2"):
        trainer.test(centred, datamodule=tasks, verbose=False)


def test_only_trained_weights_are_evaluated_without_a_checkpoint(tmp_path):
    path = fitted(PrototypicalNetwork(backbone="tiny"), tmp_path)
    trained = {"backbone": "tiny", "backbone_checkpoint": path}
    for made in (TransferNetwork("ridge", **trained), PrototypicalNetwork(**trained), MatchingNetwork(**trained)):
        assert made.can_be_evaluated_as_made
    assert not TransferNetwork(backbone="tiny").can_be_evaluated_as_made
    random_heads = (
        MatchingNetwork(full_context=True, **trained),
        CrossAttentionNetwork(image_size=16, num_classes=9, **trained),
        ImageClassifier(5, **trained),
    )
    assert not any(made.can_be_evaluated_as_made for made in random_heads)


DATA = [
    "--data=fewshot.EpisodicDataModule", "--data.dataset=shades", "--data.episodes_per_step=2",
    "--data.train={ways: 4, queries: 2, episodes: 4}", "--data.val={ways: 3, shots: 2, queries: 4, episodes: 30}",
    "--data.test={ways: 3, shots: 2, queries: 4, episodes: 30}", "--trainer.accelerator=cpu",
    "--whiteness.num_images=16",
]  # fmt: skip


def told(name, file="run.json", version=0):
    return json.loads(Path("runs", name, f"version_{version}", file).read_text())


def test_through_the_command(capsys):
    main(["fit", *DATA, "--model=fewshot.PrototypicalNetwork", "--model.backbone=tiny", "--run.name=proto",
          "--trainer.max_epochs=1"])  # fmt: skip
    backbone = ["--model.backbone=tiny", "--model.backbone_checkpoint=runs/proto"]
    transfer = [*DATA, "--model=fewshot.TransferNetwork", *backbone]
    capsys.readouterr()
    main(["test", *transfer, "--model.head=soft-kmeans", "--model.head_args.steps=2", "--run.name=soft"])
    printed = capsys.readouterr()
    (row,) = told("soft", "results.json")["results"]
    assert (row["head"], row["inference"]) == ("soft-kmeans, steps=2", "transductive")
    assert "soft-kmeans, steps=2" in printed.out and "transductive" in printed.out
    # It is a test of the run that trained the backbone.
    assert told("soft")["from"] == told("soft")["trained"]["id"] == told("proto")["id"]
    assert told("soft", "results.json")["tested_checkpoint"].startswith("runs/proto/version_0")

    main(["test", *transfer, "--model.head=logistic-regression", "--run.name=lr"])
    main(["test", *transfer, "--model.head_args.features=l2", "--run.name=nc"])
    main(["compare", "runs/nc", "runs/lr"])
    assert "test, 3-way 2-shot, 4 queries, seed 0, 30 episodes" in capsys.readouterr().out

    def refused(*arguments):
        with pytest.raises(SystemExit):
            main([*arguments])
        return capsys.readouterr().err

    assert "test needs the weights of a trained model" in refused(
        "test", *DATA, "--model=fewshot.TransferNetwork", "--model.backbone=tiny"
    )
    assert "test needs the weights of a trained model" in refused(
        "test", *DATA, "--model=fewshot.CrossAttentionNetwork", *backbone
    )
    for name, shade in (("dark", 20), ("bright", 220)):
        (Path("support") / name).mkdir(parents=True)
        Image.new("L", (16, 16), shade).save(f"support/{name}/0.png")
    images = ["--data.support=support", "--data.query=support/dark/0.png"]
    assert "names each image by itself" in refused("predict", *transfer, *images, "--model.head=laplacian-shot")
    main(["predict", *transfer, *images, "--run.name=named"])  # nearest-centroid with the training split's mean
    Image.new("L", (16, 16), 230).save("support/bright/1.png")  # one more than of the other class
    for head, options in (("ridge", "{penalty: 0.001}"), ("logistic-regression", "{C: 1000}")):
        head = [f"--model.head={head}", f"--model.head_args={options}"]
        main(["predict", *transfer, *images, *head, "--run.name=named"])
    for version in range(3):
        table = Path(f"runs/named/version_{version}/predictions.csv").read_text()
        assert table.splitlines()[1].split(",")[1] == "dark"


@pytest.mark.slow
def test_two_processes_find_the_same_statistics_and_mean():
    """All take the same batches, and each embeds its share of the training split: figures are those of one process."""
    arguments = [
        "--config", str(REPOSITORY / "configs" / "quickstart.yaml"), "--trainer.accelerator=cpu",
        "--data.train={ways: 5, shots: 1, queries: 3, episodes: 6}", "--data.val.episodes=50",
        "--data.test.episodes=50", "--model.backbone=mlp", "--model.backbone_args={hidden: [16]}",
        "--trainer.max_epochs=1", "--whiteness.every_n_epochs=0",
    ]  # fmt: skip
    main(["fit", *arguments])
    arguments += ["--model=fewshot.TransferNetwork", "--model.backbone_checkpoint=runs/quickstart/version_0"]
    arguments.append("--model.update_norms=3")
    main(["test", *arguments, "--run.name=one"])
    command = [sys.executable, "-m", "cli", "test", *arguments, "--run.name=two", "--trainer.devices=2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--trainer.strategy=ddp"], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (one,), (two,) = (told(name, "results.json")["results"] for name in ("one", "two"))
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=1e-9)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
