"""The kernels against references: in Triton's interpreter, or on a GPU.

The interpreter must be chosen before Triton is imported, so test_kernels.py runs this file in a process of its own,
with ``TRITON_INTERPRET=1``. It cuts float32 down to bfloat16 where a GPU rounds: that is held to twice its precision.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from swbn_lightning import SWBN1d, SWBN2d
from swbn_lightning.norms import functional as WF
from swbn_lightning.norms import kernels
from swbn_lightning.norms.kernels import launch
from tests.norms.reference import ReferenceSWBN, central_difference, correlated, from_columns, to_columns
from tests.norms.test_closed_form import Allocations
from tests.norms.test_recompute import NoHostSynchronisation

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
EPS = 1e-3
TOLERANCE = {torch.float32: 2e-6 if DEVICE.type == "cpu" else 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
PASS = ["moments", "merge_moments", "covariance", "merge_covariance", "direction", "state", "output"]
BACKWARD = ["cross", "merge_cross", "gradient"]
STEP = ["direction", "state"]


@pytest.fixture(autouse=True)
def _switched_on():
    with kernels.use_kernels(), DEVICE:
        yield


@pytest.fixture
def few_programs(monkeypatch):
    """A larger block in the kernel with the most programs: what each costs the interpreter is most of the time."""
    original = launch.blocks
    larger = {"merge_cross": {"BLOCK_R": 16}}
    monkeypatch.setattr(launch, "blocks", lambda kernel, *args: {**original(kernel, *args), **larger.get(kernel, {})})


whole_layers = pytest.mark.usefixtures("few_programs")


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


def draw(n, d, dtype, mean=0.0, seed=0):
    """Correlated samples as rows, of different scale; the tensor and what it holds in float64."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) @ (np.eye(d) + rng.normal(size=(d, d)) / d) * np.exp(rng.normal(size=d) / 2)
    x = torch.from_numpy(x + mean * x.std(0)).to(DEVICE, dtype)
    return x, exactly(x)


def exactly(values):
    """What a tensor holds, in float64."""
    return values.detach().double().cpu().numpy()


def statistics(x):
    """Algorithm 1, steps 1, 2 and 5, in float64."""
    mean, variance = x.mean(0), x.var(0, ddof=1)
    return mean, variance, (x - mean) / np.sqrt(variance + EPS)


def vectors(*arrays):
    return [torch.from_numpy(np.asarray(array)).to(DEVICE, torch.float32) for array in arrays]


def assert_near(found, expected, tolerance):
    """The error of the whole, against the size of the whole."""
    found, expected = (exactly(v) if isinstance(v, torch.Tensor) else v for v in (found, expected))
    assert np.isfinite(found).all()
    error, size = np.linalg.norm(found - expected), np.linalg.norm(expected)
    assert error <= tolerance * size, error / size


@pytest.mark.parametrize(("n", "d", "dtype", "mean"), [
    (2, 16, torch.float32, 0), (777, 24, torch.float32, 300), (203, 100, torch.bfloat16, 5),
    (1500, 16, torch.float16, 20), (130, 130, torch.float32, 1e4),
])  # fmt: skip
def test_moments(n, d, dtype, mean):
    x, exact = draw(n, d, dtype, mean)
    x[:, 3], exact[:, 3] = 3.0, 3.0
    found = launch.moments(x, EPS)
    expected = statistics(exact)
    expected = *expected[:2], 1 / np.sqrt(expected[1] + EPS)
    tolerance = 1e-3 if mean == 1e4 else 1e-5  # of a deviation, float32 itself has 1e-3 there
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        np.testing.assert_allclose(exactly(mine), theirs, rtol=tolerance, atol=1e-9)
    assert found[1][3] == 0
    x[n // 2, 5] = torch.nan
    assert [v.isnan().nonzero().flatten().tolist() for v in launch.moments(x, EPS)] == [[5]] * 3
    again = launch.moments(x, EPS)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again, launch.moments(x, EPS), strict=True))


