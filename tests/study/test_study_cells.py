"""What a study runs: the grid, the options of norms and networks, and by what runs are known."""

from pathlib import Path

import pytest
import yaml

from cli import main
from swbn_lightning.runs.study.cells import Experiment, grid, short_names
from tests.study.tiny import CIFAR_FS, CONFIGS, GLYPHS, cells_of


def test_the_grid_is_seed_after_seed_and_what_is_given_twice_is_run_once():
    cells = cells_of(GLYPHS, networks=["resnet20", "resnet12"], norms=["bn", "swbn-fro", "bn"], seeds=[0, 1, 0])
    assert [(c.seed, c.network.name, c.norm.name) for c in cells] == [
        (seed, network, norm) for seed in (0, 1) for network in ("resnet20", "resnet12") for norm in ("bn", "swbn-fro")
    ]
    assert len({cell.folder for cell in cells}) == 8
    (cell,) = cells_of(CIFAR_FS, shots=[5, 1, 5], settings=["trainer.max_epochs=2", "trainer.max_epochs=3"])
    assert [test.shots for test in cell.tests] == [5, 1] and cell.settings == ("trainer.max_epochs=3",)
    assert short_names(["a/b/c.yaml", "c.yaml", "x/b/c.yaml", "d.yaml"]) == {
        "a/b/c.yaml": "a/b/c", "c.yaml": "c", "x/b/c.yaml": "x/b/c", "d.yaml": "d",
    }  # fmt: skip


def test_options_are_those_of_the_norm_and_network_they_were_given_for():
    cells = cells_of(
        CONFIGS / "quickstart.yaml",
        networks=[None, "resnet12", "resnet20:shortcut=identity"],
        norms=["swbn-fro", "bn", "swbn-kl", "swbn-fro:num_groups=2", "iternorm:num_iterations=3"],
    )
    assert {cell.norm.label: cell.norm_args for cell in cells} == {
        "swbn-fro": {"step_size": 0.01}, "bn": None, "swbn-kl": None, "swbn-fro:num_groups=2": {"num_groups": 2},
        "iternorm:num_iterations=3": {"num_iterations": 3},
    }  # fmt: skip
    assert {cell.network.label: cell.network_args for cell in cells} == {
        "resnet20": {"in_channels": 1}, "resnet12": {"in_channels": 1},
        "resnet20:shortcut=identity": {"in_channels": 1, "shortcut": "identity"},
    }  # fmt: skip
    batch_norm = next(cell for cell in cells if cell.norm.name == "bn")
    assert {"--model.norm=bn", "--model.norm_args=null", "--seed_everything=0"} <= set(batch_norm.arguments())


def test_runs_are_known_by_their_settings(tmp_path):
    (cell,) = cells_of(GLYPHS)
    content = yaml.safe_load(GLYPHS.read_text())
    # What does not change the training does not change the key: comments, the run's name, the configuration's own norm.
    content["run"]["name"] = content["seed_everything"] = 5
    content["model"]["init_args"] |= {"norm": "iternorm", "norm_args": None}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(content))
    assert cells_of(tmp_path / "other.yaml")[0].key == cell.key
    # Anything else does.
    content["model"]["init_args"]["label_smoothing"] = 0.1
    (tmp_path / "smooth.yaml").write_text(yaml.safe_dump(content))
    others = [{"seeds": [1]}, {"norms": ["bn:eps=1e-3"]}, {"networks": ["resnet12"]}, {"root": str(tmp_path)},
              {"networks": ["resnet20:shortcut=identity"]}, {"settings": ["trainer.max_epochs=7"]}]  # fmt: skip
    keys = {cells_of(GLYPHS, **other)[0].key for other in others}
    assert len({cell.key, cells_of(tmp_path / "smooth.yaml")[0].key, *keys}) == 8
    # Keys of a mapping are texts in the file that a finished run is known by.
    content["model"]["init_args"]["lr_scheduler"] = {"values": {9: 0.1, 10: 0.01}}
    (tmp_path / "numbers.yaml").write_text(yaml.safe_dump(content))
    (numbers,) = cells_of(tmp_path / "numbers.yaml")
    content["model"]["init_args"]["lr_scheduler"] = {"values": {"9": 0.1, "10": 0.01}}
    (tmp_path / "texts.yaml").write_text(yaml.safe_dump(content))
    assert cells_of(tmp_path / "texts.yaml")[0].key == numbers.key


