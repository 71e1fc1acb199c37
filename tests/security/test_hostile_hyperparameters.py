"""What a checkpoint says of its model reaches it as plain values only: nothing is imported, called or fetched."""

import collections
import sys

import pytest
import torch

from cli import main
from fewshot import MatchingNetwork, PrototypicalNetwork


@pytest.fixture
def attack(trained, tmp_path, monkeypatch):
    """Writes a checkpoint that is changed; a module that leaves a mark when imported lies on the path."""
    marker = tmp_path / "ran"
    (tmp_path / "evil_module.py").write_text(f"open({str(marker)!r}, 'w')\nclass Model: pass\n")
    call = {"class_path": "os.system", "init_args": {"command": f"touch {marker}"}}
    (tmp_path / "call.yaml").write_text(f"class_path: os.system\ninit_args: {{command: touch {marker}}}\n")
    monkeypatch.syspath_prepend(tmp_path)

    def write(change):
        content = torch.load(trained[0], weights_only=True)
        change(content, call, tmp_path)
        torch.save(content, tmp_path / "evil.ckpt")
        return tmp_path / "evil.ckpt"

    yield write
    assert not marker.exists() and "evil_module" not in sys.modules


def keep(name, value):
    """A hyperparameter of that value, or of what it makes of the call and the folder."""

    def change(content, call, folder):
        content["hyper_parameters"][name] = value(call, folder) if callable(value) else value

    return change


def contained_in_itself(call, folder):
    endless = []
    endless.append(endless)
    return {"a": endless}


def a_thousand_times_a_thousand(call, folder):
    value = [0] * 900
    for _ in range(5):
        value = [value] * 900
    return {"a": value}


ATTACKS = {
    "optimizer": keep("optimizer", lambda call, folder: call),
    "lr_scheduler": keep("lr_scheduler", lambda call, folder: call),
    "_class_path": keep("_class_path", "evil_module.Model"),
    "_instantiator": keep("_instantiator", "os.system"),
    "norm_args.class_path": keep("norm_args", lambda call, folder: call),
    "norm_args.options.0.class_path": keep("norm_args", lambda call, folder: {"options": [call]}),
    "norm_args.criterion": keep("norm_args", lambda call, folder: {"criterion": str(call)}),
    "norm_args.eps": keep("norm_args", {"eps": "class_path: evil_module.Model"}),
    "norm": keep("norm", "!!python/name:evil_module.Model"),
    "future_option": keep("future_option", 1),
    "backbone_args.pretrained": keep("backbone_args", {"pretrained": True}),
    "backbone_checkpoint": keep("backbone_checkpoint", "evil.ckpt"),
    "channels_last": keep("channels_last", 2),
    "backbone_args": keep("backbone_args", lambda call, folder: str(folder / "call.yaml").replace(":", "")),
    "backbone_args.a": keep("backbone_args", contained_in_itself),
    "backbone_args.a.0": keep("backbone_args", a_thousand_times_a_thousand),
    "backbone_args.weights": keep("backbone_args", {"weights": torch.zeros(2)}),
}


class Hidden:
    """A mapping that looks empty to whoever asks for its items: torch lets a file set an OrderedDict's attributes."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return collections.OrderedDict, (), {"items": set}, None, iter(list(self.value.items()))


@pytest.mark.parametrize("where", ["hyper_parameters", "norm_args", "whole"])
def test_a_mapping_that_hides_its_content(where, attack, trained, capsys):
    def change(content, call, folder):
        kept = content["hyper_parameters"]
        kept["norm_args"] = {**kept["norm_args"], "affine": call}
        if where == "norm_args":
            kept["norm_args"] = Hidden(kept["norm_args"])
        if where == "hyper_parameters":
            content["hyper_parameters"] = Hidden(kept)
        if where == "whole":
            content.update(callbacks=Hidden(content["callbacks"]), hyper_parameters=Hidden({**kept, "optimizer": call}))

    path = attack(change)
    for command in ("test", "fit"):
        with pytest.raises(SystemExit) as stopped:
            main([command, *trained[1], "--ckpt_path", str(path)])
        assert stopped.value.code == 2 and "is refused: it names something to be imported" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is refused"):
        PrototypicalNetwork.load_from_checkpoint(path)


@pytest.mark.parametrize(("key", "value"), [
    ("callbacks", []), ("loops", None), ("epoch", "1"), ("state_dict", {1: torch.zeros(1)}), ("hyper_parameters", 5),
])  # fmt: skip
def test_parts_of_another_kind_are_said_in_a_line(key, value, attack, trained, capsys):
    path = attack(lambda content, call, folder: content.update({key: value}))
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *trained[1], "--ckpt_path", str(path)])
    assert stopped.value.code == 2 and f"{path} is not a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("name", ATTACKS)
def test_the_command_refuses_a_hyperparameter_by_name(name, attack, trained, capsys):
    path = attack(ATTACKS[name])
    with pytest.raises(SystemExit) as stopped:
        main(["test", *trained[1], "--ckpt_path", str(path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and f"{path}: its hyperparameter '{name}" in said and "is refused" in said
    with pytest.raises(ValueError, match="is refused"):
        PrototypicalNetwork.load_from_checkpoint(path)


@pytest.mark.parametrize("command", ["fit", "validate", "predict"])
def test_every_command_does(command, attack, trained, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, *trained[1], "--ckpt_path", str(attack(ATTACKS["_class_path"]))])
    assert stopped.value.code == 2 and "its hyperparameter '_class_path" in capsys.readouterr().err


@pytest.mark.parametrize("told", ["evil_module.Model", "fewshot.modules.matching.MatchingNetwork", 5])
def test_the_class_is_compared_as_a_string(told, attack, trained, capsys):
    path = attack(lambda content, call, folder: content.update(model_class=told))
    with pytest.raises(SystemExit):
        main(["test", *trained[1], "--ckpt_path", str(path)])
    assert "the configuration says fewshot.modules.prototypical.PrototypicalNetwork" in capsys.readouterr().err


def test_what_lightning_once_read_is_not_read(attack, trained):
    keys = ("hparams", "module_arguments", "datamodule_hyper_parameters", "hparams_name")
    path = attack(lambda content, call, folder: content.update({key: {"optimizer": call} for key in keys}))
    main(["test", *trained[1], "--ckpt_path", str(path)])
    PrototypicalNetwork.load_from_checkpoint(path)


def test_what_is_kept_is_plain_and_makes_the_model_again(trained):
    content = torch.load(trained[0], weights_only=True)
    assert content["model_class"] == "fewshot.modules.prototypical.PrototypicalNetwork"
    kept = content["hyper_parameters"]
    assert kept["norm"] == "swbn-fro" and kept["backbone_args"] == {"hidden": [8]}
    assert not kept.keys() & {"_class_path", "_instantiator", "optimizer", "lr_scheduler", "backbone_checkpoint"}
    model = PrototypicalNetwork.load_from_checkpoint(trained[0])
    assert all(torch.equal(value, content["state_dict"][key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"is a checkpoint of fewshot\.modules\.prototypical.*modules\.matching"):
        MatchingNetwork.load_from_checkpoint(trained[0])