def test_moments_where_the_first_rows_are_far_from_the_rest():
    x = torch.randn(2000, 16)
    x[:256] += 1e4
    mean, variance, _ = launch.moments(x, 0.0)
    exact = exactly(x)
    np.testing.assert_allclose(exactly(mean), exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(exactly(variance), exact.var(0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize(("n", "d", "dtype", "mean", "step"), [
    (203, 24, torch.float32, 300, 1), (100, 100, torch.float16, 5, 1), (90, 160, torch.float32, 0, 1),
    (70, 16, torch.bfloat16, 0, 1), (400, 24, torch.float32, 0, 3),
])  # fmt: skip
def test_covariance_of_the_standardised(n, d, dtype, mean, step):
    x, exact = draw(n, d, dtype, mean)
    middle, variance, xs = statistics(exact)
    xs = xs[::step]
    found = launch.covariance(x[::step], *vectors(middle, 1 / np.sqrt(variance + EPS)))
    assert found.shape == (1, d, d) and torch.equal(found, found.mT)
    tolerance = TOLERANCE[dtype] if mean != 300 else 1e-4  # of a deviation, float32 itself has 2e-5 there
    assert_near(found[0], xs.T @ xs / len(xs), tolerance)


CASES = [(203, 24, torch.float32), (150, 100, torch.float16), (70, 16, torch.bfloat16), (90, 160, torch.float32)]


@pytest.mark.parametrize(("n", "d", "dtype"), CASES)
def test_output_and_gradients(n, d, dtype):
    x, exact = draw(n, d, dtype, mean=5)
    rng = np.random.default_rng(1)
    w, gamma, beta = np.eye(d) + rng.normal(size=(d, d)) / d, rng.uniform(0.5, 2, d), rng.normal(size=d)
    matrix = torch.from_numpy(gamma[:, None] * w).to(DEVICE, dtype)
    a = exactly(matrix)
    mean, variance, xs = statistics(exact)
    middle, rstd, bias = vectors(mean, 1 / np.sqrt(variance + EPS), beta)
    y = launch.output(x, middle, rstd, matrix, bias)
    assert y.dtype == dtype
    assert_near(y, xs @ a.T + beta, TOLERANCE[dtype])
    assert_near(launch.output(x, middle, rstd, matrix, None), xs @ a.T, TOLERANCE[dtype])

    # By the chain rule through the variance and the mean, one after the other.
    upstream = torch.from_numpy(rng.normal(size=(n, d)) + 0.5).to(DEVICE, dtype)
    g = exactly(upstream)
    of_xs, centred, scale = g @ a, exact - mean, 1 / np.sqrt(variance + EPS)
    of_variance = (of_xs * centred * -0.5 * scale**3).sum(0)
    of_mean = -(of_xs * scale).sum(0) - of_variance * 2 * centred.sum(0) / (n - 1)
    of_x = of_xs * scale + of_variance * 2 * centred / (n - 1) + of_mean / n
    kinds = (True, torch.float32, torch.float32)
    found = launch.gradients(upstream, x, middle, rstd, vectors(w)[0][None], matrix, kinds)
    assert found[0].dtype == dtype
    expected = of_x, (g * (xs @ w.T)).sum(0), g.sum(0)
    for mine, theirs, tolerance in zip(found, expected, (TOLERANCE[dtype], TOLERANCE[dtype], 2e-6), strict=True):
        assert_near(mine, theirs, tolerance)
    # dL/dx adds up to nothing over the samples, and is at right angles to xs.
    assert abs(exactly(found[0]).sum(0)).max() <= 2 * TOLERANCE[dtype] * abs(of_x).sum(0).max()


def state(groups, width):
    """Buffers of a layer: W, running mean, running variance, counters of the accepted, rejected and small."""
    rng = np.random.default_rng(2)
    w = np.eye(width) + rng.normal(size=(groups, width, width)) / width
    root = np.eye(width) + rng.normal(size=(groups, width, width)) / width**0.5
    s = root @ root.transpose(0, 2, 1)
    d = groups * width
    mean, variance, old_mean, old_variance = rng.normal(size=(4, d)) + np.array([[0], [5], [0], [5]])
    counters = [torch.tensor(value) for value in (7, 2, 3)]
    return w, s, mean, variance, old_mean, old_variance, counters


@pytest.mark.parametrize(("groups", "width", "criterion", "momentum"), [
    (1, 24, "fro", 0.05), (1, 24, "kl", 0.9), (3, 16, "fro", None), (3, 16, "kl", 0.05), (1, 100, "fro", 0.05),
])  # fmt: skip
def test_step_and_state(groups, width, criterion, momentum):
    w, s, mean, variance, old_mean, old_variance, (tracked, rejected, small) = state(groups, width)
    buffer, *running = vectors(w, old_mean, old_variance)
    before = buffer._version
    out = launch.update_state(
        buffer, vectors(s)[0], *vectors(mean, variance), (*running, tracked), rejected, small, True,
        criterion, 0.3, momentum,
    )  # fmt: skip
    paper = ReferenceSWBN(width, criterion, 0.3)
    stepped = np.stack([w[g] - 0.3 * paper._delta(w[g], s[g]) for g in range(groups)])
    assert_near(out, (stepped + stepped.transpose(0, 2, 1)) / 2, 1e-6)
    assert torch.equal(out, buffer) and out.data_ptr() != buffer.data_ptr() and torch.equal(out, out.mT)
    assert (tracked, rejected, small) == (8, 2, 4) and buffer._version > before
    share = 1 / 8 if momentum is None else momentum
    for found, old, new in zip(running, (old_mean, old_variance), (mean, variance), strict=True):
        assert_near(found, (1 - share) * old + share * new, 1e-6)


@pytest.mark.parametrize("criterion", ["fro", "kl"])
@pytest.mark.parametrize("where", ["covariance", "mean", "variance", "overflow", "no step"])
def test_all_groups_are_accepted_or_rejected_together(criterion, where):
    w, s, mean, variance, *_, (tracked, rejected, small) = state(3, 16)
    buffer, s, mean, variance = vectors(w, s, mean, variance)
    if where == "covariance":
        s[2, 3, 4] = torch.nan
    elif where == "mean":
        mean[40] = torch.nan
    elif where == "overflow":
        buffer[1] *= 1e30
    else:
        variance[0] = torch.inf
    old = buffer.clone()
    running = torch.zeros(48), torch.ones(48), tracked
    s = None if where == "no step" else s
    out = launch.update_state(buffer, s, mean, variance, running, rejected, small, False, criterion, 0.1, 0.5)
    assert torch.equal(out, old) and torch.equal(buffer, old)
    assert torch.equal(running[0], torch.zeros(48)) and torch.equal(running[1], torch.ones(48))
    assert (tracked, rejected, small) == (7, 3, 3)


@pytest.mark.parametrize("criterion", ["fro", "kl"])
def test_a_w_that_whitens_stays(criterion):
    buffer = torch.eye(24)[None]
    counters = [torch.tensor(0) for _ in range(2)]
    mean, variance = torch.zeros(24), torch.ones(24)
    out = launch.update_state(buffer, torch.eye(24)[None], mean, variance, None, *counters, False, criterion, 50.0, 0.1)
    assert torch.equal(out[0], torch.eye(24)) and counters == [0, 0]
    # Without a step, and rejected by W itself.
    buffer[0, 3, 3] = torch.inf
    launch.update_state(buffer, None, mean, variance, None, *counters, False, criterion, 50.0, 0.1)
    assert counters == [1, 0]


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
    (16, {"bias": False, "track_running_stats": False, "cov_samples": 128}, torch.float32),
    (16, {"update_every": 2}, torch.float32), (16, {"num_groups": 4}, torch.float32),
]  # fmt: skip


@whole_layers
@pytest.mark.parametrize(("d", "options", "dtype"), LAYERS, ids=str)
def test_steps_are_those_of_the_stock_operators(d, options, dtype, launched):
    torch.manual_seed(0)
    norm = SWBN2d(d, step_size=0.1, eps=EPS, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    stock = copy.deepcopy(norm)
    for step in range(3 if d == 24 else 2):
        x = channels_last(4, d, 9, 7, dtype=dtype)
        upstream = torch.randn_like(x)
        launched.clear()
        found = train(norm, x, upstream)
        if options.get("num_groups"):
            assert launched == STEP
        elif options.get("update_every") and step == 1:
            assert launched == ["moments", "merge_moments", "state", "output", *BACKWARD]
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


@whole_layers
@pytest.mark.parametrize("criterion", ["fro", "kl"])
def test_a_layer_against_algorithms_1_and_3(criterion):
    shape = (6, 16, 5, 4)
    norm = SWBN2d(16, criterion=criterion, step_size=0.02)
    rng = np.random.default_rng(0)
    reference = ReferenceSWBN(16, criterion, 0.02)
    reference.gamma, reference.beta = rng.uniform(0.5, 2, 16), rng.normal(size=16)
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(reference.gamma).to(DEVICE))
        norm.bias.copy_(torch.from_numpy(reference.beta).to(DEVICE))
    for _ in range(3):
        x = vectors(correlated(rng, shape))[0].contiguous(memory_format=torch.channels_last)
        upstream = torch.randn_like(x)
        found = train(norm, x, upstream)
        exact = exactly(x)
        assert_near(found[0], from_columns(reference.train(to_columns(exact)), shape), 1e-5)
    assert_near(norm.whitening_matrix[0], reference.w[0], 1e-5)
    assert_near(norm.running_var, reference.v_e, 1e-6)

    def loss():
        return (from_columns(reference.frozen(to_columns(exact)), shape) * exactly(upstream)).sum()

    for place in rng.choice(x.numel(), 12, replace=False):
        index = np.unravel_index(place, shape)
        assert found[1][index].item() == pytest.approx(central_difference(loss, exact, index), rel=1e-3, abs=1e-4)
    gamma = [central_difference(loss, reference.gamma, channel) for channel in range(16)]
    assert_near(found[2], np.array(gamma), 1e-5)
    assert_near(norm.eval()(x), from_columns(reference.predict(to_columns(exact)), shape), 1e-5)


@whole_layers
def test_a_mean_of_300_deviations_and_a_constant_channel():
    torch.manual_seed(0)
    x = channels_last(8, 16, 6, 6, mean=300.0)
    x[:, 5] = 7.0
    norm = SWBN2d(16, step_size=1e-3)
    exact = copy.deepcopy(norm).double()
    found, expected = train(norm, x, torch.ones_like(x)), train(exact, x.double(), torch.ones_like(x).double())
    assert_near(found[0], expected[0], 1e-4)
    assert torch.isfinite(found[1]).all()


@whole_layers
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


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_batch_that_is_not_finite(dtype):
    norm = SWBN2d(16)
    norm(channels_last(4, 16, 5, 5, dtype=dtype))
    before = copy.deepcopy(norm.state_dict())
    x = channels_last(4, 16, 5, 5, dtype=dtype)
    x[0, 1, 2, 2] = torch.nan
    assert not norm(x).isfinite().all()
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())
    assert norm.num_batches_rejected == 1


@whole_layers
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


@whole_layers
def test_a_batch_of_gradients_at_once_and_some_gradients_alone():
    norm = SWBN1d(16, eps=EPS)
    inputs = torch.randn(30, 16, requires_grad=True)
    y = norm(inputs)
    upstream = torch.randn(3, 30, 16)
    for of in ((inputs,), (norm.weight, norm.bias), (norm.bias, inputs)):
        batched = torch.autograd.grad(y, of, upstream, is_grads_batched=True, retain_graph=True)
        for i in range(3):
            alone = torch.autograd.grad(y, of, upstream[i], retain_graph=True)
            for mine, theirs in zip(batched, alone, strict=True):
                torch.testing.assert_close(mine[i], theirs, rtol=1e-4, atol=1e-5)
    frozen = SWBN1d(16, affine=False)
    assert not frozen(inputs.detach()).requires_grad
    norm.weight.requires_grad_(False)
    norm(inputs.detach()).sum().backward()
    torch.testing.assert_close(norm.bias.grad, torch.full((16,), 30.0))


@whole_layers
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


@whole_layers
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


@whole_layers
def test_around_the_layer():
    """An activation in place behind it, two forwards before a backward, autocast, inference mode, expanded gradient."""
    torch.manual_seed(0)
    norm = SWBN2d(16, step_size=0.1)
    a, b = channels_last(4, 16, 5, 5).requires_grad_(), channels_last(4, 16, 5, 5).requires_grad_()
    torch.relu(copy.deepcopy(norm)(a)).sum().backward()
    expected, a.grad = a.grad, None
    y = norm(a)
    assert not y._is_view()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        other = norm(b)
    assert other.dtype == torch.float32
    (torch.relu_(y).sum() + other.sum()).backward()
    torch.testing.assert_close(a.grad, expected)
    with torch.inference_mode():
        norm(a)
    assert norm.num_batches_tracked == 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as BatchNorm: x is kept
        x = a.detach().requires_grad_() * 1
        y = norm(x)
        x.mul_(2)
        y.sum().backward()


@whole_layers
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


def test_covariance_agrees_with_the_stock_formula():
    x, _ = draw(60, 16, torch.float32)
    mean, _, rstd = launch.moments(x, EPS)
    torch.testing.assert_close(launch.covariance(x, mean, rstd), WF.covariance((x - mean) * rstd))