def test_a_test_is_no_part_of_the_training():
    plain, shots, episodes = (
        cells_of(CIFAR_FS, shots=number, settings=given)[0]
        for number, given in (([], []), ([1, 5], []), ([1], ["data.test.episodes=10"]))
    )
    assert plain.key == shots.key == episodes.key
    names = [test.name for cell in (plain, shots, episodes) for test in cell.tests]
    assert len(set(names)) == 4
    assert episodes.tests[0].arguments == ["--data.test.shots=1", "--data.test.episodes=10"]
    assert "--data.test.episodes=10" not in episodes.arguments()
    # The configuration's own test settings are the test's, too.
    changed = Experiment(str(CIFAR_FS), yaml.safe_load(CIFAR_FS.read_text()))
    changed.content["data"]["init_args"]["test"]["episodes"] = 7
    (other,) = grid([changed], [], ["bn"], [0], [], [], None, Path("runs"))
    assert other.key == plain.key and other.tests[0].name != plain.tests[0].name


def test_a_setting_has_one_name():
    (short,), (long,) = (
        cells_of(CIFAR_FS, settings=[f"data.{given}dataset=fc100", f"data.{given}test.episodes=7"])
        for given in ("", "init_args.")
    )
    assert long.dataset == "fc100" and long.key == short.key and long.tests == short.tests
    assert long.tests[0].settings == ("data.test.episodes=7",)
    (cell,) = cells_of(CIFAR_FS, settings=["data.dataset=fc100", "data.init_args.dataset=cub"])
    assert cell.settings == ("data.dataset=cub",)


def test_a_network_of_the_users_is_the_configurations(tmp_path):
    content = yaml.safe_load(GLYPHS.read_text())
    keys = set()
    for width in (8, 16):
        backbone = {"class_path": "my_models.Net", "init_args": {"width": width}}
        content["model"]["init_args"] |= {"backbone": backbone, "backbone_args": None}
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
        (cell,) = cells_of(tmp_path / "own.yaml")
        assert cell.network.label == "Net" and cell.name.startswith("own/Net/bn/seed0-")
        assert not any(word.startswith("--model.backbone") for word in cell.arguments())
        keys.add(cell.key)
    assert len(keys) == 2
    (named,) = cells_of(tmp_path / "own.yaml", networks=["resnet20"])
    assert {"--model.backbone=resnet20", "--model.backbone_args=null"} <= set(named.arguments())


WRONG = [
    (["nowhere.yaml"], "configuration nowhere.yaml cannot be read"),
    (["empty.yaml"], "configuration empty.yaml must give model and data, each with class_path"),
    ([str(GLYPHS), "--set", "trainer.max_epochs"], "--set takes KEY=VALUE, as trainer.max_epochs=2, got"),
    ([str(GLYPHS), "--set", "model.init_args.norm_args.eps=1"], "--set cannot change model.init_args.norm_args.eps"),
    ([str(GLYPHS), "--set", "run.name=mine"], "--set cannot change run.name"),
    ([str(GLYPHS), "--shots", "1"], "--shots are of few-shot configurations"),
    ([str(GLYPHS), "--norms", "bn:eps"], "options of bn are given as bn:KEY=VALUE"),
    ([str(GLYPHS), "--runs", "a_file"], "a_file/study.csv cannot be written: a_file is a file; give the runs another"),
    ([str(GLYPHS), "--output", "a_file"], "a_file/study.csv cannot be written: a_file is a file; give the table"),
    ([str(GLYPHS), "--norms", "bn", "bnn"], "unknown norm 'bnn'; did you mean 'bn'?"),
    ([str(GLYPHS), "--seeds", "0..2"], "--seeds takes numbers with commas, as 0,1,2, got '0..2'"),
    ([str(GLYPHS), "--reach", "60"], "--reach is a fraction in (0, 1], as 0.6, got 60"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_input_is_said_before_anything_runs(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("")
    Path("a_file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["study", *arguments])
    assert stopped.value.code == 2 and f"swbn: error: {words}" in capsys.readouterr().err
    assert not Path("runs").exists()
