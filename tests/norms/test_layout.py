"""The output lies in memory as the input does, also where a dimension of 1 leaves several strides to choose from."""

import itertools
import math

import pytest
import torch
from torch import nn

from swbn_lightning import NormFactory

NAMES = ["swbn-fro", "swbn-kl", "iternorm", "dbn"]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CHANNELS = (1, 2)


def shapes(rank):
    sizes = itertools.product((1, 2), CHANNELS, *[(1, 3)] * (rank - 2))
    return [shape for shape in sizes if math.prod(shape) > shape[1] and (rank < 5 or shape[0] == 1)]


def inputs(rank):
    """Each shape in every layout that PyTorch's operators make."""
    torch.manual_seed(0)
    for shape in shapes(rank):
        x = torch.randn(shape)
        yield x
        yield x.movedim(1, -1).contiguous().movedim(-1, 1)
        yield torch.randn(shape[::-1]).permute(*reversed(range(rank)))
        yield torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        if rank in FORMATS:
            yield torch.empty(shape, memory_format=FORMATS[rank]).copy_(x)


@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_output_has_the_strides_of_an_operator_on_each_value(name, rank, training, tracking):
    layers = {c: NormFactory(name, track_running_stats=tracking)(c, max(rank - 2, 1)) for c in CHANNELS}
    for x in inputs(rank):
        norm = layers[x.shape[1]].train(training)
        y = norm(x.requires_grad_())
        assert y.stride() == (x * 2).stride(), (tuple(x.shape), x.stride())
        assert y.shape == x.shape and not (training and y._is_view())
        torch.testing.assert_close(
            y, norm(x.detach().clone(memory_format=torch.contiguous_format)), atol=5e-5, rtol=1e-4
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_pixels_stays_channels_last(name):
    x = torch.randn(1, 2, 3, 1).contiguous(memory_format=torch.channels_last)
    norm = NormFactory(name)(2)
    norm(torch.randn(4, 2, 3, 1))
    assert norm.eval()(x).is_contiguous(memory_format=torch.channels_last)
    assert not norm(x).is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_where_the_output_was_laid_out_anew(name):
    x = torch.randn(1, 2, 3, 1, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    found = []
    for start in (x, x.contiguous()):
        norm = NormFactory(name, dtype=torch.float64)(2)
        at = start.clone(memory_format=torch.preserve_format).requires_grad_()
        nn.functional.relu(norm(at), inplace=True).pow(2).sum().backward()
        found.append(at.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_gradients_with_holes_in_memory(name):
    x, upstream = torch.randn(2, 8, 2, 4, 4, dtype=torch.float64)
    found = []
    for spread in (False, True):
        norm = NormFactory(name, dtype=torch.float64)(2)
        at, grad = (torch.stack([t, t], -1)[..., 0] if spread else t for t in (x, upstream))
        at = at.detach().requires_grad_()
        norm(at).backward(grad)
        found.append((at.grad, norm.weight.grad))
    torch.testing.assert_close(*found)
