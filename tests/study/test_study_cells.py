"""What a study runs: the grid, the options of norms and networks, and by what runs are known."""

from pathlib import Path

import pytest
import yaml

from swbn_lightning.runs.study.cells import Experiment, grid
from swbn_lightning.runs.study.command import main
from tests.study.tiny import CIFAR_FS, CONFIGS, GLYPHS, cells_of


def test_the_grid_is_seed_after_seed():
    cells = cells_of(GLYPHS, networks=["resnet20", "resnet12"], norms=["bn", "swbn-fro"], seeds=[0, 1])
    assert [(c.seed, c.network.name, c.norm.name) for c in cells] == [
        (seed, network, norm) for seed in (0, 1) for network in ("resnet20", "resnet12") for norm in ("bn", "swbn-fro")
    ]
    assert len({cell.folder for cell in cells}) == 8


def test_what_is_given_twice_is_run_once():
    cells = cells_of(CIFAR_FS, norms=["bn", "bn"], seeds=[0, 1, 0], shots=[5, 1, 5])
    assert [cell.seed for cell in cells] == [0, 1] and [test.shots for test in cells[0].tests] == [5, 1]
    (cell,) = cells_of(GLYPHS, settings=["trainer.max_epochs=2", "data.seed=1", "trainer.max_epochs=3"])
    assert cell.settings == ("trainer.max_epochs=3", "data.seed=1")


def test_options_are_those_of_the_norm_and_network_they_were_given_for():
    cells = cells_of(
        CONFIGS / "quickstart.yaml",
        networks=[None, "resnet12", "resnet20:shortcut=identity"],
        norms=["swbn-fro", "bn", "swbn-kl", "swbn-fro:num_groups=2", "iternorm:num_iterations=3"],
    )
    norms = {cell.norm.label: cell.norm_args for cell in cells}
    assert norms == {
        "swbn-fro": {"step_size": 0.01},  # the configuration's own
        "bn": None,
        "swbn-kl": None,
        "swbn-fro:num_groups=2": {"num_groups": 2},
        "iternorm:num_iterations=3": {"num_iterations": 3},
    }
    networks = {cell.network.label: cell.network_args for cell in cells}
    assert networks == {
        "resnet20": {"in_channels": 1},
        "resnet12": {"in_channels": 1},
        "resnet20:shortcut=identity": {"in_channels": 1, "shortcut": "identity"},
    }
    batch_norm = next(cell for cell in cells if cell.norm.name == "bn")
    assert {"--model.norm=bn", "--model.norm_args=null", "--seed_everything=0"} <= set(batch_norm.arguments())


def test_a_networks_options_do_not_pass_to_another(tmp_path):
    content = yaml.safe_load(GLYPHS.read_text())
    content["model"]["init_args"]["backbone_args"] = {"in_channels": 1, "shortcut": "identity"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    own, other = cells_of(tmp_path / "own.yaml", networks=["resnet20", "resnet12"])
    assert own.network_args == {"in_channels": 1, "shortcut": "identity"} and other.network_args == {"in_channels": 1}


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
    others = [
        cells_of(tmp_path / "smooth.yaml")[0],
        cells_of(GLYPHS, seeds=[1])[0],
        cells_of(GLYPHS, norms=["bn:eps=1e-3"])[0],
        cells_of(GLYPHS, networks=["resnet12"])[0],
        cells_of(GLYPHS, networks=["resnet20:shortcut=identity"])[0],
        cells_of(GLYPHS, settings=["trainer.max_epochs=7"])[0],
        cells_of(GLYPHS, root=str(tmp_path))[0],
    ]
    assert len({cell.key, *(other.key for other in others)}) == 8


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


WRONG = [
    (["nowhere.yaml"], "configuration nowhere.yaml cannot be read"),
    (["empty.yaml"], "configuration empty.yaml must give model and data, each with class_path"),
    ([str(GLYPHS), "--set", "trainer.max_epochs"], "--set takes KEY=VALUE, as trainer.max_epochs=2, got"),
    ([str(GLYPHS), "--set", "model.norm=bn"], "--set cannot change model.norm"),
    ([str(GLYPHS), "--set", "model.init_args.norm_args.eps=1"], "--set cannot change model.init_args.norm_args.eps"),
    ([str(GLYPHS), "--set", "run.name=mine"], "--set cannot change run.name"),
    ([str(GLYPHS), "--shots", "1"], "--shots are of few-shot configurations"),
    ([str(GLYPHS), "--norms", "bn:eps"], "options of bn are given as bn:KEY=VALUE"),
    ([str(GLYPHS), "--reach", "60"], "--reach is a fraction in (0, 1], as 0.6, got 60"),
    (["class.yaml"], "model mine.Model: No module named 'mine'"),
    (["short.yaml"], "model Model is not known; give its class as MODULE.CLASS"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(a[-2:]) for a, _ in WRONG])
def test_wrong_input_is_said_before_anything_runs(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("")
    for name, path in (("class", "mine.Model"), ("short", "Model")):
        Path(f"{name}.yaml").write_text(f"model: {{class_path: {path}}}\ndata: {{class_path: Data}}\n")
        arguments = [*arguments, "--shots", "1"] if arguments == [f"{name}.yaml"] else arguments
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err.replace("\n", " ")
    assert not Path("runs").exists()
