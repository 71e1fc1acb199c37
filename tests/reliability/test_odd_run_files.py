"""Run folders of others: the newest test by what they say, each odd file named, and nothing done to the terminal."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.study.__main__ import Study
from cli import main
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import csv_rows, finite, flatten, folders_with, printable, read_json, read_yaml
from swbn_lightning.runs.compare import compare
from tests.report.made_runs import make_fit, make_test
from tests.report.page_reader import report
from tests.study.tiny import GLYPHS, cells_of
from tests.test_compare import episodes, saved

ONE_TEST = "test, 5-way 1-shot, %"


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch):
    monkeypatch.setattr("swbn_lightning.runs.page.html.to_png", lambda figure: b"")


def change(file, **values):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: v for key, v in {**content, **values}.items() if v is not None}))


def make_tested(folder, training, accuracy, ended=None, started=None):
    """A test of ten episodes of that accuracy."""
    make_test(folder, training, accuracy, episodes=10, episodes_id="same")
    (folder / "episodes.csv").write_text("\n".join(["episode,accuracy", *(f"{i},{accuracy}" for i in range(10)), ""]))
    (folder / "training.yaml").write_text((training / "config.yaml").read_text())
    change(folder / "results.json", ended=ended, tested_run=os.path.relpath(training, folder))
    change(folder / "environment.json", started=started)
    return folder


def both(folder, other):
    """What compare and the report say of the runs in a folder."""
    (line, _) = compare([str(folder), str(other)])
    (row,) = {row[ONE_TEST] for row in report(folder, output=other / "page.html").table("run")} - {"–"}
    return line.accuracy.mean, row.partition(" ")[0]


@pytest.fixture
def other(tmp_path):
    fit = make_fit(tmp_path / "other" / "version_0", "other")
    make_tested(tmp_path / "other" / "version_1", fit, 0.5, ended="2026-01-01T00:00:00+00:00")
    return tmp_path / "other"


DAY = "2026-01-0{}T00:00:00.{:06}+00:00"


@pytest.mark.parametrize("old,new", [
    ({"ended": DAY.format(1, 1)}, {"ended": DAY.format(1, 2)}),
    ({"started": DAY.format(1, 0)}, {"started": DAY.format(2, 0)}),
    ({"started": DAY.format(1, 0)}, {"ended": DAY.format(2, 0)}),
    ({"ended": DAY.format(1, 0), "started": DAY.format(3, 0)}, {"ended": DAY.format(2, 0)}),
    ({"ended": "2026-01-02T00:30:00+02:00"}, {"ended": "2026-01-01T23:00:00"}),
])  # fmt: skip
@pytest.mark.parametrize("first", ["old", "new"])
def test_the_newest_test_is_that_which_says_so_whatever_the_times_of_files(tmp_path, other, old, new, first):
    fit = make_fit(tmp_path / "n" / "version_0")
    change(fit / "environment.json", started=None)  # it is one training
    numbers = (1, 2) if first == "old" else (2, 1)
    made = [make_tested(tmp_path / "n" / f"version_{number}", fit, accuracy, **times)
            for number, accuracy, times in zip(numbers, (0.29, 0.75), (old, new), strict=True)]  # fmt: skip
    for place, folder in enumerate(made):  # as a copy leaves them
        for file in folder.iterdir():
            os.utime(file, (2e9 - place, 2e9 - place))
    assert both(tmp_path / "n", other) == (pytest.approx(0.75), "75.00")


@pytest.mark.parametrize("times", [{}, {"started": "yesterday"}, {"ended": 5}, {"started": DAY.format(1, 0)}])
def test_where_none_says_when_it_is_not_guessed(tmp_path, other, times):
    fit = make_fit(tmp_path / "n" / "version_0")
    change(fit / "environment.json", started=None)
    for number, accuracy in ((1, 0.25), (2, 0.75)):
        make_tested(tmp_path / "n" / f"version_{number}", fit, accuracy, **times)
    with pytest.raises(InputError, match=r"cannot be told which of .*version_[12] and .*version_[12] is newer.*delete"):
        compare([str(tmp_path / "n"), str(other)])
    page = report(tmp_path / "n")
    assert "it cannot be told which of" in page.text and len(page.table("run")) == 1
    assert ONE_TEST not in page.table("run")[0]
    (line, _) = compare([str(tmp_path / "n" / "version_1"), str(other)])
    assert line.accuracy.mean == pytest.approx(0.25)


def test_a_copy_is_the_same_test(tmp_path, other):
    fit = make_fit(tmp_path / "n" / "version_0")
    make_tested(tmp_path / "n" / "version_1", fit, 0.75)
    change(tmp_path / "n" / "version_1" / "environment.json", started=None)
    shutil.copytree(tmp_path / "n", tmp_path / "n" / "copy")
    assert both(tmp_path / "n", other) == (pytest.approx(0.75), "75.00")
    assert "cannot be told" not in report(tmp_path / "n").text


def test_an_older_training_that_was_tested_last_stands_for_nothing(tmp_path, other):
    for name, trained, tested_on, accuracy in (("a", 1, 4, 0.25), ("b", 2, 3, 0.75)):
        fit = make_fit(tmp_path / "n" / name / "version_0")
        change(fit / "results.json", ended=DAY.format(trained, 0))
        make_tested(tmp_path / "n" / name / "version_1", fit, accuracy, ended=DAY.format(tested_on, 0))
    (line, _) = compare([str(tmp_path / "n"), str(other)])
    assert line.accuracy.mean == pytest.approx(0.75)
    page = report(tmp_path / "n", other, output=tmp_path / "page.html")
    assert [row["value"] for row in page.links["accuracy.csv"]] == ["0.75", "0.5"]


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
    for told in (0.99, "0.99", None, float("nan")):
        b = saved(tmp_path, "b", values, accuracy=told)
        with pytest.raises(InputError, match=r"mean accuracy of 0\.\d+, and results\.json says .*test again") as error:
            compare([a, b])
        assert repr(told) in str(error.value) and str(values.mean())[:8] in str(error.value)


@pytest.mark.parametrize("header", ["episode,accuracy,accuracy", "episode,accuracy,episode"])
def test_a_column_that_stands_twice(tmp_path, header):
    a, b = saved(tmp_path, "a", episodes(1, 1)), saved(tmp_path, "b", episodes(2, 1))
    (Path(b) / "version_1" / "episodes.csv").write_text(f"{header}\n0,0.5,0\n")
    with pytest.raises(InputError, match=r"b/version_1/episodes\.csv cannot be read: it has the column .* 2 times"):
        compare([a, b])


@pytest.mark.parametrize("given", ["", None, 5, True, ["a"]])
def test_episodes_that_are_not_named(tmp_path, given):
    runs = [saved(tmp_path, name, episodes(1), episodes_id=given) for name in "ab"]
    with pytest.raises(
        InputError, match=r"a/version_1/results\.json cannot be read: its episodes_id is .*, not a text"
    ):
        compare(runs)


@pytest.mark.parametrize("key", ["tested_checkpoint", "tested_run"])
@pytest.mark.parametrize("path", ["a/" * 20_000, "/" + "a/" * 64, "a" * 5_000 + "/"])
def test_a_path_of_many_parts_is_not_looked_for(tmp_path, path, key):
    a, b = saved(tmp_path, "a", episodes(1)), saved(tmp_path, "b", episodes(2))
    test = Path(b) / "version_1"
    shutil.copy(test.parent / "version_0" / "config.yaml", test / "training.yaml")
    for run in ("../version_9", "../version_0"):  # which is there, and needs no look
        change(test / "results.json", **{"tested_run": run, key: f"{path}checkpoints/x.ckpt"})
        begun = time.monotonic()
        if run == "../version_0" and key == "tested_checkpoint":
            compare([a, b])
            assert "what it started from" not in report(b).text
        else:
            with pytest.raises(
                InputError, match=r"b/version_1/results\.json cannot be read: it names a path of \d+ let"
            ):
                compare([a, b])
            assert "what it started from is not known (it names a path of" in report(b).text
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize("line,reason", [
    ("1,0.5", "line 3: episode 1 stands in line 2, too"),
    ("2,0.5", "line 3: episode 2 of 2, which should be numbered from 0"),
    ("-1,0.5", "line 3: '-1' is not the number"), ("x,0.5", "line 3: 'x' is not the number"),
    ("9" * 5000 + ",0.5", "is too large for a count"), ("0,0.5,1", "line 3 has 3 cells for 2 columns"),
    *((f"0,{value}", f"line 3: the accuracy '{value}' is not a number from 0 to 1")
      for value in ("nan", "inf", "-inf", "1.01", "-0.01", "", "1e308", "x")),
])  # fmt: skip
def test_a_list_of_episodes_that_is_none(tmp_path, line, reason):
    a, b = saved(tmp_path, "a", episodes(1, 2)), saved(tmp_path, "b", episodes(2, 2))
    (Path(b) / "version_1" / "episodes.csv").write_text(f"episode,accuracy\n1,0.5\n{line}\n")
    with pytest.raises(InputError, match=r"b/version_1/episodes\.csv cannot be read") as error:
        compare([a, b])
    assert reason in str(error.value)


LAUGHS = ["a0: &a0 {x: 1, y: 2}"] + [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
MERGED = ["a0: &a0 {x: 1, y: 2}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)]
LONG = [f"a: &a {'x' * 20_000}", f"b: [{', '.join(['*a'] * 1_000)}]"]
ODD_YAML = [
    ("seed_everything: \xe9".encode("latin-1"), "can't decode"), (b"a: &a [*a]", "*a refers to what it is a part of"),
    (b"a: &a {b: *a}", "*a refers to"), (b"a: &a\n  <<: *a\n", "*a refers to"), (b"a: *b", "*b refers to"),
    ("\n".join(LAUGHS).encode(), "more than 20000 in number"), ("\n".join(MERGED).encode(), "more than 20000"),
    ("\n".join(LONG).encode(), "more than 20000"), (b"a: " + b"[" * 90 + b"]" * 90, "nested more than 40 deep"),
    (b"a: " + b"[" * 100_000, "nest"), (b"a: " + b"9" * 5000, "digits"),
    (b"a: " + b"9" * 400, "an integer of 1329 bits"),
    (b"a: !!bool x", "it lacks 'x'"), (b"a: !!timestamp x", "cannot be read"), (b"- 1", "a list, not a mapping"),
    (b"", "it holds nothing, not a mapping"), (b"a: 1\n---\na: 2", "single document"), (b"? [a, b]\n: 1", "unhashable"),
    (b"#" * (2 << 20), "it has 2 MiB, and 1 are the most that is read"),
    (b"? " + b"a" * 2_000 + b"\n: {b: 1}", "names of more than 1000 letters"),
]  # fmt: skip


@pytest.mark.parametrize("content,reason", ODD_YAML, ids=lambda value: None)
def test_settings_that_cannot_be_read_are_told_at_once(tmp_path, content, reason):
    a, b = saved(tmp_path, "a", episodes(1)), saved(tmp_path, "b", episodes(2))
    (Path(b) / "version_0" / "config.yaml").write_bytes(content)
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"b/version_0/config\.yaml cannot be read") as error:
        compare([a, b])
    assert reason in str(error.value) and len(str(error.value)) < 600 and time.monotonic() - begun < 10


@pytest.mark.parametrize("content,reason", [
    (b'{"a":' + b"[" * 100_000, "nested more than 40 deep"), (b'{"a":' + b"[" * 50 + b"]" * 50 + b"}", "nested more"),
    (b'{"a": ' + b"9" * 5000 + b"}", "digits"), (b'{"a": 1' + b"0" * 400 + b"}", "an integer of 1329 bits"),
    (b"[]", "a list, not a mapping"), (b'{"results": 1}', "cannot be read"), (b'{"results": [[]]}', "cannot be read"),
    (b'{"results": [{}], "tested_checkpoint": ["x"]}', "tested_checkpoint is ['x'], not a path"),
    (b'{"results": [{}], "tested_checkpoint": "x"}', "it lacks 'episodes_id'"), (b"\xff", "can't decode"),
    (b" " * (17 << 20), "it has 17 MiB, and 16 are the most that is read"),
])  # fmt: skip
def test_results_that_cannot_be_read_are_told(tmp_path, content, reason):
    a, b = saved(tmp_path, "a", episodes(1)), saved(tmp_path, "b", episodes(2))
    (Path(b) / "version_1" / "results.json").write_bytes(content)
    with pytest.raises(InputError, match=r"b/version_1/results\.json cannot be read") as error:
        compare([a, b])
    assert reason in str(error.value)


@pytest.mark.parametrize("name", ["config.yaml", "results.json", "episodes.csv"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    file = tmp_path / name
    os.mkfifo(file)
    with pytest.raises(InputError, match=r"cannot be read: it is not a regular file"):
        {"config.yaml": read_yaml, "results.json": read_json, "episodes.csv": lambda f: list(csv_rows(f))}[name](file)


def test_a_date_in_settings_is_a_word_and_nothing_is_equal_to_nothing(tmp_path):
    a = saved(tmp_path, "a", episodes(1))
    for seed in (0, 1):
        saved(tmp_path / "b", f"seed{seed}", episodes(2), seed=seed, norm="b")
        with (tmp_path / "b" / f"seed{seed}" / "version_0" / "config.yaml").open("a") as file:
            file.write("when: 2026-99-99\nlimit: .nan\nkept: &k [1, 2]\nsame: *k\n")
    assert read_yaml(tmp_path / "b" / "seed0" / "version_0" / "config.yaml")["when"] == "2026-99-99"
    assert compare([a, str(tmp_path / "b")])[1].seeds == (0, 1)


@pytest.mark.parametrize("path", ["\ud800", "a\0b", "x" * 5_000, "/".join(["x" * 300] * 3)])
def test_a_checkpoint_with_an_impossible_name(tmp_path, path):
    a, b = saved(tmp_path, "a", episodes(1)), saved(tmp_path, "b", episodes(2))
    for given in (path, f"{path}/version_0/checkpoints/best.ckpt"):
        change(Path(b) / "version_1" / "results.json", tested_checkpoint=given, tested_run=f"../{path}")
        try:
            compare([a, b])  # of a checkpoint outside of a run
        except InputError as error:
            assert "is a test of" in str(error) or "results.json cannot be read: it names a path of 50" in str(error)


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
    odd = saved(tmp_path, os.fsdecode(b"\xff\xfe"), episodes(1))
    change(Path(odd) / "version_1" / "results.json", tested_run="../version_0")
    shutil.copy(Path(odd) / "version_0" / "config.yaml", Path(odd) / "version_1" / "training.yaml")
    main(["compare", odd, saved(tmp_path, "c", episodes(2)), "--output", str(tmp_path / "odd.csv")])
    assert r"\udcff" in capsys.readouterr().out and r"\udcff" in (tmp_path / "odd.csv").read_text(encoding="utf-8")


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


def test_numbers_that_are_none():
    assert [finite(v) for v in (1, "2.5", -1e99, "1e-400")] == [1, 2.5, -1e99, 0]
    assert {finite(v) for v in (True, None, [1], "x", "nan", float("inf"), 10**400, 1e308, "9" * 5_000)} == {None}


def test_rows_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("swbn_lightning.files.reading._MOST_ROWS", 3)
    (tmp_path / "a.csv").write_text("x\n1\n2\n3\n")
    assert [row["x"] for _, row in csv_rows(tmp_path / "a.csv")] == ["1", "2", "3"]
    (tmp_path / "a.csv").write_text("x\n1\n2\n3\n4\n")
    with pytest.raises(InputError, match=r"a\.csv cannot be read: it has more than 3 rows"):
        list(csv_rows(tmp_path / "a.csv"))


def test_settings_of_many_letters():
    with pytest.raises(InputError, match="names of more than 1000 letters"):
        flatten({"x" * 600: {"y" * 600: {"z": 1}}})


def test_a_broken_file_of_a_study_costs_its_own_cell_only(tmp_path, monkeypatch):
    cells = cells_of(GLYPHS, norms=["bn", "swbn-fro"], runs=tmp_path)
    for cell, content in zip(cells, ("{", '{"command": "fit", "completed": true, "epoch_seconds": 5}'), strict=True):
        (cell.folder / "version_0").mkdir(parents=True)
        (cell.folder / "version_0" / "results.json").write_text(content)
    monkeypatch.setattr("benchmarks.study.__main__.complete", lambda cell, wait: 0)
    study = Study(cells, None, tmp_path, [])
    study.run()
    first, second = study.failures.values()
    assert "version_0/results.json cannot be read: Expecting" in first and first in (tmp_path / "study.md").read_text()
    assert "version_0/results.json cannot be read: " in second
