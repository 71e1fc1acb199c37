"""What else a checkpoint brings: states of generators and of whiteness, settings that lie beside it."""

import json

import numpy as np
import pytest
import torch

from cli import main
from swbn_lightning.training.callbacks.random_streams import random_streams, set_random_streams
from swbn_lightning.whiteness import WhitenessMonitor


def changed(trained, folder, change):
    content = torch.load(trained[0], weights_only=True)
    change(content)
    path = folder / "version_0" / "checkpoints" / "changed.ckpt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    return path


@pytest.mark.parametrize(("name", "value"), [("pos", 700), ("pos", -1), ("pos", 10**9), ("key", torch.zeros(3))])
def test_numpys_generator_reads_no_foreign_memory(name, value):
    streams = random_streams()
    streams["numpy"]["state"][name] = value
    before = np.random.get_state()[1].copy()
    with pytest.raises(ValueError, match="numpy's is none"):
        set_random_streams(streams)
    assert np.array_equal(np.random.get_state()[1], before)


def test_broken_streams_are_an_error_before_training(trained, tmp_path, capsys):
    path = changed(trained, tmp_path, lambda content: content["random_streams"][0].update(python=(3, (1, 2), None)))
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *trained[1], "--trainer.max_epochs=2", "--ckpt_path", str(path)])
    assert stopped.value.code == 2 and "random_streams are no states of random" in capsys.readouterr().err


GOOD = {"epoch": 0, "step": 1, "distance": 1.0, "rms": 0.1}
MAP = {"channels": [0, 1], "correlation": torch.eye(2), "epoch": 0, "num_features": 2, "rms": 0.5}


@pytest.mark.parametrize("rows", [
    None, 5, [1], [{**GOOD, "more": 1}], [{**GOOD, "rms": "x"}], [{**GOOD, "rms": 10**400}], [GOOD] * 300_000,
    [{**GOOD, "epoch": 0.5}], [{**GOOD, "layer": 7}], [{**GOOD, "layer": "x" * 400}], [{}],
])  # fmt: skip
def test_rows_that_are_no_measurements_are_none(rows):
    monitor = WhitenessMonitor()
    monitor.load_state_dict({"history": rows, "rows": rows})
    assert monitor.history == [] and monitor.rows == []
    monitor.load_state_dict({"history": [GOOD], "rows": [{**GOOD, "layer": "a"}]})
    assert monitor.history == [GOOD] and len(monitor.rows) == 1


@pytest.mark.parametrize("more", [
    {"correlation": "x"}, {"correlation": torch.eye(3)}, {"correlation": torch.zeros(1).expand(10**6, 10**6)},
    {"correlation": torch.empty(2, 2, device="meta")}, {"channels": ["a", "b"]}, {"rms": "x"}, {"num_features": -1},
    {"unknown": 1}, {"epoch": 2**2000},
])  # fmt: skip
def test_maps_that_are_none_are_not_drawn(more):
    monitor = WhitenessMonitor()
    monitor.load_state_dict({"history": [], "rows": [], "maps": {"layer": {"before": {**MAP, **more}}}})
    assert monitor._maps == {}
    monitor.load_state_dict({"history": [], "rows": [], "maps": {"layer": {"before": MAP}}})
    assert monitor._maps["layer"]["before"].rms == 0.5


@pytest.mark.parametrize("beside", ["a link", "absurd", "a pipe", "no mapping"])
def test_the_run_beside_a_checkpoint_costs_no_results(beside, trained, tmp_path):
    import os

    path = changed(trained, tmp_path / "theirs", lambda content: content.pop("run"))
    config, secret = path.parents[1] / "run.json", tmp_path / "secret"
    secret.write_text('{"id": "0123456789abcdef", "settings": {"password": "hunter2"}}')
    if beside == "a link":
        config.symlink_to(secret)
    elif beside == "a pipe":
        os.mkfifo(config)
    else:
        with config.open("wb") as file:
            file.truncate(20 * 2**30) if beside == "absurd" else file.write(b"- 1\n")
    main(["test", *trained[1], f"--run.root={tmp_path / 'mine'}", "--ckpt_path", str(path)])
    run = tmp_path / "mine" / "quickstart" / "version_0"
    assert json.loads((run / "results.json").read_text())["results"]
    own = (run / "run.json").read_text()
    assert "hunter2" not in own and json.loads(own)["trained"] is None


@pytest.mark.parametrize("name", ["running_var", "gamma"])
def test_an_infinite_factor_is_no_accuracy(name, trained, tmp_path, capsys):
    def spoil(content):
        key = next(
            k for k in content["state_dict"] if k.endswith("running_var" if name == "running_var" else ".weight")
        )
        content["state_dict"][key].fill_(float("inf"))

    with pytest.raises(SystemExit) as stopped:
        main(["test", *trained[1], "--ckpt_path", str(changed(trained, tmp_path, spoil))])
    assert stopped.value.code == 2 and "is not finite" in capsys.readouterr().err
