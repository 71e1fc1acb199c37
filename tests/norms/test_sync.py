"""One batch over two processes gives what one process gives on the whole batch."""

import copy
import functools

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swbn_lightning import DBN2d, IterNorm2d, NormFactory, OnlineWhitening2d, SWBN2d, convert_norms
from swbn_lightning.norms.passes.processes import merge_statistics

SPLITS = [(9, 3), (11, 1), (12, 0)]
FAMILIES = {
    "swbn": [SWBN2d(6, step_size=0.05, num_groups=2), SWBN2d(4, step_size=0.05, criterion="kl")],
    "batch": [IterNorm2d(6, num_groups=2), DBN2d(4)],
    "online": [OnlineWhitening2d(6, num_groups=2), OnlineWhitening2d(4)],
}
COLLECTIVES = ("all_gather", "all_reduce", "all_gather_into_tensor", "reduce", "broadcast", "all_to_all")


def network(family):
    torch.manual_seed(0)
    first, second = FAMILIES[family]
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), copy.deepcopy(first), nn.Conv2d(6, 4, 1), copy.deepcopy(second)
    ).double()  # fmt: skip


def batches():
    torch.manual_seed(1)
    # One position an image: a process with one image has one value a channel.
    inputs = [torch.randn(12, 3, 1, 1, dtype=torch.float64) * 2 + 30 for _ in range(3)]
    return inputs, torch.randn(12, 4, 1, 1, dtype=torch.float64)


def train(model, inputs, upstream, part):
    """A forward for each input, one backward of a sum over samples: output, gradients and state."""
    for x in inputs[:-1]:
        model(x[part])
    x = inputs[-1][part].clone().requires_grad_()
    y = model(x)
    (y * upstream[part]).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    return y.detach(), x.grad, gradients, copy.deepcopy(model.state_dict())


def train_float64(family, part):
    return train(network(family), *batches(), part)


LAYERS = {"fro": SWBN2d(8, step_size=0.05), "iternorm": IterNorm2d(8), "online": OnlineWhitening2d(8)}


def train_float16(layer, part):
    """Large activations in float16, and for SWBN a W that has diverged, whose output is kept in range."""
    torch.manual_seed(3)
    norm = copy.deepcopy(LAYERS[layer])
    if layer == "fro":
        norm.whitening_matrix.mul_(3e4)
    inputs = [(torch.randn(12, 8, 4, 4) * 300).half() for _ in range(2)]
    return train(norm, inputs, torch.randn(12, 8, 4, 4).half(), part)


