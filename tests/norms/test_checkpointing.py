"""Activation checkpointing: what plain training gives, or an error."""

import copy
import functools
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from swbn_lightning import NormFactory, SWBN1d

NAMES = ["swbn-fro", "swbn-kl", "online", "iternorm", "dbn"]
KINDS = [True, False]  # use_reentrant


def network(name):
    # No bias before a norm: its gradient is nothing but rounding.
    options = {"step_size": 0.1} if name.startswith("swbn") else {}
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), NormFactory(name, **options)(6), nn.ReLU(),
        nn.Conv2d(6, 6, 1, bias=False), NormFactory(name, **options)(6),
    )  # fmt: skip


def segment(reentrant):
    return functools.partial(checkpoint, use_reentrant=reentrant)


def assert_same_training(run, model, plain_run, plain, steps=3, tolerance=1e-5):
    """``run(x)`` and ``plain_run(x)`` train their models alike: outputs, gradients, state."""
    for _ in range(steps):
        a = torch.randn(4, 3, 8, 8).requires_grad_()
        b = a.detach().clone().requires_grad_()
        y, expected = run(a), plain_run(b)
        (y**3).sum().backward(), (expected**3).sum().backward()
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        assert (a.grad - b.grad).norm() <= tolerance * b.grad.norm()
    for (key, value), reference in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance, msg=key)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm()
    counted = [m.num_batches_tracked.item() for m in model.modules() if hasattr(m, "num_batches_tracked")]
    assert counted and min(counted) == max(counted) >= steps


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_nothing(name, reentrant):
    model = network(name)
    plain = copy.deepcopy(model)
    assert_same_training(lambda x: segment(reentrant)(model, x), model, plain, plain)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", ["swbn-fro", "iternorm"])
def test_several_forwards_before_the_backward(name, reentrant):
    model = network(name)
    plain = copy.deepcopy(model)
    run = segment(reentrant)

    def twice(forward):
        def loss(x):
            forward(x.detach() + 1)
            return forward(x) + 2 * forward(2 * x) + 3 * forward(x + x.roll(1, 0))

        return loss

    assert_same_training(twice(lambda x: run(model, x)), model, twice(plain), plain)


