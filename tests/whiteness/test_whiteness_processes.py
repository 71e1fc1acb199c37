"""Metrics and monitor in two processes, which give what one gives."""

import os
import traceback

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from swbn_lightning import SWBN2d, WhitenessMonitor
from swbn_lightning.whiteness import FeatureMoments, NumSamples, RMSCorrelation, read_whiteness, whiteness_metrics

pytestmark = pytest.mark.slow  # interpreters of their own
SPLITS = [(199, 1), (0, 200)]


def features():
    rng = np.random.default_rng(0)
    return rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6)) + 5


def metrics_of(rank, sizes):
    part = torch.from_numpy(features()).split(sizes)[rank]
    metrics = [FeatureMoments(), NumSamples(), whiteness_metrics()]
    for metric in metrics:
        for batch in part.split(17) if len(part) else ():
            metric.update(batch)
    moments, count, collection = metrics
    correlation = moments.compute().numpy()
    local = moments.num_samples()  # outside of compute the state is this process's own again
    count.compute()
    count.update(part)  # it goes on
    values = {name: value.item() for name, value in collection.compute().items()}
    return values, correlation, local, count.compute().item()


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), SWBN2d(8, step_size=0.01), nn.ReLU(), nn.Conv2d(8, 6, 3))
        self.last = nn.Sequential(SWBN2d(6, step_size=0.01, criterion="kl"), nn.Flatten(), nn.Linear(24, 3))

    def forward(self, x):
        return self.last(self.net(x))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(folder, rank, processes):
    """Two epochs of three batches, of which each process has its part; the history, and the state at the end."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 3, 6, 6, generator=generator), torch.arange(8) % 3) for _ in range(3)]
    parts = [tuple(values.chunk(processes)[rank] for values in batch) for batch in batches]
    monitor = WhitenessMonitor(images=torch.randn(30, 3, 6, 6, generator=generator), batch_size=7)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto",
        logger=CSVLogger(folder, name=None, version=0), callbacks=[monitor], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=1,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, torch.utils.data.DataLoader(parts, batch_size=None))
    return monitor.history, {name: value.numpy() for name, value in model.state_dict().items()}


def uneven(rank):
    metric = RMSCorrelation()
    metric.update(torch.randn(9, 3 + rank))
    with pytest.raises(ValueError) as error:
        metric.compute()
    return str(error.value)


def work(rank, folder, queue):
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
        torch.set_num_threads(1)
        results = [*(metrics_of(rank, sizes) for sizes in SPLITS), uneven(rank)]
        # As torchrun would start it.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test")
        queue.put([*results, fit(folder / "two", rank, 2)])
    except BaseException:
        queue.put(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder, and what both processes gave for each job; all jobs in one pair of them."""
    folder = tmp_path_factory.mktemp("processes")
    context = torch.multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in range(2)]
    processes = [context.Process(target=work, args=(rank, folder, queues[rank])) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        results = [queue.get(timeout=240) for queue in queues]
        assert not any(isinstance(result, str) for result in results), results
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return folder, list(zip(*results, strict=True))


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_metrics_of_two_processes_equal_one_whatever_their_shares(two, sizes):
    x = features()
    whole = whiteness_metrics()
    whole.update(torch.from_numpy(x))
    expected = {name: value.item() for name, value in whole.compute().items()}
    results = two[1][SPLITS.index(sizes)]
    for rank, (values, correlation, local, count) in enumerate(results):
        assert values == pytest.approx(expected, rel=1e-10)
        np.testing.assert_allclose(correlation, np.corrcoef(x.T), atol=1e-10)
        assert local == sizes[rank] and count == 2 * 200
    assert np.array_equal(results[0][1], results[1][1])  # to the bit


def test_processes_with_different_channels_say_so(two):
    assert all("features of 3 and 4 channels" in message for message in two[1][len(SPLITS)])


def test_the_monitor_gives_the_same_on_one_process_and_two(two, tmp_path):
    folder, results = two
    (first, state), (second, other) = results[-1]
    assert first == second  # each measures the whole sample, with the same W
    alone, expected = fit(tmp_path / "one", 0, 1)
    assert [entry["epoch"] for entry in first] == [-1, 0, 1]
    assert first[0] == alone[0]  # to the bit, before training
    for found, wanted in zip(first, alone, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-4, atol=1e-5)
        assert np.array_equal(state[name], other[name]), name
    rows = [read_whiteness(path / "version_0" / "whiteness.csv") for path in (folder / "two", tmp_path / "one")]
    assert len(rows[0]) == len(rows[1]) == 9
    assert len((folder / "two" / "version_0" / "whiteness.csv").read_text().splitlines()) == 1 + 9  # one writes
