"""Links, pipes and odd names in a downloaded folder: nothing else of the user's is written, shown or removed."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from classification import ImageFolderDataModule, ImageNetDataModule
from swbn_lightning.data.cache import CACHE_FOLDER, ImageCache
from swbn_lightning.data.folders import list_class_folders
from swbn_lightning.data.listing import ImageListing, load_listing
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import read_json
from swbn_lightning.files.writing import markdown_text, write_whole
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from swbn_lightning.runs.checkpoints import find_checkpoint
from swbn_lightning.runs.folders import new_run_folder, run_versions
from swbn_lightning.runs.page.page import write_report
from swbn_lightning.runs.read import read_runs
from swbn_lightning.runs.study import command as study
from swbn_lightning.runs.study import running as study_runs
from swbn_lightning.runs.study.cells import Experiment, grid
from swbn_lightning.runs.study.observations import _check
from swbn_lightning.whiteness.records import write_heatmap

GLYPHS = Path(__file__).parents[2] / "configs" / "classification" / "glyphs.yaml"


def results(folder, **content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"command": "fit", "results": [], **content}))
    return folder


def test_a_temporary_file_is_never_one_that_is_there(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    for name in (f".report.html.{os.getpid()}.tmp", "heatmap_a.tmp", f".last.ckpt.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(precious)
    write_whole(tmp_path / "report.html", "page")
    write_heatmap(tmp_path / "heatmap_a.csv", {})
    WholeCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "last.ckpt")
    assert precious.read_text() == "thesis" and (tmp_path / "report.html").read_text() == "page"
    assert len(list(tmp_path.iterdir())) == 7  # no temporary file is left


def test_a_link_in_a_run_folder_is_not_read(tmp_path):
    (tmp_path / "secret.json").write_text('{"token": "hunter2"}')
    run = results(tmp_path / "theirs" / "version_0")
    (run / "metrics.csv").symlink_to(tmp_path / "secret.json")
    (run / "run.json").symlink_to(tmp_path / "secret.json")
    page = write_report([tmp_path / "theirs"]).read_text()
    assert "hunter2" not in page and "run.json cannot be read (it is a link" in page


def test_a_file_without_an_end_that_says_it_has_no_bytes(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_bytes(b" " * (17 << 20))
    told = os.stat_result((stat.S_IFREG | 0o600, *[0] * 9))
    monkeypatch.setattr("swbn_lightning.files.reading.os.fstat", lambda file: told)
    with pytest.raises(InputError, match="it has more than 16 MiB"):
        read_json(path)


def cell(tmp_path):
    return grid([Experiment.read(str(GLYPHS))], [], ["bn"], [0], [], [], None, tmp_path / "runs")[0]


@pytest.mark.parametrize("name", ["lock", "output.txt"])
def test_a_link_or_a_pipe_in_a_cell_is_not_written_to(tmp_path, name, monkeypatch):
    own, precious = cell(tmp_path), tmp_path / "precious"
    monkeypatch.setattr(study_runs, "COMMAND", ("false",))
    own.folder.mkdir(parents=True)
    precious.write_text("mine")
    (own.folder / name).symlink_to(precious)
    with pytest.raises(InputError, match=f"{name} cannot be written: it is a link; remove it"):
        study_runs.complete(own, wait=False)
    assert precious.read_text() == "mine"
    (own.folder / name).unlink()
    os.mkfifo(own.folder / name)
    with pytest.raises(InputError, match=f"{name} cannot be written: it is not a regular file"):
        study_runs.complete(own, wait=False)


def test_a_linked_version_in_a_cell(tmp_path):
    own = cell(tmp_path)
    own.folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (own.folder / "version_0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="version_0 is in the way of the training: it is a link"):
        study_runs.complete(own, wait=False)
    assert (tmp_path / "elsewhere").is_dir()


def test_checkpoints_of_a_cell_are_its_own(tmp_path):
    (tmp_path / "other.ckpt").write_text("")
    ended, killed = results(tmp_path / "a", best_checkpoint=str(tmp_path / "other.ckpt")), tmp_path / "b"
    (killed / "checkpoints").mkdir(parents=True)
    os.mkfifo(killed / "checkpoints" / "a.ckpt")
    (killed / "checkpoints" / "b.ckpt").symlink_to(tmp_path / "other.ckpt")
    assert [study_runs._kept(run) for run in read_runs([ended, killed])] == [[], []]


def test_odd_values_of_a_cells_results():
    good = {"ways": 5, "shots": 1, "queries": 15, "episodes": 9, "seed": 0, "loss": 1.0, "ci95": None, "accuracy": 0.5}
    whole = ("ways", "shots", "queries", "episodes", "seed")
    _check(good, whole)
    _check({**good, "ways": "5-20"}, whole)
    for key, value in (
        ("ci95", "x"),
        ("ways", "\x1b]0;x\x07"),
        ("ways", [1]),
        ("seed", "5-20"),
        ("seed", [1]),
        ("loss", {}),
        ("accuracy", "0.5"),
        ("accuracy", float("nan")),
    ):
        with pytest.raises(InputError, match=f"its {key} is"):
            _check({**good, key: value}, whole)


def test_what_a_study_says_is_printable_and_escaped(capsys):
    study._say("a\x1b[31m\nb")
    assert capsys.readouterr().err == "a\\x1b[31m\nb\n"
    assert markdown_text("<img src=x>\x1b[x](y)|`z`") == r"&lt;img src=x&gt;\\x1b\[x\](y)\|\`z\`".replace(r"\\x", r"\x")


def images(folder, count=2):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(sum(map(ord, str(folder))))
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


def test_a_cache_folder_that_is_a_link_is_not_used(tmp_path):
    listing = ImageListing({"a": images(tmp_path / "data" / "a")}, tmp_path / "data")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "x-8x3-of_another.npy").write_text("")
    (tmp_path / "data" / CACHE_FOLDER).symlink_to(mine)
    with pytest.warns(UserWarning, match="is a link, which may have come with the data"):
        load_listing(listing, "x", 8, cache=ImageCache(tmp_path / "data" / CACHE_FOLDER))
    assert [path.name for path in mine.iterdir()] == ["x-8x3-of_another.npy"]


def test_of_a_cache_only_files_are_removed_and_names_are_printable(tmp_path):
    listing, cache = ImageListing({"a": images(tmp_path / "a")}, tmp_path), ImageCache(tmp_path / "cache")
    (cache.folder / "x-8x3-0.npy").mkdir(parents=True)
    (cache.folder / "x-8x3-1.npy").symlink_to("nowhere")
    (cache.folder / "x-8x3-\x1b[31m.npy").write_text("")
    with pytest.warns(UserWarning, match=r"x-8x3-\\x1b\[31m.npy any more") as said:
        load_listing(listing, "x", 8, cache=cache)
    assert len(said) == 1 and len(list(cache.folder.iterdir())) == 3


def test_the_files_passed_over_are_named_in_printable_letters(tmp_path):
    images(tmp_path / "a")
    (tmp_path / "a" / "note\x1b]0;x\x07.txt").write_text("")
    with pytest.warns(UserWarning, match=r"a/note\\x1b\]0;x\\x07.txt"):
        list_class_folders(tmp_path, "x")


def test_versions_are_numbered_in_plain_digits(tmp_path):
    for name in ("version_²", "version_" + "9" * 200, "version_٣", "version_1"):
        (tmp_path / "a" / name).mkdir(parents=True)
    assert [folder.name for folder in run_versions(tmp_path / "a")] == ["version_1"]
    assert new_run_folder(tmp_path, "a").name == "version_2"
    with pytest.raises(InputError, match="holds no best checkpoint"):
        find_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("link", [os.link, lambda source, path: path.symlink_to(source)])
@pytest.mark.parametrize(
    ("kind", "other", "options"),
    [
        (ImageFolderDataModule, "test", {}),
        (ImageNetDataModule, "val", {"num_workers": 0, "eval_resize": 8, "val_share": 0.1}),
    ],
)
def test_images_of_the_test_are_not_those_of_the_training(tmp_path, kind, other, options, link):
    for name in "ab":
        files = images(tmp_path / "train" / name, 20)
        images(tmp_path / other / name)
    options |= {"root": str(tmp_path), "image_size": 8, "batch_size": 4}
    kind(**options).setup("fit"), kind(**options).setup("test")
    for place in (tmp_path / other / "a" / "z.png", tmp_path / "train" / "b" / "z.png"):
        link(files[3], place)
        with pytest.raises(InputError, match=r"train/b/11.png .*z.png .*one and the same file"):
            kind(**options).setup("fit")
        place.unlink()
