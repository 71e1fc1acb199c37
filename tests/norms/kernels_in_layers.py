"""Layers by kernels against the same layers by stock operators, and against the paper's algorithms."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from swbn_lightning import SWBN1d, SWBN2d
from swbn_lightning.norms.passes import kernels
from swbn_lightning.norms.passes.kernels import launch
from tests.norms.device_tools import DEVICE, EPS, TOLERANCE, assert_near
from tests.norms.test_checkpointing import NoHostSynchronisation
from tests.norms.test_passes import Allocations

PASS = ["moments", "merge_moments", "covariance", "merge_covariance", "direction", "state", "output"]
BACKWARD = ["cross", "merge_cross", "gradient"]
STEP = ["direction", "state"]


@pytest.fixture(autouse=True)
def _switched_on():
    with kernels.use_kernels(), DEVICE:
        yield


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """A larger block in the kernel with the most programs: what each costs the interpreter is most of the time."""
    original = launch.blocks
    larger = {"merge_cross": {"BLOCK_R": 16}}
    monkeypatch.setattr(launch, "blocks", lambda kernel, *args: {**original(kernel, *args), **larger.get(kernel, {})})


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels launched so far."""
    names = []
    original = launch._launch

    def note(kernel, *args, **options):
        names.append(kernel.__name__.removesuffix("_kernel"))
        original(kernel, *args, **options)

    monkeypatch.setattr(launch, "_launch", note)
    return names


def channels_last(*shape, dtype=torch.float32, mean=3.0):
    x = torch.randn(shape) * torch.rand(1, shape[1], 1, 1).add(0.5) + torch.randn(shape[0], 1, *shape[2:]) + mean
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def train(norm, x, upstream):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    norm.zero_grad()
    y = norm(x)
    y.backward(upstream)
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in norm.parameters())]


LAYERS = [
    (24, {}, torch.float32), (16, {}, torch.float16), (16, {}, torch.bfloat16),
    (16, {"criterion": "kl", "affine": False, "momentum": None}, torch.float32),
    (16, {"bias": False, "track_running_stats": False}, torch.float32),
    (16, {"num_groups": 4}, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("d", "options", "dtype"), LAYERS, ids=str)
def test_steps_are_those_of_the_stock_operators(d, options, dtype, launched):
    torch.manual_seed(0)
    norm = SWBN2d(d, step_size=0.1, eps=EPS, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    stock = copy.deepcopy(norm)
    for _ in range(3 if d == 24 else 2):
        x = channels_last(4, d, 9, 7, dtype=dtype)
        upstream = torch.randn_like(x)
        launched.clear()
        found = train(norm, x, upstream)
        if options.get("num_groups"):
            assert launched == STEP
        else:
            assert launched == PASS + BACKWARD
        with kernels.use_kernels(False):
            launched.clear()
            expected = train(stock, x, upstream)
        assert not launched
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
            assert_near(mine, theirs, 2 * TOLERANCE[dtype])
    rough = TOLERANCE[dtype] if dtype == torch.bfloat16 else 1e-5  # W by way of its covariance
    torch.testing.assert_close(norm.state_dict(), stock.state_dict(), rtol=rough, atol=rough / 10)
    assert norm.num_batches_small == stock.num_batches_small == 0 == norm.num_batches_rejected


def test_float16_stays_in_range():
    torch.manual_seed(0)
    x = channels_last(8, 16, 6, 6, dtype=torch.float16)
    norm = SWBN2d(16, step_size=1e-6)
    with torch.no_grad():
        norm.whitening_matrix.mul_(2e4)
    y, exact = norm(x), copy.deepcopy(norm)(x.float())
    assert exact.abs().max() > 65504 and torch.isfinite(y).all()
    scale = (y.double() * exact).sum() / exact.double().square().sum()  # made smaller as a whole
    assert_near(y.double() / scale, exact, 1e-3)
    # Of a constant channel: gamma W times 1 / sqrt(eps) alone is beyond float16.
    x[:, 2] = 3.0
    upstream = torch.randn(x.shape).half() * 1e-3
    norm = SWBN2d(16, step_size=1e-6)
    norm.whitening_matrix.mul_(20)
    exact = copy.deepcopy(norm)
    found, expected = train(norm, x, upstream)[1], train(exact, x.float(), upstream.float())[1]
    assert torch.isfinite(found).all()
    keep = [channel for channel in range(16) if channel != 2]
    assert_near(found[:, keep], expected[:, keep], 1e-3)


def test_derivatives_of_second_order(launched):
    torch.manual_seed(0)
    norm = SWBN1d(16, step_size=1e-3, eps=EPS)
    x, direction = torch.randn(30, 16), torch.randn(30, 16)
    found = []
    for on in (True, False):
        inputs = x.clone().requires_grad_()
        with kernels.use_kernels(on):
            launched.clear()
            y = copy.deepcopy(norm)(inputs)
            assert bool(launched) is on
            (gradient,) = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
            (second,) = torch.autograd.grad((gradient * direction).sum(), inputs, create_graph=True)
            (third,) = torch.autograd.grad(second.pow(2).sum(), inputs)
        found.append((gradient.detach(), second.detach(), third))
    for mine, theirs in zip(*found, strict=True):
        assert_near(mine, theirs, 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant, launched):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, bias=False), SWBN2d(16, step_size=0.1), nn.ReLU(inplace=True)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    x = channels_last(4, 3, 6, 6).requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).pow(3).sum().backward()
    again = ["moments", "merge_moments", "output"]
    assert launched == PASS + again + BACKWARD
    plain(x).pow(3).sum().backward()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