@pytest.mark.parametrize("reentrant", KINDS)
def test_the_same_batch_twice_before_the_backward_is_an_error(reentrant):
    norm = SWBN1d(4, step_size=0.1)
    y = segment(reentrant)(lambda x: norm(x) * norm(x), torch.randn(16, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="twice on the very same batch"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", KINDS)
def test_many_segments_wait_for_one_backward(reentrant):
    model = network("swbn-fro")[1]
    plain = copy.deepcopy(model)

    def recurrent(step):
        def loss(h):
            for _ in range(70):
                h = h + 0.1 * step(h)
            return h

        return loss

    x = torch.randn(8, 6, 2, 2)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    recurrent(functools.partial(segment(reentrant), model))(a).sum().backward(), recurrent(plain)(b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert model.num_batches_tracked == 70


def test_a_graph_that_is_kept_may_be_gone_through_again_after_another_forward():
    norm = SWBN1d(4, step_size=0.1)
    plain = copy.deepcopy(norm)
    grads = []
    x = torch.randn(16, 4)
    for run in (functools.partial(segment(False), norm), plain):
        a = x.clone().requires_grad_()
        y = run(a)
        y.pow(2).sum().backward(retain_graph=True)
        run(2 * a.detach().requires_grad_()).sum().backward()
        y.pow(3).sum().backward()
        grads.append(a.grad)
    assert torch.equal(*grads) and norm.num_batches_tracked == 2


def test_a_saved_tensor_looked_at_outside_a_backward_steps_nothing():
    norm = SWBN1d(4, step_size=0.1)
    y = segment(False)(lambda x: torch.tanh(norm(x)), torch.randn(16, 4, requires_grad=True))
    before = copy.deepcopy(norm.state_dict())
    assert torch.equal(y.grad_fn._saved_result, y)
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", KINDS)
def test_a_batch_that_is_not_finite_is_rejected_as_without(reentrant):
    model = network("swbn-fro")
    before = copy.deepcopy(model.state_dict())
    x = torch.full((4, 3, 8, 8), float("inf"), requires_grad=True)
    segment(reentrant)(lambda x: model(x) + model(2 * x), x).sum().backward()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model[1].num_batches_rejected == 2 and not x.grad.isfinite().any()


@pytest.mark.parametrize("name", NAMES)
def test_selective_checkpointing_changes_nothing(name):
    saved = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mean.dim, torch.ops.aten.mul.Tensor]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    model = network(name)
    plain = copy.deepcopy(model)
    run = functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
    assert_same_training(run, model, plain, plain)


class Outer(nn.Module):
    """A segment in a segment, with more behind it."""

    def __init__(self, inner, run):
        super().__init__()
        self.inner, self.behind, self.run = inner, nn.Tanh(), run

    def forward(self, x):
        return self.behind(self.run(self.inner, x)) + x.sum()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", ["composable", *KINDS])
def test_nested_segments_inside_a_module_checkpointed_by_hooks_of_its_own(kind):
    from torch.distributed._composable import checkpoint as checkpoint_module

    model = network("swbn-fro")
    plain = Outer(copy.deepcopy(model), lambda inner, x: inner(x))
    outer = Outer(model, plain.run if kind == "composable" else segment(kind))
    if kind == "composable":
        checkpoint_module(outer.inner)
    checkpoint_module(outer)
    assert_same_training(outer, outer, plain, plain)


@pytest.mark.parametrize("reentrant", KINDS)
def test_another_batch_the_second_time_is_an_error(reentrant):
    norm = SWBN1d(4)
    x = torch.randn(16, 4, requires_grad=True)
    y = checkpoint(lambda x: norm(x + torch.randn(16, 4)), x, use_reentrant=reentrant, preserve_rng_state=False)
    before = norm.whitening_matrix.clone()
    with pytest.raises(RuntimeError, match="has not seen in a forward under torch.utils.checkpoint"):
        y.sum().backward()
    assert torch.equal(norm.whitening_matrix, before)


def kept(norm):
    """Matrices of the layer's size that are still in memory, its own aside."""
    gc.collect()
    own = norm.whitening_matrix
    matrices = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == own.shape]
    return len({t.data_ptr() for t in matrices} - {own.data_ptr()})


def test_no_more_is_kept_than_a_backward_may_need():
    norm = SWBN1d(37, step_size=0.1)
    x = torch.randn(64, 37, requires_grad=True)
    for _ in range(3):
        y = segment(False)(norm, x + torch.randn(64, 37))
    assert kept(norm) == 1  # of the last graph; a graph that is gone needs none
    del y
    assert kept(norm) == 0
    wide = SWBN1d(600, step_size=0.1)
    for _ in range(9):
        segment(True)(wide, torch.randn(8, 600, requires_grad=True))
    assert kept(wide) == 4
    assert len(pickle.dumps(wide)) < 3 * 600 * 600 * 4
    narrow = SWBN1d(23)
    with torch.no_grad():  # an averaged network left in training mode: no backward ever follows
        for _ in range(300):
            narrow(x[:, :23])
    assert kept(narrow) <= 256


class NoHostSynchronisation(TorchDispatchMode):
    """Refuses the operators by which a value reaches the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item", "masked_select"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_brings_no_value_to_the_host(name, momentum):
    norm = NormFactory(name, momentum=momentum)(6)
    x = torch.randn(4, 6, 5, 5, requires_grad=True)
    with NoHostSynchronisation():
        norm(x).square().sum().backward()
    assert norm.num_batches_tracked == 1
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoHostSynchronisation():
        x.sum().item()
