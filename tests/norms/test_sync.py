"""One batch over two processes gives what one process gives on the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swbn_lightning import DBN2d, IterNorm2d, SWBN2d
from swbn_lightning.norms.distributed import merge_moments

SPLITS = [(6, 6), (9, 3), (11, 1), (12, 0)]
# Each: two layers; the collectives of a layer's forward and of its backward.
FAMILIES = {
    "swbn": ([SWBN2d(6, step_size=0.05, num_groups=2), SWBN2d(4, step_size=0.05, criterion="kl")], 2, 1),
    "batch": ([IterNorm2d(6, num_groups=2), DBN2d(4)], 2, 2),
}
CASES = [(family, sizes) for family in FAMILIES for sizes in SPLITS]


def network(family):
    torch.manual_seed(0)
    first, second = FAMILIES[family][0]
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), copy.deepcopy(first), nn.Conv2d(6, 4, 1), copy.deepcopy(second)
    ).double()  # fmt: skip


def batches():
    torch.manual_seed(1)
    # One position an image: a process with one image has one value a channel.
    inputs = [torch.randn(12, 3, 1, 1, dtype=torch.float64) * 2 + 30 for _ in range(3)]
    return inputs, torch.randn(12, 4, 1, 1, dtype=torch.float64)


def train(model, part):
    """Three forwards, one backward of a sum over samples: output, gradients and state."""
    inputs, upstream = batches()
    for x in inputs[:-1]:
        model(x[part])
    x = inputs[-1][part].clone().requires_grad_()
    y = model(x)
    (y * upstream[part]).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    return y.detach(), x.grad, gradients, copy.deepcopy(model.state_dict())


def penalty(model, part):
    """The gradient of a gradient's square, the penalty summed over the processes' parts."""
    inputs, upstream = batches()
    x = inputs[0][part].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(x).square() * upstream[part]).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    return second


def work(rank, address, queue):
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    calls = []
    for name in ("all_gather", "all_reduce"):
        original = getattr(dist, name)
        setattr(
            dist, name, lambda *a, _original=original, _name=name, **k: (calls.append(_name), _original(*a, **k))[1]
        )
    for family, sizes in CASES:
        calls.clear()
        part = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], 12)
        result = train(network(family), part)
        count = len(calls)
        queue.put((family, sizes, rank, (*result, penalty(network(family), part)), count))
    queue.join()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(family, sizes, rank) to what that process got; all cases in one pair of processes."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.JoinableQueue()
    arguments = (tmp_path_factory.mktemp("sync") / "store", queue)
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    found = {}
    for _ in range(2 * len(CASES)):
        *case, result, calls = queue.get(timeout=120)
        found[tuple(case)] = copy.deepcopy(result), calls
        queue.task_done()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return found


@pytest.mark.parametrize(("family", "sizes"), CASES, ids=str)
def test_two_processes_equal_one(results, family, sizes):
    _, forward, backward = FAMILIES[family]
    both = [results[family, sizes, rank] for rank in range(2)]
    for _, calls in both:
        assert calls == 2 * 3 * forward + 2 * backward  # two layers, three forwards, one backward
    results = [result for result, _ in both]
    second = penalty(network(family), slice(0, 12))
    torch.testing.assert_close(torch.cat([results[0][4], results[1][4]]), second, rtol=1e-8, atol=1e-8)
    y, x_grad, gradients, state = train(network(family), slice(0, 12))
    # Six channels of a three-channel image: whitening by the batch amplifies rounding by 1 / sqrt(eps) there.
    close = {"rtol": 1e-9, "atol": 1e-9} if family == "swbn" else {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(torch.cat([results[0][0], results[1][0]]), y, **close)
    torch.testing.assert_close(torch.cat([results[0][1], results[1][1]]), x_grad, **close)
    for own in zip(results[0][2], results[1][2], gradients, strict=True):
        torch.testing.assert_close(own[0] + own[1], own[2], **close)
    for name, value in state.items():
        torch.testing.assert_close(results[0][3][name], value, **close)
        assert torch.equal(results[0][3][name], results[1][3][name]), name  # W is the same on both


def test_merging_in_one_process_is_exact(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        x = torch.randn(20, 3, dtype=torch.float64) + 1e4
        variance, mean = torch.var_mean(x, 0)
        merged = merge_moments(mean, variance, 20)
        for value, expected in zip(merged, (mean, variance, torch.tensor(20.0).double()), strict=True):
            torch.testing.assert_close(value, expected)
    finally:
        dist.destroy_process_group()
