"""The backward passes that are written out: equal to autograd's of the formulas, of any order, and without copies."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from swbn_lightning import NormFactory, SWBN2d
from swbn_lightning.norms import functional as WF
from swbn_lightning.norms.passes.rows import as_rows
from swbn_lightning.norms.passes.stock import StockCentred, StockStandardized, whiten_standardized

EPS = 1e-3


def literal(x, w, weight, bias):
    """Algorithm 1 for a given W, one plain operation after the other."""
    d, groups = x.shape[1], len(w)
    flat = x.movedim(1, 0).reshape(d, -1)
    n = flat.shape[1]
    mean = flat.sum(1, keepdim=True) / n
    variance = (flat - mean).square().sum(1, keepdim=True) / (n - 1)
    xs = (flat - mean) / (variance + EPS).sqrt()
    y = torch.cat([w[g] @ part for g, part in enumerate(xs.chunk(groups))])
    y = y if weight is None else y * weight[:, None]
    y = y if bias is None else y + bias[:, None]
    return y.view(d, x.shape[0], *x.shape[2:]).movedim(0, 1)


def ours(x, w, weight, bias, centred=True):
    """Rows that are centred only, as on a CPU, or standardised, as on a GPU and over several processes."""
    if centred:
        return StockStandardized(x, len(w), EPS).output(w, weight, bias)
    mean, variance = WF.moments(x.detach())
    rows = WF.standardize(as_rows(x.detach()), mean, variance, EPS)
    return whiten_standardized(x, rows, (variance + EPS).rsqrt(), w, weight, bias)


def problem(shape, groups=1, affine=True, layout=torch.contiguous_format, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    d = shape[1]
    x = (draw(*shape) * 2 + 3).to(memory_format=layout).requires_grad_()
    w = torch.eye(d // groups, dtype=torch.float64) + draw(groups, d // groups, d // groups) * 0.3
    weight, bias = (draw(d).requires_grad_(), draw(d).requires_grad_()) if affine else (None, None)
    return x, w, weight, bias, draw(*shape)


CASES = [
    ((10, 6), 1, True, torch.contiguous_format), ((5, 6, 4), 3, True, torch.contiguous_format),
    ((4, 6, 3, 5), 1, True, torch.channels_last), ((1, 6, 4, 4), 3, True, torch.channels_last),
    ((4, 6, 3, 5), 1, False, torch.contiguous_format), ((3, 6, 2, 3, 2), 1, True, torch.channels_last_3d),
    ((3, 6, 2, 3, 2), 3, False, torch.contiguous_format),
]  # fmt: skip


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("shape", "groups", "affine", "layout"), CASES, ids=str)
def test_output_and_gradients_of_three_orders_equal_autograds(shape, groups, affine, layout, centred):
    x, w, weight, bias, upstream = problem(shape, groups, affine, layout)
    inputs = [t for t in (x, weight, bias) if t is not None]
    results = []
    for function in (functools.partial(ours, centred=centred), literal):
        y = function(x, w, weight, bias)
        first = torch.autograd.grad((y * upstream).sum(), inputs, create_graph=True)
        gradient = first[0]
        for _ in range(2):
            value = (gradient * upstream).sum() + gradient.pow(3).sum()
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        results.append([y, *first, gradient])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9 * theirs.abs().max().item())
    assert all(tensor.is_contiguous(memory_format=layout) for tensor in results[0][:2])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(7, 4), (3, 4, 2, 2)], ids=str)
def test_gradcheck_of_centring(shape, groups):
    x, *_ = problem(shape)

    def both(x):
        batch = StockCentred(x, groups, x.dtype)
        return batch.covariance(), batch.output(batch.covariance() + 1, None, None)

    torch.autograd.gradcheck(both, (x,))
    torch.autograd.gradgradcheck(both, (x,))


def test_parameters_alone_and_input_alone():
    x, w, weight, bias, _ = problem((6, 4))
    expected = torch.autograd.grad(literal(x, w, weight, bias).pow(3).sum(), (x, weight, bias))
    parameters = torch.autograd.grad(ours(x.detach(), w, weight, bias).pow(3).sum(), (weight, bias))
    (of_x,) = torch.autograd.grad(ours(x, w, weight.detach(), bias.detach()).pow(3).sum(), x)
    for mine, theirs in zip((of_x, *parameters), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


class Allocations(TorchDispatchMode):
    """Counts tensors as large as the activation that operators make, and their copies."""

    def __init__(self, size):
        super().__init__()
        self.size, self.made, self.copies = size, set(), 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        result = operator(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.size:
                storage = tensor.untyped_storage().data_ptr()
                if storage not in known:
                    self.made.add(str(operator))
                    self.copies += operator in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
        return result


# Of the activation's size: the standardised (centred) tensor and the output; backward, the gradient, and IterNorm's
# through the covariance and through the output apart.
@pytest.mark.parametrize(("layout", "copies"), [(torch.channels_last, 0), (torch.contiguous_format, 1)], ids=str)
@pytest.mark.parametrize("name", ["swbn-fro", "swbn-kl", "iternorm"])
def test_no_copy_of_a_channels_last_activation(name, layout, copies):
    norm = NormFactory(name)(6)
    x = torch.randn(8, 6, 5, 5).contiguous(memory_format=layout).requires_grad_()
    norm(x).sum().backward()
    with Allocations(x.numel()) as forward:
        y = norm(x)
    upstream = torch.randn_like(y)
    with Allocations(x.numel()) as backward:
        y.backward(upstream)
    assert forward.copies == copies, forward.made
    assert backward.copies == copies, backward.made


@pytest.mark.parametrize("name", ["swbn-fro", "iternorm", "dbn"])
def test_one_tensor_is_kept_for_the_backward_as_in_batchnorm(name):
    kept = {}
    for key in (name, "bn"):
        x = torch.randn(32, 8, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
        sizes = {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = NormFactory(key)(8)(x)
        kept[key] = [size for size in sizes.values() if size >= x.numel()]
        del y
    assert len(kept[name]) == len(kept["bn"]) == 1


@pytest.mark.parametrize("name", ["swbn-fro", "iternorm", "online"])
def test_a_backward_under_autocast_is_not_cast(name):
    x = torch.randn(16, 6, 3, 3)
    gradients = []
    for autocast in (False, True):
        inputs = x.clone().requires_grad_()
        y = NormFactory(name)(6)(inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y.pow(3).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_those_of_float32_and_finite_where_a_channel_is_constant(dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 6, 4, 4).to(dtype)
    x[:, 2] = 3.0
    upstream = (torch.randn(64, 6, 4, 4) * 1e-3).to(dtype)  # gamma W times 1 / sqrt(eps) alone is beyond float16
    gradients = []
    for kind in (dtype, torch.float32):
        norm = SWBN2d(6, step_size=1e-3)
        with torch.no_grad():
            norm.whitening_matrix.add_(torch.diag(torch.full((6,), 20.0)))
        inputs = x.detach().to(kind, copy=True).requires_grad_()
        norm(inputs).backward(upstream.to(kind))
        gradients.append(inputs.grad.float())
        assert inputs.grad.dtype == kind
    keep = [0, 1, 3, 4, 5]
    found, expected = (gradient[:, keep] for gradient in gradients)
    assert torch.isfinite(gradients[0]).all()
    assert (found - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("name", ["iternorm", "dbn"])
def test_16_bit_gradients_through_the_covariance(name):
    torch.manual_seed(0)
    x = (torch.randn(32, 8, 4, 4) * 300).half()
    gradients = []
    for kind in (torch.float16, torch.float32):
        inputs = x.detach().to(kind, copy=True).requires_grad_()
        (NormFactory(name)(8)(inputs).float() ** 4).mean().mul(16).backward()
        gradients.append(inputs.grad.float())
    assert (gradients[0] - gradients[1]).norm() <= 0.01 * gradients[1].norm()


@pytest.mark.parametrize("name", ["swbn-fro", "iternorm"])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_activation_behind_may_work_in_place(name, groups):
    x = torch.randn(8, 6, 5, 5)
    gradients = []
    for inplace in (False, True):
        inputs = x.clone().requires_grad_()
        y = NormFactory(name, num_groups=groups)(6)(inputs)
        assert not y._is_view()
        nn.functional.relu(y, inplace=inplace).pow(2).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["swbn-fro", "iternorm", "dbn"])
def test_many_gradients_at_once(name):
    inputs = torch.randn(6, 4, 3, 3, requires_grad=True)
    y = NormFactory(name)(4)(inputs)
    upstream = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, inputs, upstream, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        torch.testing.assert_close(batched[i], torch.autograd.grad(y, inputs, upstream[i], retain_graph=True)[0])


@pytest.mark.parametrize("name", ["swbn-fro", "iternorm", "dbn", "online"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((64, 6, 8, 8), torch.channels_last), ((64, 6, 8, 8), torch.contiguous_format),
     ((4099, 6), torch.contiguous_format),
     ((2, 6, 2047), torch.contiguous_format), ((16, 6, 4, 8, 8), torch.channels_last_3d)], ids=str,
)  # fmt: skip
def test_many_rows_in_float32_are_as_in_float64(name, shape, layout):
    # From 4,096 rows on the products are convolutions, in float32 on a CPU.
    wide, *_, upstream = problem(shape, layout=layout)
    results = []
    for dtype in (torch.float32, torch.float64):
        norm = NormFactory(name)(6, len(shape) - 2 or 1).to(dtype)
        x = wide.detach().to(dtype).requires_grad_()
        y = norm(x)
        first = torch.autograd.grad(y, (x, norm.weight, norm.bias), upstream.to(dtype), retain_graph=True)
        again = torch.autograd.grad(y, (x, norm.weight, norm.bias), upstream.to(dtype), create_graph=True)
        (second,) = torch.autograd.grad(again[0].pow(3).sum(), x)
        results.append([y, *first, second, *norm.buffers()])
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert results[0][0].is_contiguous(memory_format=layout)
