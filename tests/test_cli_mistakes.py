"""Input that cannot work is met by a message, before any training."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from cli import main
from swbn_lightning.errors import InputError
from swbn_lightning.runs.folders import new_run_folder
from tests.test_cli import CIFAR_FS, REPOSITORY, SHORT


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


BAD_INPUT = [
    (["--data.dataset=cifar_fs"], "unknown dataset 'cifar_fs'; did you mean 'cifar-fs'? Known: cifar-fs, cub, fc100"),
    (["--model.backbone=resnet21"], "unknown backbone 'resnet21'; did you mean 'resnet20'"),
    (["--model.norm=swbn-fr"], "unknown norm 'swbn-fr'; did you mean 'swbn-fro'"),
    (["--imports=./my_norms.py"], "imports: './my_norms.py' is no module's name; give one as my_norms"),
    (["--imports=no_norms"], "imports: there is no module 'no_norms' on the Python path; PYTHONPATH=FOLDER"),
    (["--model.norm_args={stepsize: 1}"], "'stepsize'; did you mean 'step_size'"),
    (["--model.norm_args={step_size: -1}"], "step_size of SWBN2d must be positive and finite, got -1"),
    (["--model.backbone_args={in_channels: 1}"], "the images have 3 channel(s), but the backbone takes 1"),
    (["--data.root=nowhere"], "root nowhere does not exist"),
    (["--data.root=empty"], "nothing usable in empty (it holds nothing)"),
    (["--data.root=other"], "nothing usable in other (it holds train-images-idx3-ubyte)"),
    (["--data.train.shots=0"], "shots must be an integer of at least 1, got 0"),
    (["--data.episodes_per_step=4"], "episodes_per_step=4 is more than the 3 episodes"),
    (["--data.eval_seed=-1"], "must not be negative"),
    (["--model.lr_interval=batch"], "unknown lr_interval 'batch'"),
    (["--ckpt_path=nowhere.ckpt"], "checkpoint nowhere.ckpt does not exist"),
    (["--ckpt_path=a_file"], "a_file is not a readable checkpoint"),
    (["--ckpt_path=empty"], "empty holds no last checkpoint"),
    (["--model.optimizer.init_args.lr=-1"], "Invalid learning rate: -1"),
    (["--trainer.max_epochs=-5"], "max_epochs"),
    (["--data.wayz=5"], "error: data: fewshot.EpisodicDataModule has no option 'wayz'."),
    (["--data.train.wayz=5"], "error: data: fewshot.EpisodicDataModule has no option 'train.wayz'."),
    (["--model.optimizer.lrr=5"], "error: model.optimizer: torch.optim.SGD has no option 'lrr'."),
    (["--data.train.ways=abc"], "error: data.train.ways: expected int or a list, got 'abc'."),
    (["--model.optimizer.lr=abc"], "error: model.optimizer.lr: expected float, got 'abc'."),
    (["--model.optimizer=Nosuch"], "error: model.optimizer: no class 'Nosuch' is known; give its import path"),
    (["--trainer.precision=99"], "error: trainer.precision: expected one of 64, 32, 16 or one of"),
    (["--model.norm_args=5"], "error: model.norm_args: expected a mapping or null, got '5'."),
    (["--seed_everything=-1"], "seed_everything must be from 0 to 4294967295"),
    (["--trainer.strategy=nosuch"], "trainer: You selected an invalid strategy name: `strategy='nosuch'`"),
    (["--trainer.precision=transformer-engine"], "trainer: Requirement 'transformer_engine>=0.11.0' not met"),
    (["--trainer.accumulate_grad_batches=0"], "trainer: accumulate_grad_batches must be an integer of at least 1"),
    (["--trainer.val_check_interval=50"], "`val_check_interval` (50) must be less than or equal to the number"),
    (["--run.root=a_file"], "no run folder can be made at a_file/cifar_fs_prototypical: Not a directory"),
    (["--model.backbone=null"], "backbone must be a name (such as resnet20) or a network, got None"),
    (["--finite.every_n_steps=-1"], "every_n_steps must be an integer of at least 0"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT, ids=[" ".join(a) for a, _ in BAD_INPUT])
def test_bad_input_is_met_by_a_clear_error(arguments, words, tiny_cifar100, capsys):
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/train-images-idx3-ubyte").write_bytes(b"")
    Path("a_file").write_text("text")
    given = ["fit", "--config", str(CIFAR_FS), "--data.root", str(tiny_cifar100), *SHORT, *arguments]
    with pytest.raises(SystemExit) as stopped:
        main(given)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert words in printed.err.replace("\n", " ") and "usage:" not in printed.err
    assert "Traceback" not in printed.err + printed.out
    assert "Epoch 0" not in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fit"], "error: fit needs a configuration, as swbn fit --config configs/quickstart.yaml."),
        (["test", "mine.yaml"], "error: a configuration is given as --config mine.yaml."),
    ],
)
def test_a_configuration_is_asked_for(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err


def test_a_folder_of_runs_that_may_not_be_written_is_named(monkeypatch):
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=[None, FileExistsError(), refused]))
    with pytest.raises(InputError, match="no run folder can be made at runs/mine: Permission denied"):
        new_run_folder("runs", "mine")


def test_glyphs_take_no_root_and_a_missing_config_is_named(capsys):
    quickstart = str(REPOSITORY / "configs" / "quickstart.yaml")
    with pytest.raises(SystemExit):
        main(["fit", "--config", quickstart, "--data.root=somewhere"])
    assert "glyphs are drawn, not read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", "--config", "missing.yaml"])
    assert "missing.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["test", "fit"])
def test_a_checkpoint_of_another_model_is_refused(command, trained, capsys):
    checkpoint = ["--ckpt_path", str(trained[0])]
    given = [*trained[1], "--model.class_path=fewshot.MatchingNetwork", *checkpoint]
    with pytest.raises(SystemExit) as stopped:
        main([command, *given])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert "is a checkpoint of fewshot.modules.prototypical.PrototypicalNetwork" in printed
    assert "the configuration says fewshot.modules.matching.MatchingNetwork" in printed
    main(["validate", *trained[1], "--model.class_path=fewshot.modules.prototypical.PrototypicalNetwork", *checkpoint])


def test_a_training_that_is_complete_says_so(trained):
    with pytest.warns(UserWarning, match=r"nothing was trained: 1 epochs and 1 steps are behind.*max_epochs=1"):
        main(["fit", *trained[1], "--ckpt_path", str(trained[0])])
