"""A backbone whose weights another program saved, by other names, and its statistics taken anew for a test."""

import copy
import json
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import safetensors.torch
import torch
from PIL import Image
from torchvision.models import resnet18

from classification import ImageClassifier
from cli import main
from fewshot import PrototypicalNetwork, TransferNetwork
from swbn_lightning import update_norms
from swbn_lightning.backbones import build_backbone
from swbn_lightning.errors import InputError
from swbn_lightning.runs.checkpoints import load_backbone
from tests.fewshot.conftest import QUIET, Tiny, load_shades, shades

pytestmark = pytest.mark.usefixtures("small_things")
LIBRARY = "torchvision/resnet18"


@pytest.fixture(scope="module")
def trained():
    """A network of torchvision with its classifier; statistics are not those of the start."""
    torch.manual_seed(0)
    network = resnet18(num_classes=7)
    network(torch.randn(4, 3, 32, 32))
    return network.eval()


def named(state, begin):
    return {begin + name: value for name, value in state.items()}


@pytest.mark.parametrize(
    ("form", "norm"),
    [("plain", "iternorm"), ("nested", "bn"), ("beside", "bn"), ("safetensors", "swbn-fro")],
)
def test_a_state_dict_by_other_names_gives_the_plain_networks_features(form, norm, trained, caplog):
    state, names = named(trained.state_dict(), "module.encoder."), {"module.encoder.": "", "module.encoder.fc.": None}
    content = {"state_dict": state, "epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}
    if form == "safetensors":
        safetensors.torch.save_file(state, "weights.safetensors")
    elif form == "beside":  # of two mappings the keys are a part of the names
        torch.save({"model": state, "ema": {"weight": torch.ones(1)}}, "weights.pth")
        names = {"ema.": None, **{f"model.{begin}": stands for begin, stands in names.items()}}
    else:
        torch.save(content if form == "nested" else state, "weights.pth")
    backbone = build_backbone(LIBRARY, norm, {"step_size": 1e-3} if norm == "swbn-fro" else None).eval()
    load_backbone(backbone, f"weights.{'safetensors' if form == 'safetensors' else 'pth'}", names)
    images = torch.randn(3, 3, 32, 32)
    plain = torch.nn.Sequential(*list(trained.children())[:-1], torch.nn.Flatten())
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), plain(images), rtol=1e-4, atol=1e-5)
    assert "backbone_names leave out" in caplog.text and "module.encoder.fc.weight" in caplog.text


def test_the_longest_beginning_counts_and_an_empty_one_is_all_others(trained):
    state = {**named(trained.state_dict(), "encoder."), "queue": torch.zeros(2, 3), "head.0.weight": torch.zeros(1)}
    torch.save(state, "moco.pt")
    backbone = build_backbone(LIBRARY)
    load_backbone(backbone, "moco.pt", {"": None, "encoder.": "", "encoder.fc.": None})
    assert torch.equal(backbone.network.conv1.weight, trained.conv1.weight)


