"""The checks that PyTorch's own suite (``test/test_modules.py``) makes on each of its modules, made on these layers.

Written again by what they do, on the constructor arguments and inputs that ``torch.testing._internal.common_modules``
gives to BatchNorm: that module needs the package expecttest, and ``test_modules.py`` is not installed with torch. What
does not carry over:

=========================================  ===========================================================================
``test_check_inplace``                     the layers have no ``inplace``
``test_cpu_gpu_parity``,                   need a GPU; the kernels' and devices' tests beside this one compare there
``test_multiple_device_transfer``
``test_errors``                            is ``test_contract.test_errors_are_batchnorms``, for the errors of BatchNorm
``test_factory_kwargs``, of 16 bit         buffers are float32 there, by design
``test_grad``, ``test_gradgrad``, of SWBN  W steps with the batch and is a constant to the derivative, which a finite
                                           difference does not know: checked with a step too small to be seen. With
                                           steps that are seen: ``test_transforms``, ``test_swbn``
``test_to``, of buffers to 16 bit          they stay float32 (float64 after ``.double()``), by design
=========================================  ===========================================================================
"""

import copy
import io
import itertools
import pickle
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import swbn_lightning

pytestmark = pytest.mark.slow

UNSEEN = 1e-14
KINDS = [("SWBN", {"criterion": "fro"}), ("SWBN", {"criterion": "kl"}), ("IterNorm", {}), ("DBN", {})]
DTYPES = [torch.float32, torch.float64]
# As common_modules gives them to BatchNorm: constructor arguments and the shape of the input.
ARGUMENTS = {
    1: [
        ((10,), (4, 10)),
        ((5,), (4, 5, 3)),
        ((10, 1e-3, None), (4, 10)),
        ((10, 1e-3, 0.3, False), (4, 10)),
        ((10, 1e-3, 0.3, True, False), (4, 10)),
        ((5, 1e-3, 0.3, False), (4, 5, 3)),
    ],
    2: [
        ((3,), (2, 3, 6, 6)),
        ((3, 1e-3, None), (2, 3, 6, 6)),
        ((3, 1e-3, 0.8), (2, 3, 6, 6)),
        ((3, 1e-3, 0.8, False), (2, 3, 6, 6)),
        ((3, 1e-3, 0.8, True, False), (2, 3, 6, 6)),
    ],
    3: [
        ((3,), (2, 3, 4, 4, 4)),
        ((3, 1e-3, 0.7), (2, 3, 4, 4, 4)),
        ((3, 1e-3, 0.7, False), (2, 3, 4, 4, 4)),
        ((3, 1e-3, 0.7, True, False), (2, 3, 4, 4, 4)),
    ],
}
MODULES = [
    pytest.param(kind, options, dims, arguments, shape, id=f"{kind}{dims}d-{'-'.join(options.values())}-{arguments}")
    for (kind, options), dims in itertools.product(KINDS, ARGUMENTS)
    for arguments, shape in ARGUMENTS[dims][: 1 if options.get("criterion") == "kl" else None]
]
EACH = pytest.mark.parametrize(("kind", "options", "dims", "arguments", "shape"), MODULES)
EITHER_MODE = pytest.mark.parametrize("training", [True, False])
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(kind, options, dims, arguments, dtype, training=True, **more):
    torch.manual_seed(0)
    layer = getattr(swbn_lightning, f"{kind}{dims}d")
    return layer(*arguments, **options, **more, dtype=dtype).train(training)


def draw(shape, dtype):
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype)


def seen(norm, shape, dtype):
    """The layer after a batch, so that no state has its first value."""
    mode = norm.training
    norm.train()(draw(shape, dtype) * 2 + 1)
    return norm.train(mode)


def all_gradients(norm, x, upstream):
    for parameter in norm.parameters():
        parameter.grad = None
    (norm(x) * upstream).sum().backward()
    return [x.grad, *(parameter.grad for parameter in norm.parameters())]


