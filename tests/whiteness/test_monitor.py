"""WhitenessMonitor in a training: what it logs and leaves in the run's folder, and that it changes nothing."""

import csv
import math
import random
import types

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.strategies import FSDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from swbn_lightning import SWBN2d, WhitenessMonitor
from swbn_lightning.whiteness import measure_whiteness, read_heatmap, read_whiteness
from swbn_lightning.whiteness.measures import MEASURES

IMAGES = torch.randn(20, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LAYERS = ["net.1", "net.4"]


class Classifier(pl.LightningModule):
    def __init__(self, norm=SWBN2d):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 1), norm(4), nn.Dropout(0.5), nn.Flatten()
        )
        self.head = nn.Linear(64, 3)
        self.seen = []

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, _):
        # Everything that a measurement could have shifted.
        self.seen.append((random.random(), np.random.rand(), float(torch.rand(())), self.training))
        self.seen.append([module.training for module in self.modules()])
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(callbacks, model=None, epochs=2, ckpt_path=None, **options):
    pl.seed_everything(0, verbose=False)
    model = Classifier() if model is None else model
    data = torch.utils.data.TensorDataset(torch.randn(32, 3, 6, 6), torch.randint(3, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    trainer = pl.Trainer(**{
        "max_epochs": epochs, "logger": False, "callbacks": callbacks, "enable_progress_bar": False,
        "accelerator": "cpu", "enable_checkpointing": False, "enable_model_summary": False, "log_every_n_steps": 1,
        **options,
    })  # fmt: skip
    trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    return model, trainer


def monitor(**options):
    return WhitenessMonitor(**{"images": IMAGES, "batch_size": 7, **options})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two epochs with both loggers: the monitor, the model, the folder."""
    root = tmp_path_factory.mktemp("run")
    watching = monitor()
    loggers = [CSVLogger(root, "run", 0), TensorBoardLogger(root, "run", 0, default_hp_metric=False)]
    model, _ = fit([watching], logger=loggers)
    return watching, model, root / "run" / "version_0"


def test_it_changes_nothing():
    watching = monitor()
    (watched, _), (alone, _) = fit([watching]), fit([])
    assert watched.seen == alone.seen
    for name, value in watched.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    assert [entry["epoch"] for entry in watching.history] == [-1, 0, 1]


def test_it_logs_every_measure_by_layer_and_as_a_mean(run):
    watching, model, folder = run
    with (folder / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["whiteness/rms/mean"]]
    assert [int(row["step"]) for row in logged] == [entry["step"] for entry in watching.history] == [0, 4, 8]
    measured = measure_whiteness(model, IMAGES)  # the model is what it was after the last epoch
    assert list(measured) == LAYERS
    for measure in MEASURES:
        values = [getattr(layer, measure) for layer in measured.values()]
        for name, value in zip([*LAYERS, "mean"], [*values, np.mean(values)], strict=True):
            assert float(logged[-1][f"whiteness/{measure}/{name}"]) == pytest.approx(value, rel=1e-6)
        assert watching.history[-1][measure] == pytest.approx(np.mean(values), rel=1e-6)
    for name, layer in measured.items():
        assert float(logged[-1][f"whiteness/num_samples/{name}"]) == layer.num_samples == 20 * 16
        assert float(logged[-1][f"whiteness/num_constant/{name}"]) == 0
    scalars = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    names = {f"whiteness/{measure}/{name}" for measure in MEASURES for name in (*LAYERS, "mean")}
    counts = {f"whiteness/{count}/{name}" for count in ("num_samples", "num_constant") for name in LAYERS}
    assert {name for name in scalars if name.startswith("whiteness/")} == names | counts | {"whiteness/seconds"}


def test_the_csv_file_has_the_same_figures(run):
    watching, _, folder = run
    rows = read_whiteness(folder / "whiteness.csv")
    assert [(row["epoch"], row["layer"]) for row in rows] == [(e, n) for e in (-1, 0, 1) for n in (*LAYERS, "mean")]
    assert rows == watching.rows  # to the last digit
    assert rows[-2]["num_features"] == 4 and rows[-1]["seconds"] > 0
    assert {key: rows[-1][key] for key in MEASURES} == {key: watching.history[-1][key] for key in MEASURES}


def test_pictures_and_their_figures(run):
    _, model, folder = run
    images = EventAccumulator(str(folder)).Reload().Tags()["images"]
    assert set(images) == {"whiteness/whiteness", "whiteness/heatmap_net.4"}
    for name in ("whiteness", "heatmap_net.4"):
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG" and (folder / f"{name}.csv").is_file()
    maps = read_heatmap(folder / "heatmap_net.4.csv")
    assert [(name, found.epoch) for name, found in maps.items()] == [("before", -1), ("after", 1)]
    features = model.eval().net[:5](IMAGES).detach().movedim(1, -1).reshape(-1, 4)  # beta and gamma change it not
    np.testing.assert_allclose(maps["after"].correlation.numpy(), np.corrcoef(features.T), atol=1e-5)
    assert maps["after"].rms == pytest.approx(measure_whiteness(model, IMAGES)["net.4"].rms, rel=1e-6)
    assert not list(folder.glob("*.tmp"))


def test_options(tmp_path):
    logger = CSVLogger(tmp_path, "run", 0)
    watching = monitor(
        layers="net.*", exclude=["*.4"], every_n_epochs=2, num_images=5, heatmaps="*", heatmap_channels=3, seed=1,
        signed=True,
    )  # fmt: skip
    fit([watching], epochs=5, logger=logger)
    assert [entry["epoch"] for entry in watching.history] == [-1, 1, 3, 4]  # and the last
    assert {row["layer"] for row in watching.rows} == {"net.1", "mean"}
    assert watching.rows[0]["num_samples"] == 5 * 16
    maps = read_heatmap(tmp_path / "run" / "version_0" / "heatmap_net.1.csv")
    assert len(maps["after"].channels) == 3 and maps["after"].num_features == 8 and maps["after"].epoch == 4

    nothing = monitor(every_n_epochs=0)
    fit([nothing], logger=CSVLogger(tmp_path, "run", 1))
    assert nothing.history == nothing.rows == [] and not list((tmp_path / "run" / "version_1").glob("w*"))
    fit([monitor(pictures=False)], logger=CSVLogger(tmp_path, "run", 2), epochs=1)
    found = {path.name for path in (tmp_path / "run" / "version_2").iterdir()}
    assert "whiteness.csv" in found and not any(name.endswith(".png") or "heatmap" in name for name in found)


def test_a_training_that_ends_before_its_time_is_measured_at_its_end():
    watching = monitor(every_n_epochs=10)
    fit([watching], max_steps=6, epochs=50)
    assert [(entry["epoch"], entry["step"]) for entry in watching.history] == [(-1, 0), (1, 6)]


class Stops(pl.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, *args):
        if trainer.current_epoch == 2:
            raise self.error


def test_a_run_that_is_killed_keeps_what_it_had(tmp_path):
    logger = CSVLogger(tmp_path, "run", 0)
    with pytest.raises(RuntimeError, match="killed"):
        fit([monitor(), Stops(RuntimeError("killed"))], epochs=4, logger=logger)
    folder = tmp_path / "run" / "version_0"
    assert [row["epoch"] for row in read_whiteness(folder / "whiteness.csv") if row["layer"] == "mean"] == [-1, 0, 1]
    assert read_heatmap(folder / "heatmap_net.4.csv")["after"].epoch == 1
    assert not (folder / "whiteness.png").exists()
    with pytest.raises(SystemExit):  # Ctrl-C
        fit([monitor(), Stops(KeyboardInterrupt())], epochs=4, logger=CSVLogger(tmp_path, "run", 1))
    assert (tmp_path / "run" / "version_1" / "whiteness.png").exists()


def test_resuming_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(WhitenessMonitor, "_draw", lambda *_: None)  # which takes longer than the rest
    first, folder = monitor(), tmp_path / "run" / "version_0"
    _, trainer = fit([first], logger=CSVLogger(tmp_path, "run", 0))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    torch.load(tmp_path / "two.ckpt", weights_only=True)
    before, text = read_heatmap(folder / "heatmap_net.4.csv"), (folder / "whiteness.csv").read_text()
    # In another folder with what the checkpoint knows; in the same one it is appended.
    for version in (1, 0):
        watching, folder = monitor(), tmp_path / "run" / f"version_{version}"
        logger = CSVLogger(tmp_path, "run", version)
        fit([watching], epochs=3, logger=logger, ckpt_path=tmp_path / "two.ckpt")
        assert [entry["epoch"] for entry in watching.history] == [-1, 0, 1, 2]
        assert watching.history[:3] == first.history and watching.rows[: len(first.rows)] == first.rows
        assert read_whiteness(folder / "whiteness.csv") == watching.rows
        maps = read_heatmap(folder / "heatmap_net.4.csv")
        assert maps["after"].epoch == 2 and torch.equal(maps["before"].correlation, before["before"].correlation)
    assert (folder / "whiteness.csv").read_text().startswith(text)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions(precision):
    watching = monitor()
    model, _ = fit([watching], precision=precision)
    dtype = next(model.parameters()).dtype
    with torch.autocast("cpu", torch.bfloat16, enabled="mixed" in precision):
        expected = measure_whiteness(model, IMAGES, lambda x: model(x.to(dtype)))
    assert watching.rows[-2]["rms"] == pytest.approx(expected["net.4"].rms, rel=1e-6)


class Plain(Classifier):
    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_compiled():
    torch._dynamo.reset()
    histories = []
    for compiled in (False, True):
        pl.seed_everything(0, verbose=False)
        watching, model = monitor(), Plain()
        fit([watching], torch.compile(model, backend="eager") if compiled else model, epochs=1)
        assert {row["layer"] for row in watching.rows} == {*LAYERS, "mean"}
        histories.append(watching.history)
    for found, expected in zip(*histories, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


class FindsOne(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[1].num_batches_rejected += 1


def warnings_of(*callbacks, **options):
    with pytest.warns(UserWarning) as caught:
        fit(list(callbacks), **options)
    return [str(warning.message) for warning in caught]


def test_it_warns_once_of_what_the_layers_have_met():
    told = [text for text in warnings_of(monitor(), FindsOne(), epochs=3) if "not finite" in text]
    assert len(told) == 1 and told[0].startswith("net.1: 1 training batches were not finite")


class Vectors(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(108, 64), nn.BatchNorm1d(64))


def test_it_warns_once_of_fewer_samples_than_channels():
    watching = monitor()
    told = [text for text in warnings_of(watching, model=Vectors()) if "samples for" in text]
    assert len(told) == 1 and told[0].startswith("net.2: 20 samples for 64 channels")
    assert "1/sqrt(N) = 0.22" in told[0] and "num_images" in told[0]
    assert watching.history[0]["kl"] == math.inf and watching.history[0]["rms"] < 1


class Spare(Classifier):
    def __init__(self):
        super().__init__()
        self.spare = nn.BatchNorm1d(3)  # not part of the forward


def test_networks_and_trainings_that_it_leaves_alone(tmp_path):
    watching = monitor()
    fit([watching], Classifier(norm=nn.Identity))
    assert watching.history == []
    fit([watching], logger=CSVLogger(tmp_path), fast_dev_run=True)
    assert len(watching.history) == 2 and not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="measures nothing: no layer that it chose was run"):
        fit([monitor(layers="spare")], Spare())
    sharded = types.SimpleNamespace(strategy=object.__new__(FSDPStrategy))
    with pytest.warns(UserWarning, match="WhitenessMonitor measures nothing: FSDPStrategy shards"):
        assert not monitor()._measures(sharded, Classifier())


def test_what_cannot_work_is_said():
    with pytest.raises(ValueError, match="sample_images"):
        fit([WhitenessMonitor()])
    for name in ("num_images", "batch_size", "heatmap_channels"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            WhitenessMonitor(**{name: 0})
    with pytest.raises(ValueError, match="heatmap_channels must be at most 1024, got 1025"):
        WhitenessMonitor(heatmap_channels=1025)
    with pytest.raises(ValueError, match="every_n_epochs must be"):
        WhitenessMonitor(every_n_epochs=-1)
    with pytest.raises(ValueError, match=r"no normalisation layer fits 'net\.9'; the model's: net\.1, net\.4"):
        fit([monitor(layers=["net.9"])])
    with pytest.raises(ValueError, match=r"no measured layer fits 'net\.4'; the model's: net\.1"):
        fit([monitor(exclude="net.4", heatmaps="net.4")])
