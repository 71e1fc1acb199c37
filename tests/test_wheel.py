"""The wheel in a fresh environment, used from another folder."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def call(*command, cwd):
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # From a copy of what git would give, so that nothing ignored slips in.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY).splitlines()
    for name in names:
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, ".", cwd=source)
    (path,) = out.glob("*.whl")
    return path


def test_it_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"swbn_lightning", "classification", "fewshot", "cli.py"}
    for data in (
        "glyph_classes.txt",
        "cifar_fs_classes.txt",
        "fc100_classes.txt",
        "mini_imagenet_classes.txt",
        "runs/paper_results.csv",
        "runs/card.md.jinja",
        "runs/page/page.html.jinja",
        "py.typed",
    ):
        assert any(name.endswith("/" + data) for name in names), data


@pytest.mark.slow
def test_installed_it_runs_any_configuration_from_another_folder(wheel, tmp_path, tiny_data):
    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    # The dependencies (gigabytes) are those of this environment, found by path; pip sees them as installed. A
    # path file does not run this environment's editable hooks, so the package itself is not found there.
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    call(python, "-m", "pip", "install", "--quiet", "--no-index", "--force-reinstall", "--no-deps", wheel, cwd=tmp_path)
    where = call(python, "-c", "import swbn_lightning, cli; print(swbn_lightning.__file__, cli.__file__)", cwd=tmp_path)
    assert all(Path(path).is_relative_to(environment) for path in where.split())
    # The new environment's own setuptools, older than what torch asks for, hides the one that came with torch.
    call(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", cwd=tmp_path)
    checked = subprocess.run([str(python), "-m", "pip", "check"], cwd=tmp_path, capture_output=True, text=True)
    # `make learn2learn` leaves out what learn2learn names and does not import.
    missing = [line for line in checked.stdout.splitlines() if not line.startswith("learn2learn ")]
    assert not missing or missing == ["No broken requirements found."], missing
    swbn = environment / "bin" / "swbn"
    for original in (REPOSITORY / "configs").rglob("*.yaml"):
        if {"paper", "scaling"} & set(original.parts):  # they need other data, or a configuration to lie over
            continue
        config = tmp_path / original.name
        config.write_text(original.read_text())
        options = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--whiteness.num_images=64"]
        assert "accuracy ± 95%" in call(swbn, "fit", "--config", config, *options, *tiny_data(original), cwd=tmp_path)