def test_an_old_file_without_counters_and_our_own_networks_names():
    torch.manual_seed(1)
    saved = build_backbone("resnet20")
    state = {name: value for name, value in saved.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(named(state, "features."), "old.pth")  # as PyTorch saved it before 0.4.1
    backbone = build_backbone("resnet20", "iternorm")
    load_backbone(backbone, "old.pth", {"features.": ""})
    assert all(torch.equal(value, dict(saved.named_parameters())[name]) for name, value in backbone.named_parameters())


def refused(names, file="weights.pth", backbone=LIBRARY, **options):
    with pytest.raises(InputError) as error:
        load_backbone(build_backbone(backbone, **options), file, names)
    message = str(error.value)
    assert "\n" not in message and len(message) < 900
    return message


def test_wrong_names_are_one_sentence_with_those_that_fit(trained):
    torch.save({"state_dict": named(trained.state_dict(), "module.")}, "weights.pth")
    fits = """--model.backbone_names '{"module.": "", "module.fc.": null}'"""
    message = refused({})
    assert "it lacks conv1.weight, bn1.weight, bn1.bias, … (100 in all) and has module.conv1.weight" in message
    assert "(122 in all), which ResNet does not know" in message and message.endswith(f"Its names fit with {fits}.")
    assert "no name in it begins with 'modul.x'" in (message := refused({"modul.x": ""})) and fits in message
    assert "has fc.weight, fc.bias, which ResNet does not know" in (message := refused({"module.": ""}))
    assert "lacks" not in message and fits in message
    load_backbone(build_backbone(LIBRARY), "weights.pth", json.loads(re.search(r"'({.*})'", fits)[1]))
    gray = refused({"module.": "", "module.fc.": None}, in_channels=1)
    assert "size mismatch for conv1.weight: copying a param" in gray and "names fit with" not in gray
    message = refused({"module.": ""}, backbone="tiny")
    assert "it lacks stages.0.0.weight" in message and "names fit with" not in message
    assert "two of its weights would be conv1.weight" in refused({"module.layer1.0.": "", "module.": ""})


def test_other_files_are_one_sentence(tmp_path, trained):
    assert "weights.pth does not exist; with backbone_names give" in refused({})
    torch.save({"epoch": 3, "lr": [0.1]}, "weights.pth")
    assert "weights.pth holds no weights: neither tensors by name" in refused({})
    torch.save(trained, "weights.pth")  # the module itself, whose class would be imported
    assert "weights.pth is not a readable checkpoint (it names code: torchvision.models.resnet.ResNet" in refused({})
    torch.save(trained.state_dict(), "weights.pth", _use_new_zipfile_serialization=False)
    assert "since PyTorch 1.6: if it is older, save it once more" in refused({})
    Path("weights.safetensors").write_bytes(b"nothing")
    assert "holds no weights that can be read" in refused({}, "weights.safetensors")
    torch.save({"conv1.weight\x1b[31m": torch.zeros(1)}, "weights.pth")
    assert r"conv1.weight\x1b[31m" in refused({})

    torch.save(trained.state_dict(), "weights.pth")
    with pytest.raises(InputError, match="it has no 'state_dict'. Weights of a backbone from elsewhere .*backbone_nam"):
        ImageClassifier(5, backbone=LIBRARY, backbone_checkpoint="weights.pth")
    torch.save({"state_dict": trained.state_dict()}, "weights.pth")
    with pytest.raises(InputError, match="holds no backbone: .* need --model.backbone_names"):
        ImageClassifier(5, backbone=LIBRARY, backbone_checkpoint="weights.pth")
    with pytest.raises(InputError, match="backbone_names are for a backbone_checkpoint"):
        ImageClassifier(5, backbone=LIBRARY, backbone_names={})


NAMES = {"net.trunk.": "", "net.fc.": None}
DATA = [
    "--data=fewshot.EpisodicDataModule", "--data.dataset=shades", "--trainer.accelerator=cpu",
    "--data.test={ways: 3, shots: 2, queries: 4, episodes: 30}", "--model=fewshot.TransferNetwork",
    "--model.backbone=tiny", "--model.backbone_checkpoint=theirs.pt",
]  # fmt: skip


def test_through_the_command(capsys, caplog):
    theirs = Tiny(torch.nn.BatchNorm2d)
    torch.save({"model": {**named(theirs.state_dict(), "net.trunk."), "net.fc.weight": torch.zeros(2)}}, "theirs.pt")
    names = """--model.backbone_names={"net.trunk.": "", "net.fc.": null}"""
    main(["test", *DATA, names, "--run.name=theirs"])
    assert "theirs.pt: backbone_names leave out net.fc.weight" in caplog.text
    folder = Path("runs/theirs/version_0")
    told = json.loads((folder / "results.json").read_text())
    assert told["tested_checkpoint"] == "theirs.pt" and json.loads((folder / "run.json").read_text())["from"] is None
    # What the run wrote down is a configuration that gives the same.
    main(["test", f"--config={folder / 'config.yaml'}"])
    again = json.loads(Path("runs/theirs/version_1/results.json").read_text())
    assert again["results"] == told["results"]
    with pytest.raises(SystemExit):
        main(["test", *DATA, """--model.backbone_names={"net.": ""}"""])
    said = capsys.readouterr().err
    assert "theirs.pt does not fit with backbone_names" in said and "Traceback" not in said
    with pytest.raises(SystemExit):
        main(["test", *DATA, "--model.backbone_names={net.: 3}"])
    assert "backbone_names" in capsys.readouterr().err


def test_a_checkpoint_needs_the_weights_that_its_training_began_with_no_more():
    weights = named(Tiny(torch.nn.BatchNorm2d).state_dict(), "net.trunk.")
    torch.save({**weights, "net.fc.weight": torch.zeros(2)}, "theirs.pt")
    fit = [word.replace("Transfer", "Prototypical").replace("theirs", f"{Path.cwd()}/theirs") for word in DATA]
    few = "{ways: 3, shots: 2, queries: 4, episodes: 8}"
    fit += [
        f"--data.train={few}",
        f"--data.val={few}",
        f"--model.backbone_names={json.dumps(NAMES)}",
        "--run.name=mine",
    ]
    main(["fit", *fit, "--trainer.max_epochs=1"])
    Path("theirs.pt").unlink()
    main(["test", "--config=runs/mine/version_0/config.yaml", "--ckpt_path=runs/mine"])
    assert "tested_checkpoint" in json.loads(Path("runs/mine/version_1/results.json").read_text())
    # What is published of it names no folder of this machine, and the mapping as it was given.
    main(["export", "runs/mine/version_0", "--output", "out"])
    told = {name: Path("out", name).read_text() for name in ("config.json", "README.md")}
    assert all(str(Path.cwd()) not in text and "theirs.pt" in text for text in told.values())
    settings = json.loads(told["config.json"])["run"]["settings"]
    assert json.loads(settings["model.init_args.backbone_names"]) == NAMES


@pytest.mark.parametrize(("norm", "options"), [("bn", {}), ("iternorm", {}), ("swbn-fro", {"step_size": 0.05})])
def test_statistics_are_those_of_update_norms_on_the_training_images(norm, options):
    torch.manual_seed(0)
    model = TransferNetwork(
        head_args={"features": "cl2"}, backbone="tiny", norm=norm, norm_args=options, update_norms=2
    )
    assert model.head_label == "nearest-centroid, features=cl2, update_norms=2"
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    seen = {}

    class Seen(pl.Callback):
        def on_test_batch_start(self, *_):
            seen.update({name: value.clone() for name, value in model.backbone.state_dict().items()})

    data = shades(eval_batch_size=32)
    pl.Trainer(callbacks=[Seen()], **QUIET).test(model, datamodule=data, verbose=False)
    first = model.results["test"]

    expected = build_backbone("tiny", norm, options)
    expected.load_state_dict(before)
    images = (load_shades("train", None, 16).images / 255 - 0.5) / 0.3
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    update_norms([images[order[:32]], images[order[32:64]]], expected)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(seen[name], value, msg=name)
    assert not torch.allclose(seen["stages.0.1.running_mean"], before["stages.0.1.running_mean"])

    # The network is as it was, so a second test is the same, and so is all of it without the option.
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    pl.Trainer(**QUIET).test(model, datamodule=data, verbose=False)
    assert model.results["test"] == first
    pl.Trainer(max_epochs=1, **QUIET).fit(
        PrototypicalNetwork(backbone=model.backbone), datamodule=data
    )  # no buffer of inference mode is left in it


@torch.no_grad()
def test_a_base_mean_and_a_prediction_are_of_the_new_statistics(tmp_path):
    model = TransferNetwork(head_args={"scale": 0.5}, backbone="tiny", update_norms=True)
    pl.Trainer(**QUIET).test(model, datamodule=shades(), verbose=False)
    images = (load_shades("train", None, 16).images / 255 - 0.5) / 0.3
    expected = copy.deepcopy(model.backbone)
    update_norms([images], expected)
    torch.testing.assert_close(model.head.base_mean, expected.eval()(images).mean(0))
    shown = {"bright": 220, "dark": 20}
    for name, shade in shown.items():
        (tmp_path / name).mkdir()
        Image.new("L", (16, 16), shade).save(tmp_path / name / "0.png")
    naming = shades(support=str(tmp_path), query=str(tmp_path / "dark"))
    (found,) = pl.Trainer(**QUIET).predict(model, datamodule=naming)
    features = expected(torch.cat([torch.full((1, 1, 16, 16), (shade / 255 - 0.5) / 0.3) for shade in shown.values()]))
    torch.testing.assert_close(found, model.head(features[None, :, None], features[None, 1:])[0].softmax(-1))


def test_statistics_that_cannot_be_had():
    with pytest.raises(InputError, match="update_norms must be an integer of at least 1, got 0"):
        TransferNetwork(backbone="tiny", update_norms=0)
    plain = TransferNetwork(
        "ridge", backbone="tiny", norm="bn", norm_args={"track_running_stats": False}, update_norms=True
    )
    with pytest.raises(InputError, match="no whitening layer or BatchNorm with running"), pytest.warns(UserWarning):
        pl.Trainer(**QUIET).test(plain, datamodule=shades(), verbose=False)
