"""Run folders of others: the newest test by what they say, each odd file named, and nothing done to the terminal."""

import os
import subprocess
from pathlib import Path

import pytest

from cli import main
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import csv_rows, flatten, folders_with, printable, read_json, read_yaml
from swbn_lightning.runs.compare import compare
from swbn_lightning.runs.study.command import Study
from tests.made_runs import change
from tests.report.page_reader import report
from tests.study.tiny import GLYPHS, cells_of
from tests.test_compare import episodes, saved

pytestmark = pytest.mark.usefixtures("quick_pictures")


def test_episodes_are_paired_by_their_numbers(tmp_path):
    a, b = saved(tmp_path, "a", episodes(1)), saved(tmp_path, "b", episodes(2))
    expected = compare([a, b])
    file = Path(b) / "version_1" / "episodes.csv"
    head, *lines = file.read_text().splitlines()
    file.write_text("\n".join([head, *lines[::-2], *lines[::2]]))
    assert compare([a, b]) == expected


def test_the_mean_of_the_episodes_is_the_accuracy_of_the_test(tmp_path):
    values = episodes(1)
    a, b = saved(tmp_path, "a", values), saved(tmp_path, "b", values, accuracy=float(values.mean()) + 5e-7)
    compare([a, b])
    for told in (0.99, None, float("nan")):
        b = saved(tmp_path, "b", values, accuracy=told)
        with pytest.raises(InputError, match=r"mean accuracy of 0\.\d+, and results\.json says .*test again") as error:
            compare([a, b])
        assert repr(told) in str(error.value) and str(values.mean())[:8] in str(error.value)


@pytest.mark.parametrize("given", ["", None, ["a"]])
def test_episodes_that_are_not_named(tmp_path, given):
    runs = [saved(tmp_path, name, episodes(1), episodes_id=given) for name in "ab"]
    with pytest.raises(
        InputError, match=r"a/version_1/results\.json cannot be read: its episodes_id is .*, not a text"
    ):
        compare(runs)


@pytest.mark.parametrize("line,reason", [
    ("1,0.5", "line 3: episode 1 stands in line 2, too"),
    ("2,0.5", "line 3: episode 2 of 2, which should be numbered from 0"),
    ("-1,0.5", "line 3: '-1' is not the number"),
    ("9" * 5000 + ",0.5", "is too large for a count"), ("0,0.5,1", "line 3 has 3 cells for 2 columns"),
    *((f"0,{value}", f"line 3: the accuracy '{value}' is not a number from 0 to 1")
      for value in ("nan", "inf", "1.01", "-0.01", "")),
])  # fmt: skip
def test_a_list_of_episodes_that_is_none(tmp_path, line, reason):
    a, b = saved(tmp_path, "a", episodes(1, 2)), saved(tmp_path, "b", episodes(2, 2))
    (Path(b) / "version_1" / "episodes.csv").write_text(f"episode,accuracy\n1,0.5\n{line}\n")
    with pytest.raises(InputError, match=r"b/version_1/episodes\.csv cannot be read") as error:
        compare([a, b])
    assert reason in str(error.value)


@pytest.mark.parametrize("odd", [
    {"id": "../../etc"}, {"id": ["a"], "from": {"a": 1}, "trained": [], "environment": 5}, {"settings": [1]},
    {"trained": {"id": "0" * 16, "settings": "x", "started": 7}}, {"kind": "\x1b[2J", "started": 1e308},
    {"settings": {"a" * 2_000: 1}},
], ids=repr)  # fmt: skip
def test_what_a_run_says_of_itself_is_taken_or_left(tmp_path, odd):
    a, b = saved(tmp_path, "a", episodes(1)), saved(tmp_path, "b", episodes(2))
    change(Path(b) / "version_1" / "run.json", **odd)
    (_, line) = compare([a, b])
    assert line.accuracy.mean == pytest.approx(episodes(2).mean())
    assert "cannot be shown" not in report(tmp_path).text


