"""Files agree about versions: the project's, the Pythons, and what the workflow runs on each."""

import ast
import re
import tomllib

import pytest
import yaml

import swbn_lightning
from tests.conftest import REPOSITORY


def text(name):
    return (REPOSITORY / name).read_text(encoding="utf-8")


PROJECT = tomllib.loads(text("pyproject.toml"))["project"]
NOXFILE = ast.parse(text("noxfile.py"))
CI = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]


def core_tests():
    return next(
        ast.literal_eval(node.value)
        for node in NOXFILE.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CORE"
    )


def nox_sessions():
    """The name of each session, and its Pythons."""
    for node in NOXFILE.body:
        for mark in getattr(node, "decorator_list", []):
            arguments = mark.keywords if isinstance(mark, ast.Call) else []
            yield node.name, [ast.literal_eval(a.value) for a in arguments if a.arg == "python"]


def test_the_version_is_the_same_everywhere():
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", text("CHANGELOG.md"), re.MULTILINE)
    cited = yaml.safe_load(text("CITATION.cff"))["version"]
    assert {released[0], cited, PROJECT["version"]} == {swbn_lightning.__version__}


@pytest.mark.parametrize("path", core_tests())
def test_the_core_tests_are_there(path):
    assert (REPOSITORY / path).is_file()


def test_the_workflow_runs_every_session_and_every_python():
    sessions = dict(nox_sessions())
    (pythons,) = sessions.pop("tests")
    assert CI["tests"]["strategy"]["matrix"]["python"] == pythons
    assert set(CI["check"]["strategy"]["matrix"]["session"]) == set(sessions)
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert sessions["lowest"] == [pythons[0]]
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert set(claimed) <= set(pythons)