def penalty(family, part):
    """The gradient of a gradient's square, the penalty summed over the processes' parts."""
    inputs, upstream = batches()
    x = inputs[0][part].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((network(family)(x).square() * upstream[part]).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    return second


def train_ddp(broadcast, part):
    """Three optimiser steps through DistributedDataParallel, which may write rank 0's buffers over the others'."""
    model = nn.Sequential(*(layer for family in FAMILIES for layer in network(family)[:2]), nn.Flatten())
    for place in range(2, len(model) - 1, 2):
        model[place] = nn.Conv2d(6, 6, 1).double()
    parallel = model if part == slice(0, 12) else DistributedDataParallel(model, broadcast_buffers=broadcast)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x in batches()[0]:
        optimizer.zero_grad()
        parallel(x[part])  # a forward more than backwards
        loss = (parallel(x[part]) - x[part, :1].flatten(1)).square().mean()
        loss.backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


JOBS = {
    **{("float64", f, s): functools.partial(train_float64, f) for f in FAMILIES for s in SPLITS},
    **{("float16", n, (9, 3)): functools.partial(train_float16, n) for n in LAYERS},
    **{("penalty", f, s): functools.partial(penalty, f) for f in FAMILIES for s in SPLITS[::2]},
    ("ddp", True, (6, 6)): functools.partial(train_ddp, True),
}


def work(rank, address, queue):
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    calls = []
    for name in COLLECTIVES:
        original = getattr(dist, name)
        setattr(
            dist, name, lambda *a, _original=original, _name=name, **k: (calls.append(_name), _original(*a, **k))[1]
        )
    for (*_, sizes), job in zip(JOBS, JOBS.values(), strict=True):
        calls.clear()
        result = job(slice(0, sizes[0]) if rank == 0 else slice(sizes[0], 12))
        queue.put((rank, result, len(calls)))
        queue.join()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A job to ``[(result, calls of collectives)]`` of both processes; all jobs in one pair of them."""
    context = torch.multiprocessing.get_context("spawn")
    queues = [context.JoinableQueue() for _ in range(2)]
    address = tmp_path_factory.mktemp("sync") / "store"
    processes = [context.Process(target=work, args=(rank, address, queues[rank])) for rank in range(2)]
    for process in processes:
        process.start()
    found = {}
    for job in JOBS:
        found[job] = []
        for queue in queues:
            _, result, calls = queue.get(timeout=120)
            found[job].append((copy.deepcopy(result), calls))
            queue.task_done()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return found


def whole(job):
    return JOBS[job](slice(0, 12))


@pytest.mark.parametrize(("family", "sizes"), [(f, s) for f in FAMILIES for s in SPLITS], ids=str)
def test_two_processes_equal_one(results, family, sizes):
    job = ("float64", family, sizes)
    for _, calls in results[job]:
        assert calls == 2 * 3 * 1 + 2 * 1  # two layers, three forwards of one, one backward of one
    first, second = [result for result, _ in results[job]]
    y, x_grad, gradients, state = whole(job)
    # Six channels of a three-channel image: whitening by the batch amplifies rounding by 1 / sqrt(eps) there.
    close = {"rtol": 1e-9, "atol": 1e-9} if family == "swbn" else {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(torch.cat([first[0], second[0]]), y, **close)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), x_grad, **close)
    for own in zip(first[2], second[2], gradients, strict=True):
        torch.testing.assert_close(own[0] + own[1], own[2], **close)
    for name, value in state.items():
        torch.testing.assert_close(first[3][name], value, **close)
        assert torch.equal(first[3][name], second[3][name]), name  # W is the same on both


@pytest.mark.parametrize("layer", LAYERS)
def test_in_float16(results, layer):
    job = ("float16", layer, (9, 3))
    first, second = [result for result, _ in results[job]]
    y, x_grad, _, state = whole(job)
    for found, expected in ((torch.cat([first[i], second[i]]), value) for i, value in enumerate((y, x_grad))):
        assert torch.isfinite(found).all() and found.dtype == torch.float16
        assert (found - expected).float().norm() <= 0.01 * expected.float().norm()
    for name, value in state.items():
        # Beside a diverged diagonal of 3e4, what rounds the covariance to 16 bits shows in the other entries.
        torch.testing.assert_close(first[3][name], value, rtol=1e-3, atol=1e-3 + 1e-5 * value.abs().max().item())


@pytest.mark.parametrize(("family", "sizes"), [(f, s) for f in FAMILIES for s in SPLITS[::2]], ids=str)
def test_second_derivatives(results, family, sizes):
    job = ("penalty", family, sizes)
    found = torch.cat([result for result, _ in results[job]])
    torch.testing.assert_close(found, whole(job), rtol=1e-8, atol=1e-8)


def test_distributed_data_parallel(results):
    job = ("ddp", True, (6, 6))
    (first, _), (second, _) = results[job]
    for name, value in whole(job).items():
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-6)
        assert torch.equal(first[name], second[name]), name


def test_merging_in_one_process_is_exact(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        x = torch.randn(20, 3) + 1e4  # raw second moments would leave nothing of the variance
        mean = x.mean(0)
        merged = merge_statistics(mean, ((x - mean).mT @ (x - mean))[None], 20)
        expected = (mean, torch.cov(x.mT, correction=0)[None], torch.tensor(20.0))
        for value, wanted in zip(merged, expected, strict=True):
            torch.testing.assert_close(value, wanted)
    finally:
        dist.destroy_process_group()


class Regression(pl.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_synchronising_batchnorm_leaves_our_layers_as_they_are(monkeypatch):
    model = convert_norms(nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)), NormFactory("swbn-fro"))
    layer = model[1]
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(model, nn.BatchNorm2d(6)))
    assert converted[0][1] is layer and isinstance(converted[1], nn.SyncBatchNorm)

    for key in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(key, "")  # so that what Lightning sets goes again
        monkeypatch.delenv(key)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="ddp", sync_batchnorm=True, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Regression(model), torch.utils.data.DataLoader(torch.randn(16, 3, 4, 4), batch_size=8))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert model[1] is layer and layer.num_batches_tracked == 2
