"""What every whitening layer must honour to stand where BatchNorm stands."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from swbn_lightning import NormFactory

NAMES = ["swbn-fro", "swbn-kl", "online", "iternorm", "dbn"]
SHAPES = {1: [(40, 6), (12, 6, 5)], 2: [(8, 6, 4, 5)], 3: [(4, 6, 3, 2, 3)]}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CASES = [(ndim, shape) for ndim, shapes in SHAPES.items() for shape in shapes]
PER_DIM = [("swbn-fro", 1), ("swbn-kl", 2), ("iternorm", 3), ("iternorm", 1), ("dbn", 2)]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
PRECISIONS = {
    "float32": (torch.float32, lambda norm: norm, 1e-4),
    "bfloat16": (torch.bfloat16, lambda norm: norm.bfloat16(), 0.1),
    "half": (torch.float16, lambda norm: norm.half(), 2e-2),
    "autocast": (torch.float16, lambda norm: norm, 2e-2),
}


def make(name, ndim=2, features=6, **options):
    step = {"step_size": 0.1} if name.startswith("swbn") else {}
    return NormFactory(name, **step, **options)(features, ndim)


def like(norm, shape, features=6):
    """Input that is correlated across channels and not centred."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    return x + 0.5 * torch.randn(shape[0], 1, *shape[2:], dtype=torch.float64) + 1


def state(norm):
    return {name: value for name, value in norm.named_buffers() if value.is_floating_point()}


USES = [  # every name, shape and precision; not all of them together
    (name, *CASES[(place + number) % len(CASES)], precision)
    for place, name in enumerate(NAMES)
    for number, precision in enumerate(PRECISIONS)
]


@pytest.mark.parametrize(("name", "ndim", "shape", "precision"), USES, ids=str)
def test_every_way_it_can_be_used(name, ndim, shape, precision):
    dtype, cast, tolerance = PRECISIONS[precision]
    flags = [True, False]
    layouts = [torch.contiguous_format, *([CHANNELS_LAST[len(shape)]] if len(shape) in CHANNELS_LAST else [])]
    for affine, tracking, training, layout in itertools.product(flags, flags, flags, layouts):
        torch.manual_seed(0)
        groups = {} if affine else {"num_groups": 2}  # either way once for each of the others
        norm = make(name, ndim, affine=affine, track_running_stats=tracking, **groups)
        norm(like(norm, shape).float())  # so that evaluation has something to use
        exact = copy.deepcopy(norm).double().train(training)
        norm = cast(norm).train(training)
        x = like(norm, shape).to(dtype).contiguous(memory_format=layout).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=precision == "autocast"):
            y = norm(x)
        y.float().square().sum().backward()

        assert y.dtype == dtype and x.grad.dtype == dtype
        assert y.shape == x.shape and y.is_contiguous(memory_format=layout)
        assert y.isfinite().all() and x.grad.isfinite().all()
        expected = exact(x.detach().double())
        torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
        assert all(value.dtype == torch.float32 and value.isfinite().all() for value in state(norm).values())
        for key, value in state(exact).items():
            torch.testing.assert_close(state(norm)[key].double(), value, atol=tolerance / 2, rtol=tolerance)
        for parameter in norm.parameters():
            assert parameter.dtype == (torch.float32 if precision == "autocast" else dtype)
            assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all()


def caught(norm, x):
    with pytest.raises(Exception) as error:
        norm(x)
    return type(error.value), str(error.value)


@pytest.mark.parametrize(("name", "ndim"), PER_DIM)
def test_errors_are_batchnorms(name, ndim):
    norm, batch_norm = make(name, ndim), BATCH_NORM[ndim](6)
    for rank in range(1, 7):
        if rank not in norm.input_dims:
            x = torch.randn(2, 6, 3, 3, 3, 3)[(0,) * (6 - rank)]
            assert caught(norm, x) == caught(batch_norm, x)
    x = torch.randn(2, 5, *[3] * ndim)
    kind, message = caught(norm, x)
    assert kind is caught(batch_norm, x)[0] and "expected 6 channels" in message and "(2, 5, 3" in message
    one = torch.randn(1, 6, *[1] * ndim)
    assert caught(norm, one) == caught(batch_norm, one)
    norm.eval()(one), batch_norm.eval()(one)
    untracked, theirs = (m.eval() for m in (make(name, ndim, track_running_stats=False),
                                            BATCH_NORM[ndim](6, track_running_stats=False)))  # fmt: skip
    assert caught(untracked, one) == caught(theirs, one)
    integers = torch.ones(4, 6, *[3] * ndim, dtype=torch.long)
    assert caught(norm, integers)[0] is caught(batch_norm, integers)[0]


