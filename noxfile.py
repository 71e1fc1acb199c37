"""Checks on other versions, and of the sdist and wheel. ``nox --list`` shows them, ``nox -s tests-3.13`` runs one.

Each has its own environment. Those with torch take several gigabytes.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import nox
from packaging.requirements import Requirement

PYPROJECT = nox.project.load_toml("pyproject.toml")
#: The core tests: what a new Python or torch is likely to break. They take a few minutes and need nothing of Linux.
CORE = (
    "tests/norms/test_contract.py",
    "tests/norms/test_factory.py",
    "tests/norms/test_swbn.py",
    "tests/norms/test_batch_whitening.py",
    "tests/norms/test_state.py",
    "tests/norms/test_convert.py",
    "tests/norms/test_freeze.py",
    "tests/norms/test_fuse.py",
    "tests/norms/test_compiling.py",
    "tests/norms/test_export.py",
    "tests/whiteness/test_measures.py",
    "tests/whiteness/test_moments.py",
    "tests/fewshot/test_episodes.py",
    "tests/fewshot/test_evaluation.py",
    "tests/fewshot/test_cross_attention.py",
    "tests/fewshot/test_matching.py",
    "tests/test_command_line.py",
    "tests/test_cli_mistakes.py",
)

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests", "lowest", "wheel"]


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    """The core tests with the newest dependencies. Arguments after ``--`` go to pytest instead of the selection."""
    session.install("-e", ".[test]")
    run_tests(session)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The core tests with the lowest versions that pyproject.toml allows."""
    project, build = PYPROJECT["project"], PYPROJECT["build-system"]
    promised = [*build["requires"], *project["dependencies"], *project["optional-dependencies"]["test"]]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in lower_bounds(promised)), encoding="utf-8")
    session.install("-c", str(constraints), *(Requirement(name).name for name in build["requires"]))
    session.install("-c", str(constraints), "--no-build-isolation", "-e", ".[test]")
    run_tests(session)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel, check both, and run the installed wheel from another folder."""
    session.install("build", "twine", "check-wheel-contents")
    folder = Path(session.create_tmp()).resolve()
    built, environment = folder / "dist", folder / "environment"
    for old in (built, environment):
        shutil.rmtree(old, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(built))  # the wheel from the sdist
    (made,) = built.glob("*.whl")
    session.run("twine", "check", "--strict", *map(str, built.iterdir()))
    session.run("check-wheel-contents", str(made))
    session.run("python", "-m", "venv", str(environment))
    (scripts,) = [path for path in (environment / "bin", environment / "Scripts") if path.is_dir()]
    session.chdir(folder)
    installed = {"external": True, "env": {"PYTHONPATH": ""}}
    session.run(str(scripts / "python"), "-m", "pip", "install", str(made), **installed)
    session.run(str(scripts / "swbn"), "--version", **installed)
    session.run(str(scripts / "swbn"), "fit", "--help", silent=True, **installed)
    session.run(str(scripts / "python"), "-c", "import swbn_lightning, fewshot, classification, cli", **installed)


def run_tests(session: nox.Session) -> None:
    session.run("python", "-m", "pip", "list", "--format=freeze")
    session.run("python", "-m", "pytest", "-m", "not slow", *(session.posargs or CORE))


def lower_bounds(requirements: Iterable[str]) -> Iterable[str]:
    """``name>=1.2,<2`` as ``name==1.2``."""
    for requirement in map(Requirement, requirements):
        (lowest_version,) = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        yield f"{requirement.name}=={lowest_version}"
