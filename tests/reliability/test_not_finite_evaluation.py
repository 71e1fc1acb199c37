"""A network whose outputs are not finite has no accuracy: an error, with the weight or layer at which it begins."""

import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from cli import main
from fewshot import PrototypicalHead, evaluate_episodes
from swbn_lightning.errors import InputError
from tests.reliability.tiny_runs import QUIET, classification, few_shot


@pytest.mark.parametrize("kind", ["few-shot", "classification"])
@pytest.mark.parametrize(("value", "expected"), [
    (math.nan, r"test: .*it begins in (backbone\.\S+) \(Linear\), for \1\.weight is not finite\).*earlier checkpoint"),
    (3e38, r"test: .*it begins in backbone\.\S+ \(\w+\)\), so no accuracy"),
])  # fmt: skip
def test_a_test_of_such_a_network_is_an_error(kind, value, expected, tiny_mnist, tiny_cifar100):
    model, data = classification(tiny_mnist) if kind == "classification" else few_shot(tiny_cifar100)
    last = [module for module in model.backbone.modules() if isinstance(module, nn.Linear)][-1]
    nn.init.constant_(last.weight, value)
    with pytest.raises(InputError, match=expected):
        pl.Trainer(**QUIET).test(model, datamodule=data, verbose=False)
    with pytest.raises(InputError, match="validate|val"):
        pl.Trainer(**QUIET).validate(model, datamodule=data, verbose=False)


def test_the_command_says_it(trained, tmp_path, capsys):
    content = torch.load(trained[0], weights_only=True)
    name = next(key for key, value in content["state_dict"].items() if value.is_floating_point() and value.dim() > 1)
    content["state_dict"][name].fill_(math.nan)
    torch.save(content, tmp_path / "nan.ckpt")
    for command in ("test", "validate"):
        with pytest.raises(SystemExit) as stopped:
            main([command, *trained[1], "--ckpt_path", str(tmp_path / "nan.ckpt")])
        assert stopped.value.code == 2 and f"for {name} is not finite)" in capsys.readouterr().err


def test_cached_features_are_looked_at():
    features, labels = torch.randn(60, 4), torch.arange(6).repeat_interleave(10)
    settings = {"ways": 3, "shots": 1, "queries": 4, "num_episodes": 5, "seed": 0}
    features[7, 2] = math.inf
    features[9, 0] = math.nan
    with pytest.raises(InputError, match="2 of 60 features are not finite, the first of number 7"):
        evaluate_episodes(features, labels, PrototypicalHead(), **settings)
    with pytest.raises(InputError, match=r"5 of 5 logits are not finite"):
        evaluate_episodes(torch.randn(60, 4) * 1e30, labels, PrototypicalHead(), **settings)