@pytest.mark.parametrize(("options", "words"), [
    ({"num_groups": 4}, r"num_groups=4 .* num_features=6"),
    ({"num_groups": 0}, "num_groups=0"),
    ({"num_groups": "two"}, "num_groups='two'"),
    ({"group_size": 5, "num_groups": 2}, "num_groups=2 or group_size=5, not both"),
    ({"group_size": 0}, "group_size must be an integer of at least 1, got 0"),
    ({"group_size": "two"}, "group_size must be an integer of at least 1, got 'two'"),
    ({"group_size": 1.5}, "group_size must be an integer of at least 1, got 1.5"),
    ({"group_size": 5, "features": 7}, "group_size=5 does not divide num_features=7"),
    ({"eps": -1e-5}, "eps must be"),
    ({"momentum": 1.5}, "momentum must be"),
])  # fmt: skip
def test_constructor_errors(options, words):
    for name in ("swbn-fro", "dbn"):
        with pytest.raises(ValueError, match=words):
            make(name, **options)


@pytest.mark.parametrize(("features", "groups"), [(16, 1), (64, 1), (96, 2), (128, 2), (512, 8)])
def test_groups_of_at_most_so_many_channels(features, groups):
    for name in ("swbn-kl", "iternorm", "dbn"):
        norm = make(name, features=features, group_size=64)
        assert norm.num_groups == groups and norm.whitening_matrix.shape[-1] == features // groups


@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "ndim"), PER_DIM)
def test_an_empty_batch_is_taken_as_batchnorm_takes_it(name, ndim, training, tracking):
    norm = make(name, ndim, track_running_stats=tracking)
    norm(like(norm, (8, 6, *[3] * ndim)).float())
    norm.train(training)
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(0, 6, *[3] * ndim, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad.shape == x.shape
    nowhere = torch.randn(2, 6, *[0] * ndim)
    assert norm(nowhere).shape == nowhere.shape
    assert torch.equal(norm.weight.grad, torch.zeros(6)) and torch.equal(norm.bias.grad, torch.zeros(6))
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_momentum_none_is_the_plain_average(name):
    norm, batch_norm = make(name, 1, 3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for _ in range(4):
        x = torch.randn(20, 3) * 2 + 1
        norm(x), batch_norm(x)
    torch.testing.assert_close(norm.running_mean, batch_norm.running_mean)
    if name.startswith("swbn"):
        torch.testing.assert_close(norm.running_var, batch_norm.running_var)
    assert norm.num_batches_tracked == batch_norm.num_batches_tracked


@pytest.mark.parametrize("name", NAMES)
def test_numpy_numbers_and_a_flag_set_later(name):
    norm = make(name, features=np.int64(6), eps=np.float32(1e-3), num_groups=np.int64(2))
    assert type(norm.num_features) is int and type(norm.eps) is float
    for wrong in ({"eps": True}, {"momentum": True}, {"num_groups": True}, {"group_size": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*True"):
            make(name, **wrong)
    norm.track_running_stats = False  # as BatchNorm: from here on nothing is averaged
    norm(like(norm, (8, 6, 5, 5)).float())
    assert torch.equal(norm.running_mean, torch.zeros(6)) and norm.num_batches_tracked == 0


@pytest.mark.parametrize(("name", "bad"), list(zip(NAMES, itertools.cycle([float("nan"), float("inf")]))))
def test_a_batch_that_is_not_finite_leaves_the_state(name, bad):
    norm = make(name)
    norm(torch.randn(4, 6, 5, 5))
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(4, 6, 5, 5)
    x[0, 1, 2, 2] = bad
    assert not norm(x).isfinite().all()  # as BatchNorm: the loss shows it
    for key, value in norm.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert norm.num_batches_rejected == 1
    norm(torch.randn(4, 6, 5, 5))
    assert norm.num_batches_tracked == 2 and norm.num_batches_rejected == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_a_forward_survives_a_training_forward_before_its_backward(name, training):
    norm = make(name, 1)
    norm(torch.randn(16, 6))
    a = torch.randn(16, 6, requires_grad=True)
    (copy.deepcopy(norm).train(training)(a) ** 3).sum().backward()
    expected, a.grad = a.grad, None
    y = norm.train(training)(a)
    norm.train()(torch.randn(16, 6))
    (y**3).sum().backward()
    torch.testing.assert_close(a.grad, expected)


def test_repr_says_what_it_was_made_with():
    text = repr(make("swbn-kl", eps=0.25, momentum=None, affine=False, num_groups=3, sync=False))
    assert text == (
        "SWBN2d(6, eps=0.25, momentum=None, affine=False, track_running_stats=True, num_groups=3, sync=False, "
        "criterion=kl, step_size=0.1)"
    )
    assert repr(make("iternorm")).endswith("num_iterations=5)")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_float32_stays_near_float64_even_far_from_zero_mean(name, mean):
    x = like(None, (64, 6, 6, 6)) + mean
    exact, single = make(name).double(), make(name)
    error = (single(x.float()) - exact(x)).abs().max()
    assert error < (2e-5 if mean == 0 else 1e-3)  # at 300 deviations float32's own rounding is 2e-5 and more
    torch.testing.assert_close(single.whitening_matrix.double(), exact.whitening_matrix, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_class_without_a_number_of_dimensions_takes_any(name):
    norm = make(name, None)
    for ndim, shapes in SHAPES.items():
        for shape in shapes:
            x = like(norm, shape).float()
            torch.testing.assert_close(copy.deepcopy(norm)(x), make(name, ndim)(x))
    with pytest.raises(ValueError, match="expected 2D or 3D or 4D or 5D input"):
        norm(torch.randn(6))