class Operators(TorchDispatchMode):
    """Names of the operators that make a GPU work, besides the kernels; without the interpreter's own copies."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if not operator.is_view and not name.startswith(("empty", "new_empty", "set_", "copy_", "detach", "unbind")):
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


def test_no_tensor_is_written_but_the_output_and_the_gradient(launched):
    norm = SWBN2d(16)
    x = channels_last(6, 16, 5, 5, dtype=torch.bfloat16).requires_grad_()
    upstream = torch.randn_like(x)
    norm(x.detach()).sum().backward()  # so that gradients of the parameters are there
    norm.zero_grad()
    saved = []
    launched.clear()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        Operators() as operators, Allocations(x.numel()) as forward, NoHostSynchronisation(),
    ):  # fmt: skip
        y = norm(x)
    assert launched == PASS and operators.names == ["mul", "_to_copy"], operators.names
    with Operators() as operators, Allocations(x.numel()) as backward, NoHostSynchronisation():
        y.backward(upstream)
    assert launched == PASS + BACKWARD and not operators.names, operators.names
    interpreters_own = {"aten.set_.source_Storage_storage_offset"}
    assert forward.made - interpreters_own == backward.made - interpreters_own == {"aten.new_empty_strided.default"}
    assert forward.copies == backward.copies == 0
    assert [tensor.data_ptr() for tensor in saved if tensor.numel() == x.numel()] == [x.data_ptr()]


def test_what_no_kernel_is_for_runs_by_the_stock_operators(launched, monkeypatch):
    torch.manual_seed(0)
    x = channels_last(4, 16, 5, 5)
    norm = SWBN2d(16)
    copy.deepcopy(norm).double()(x.double())
    norm.eval()(x)
    norm.train()
    with forward_ad.dual_level():
        copy.deepcopy(norm)(forward_ad.make_dual(x, x))
    twin = copy.deepcopy(norm)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = twin(mode.from_tensor(x))
    assert fake.shape == x.shape and not launched
    norm(x.contiguous())  # images with their channels apart: W's step alone
    SWBN1d(16)(torch.randn(30, 17)[:, :16])
    assert launched == STEP * 2
    launched.clear()
    SWBN1d(514)(torch.randn(2, 514))
    assert not launched
    monkeypatch.setattr(kernels, "MOST_WIDTH", 15)
    SWBN1d(16)(torch.randn(4, 16))
    assert launched == [name for name in PASS if name not in STEP]
    launched.clear()
    monkeypatch.setattr(kernels, "_MOST_OF_X", 63)
    SWBN1d(16)(torch.randn(4, 16))
    assert not launched
