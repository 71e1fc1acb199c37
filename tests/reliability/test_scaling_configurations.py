"""The overlays for more machines and other precisions parse behind a configuration, and are what they say."""

import subprocess
from pathlib import Path

import pytest
import yaml

from cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = sorted((CONFIGS / "scaling").glob("*.yaml"))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
@pytest.mark.parametrize("base", ["classification/glyphs.yaml", "fewshot/cifar_fs_prototypical.yaml"])
def test_an_overlay_parses_behind_a_configuration(overlay, base, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(CONFIGS / base), "--config", str(overlay), "--print_config"])
    assert stopped.value.code in (None, 0)
    found = yaml.safe_load(capsys.readouterr().out)
    own, before = (yaml.safe_load(path.read_text()) for path in (overlay, CONFIGS / base))
    assert own["trainer"].items() <= found["trainer"].items()
    assert found["model"]["class_path"].endswith(before["model"]["class_path"]) and list(own) == ["trainer"]
    assert found["trainer"]["max_epochs"] == before["trainer"]["max_epochs"]


def test_the_job_script_goes_on_and_asks_to_be_queued_again(tmp_path):
    calls = tmp_path / "calls"
    for name, code in (("srun", 143), ("scontrol", 0)):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\nexit {code}\n')
        tool.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77"}
    command = ["bash", str(CONFIGS / "scaling" / "slurm.sh"), "some.yaml", "mine", "--seed_everything=3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    first, requeue = calls.read_text().splitlines()
    assert done.returncode == 143 and requeue == "scontrol requeue 77"
    assert first.startswith("srun swbn fit --config some.yaml") and "--run.name mine" in first
    assert "--ckpt_path" not in first and "--seed_everything=3" in first
    last = tmp_path / "runs" / "mine" / "version_0" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert "--ckpt_path runs/mine --seed_everything=3" in calls.read_text().splitlines()[2]
