"""How the command starts: what it answers without Lightning, and whether other modules of the same names disturb it."""

import os
import subprocess
import sys

import pytest

import swbn_lightning
from tests.conftest import REPOSITORY

QUICKSTART = ["fit", "--config", str(REPOSITORY / "configs" / "quickstart.yaml"), "--print_config"]


def python(*words, cwd):
    """A new Python that finds modules in ``cwd`` first, then those of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--help"], 0, "study     train and test a grid"),
    (["--version"], 0, f"swbn {swbn_lightning.__version__}"),
    (["fitt"], 2, "'fitt' is no command. Did you mean 'fit'? The commands: fit, validate,"),
    (["\x1b[2J"], 2, r"'\x1b[2J' is no command. The commands"),
    ([], 2, "usage: swbn COMMAND"),
])  # fmt: skip
def test_what_needs_no_training_is_answered_before_lightning_is_loaded(words, code, said):
    program = (
        f"import sys; sys.argv[1:] = {words!r}\nfrom swbn_lightning.__main__ import console\ntry: console()\n"
        "finally: assert not {'torch', 'pytorch_lightning', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == code and said in (done.stderr if code else done.stdout)


@pytest.fixture
def foreign(tmp_path):
    """Writes a module that must not be imported into the folder that Python looks in first."""

    def write(name):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise RuntimeError('not this one')\n")
        return file

    return write


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--version"], 0, f"swbn {swbn_lightning.__version__}"),
    (["compare", "a"], 2, "compare needs at least two runs"),
    ([*QUICKSTART, "--trainer.limit_train_batches=1"], 0, "limit_train_batches: 1\n"),  # one batch; 1.0 is all
])  # fmt: skip
def test_another_module_called_cli_or_a_folder_of_images_called_as_a_package_is_no_matter(
    words, code, said, foreign, tmp_path
):
    foreign("cli.py")
    (tmp_path / "fewshot").mkdir()
    done = python("-m", "swbn_lightning", *words, cwd=tmp_path)
    assert done.returncode == code and said in (done.stderr if code else done.stdout), done.stderr


@pytest.mark.parametrize(("name", "how"), [
    ("fewshot.py", ["-m", "swbn_lightning"]),
    ("fewshot/__init__.py", ["-c", "import cli; cli.main()"]),
    ("classification/__init__.py", ["-m", "swbn_lightning"]),
])  # fmt: skip
def test_a_foreign_module_in_place_of_a_package_is_named(name, how, foreign, tmp_path):
    file = foreign(name)
    done = python(*how, "compare", "a", cwd=tmp_path)
    own = file.parent.name if file.name == "__init__.py" else file.stem
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"`import {own}` finds {file}, but {REPOSITORY / own} is needed" in done.stderr


@pytest.mark.parametrize("how", [[str(REPOSITORY / "cli.py")], ["-m", "cli"], ["-c", "import my, cli; cli.main()"]])
def test_the_other_ways_to_call_it(how, tmp_path):
    (tmp_path / "my.py").write_text("")
    assert "'fitt' is no command" in python(*how, "fitt", cwd=tmp_path).stderr


def test_ctrl_c_is_no_traceback():
    """Not while torch is loaded either, which takes the first seconds."""
    program = (
        "import sys\nclass Stop:\n    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': raise KeyboardInterrupt\nsys.meta_path.insert(0, Stop())\n"
        "from swbn_lightning.__main__ import console\nsys.argv[1:] = ['embed', 'runs/a']\nconsole()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "swbn: stopped by Ctrl-C.\n"
