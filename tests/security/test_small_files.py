"""Small files that would take minutes or gigabytes."""

import json
import time

import pytest

from swbn_lightning.data.safe_pickle import load_pickle
from swbn_lightning.errors import InputError
from swbn_lightning.runs.page import page as page_module
from swbn_lightning.runs.page.page import write_report


def seconds(function):
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def pickle_of(path, body):
    path.write_bytes(body)
    return path


def test_numbers_under_which_a_pickle_stores_cannot_collide(tmp_path):
    prime = 2**61 - 1
    body = b"N" + b"".join(b"p%d\n" % (number * prime) for number in range(1, 20)) + b"."
    with pytest.raises(InputError, match="a number of more than 32 bits"):
        load_pickle(pickle_of(tmp_path / "a", body))
    chain = [0]
    for _ in range(30_000):
        chain.append((5 * chain[-1] + 1) % 2**16)
    body = b"".join(b"r" + number.to_bytes(4, "little") for number in chain)
    body += b"".join(b"r" + (2**16 * k).to_bytes(4, "little") for k in range(1, 30_000))
    assert seconds(lambda: load_pickle(pickle_of(tmp_path / "b", b"N" + body + b"."))) < 2
    assert load_pickle(pickle_of(tmp_path / "c", b"\x80\x02]q\x07(h\x07K\x01e0h\x07.")) is not None


def test_numbers_as_keys_are_few(tmp_path):
    def of(count):
        return b"\x80\x02}(" + b"".join(b"J" + key.to_bytes(4, "little") + b"N" for key in range(count)) + b"u"

    assert len(load_pickle(pickle_of(tmp_path / "a", of(10_000) + b"."))) == 10_000
    with pytest.raises(InputError, match="more than 10000 numbers as keys"):
        load_pickle(pickle_of(tmp_path / "b", of(10_001) + b"."))
    with pytest.raises(InputError, match="or 100000 in all"):
        load_pickle(pickle_of(tmp_path / "c", b"](" + of(10_000) * 11 + b"e."))
    names = b"\x80\x02}(" + b"".join(b"U\x05%05dK\x01" % key for key in range(38_400)) + b"u."
    assert len(load_pickle(pickle_of(tmp_path / "d", names))) == 38_400


def run(folder, rows=(), kind="test", settings=None):
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"results": list(rows)}))
    (folder / "run.json").write_text(json.dumps({"kind": kind, "settings": settings or {"a": 1}}))


def test_the_results_of_a_report_are_limited(tmp_path):
    run(tmp_path / "a" / "version_0", [{"split": f"s{number}", "accuracy": 0.5} for number in range(3_000)])
    run(tmp_path / "b" / "version_0", [{"split": f"t{number}", "accuracy": 0.5} for number in range(3_000)])
    page = write_report([tmp_path]).read_text()
    assert "2900 further results are only in results.json" in page
    assert "results of more than 40 kinds of tests are only in the folders" in page
    assert page.count("<th") < 400 and ">s39<" in page and ">s40<" not in page and ">t0<" not in page


def test_the_settings_of_a_report_are_limited(tmp_path, monkeypatch):
    for number in range(3):
        settings = {f"r{number}k{key}": 0 for key in range(1_000)}
        run(tmp_path / f"r{number}" / "version_0", kind="fit", settings=settings)
    page = write_report([tmp_path]).read_text()
    assert "The first 200 of 2000 settings that differ" in page
    assert f"settings of more than {page_module._MOST_SETTINGS} names are only in the folders" in page