@contextmanager
def swapping():
    """Conversions that put the new tensor in the place of the old one (`torch.__future__`)."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def same_state(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True, msg=key)


@EITHER_MODE
@OF_DTYPE
@EACH
def test_forward_repr_and_factory_arguments(kind, options, dims, arguments, shape, dtype, training):
    norm = make(kind, options, dims, arguments, dtype, training)
    y = norm(draw(shape, dtype))
    assert y.shape == shape and y.dtype == dtype
    text = repr(norm)
    assert text.startswith(f"{kind}{dims}d({arguments[0]}, eps=") and str(norm) == text
    floating = [t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()]
    assert floating and all(tensor.dtype == dtype for tensor in floating)
    empty = make(kind, options, dims, arguments, dtype, training, device="meta")
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert dict(empty.named_parameters()).keys() == dict(norm.named_parameters()).keys()


@OF_DTYPE
@EACH
def test_pickle_save_load_and_deepcopy(kind, options, dims, arguments, shape, dtype):
    norm = seen(make(kind, options, dims, arguments, dtype), shape, dtype)
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    others = [pickle.loads(pickle.dumps(norm)), torch.load(file, weights_only=False), copy.deepcopy(norm)]
    loaded = make(kind, options, dims, arguments, dtype)
    missing = loaded.load_state_dict(norm.state_dict(), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    assert copy.deepcopy(norm.eval()).training is False and norm.train().training
    x = draw(shape, dtype)
    expected = norm(x)
    for other in (*others, loaded):
        assert other.training and repr(other) == repr(norm)
        assert torch.equal(other(x), expected)
        same_state(other.state_dict(), norm.state_dict())


@EITHER_MODE
@OF_DTYPE
@EACH
def test_inputs_that_are_not_contiguous(kind, options, dims, arguments, shape, dtype, training):
    norm = seen(make(kind, options, dims, arguments, dtype, training, **unseen(kind)), shape, dtype)
    x, upstream = draw(shape, dtype), draw(shape, dtype) * 3
    expected = all_gradients(copy.deepcopy(norm), x.clone().requires_grad_(), upstream)
    spread = torch.stack([x, x], -1)[..., 0].detach().requires_grad_()
    turned = x.movedim(0, -1).contiguous().movedim(-1, 0).detach().requires_grad_()
    for at, grad in ((spread, upstream), (turned, torch.stack([upstream, upstream], -1)[..., 0])):
        for mine, theirs in zip(all_gradients(copy.deepcopy(norm), at, grad), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-9)


def unseen(kind):
    return {"step_size": UNSEEN} if kind == "SWBN" else {}


@EITHER_MODE
@pytest.mark.parametrize(
    ("kind", "options", "dims", "arguments", "shape"),
    [module for module in MODULES if len(module.values[3]) != 3],  # which differ in the momentum only
)
def test_gradients_of_first_and_second_order(kind, options, dims, arguments, shape, training):
    # A larger eps than BatchNorm's here: a finite difference is taken of no function as steep as 1 / sqrt(1e-5).
    arguments = (arguments[0], 1e-2, *arguments[2:])
    norm = seen(make(kind, options, dims, arguments, torch.float64, training, **unseen(kind)), shape, torch.float64)
    x = draw(shape, torch.float64).requires_grad_()
    names = [name for name, _ in norm.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x, *norm.parameters())
    assert gradcheck(run, inputs, fast_mode=True, atol=1e-4, rtol=1e-3)
    if training or not norm.track_running_stats:  # otherwise an affine map
        assert gradgradcheck(run, inputs, fast_mode=True, atol=1e-4, rtol=1e-3)


@OF_DTYPE
@EACH
def test_memory_formats(kind, options, dims, arguments, shape, dtype):
    norm = seen(make(kind, options, dims, arguments, dtype), shape, dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    x = draw(shape, dtype)
    layouts = [torch.contiguous_format, *([formats[len(shape)]] if len(shape) in formats else [])]
    for training, layout in itertools.product((True, False), layouts):
        expected = copy.deepcopy(norm).train(training)(x)
        moved = copy.deepcopy(norm).train(training).to(memory_format=layout if dims == 2 else torch.contiguous_format)
        y = moved(x.contiguous(memory_format=layout))
        assert y.is_contiguous(memory_format=layout)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@EACH
def test_training_and_evaluation_differ(kind, options, dims, arguments, shape):
    norm = seen(make(kind, options, dims, arguments, torch.float64), shape, torch.float64)
    x = draw(shape, torch.float64)
    norm.train(), norm(x)
    state = copy.deepcopy(norm.state_dict())
    y = norm.eval()(x)
    same_state(norm.state_dict(), state)
    assert norm.training is False and norm.train().training is True
    tracks = norm.track_running_stats
    if kind != "SWBN" or tracks:  # without statistics SWBN differs by a step of W only
        assert torch.allclose(copy.deepcopy(norm)(x), y) != tracks


@pytest.mark.parametrize("swap", [False, True])
@EACH
def test_to_another_type_and_back(kind, options, dims, arguments, shape, swap):
    norm = seen(make(kind, options, dims, arguments, torch.float32), shape, torch.float32)
    parameters, state = list(norm.parameters()), copy.deepcopy(norm.state_dict())
    norm(draw(shape, torch.float32).requires_grad_()).sum().backward()
    norm.load_state_dict(state)
    norm.eval()
    wide = torch.float32
    with swapping() if swap else nullcontext():
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.bfloat16, torch.float32):
            assert norm.to(dtype=dtype) is norm and norm.to("cpu") is norm
            assert all(p.dtype == dtype and p.grad.dtype == dtype for p in norm.parameters())
            wide = wide if dtype.itemsize < 4 else dtype  # no state loses digits to 16 bits
            assert all(b.dtype == wide for b in norm.buffers() if b.is_floating_point())
            assert norm(draw(shape, dtype)).dtype == dtype
    assert all(a is b for a, b in zip(norm.parameters(), parameters, strict=True))
    same_state(norm.state_dict(), state)


@pytest.mark.parametrize("swap", [False, True])
@EACH
def test_to_empty(kind, options, dims, arguments, shape, swap):
    dtype = torch.float64 if swap else torch.float32
    source = seen(make(kind, options, dims, arguments, dtype), shape, dtype)
    with swapping() if swap else nullcontext():
        norm = make(kind, options, dims, arguments, dtype, device="meta")
        assert norm.to_empty(device="cpu") is norm
        assert not any(tensor.is_meta for tensor in (*norm.parameters(), *norm.buffers()))
        norm.load_state_dict(source.state_dict())
        x = draw(shape, dtype)
        assert torch.equal(norm(x), source(x))
        norm.reset_parameters()
    same_state(norm.state_dict(), make(kind, options, dims, arguments, dtype).state_dict())


@EACH
def test_inside_containers_and_by_functional_call(kind, options, dims, arguments, shape):
    dtype = torch.float32
    norm = seen(make(kind, options, dims, arguments, dtype), shape, dtype)
    twin = copy.deepcopy(norm)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.ModuleList([norm])})  # one layer, held twice
    assert len(list(model.parameters())) == len(list(norm.parameters()))
    x, found = draw(shape, dtype), []
    model["a"].register_forward_hook(lambda module, inputs, output: found.append(output))
    y = model["a"](x)
    assert found[0] is y and torch.equal(y, twin(x))
    same_state(norm.state_dict(), twin.state_dict())
    again = torch.func.functional_call(twin, {**dict(norm.named_parameters()), **dict(norm.named_buffers())}, (x,))
    assert torch.equal(again, twin(x))
    same_state(norm.state_dict(), twin.state_dict())
    norm.zero_grad(), norm.requires_grad_(False)
    assert not norm(x).requires_grad