@pytest.mark.parametrize("content,reason", [
    (b'{"a":' + b"[" * 50 + b"]" * 50 + b"}", "nested more"),
    (b'{"a": 1' + b"0" * 400 + b"}", "an integer of 1329 bits"), (b'{"results": 1}', "cannot be read"),
    (b'{"results": [[]]}', "cannot be read"), (b'{"results": [{}]}', "it lacks 'episodes_id'"),
    (b"{}", "it lacks 'results'"),
])  # fmt: skip
def test_results_that_cannot_be_read_are_told(tmp_path, content, reason):
    a, b = saved(tmp_path, "a", episodes(1)), saved(tmp_path, "b", episodes(2))
    (Path(b) / "version_1" / "results.json").write_bytes(content)
    with pytest.raises(InputError, match=r"b/version_1/results\.json cannot be read") as error:
        compare([a, b])
    assert reason in str(error.value)


@pytest.mark.parametrize("read, name", [(read_yaml, "a.yaml"), (read_json, "a.json"), (csv_rows, "a.csv")])
def test_a_pipe_is_not_waited_for(read, name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=r"cannot be read: it is not a regular file"):
        list(read(tmp_path / name))


def test_names_do_not_act_on_the_terminal(tmp_path, capsys):
    evil = "\x1b[2J\x9b1m\u202egnp.\u2066\r\x07\x00"
    assert printable(evil) == r"\x1b[2J\x9b1m\u202egnp.\u2066\r\x07\x00" and printable("é 中\udcff") == r"é 中\udcff"
    name = evil.rstrip("\0")
    a, b = saved(tmp_path, name, episodes(1), split=name), saved(tmp_path, "b", episodes(2), split=name)
    main(["compare", f"{name}={a}", b, "--output", str(tmp_path / f"{name}.csv")])
    said = capsys.readouterr().out
    main(["report", str(tmp_path / name)])
    said += capsys.readouterr().out
    (Path(a) / "version_1" / "results.json").write_text("{")
    with pytest.raises(SystemExit):
        main(["compare", a, b])
    said += capsys.readouterr().err
    assert r"\u202e" in said and all(c.isprintable() for c in said.replace("\n", ""))


def test_folders_that_lead_into_themselves_and_far_down(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "self").symlink_to("self")
    (tmp_path / "a" / "b" / "results.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    found = folders_with(tmp_path, ("results.json",))
    assert sorted(found) == [tmp_path / "a" / "b", tmp_path / "link"]
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):  # more than Python calls itself
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        assert len(folders_with(tmp_path, ("results.json",))) == 2
    finally:
        subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)


def test_more_files_than_are_looked_through(tmp_path, monkeypatch):
    monkeypatch.setattr("swbn_lightning.files.reading._MOST_ENTRIES", 20)
    for number in range(25):
        (tmp_path / f"{number}.txt").write_text("")
    with pytest.raises(InputError, match="holds more than 2000 runs or 20 files; give folders below it"):
        report(tmp_path)


def test_settings_of_many_letters():
    with pytest.raises(InputError, match="names of more than 1000 letters"):
        flatten({"x" * 600: {"y" * 600: {"z": 1}}})


def test_a_broken_file_of_a_study_costs_its_own_cell_only(tmp_path, monkeypatch):
    cells = cells_of(GLYPHS, norms=["bn", "swbn-fro"], runs=tmp_path)
    for cell, content in zip(cells, ("{", '{"command": "fit", "completed": true, "epoch_seconds": 5}'), strict=True):
        (cell.folder / "version_0").mkdir(parents=True)
        (cell.folder / "version_0" / "results.json").write_text(content)
    monkeypatch.setattr("swbn_lightning.runs.study.command.complete", lambda cell, wait: 0)
    study = Study(cells, None, tmp_path, [])
    study.run()
    first, second = study.failures.values()
    assert "version_0/results.json cannot be read: Expecting" in first and first in (tmp_path / "study.md").read_text()
    assert "version_0/results.json cannot be read: " in second
