"""The report of odd files: each is named, whatever it holds, and everything else is shown."""

import json
import os

import pytest

from cli import main
from swbn_lightning.runs.curves import MOST_POINTS
from swbn_lightning.runs.measured import measured
from swbn_lightning.runs.page import page as page_module
from swbn_lightning.runs.page.page import MOST_PICTURED
from swbn_lightning.runs.read import read_runs
from tests.made_runs import LAYERS, make_fit, make_test
from tests.report.page_reader import Page, report

pytestmark = pytest.mark.usefixtures("quick_pictures")
HEATMAP = f"heatmap_{LAYERS[1]}.csv"
HEAD = "map,epoch,num_features,rms,channel"
WHITE = "epoch,step,layer,rms,distance"


def results(**row):
    return json.dumps({"results": [{"split": "val", "accuracy": 0.5, **row}], "fit_seconds": 1e308})


def square(number):
    head = f"{HEAD},{','.join(map(str, range(number)))}\n"
    return head + "".join(f"before,0,9,0.5,{row}{',0.5' * number}\n" for row in range(number))


ODD = [
    ("results.json", b"[1]", "results.json cannot be read (it holds a list, not a mapping)"),
    ("results.json", b'{"results": [{"accuracy": "a", "ci95": [1]}, 3], "whiteness": [7]}', None),
    ("results.json", b'{"results": [{"accuracy": NaN, "ways": {}, "shots": null}]}', None),
    ("run.json", b"\xff\xfe", "run.json cannot be read"),
    ("run.json", b'{"settings": {"1": {"true": 3}, "model": 7}}', None),
    ("run.json", b"7", "run.json cannot be read (it holds a int, not a mapping)"),
    ("metrics.csv", b"epoch,step,val/loss\nnan,inf,3\n1e999,x,1\n0,0,inf\n", None),
    ("whiteness.csv", b"epoch,layer\nx,y\n", "whiteness.csv cannot be read"),
    ("whiteness.csv", b"epoch,step,layer,rms\n-1,0,mean,0.5\n", "whiteness.csv cannot be read (it holds no layer)"),
    (f"heatmap_{LAYERS[1]}.csv", b"map,epoch\nbefore,1\n", f"heatmap_{LAYERS[1]}.csv cannot be read"),
    (f"heatmap_{LAYERS[1]}.csv", b"", f"heatmap_{LAYERS[1]}.csv cannot be read (it lacks the column 'map')"),
    *((name, None, f"{name} is missing") for name in
      ("metrics.csv", "whiteness.csv", "run.json", "results.json")),
    ("results.json", '{"a": ' + "9" * 5_000 + "}", "results.json cannot be read (Exceeds the limit"),
    ("results.json", '{"a":' + "[" * 100_000, "results.json cannot be read (it is nested more than 40 deep"),
    ("results.json", results(accuracy=1e308, ci95=-1e308, loss=1e308, classes=True, split="\ud800\x00"), None),
    ("results.json", results(accuracy=True, ci95=[], ways={}, shots=[True], split=["\udfff"] * 3), None),
    ("results.json", '{"whiteness": [{"rms": 1e308}, {"rms": -1e308}], "completed": []}', None),
    ("results.json", '{"best_checkpoint": "a\\u0000b", "tested_checkpoint": "\\ud800/a/b/c"}', None),
    ("run.json", json.dumps({"a": list(range(40_000))}), "run.json cannot be read (it holds more"),
    ("run.json", '{"started": "\\ud800", "\\ud800": "\\ud800", "environment": {"\\ud800": "\\ud800"}}', None),
    ("run.json", '{"settings": {"a": "\\ud800", "\\udc00": 1, "model.init_args.backbone": "\\ud801"}}', None),
    ("run.json", '{"settings": {"trainer.max_epochs": true, "seed_everything": [1, {"a": 2}], "model": [1]}}', None),
    ("run.json", '{"settings": {"model.init_args.norm": NaN, "b": "' + 9_000 * "x" + '"}, "kind": 1e308}', None),
    ("run.json", " " * (17 << 20), "run.json cannot be read (it has 17 MiB, and 16 are"),
    ("metrics.csv", "epoch,step,val/loss\n0,0,1e308\n1,1,-1e308\n1e300,2,1\n" + "9" * 30 + ",3,1\n", None),
    ("metrics.csv", "epoch,step,val/loss\n0,0," + "1" * 200_000 + "\n", "metrics.csv cannot be read (field larger"),
    ("whiteness.csv", f"{WHITE}\n-1,0,a,1e308,-1e308\n0,1,a,1e308,1e308\n", None),
    ("whiteness.csv", f"{WHITE}\n{'9' * 30},0,a,1,1\n", "whiteness.csv cannot be read (99999999999999999999 is"),
    ("whiteness.csv", WHITE + "\n" + "".join(f"{n},0,l{n},1,1\n" for n in range(1_500)), "whiteness.csv cannot be"),
    (HEATMAP, f"{HEAD},0,1\nbefore,0,9,0.5,0,1\n", f"{HEATMAP} cannot be read (line 2 has 6 cells for 7 columns"),
    (HEATMAP, square(2).replace("before,0,9,0.5,1", "before,0,9,0.5,7"), f"{HEATMAP} cannot be read (it lacks '7'"),
    (HEATMAP, square(1).replace("before", "other"), f"{HEATMAP} cannot be read (it holds other matrices"),
    (HEATMAP, f"{HEAD},0\n" + "before,0,9,0.5,0,1\n" * 1_100, f"{HEATMAP} cannot be read (its matrix has more"),
    (HEATMAP, square(1).replace("0.5", "1e308"), f"{HEATMAP} cannot be read (it holds correlations above 1"),
]  # fmt: skip


