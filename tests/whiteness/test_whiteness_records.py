"""The CSV files of a run: what was written is read, also after a kill."""

import csv
import math

import numpy as np
import pytest
import torch

from swbn_lightning.whiteness import CorrelationMap, FeatureMoments, read_heatmap, read_whiteness
from swbn_lightning.whiteness.measures import MEASURES
from swbn_lightning.whiteness.records import append_whiteness, choose_channels, heatmap_name, write_heatmap


def rows(epoch, **values):
    given = {**dict.fromkeys(MEASURES, 1 / 3), "kl": math.inf, **values}
    layers = [{"epoch": epoch, "step": 10 * epoch, "layer": name, **given, "num_samples": 5} for name in ("b.1", "a")]
    return [*layers, {"epoch": epoch, "step": 10 * epoch, "layer": "mean", **given, "rms": math.nan, "seconds": 0.25}]


def test_what_is_appended_is_read(tmp_path):
    path = tmp_path / "whiteness.csv"
    append_whiteness(path, rows(-1)), append_whiteness(path, rows(0))
    found = read_whiteness(path)
    assert [(row["epoch"], row["layer"]) for row in found] == [(e, n) for e in (-1, 0) for n in ("b.1", "a", "mean")]
    assert math.isnan(found[2].pop("rms"))
    assert found[:3] == [{key: v for key, v in row.items() if v == v} for row in rows(-1)]
    with path.open() as file:
        assert [line["layer"] for line in csv.DictReader(file)] == 2 * ["b.1", "a", "mean"]


def test_nothing_is_written_through_a_link(tmp_path):
    path, elsewhere = tmp_path / "whiteness.csv", tmp_path / "elsewhere"
    path.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link"):
        append_whiteness(path, rows(0))
    assert not elsewhere.exists()


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_a_line_that_was_never_finished_harms_no_other(tmp_path, lost):
    path = tmp_path / "whiteness.csv"
    append_whiteness(path, rows(0))
    size = len(path.read_bytes())
    append_whiteness(path, rows(1)[:1])
    path.write_bytes(path.read_bytes()[: size + lost])
    assert len(read_whiteness(path)) == 3
    for rms in (0.1, 0.2):
        append_whiteness(path, rows(2, rms=rms))
    found = read_whiteness(path)
    assert [row["epoch"] for row in found] == [0, 0, 0, 2, 2, 2] and found[3]["rms"] == 0.2  # the later one


def test_a_file_with_other_columns_is_not_spoilt(tmp_path):
    path = tmp_path / "whiteness.csv"
    path.write_text("epoch,rms\n0,1\n")
    with pytest.raises(ValueError, match=r"has the columns \['epoch', 'rms'\].*move it away"):
        append_whiteness(path, rows(0))
    assert path.read_text() == "epoch,rms\n0,1\n"


def test_channels_are_chosen_by_the_seed():
    chosen = choose_channels(512)
    assert len(chosen) == len(set(chosen)) == 128 and chosen == sorted(chosen) == choose_channels(512)
    assert chosen != choose_channels(512, seed=1) and max(chosen) < 512
    assert choose_channels(5) == [0, 1, 2, 3, 4]


def test_heatmaps(tmp_path):
    features = torch.randn(50, 9, dtype=torch.float64)
    features[:, 2] = 1
    moments = FeatureMoments()
    moments.update(features)
    before, after = CorrelationMap.of(moments, -1, count=6, seed=0), CorrelationMap.of(moments, 4, count=9)
    assert before.num_features == 9 and len(before.channels) == 6
    path = tmp_path / "heatmap.csv"
    write_heatmap(path, {"before": before, "after": after})
    found = read_heatmap(path)
    for name, expected in (("before", before), ("after", after)):
        assert found[name].channels == expected.channels and found[name].epoch == expected.epoch
        assert found[name].rms == expected.rms and found[name].num_features == 9
        torch.testing.assert_close(found[name].correlation, expected.correlation, rtol=0, atol=0, equal_nan=True)
    kept = [channel for channel in range(9) if channel != 2]
    np.testing.assert_allclose(after.correlation[kept][:, kept], np.corrcoef(features[:, kept].T), atol=1e-12)
    assert after.correlation[2].isnan().all() and after.correlation.isnan().sum() == 17
    off_diagonal = np.corrcoef(features[:, kept].T)[~np.eye(8, dtype=bool)]
    assert before.rms == after.rms == pytest.approx(np.sqrt(np.mean(off_diagonal**2)), rel=1e-12)  # of all channels
    assert heatmap_name("net.a/b 1.norm2") == "heatmap_net.a_b_1.norm2"
