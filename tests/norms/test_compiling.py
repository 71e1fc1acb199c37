"""torch.compile: what plain training gives, with activation checkpointing too or an error."""

import copy
import functools

import pytest
import torch

from tests.norms.test_checkpointing import assert_same_training, network, segment

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["swbn-fro", "swbn-kl", "online", "iternorm"])
def test_compiled_in_one_graph_as_eager(name, training):
    model = network(name)
    model(torch.randn(4, 3, 8, 8))
    plain = copy.deepcopy(model.train(training))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        a = torch.randn(4, 3, 8, 8).requires_grad_()
        b = a.detach().clone().requires_grad_()
        y, expected = compiled(a), plain(b)
        (y**3).sum().backward(), (expected**3).sum().backward()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert model[1].num_batches_tracked == (3 if training else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swbn-fro", "online", "iternorm"])
def test_compiled_by_inductor_as_eager(name):
    model = network(name)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    assert_same_training(compiled, model, plain, plain, tolerance=1e-4)
    state = copy.deepcopy(model[1].state_dict())
    compiled(torch.full((4, 3, 8, 8), float("nan")))  # rejected by the compiled code, too
    assert all(torch.equal(value, state[key]) for key, value in model[1].state_dict().items())


@pytest.mark.parametrize(("name", "reentrant"), [("swbn-fro", True), ("online", False)])
def test_a_compiled_layer_in_a_checkpointed_segment_is_an_error(name, reentrant):
    compiled = torch.compile(network(name), backend="aot_eager")
    y = segment(reentrant)(compiled, torch.randn(4, 3, 8, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"runs a compiled normalisation layer again.*torch.compiler.disable"):
        y.sum().backward()


def test_a_checkpointed_function_compiled_whole_is_right_or_an_error():
    model = network("iternorm")
    plain = copy.deepcopy(model)
    run = torch.compile(lambda x: segment(False)(model, x), fullgraph=True, backend="aot_eager")
    assert_same_training(run, model, plain, plain, tolerance=1e-4)
    model = network("swbn-fro")
    run = torch.compile(lambda x: segment(False)(model, x), fullgraph=True, backend="aot_eager")
    y = run(torch.randn(4, 3, 8, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="runs a compiled normalisation layer again"):
        y.sum().backward()


def test_the_remedy_that_the_error_names():
    model = network("swbn-fro")
    plain = copy.deepcopy(model)
    for layer in (model[1], model[4]):
        layer.forward = torch.compiler.disable(layer.forward)
    run = functools.partial(segment(False), torch.compile(model, backend="aot_eager"))
    assert_same_training(run, model, plain, plain, tolerance=1e-4)