@pytest.mark.parametrize("first", range(0, len(ODD), MOST_PICTURED - 1))
def test_odd_files_are_named_and_cost_nothing_else(tmp_path, first, capsys, drawn):
    good = make_fit(tmp_path / "s" / "good" / "version_0", seed=1)
    make_test(tmp_path / "s" / "good" / "version_1", good)
    cases = {f"odd{number}": case for number, case in enumerate(ODD[first : first + MOST_PICTURED - 1])}
    for number, (name, (file, content, words)) in enumerate(cases.items()):
        odd = make_fit(tmp_path / "s" / name / "version_0", seed=number + 2)
        make_test(tmp_path / "s" / name / "version_1", odd)
        (odd / file).unlink()
        if content is not None:
            (odd / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        (run,) = read_runs([odd])
        measured([run])
        told = "; ".join(run.problems)
        assert told.startswith(words) if words else not told, (file, content, told)
    main(["report", str(tmp_path / "s"), "--output", str(tmp_path / "p.html")])
    page = Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert all(words in page.text for _, _, words in cases.values() if words) and "cannot be shown" not in page.text
    rows = {row["run"]: row["test, 5-way 1-shot, %"] for row in page.table("run")}
    assert rows["good"] == "62.50 ± 0.23" and len(rows) >= len(cases) + 1
    assert len([alt for alt, _ in page.images if "by" in alt]) >= 2 and "curves.csv" in page.links


def test_what_is_no_file_is_not_waited_for(tmp_path):
    folder = make_fit(tmp_path / "version_0")
    for name in ("results.json", "metrics.csv"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert report(folder).text.count("cannot be read (it is not a regular file)") == 2


def test_names_that_are_no_letters(tmp_path, capsys, drawn):
    name = os.fsdecode(b"\xff\x1b[2J\xe2\x80\xae")
    for number in range(2):
        folder = make_fit(tmp_path / name / f"{name}{number}" / "version_0", settings={"trainer.max_epochs": number})
        (folder / HEATMAP).rename(folder / os.fsdecode(b"heatmap_\xfe.csv"))
        (folder / "heatmap_a.csv").write_text("x")
        make_test(folder.parent / "version_1", folder, 0.5 + number / 4)
    main(["report", str(tmp_path / name)])
    said = capsys.readouterr().out.strip()
    assert r"\udcff\x1b[2J\u202e" in said and said.isprintable()
    page = report(tmp_path / name)
    assert page.title == r"Report: \udcff\x1b[2J\u202e"
    assert [row["run"] for row in page.table("run")] == ["max_epochs=0", "max_epochs=1"]
    assert r"max_epochs=1 (\udcff\x1b[2J\u202e1)" in page.text
    assert len(page.links["accuracy.csv"]) == 2 and r"Correlation matrices of \udcfe" in page.sizes()


@pytest.mark.parametrize(("part", "title"), [
    ("tables.summary", "The table of runs"), ("_curves", "Curves"), ("_heatmap", f"Correlations of {LAYERS[1]}"),
])  # fmt: skip
def test_a_part_that_fails_is_named_and_the_others_are_shown(tmp_path, monkeypatch, part, title):
    make_fit(tmp_path / "name" / "version_0")
    whole = report(tmp_path / "name")

    def fail(*args):
        raise ZeroDivisionError("of <b>")

    monkeypatch.setattr(f"{page_module.__name__}.{part}", fail)
    page = report(tmp_path / "name")
    assert page.text.count("cannot be shown (ZeroDivisionError: of <b>).") == 1 and title in page.text
    assert len(page.tables) + len(page.images) >= len(whole.tables) + len(whole.images) - 4
    assert page.title == whole.title and page.tags.count("h2") >= whole.tags.count("h2") - 1


def test_a_long_log_is_drawn_by_some_of_its_points_and_many_heatmaps_are_named(tmp_path):
    folder = make_fit(tmp_path / "version_0")
    with (folder / "metrics.csv").open("a") as file:
        file.writelines(f"{n // 1_000},{n + 100},,{1 / (n + 1)},,,\n" for n in range(9_000))
    for number in range(30):
        (folder / f"heatmap_l{number:04}.csv").write_text(square(1))
    page = report(folder)
    steps = [int(row["steps_trained"]) for row in page.links["curves.csv"] if row["quantity"] == "train/loss"]
    assert len(steps) == MOST_POINTS and steps == sorted(set(steps)) and (steps[0], steps[-1]) == (10, 9_100)
    assert "Of longer lines 2,000 points are shown and in the file; all are in metrics.csv" in page.text
    assert "7 further heatmaps are only in the folder" in page.text
    assert len([alt for alt, _ in page.images if alt.startswith("Correlation")]) == 24


def test_a_log_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("swbn_lightning.files.reading._MOST_ROWS", 6)  # as many as it has
    assert "metrics.csv" not in report(make_fit(tmp_path / "version_0")).text.partition("Curves")[0]
    monkeypatch.setattr("swbn_lightning.files.reading._MOST_ROWS", 5)
    assert "metrics.csv cannot be read (it has more than 5 rows)" in report(tmp_path / "version_0").text
    with (tmp_path / "version_0" / "metrics.csv").open("w") as file:
        file.truncate(1 << 30)
    assert "metrics.csv cannot be read (it has 1024 MiB, and 64 are" in report(tmp_path / "version_0").text


def test_links_into_themselves_are_not_followed(tmp_path):
    make_fit(tmp_path / "s" / "version_0")
    (tmp_path / "s" / "version_0" / "loop").symlink_to(tmp_path / "s")
    (tmp_path / "s" / "self").symlink_to("self")
    assert len(report(tmp_path / "s").table("run")) == 1
