"""What other tools do with a layer: transforms, exporters, compilers, casts of buffers, parametrisation."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from swbn_lightning import NormFactory, check_norms
from swbn_lightning.norms.passes.processes import merge_mean, merge_moments

NAMES = ["swbn-fro", "swbn-kl", "iternorm"]


def layer(name, channels=4, **options):
    torch.manual_seed(0)
    return NormFactory(name, **({"step_size": 1e-2} if name.startswith("swbn") else {}), **options)(channels)


def images(*lead):
    return torch.randn(*lead, 8, 4, 5, 5)


@pytest.mark.parametrize("name", [*NAMES, "dbn"])
def test_models_trained_side_by_side_by_vmap(name):
    models = [layer(name) for _ in range(3)]
    x = images(3)
    parameters, buffers = stack_module_state(models)
    empty = copy.deepcopy(models[0]).to("meta")
    y = vmap(lambda p, b, x: functional_call(empty, (p, b), (x,)))(parameters, buffers, x)
    for place, model in enumerate(models):
        torch.testing.assert_close(y[place], model(x[place]), rtol=1e-5, atol=1e-5)
        for key, value in model.named_buffers():
            torch.testing.assert_close(buffers[key][place], value, rtol=1e-5, atol=1e-6, msg=key)


def test_batches_side_by_side_in_a_layer_without_statistics():
    norm, x = layer("iternorm", track_running_stats=False), images(2)
    torch.testing.assert_close(vmap(norm)(x), torch.stack([norm(part) for part in x]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_training_program_exported(name, strict):
    model = nn.Sequential(layer(name))
    twin, x = copy.deepcopy(model), images()
    program = torch.export.export(model, (x,), strict=strict)
    assert not [node for node in program.graph.nodes if "swbn_lightning" in str(node.target)]  # stock operators alone
    exported = program.module()
    for _ in range(2):
        torch.testing.assert_close(exported(x), twin(x), rtol=1e-5, atol=1e-5)
    found = dict(exported.named_buffers())
    for key, value in twin.named_buffers():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["swbn-fro", "iternorm"])
def test_compiled_in_16_bit_as_eager(name, dtype):
    torch._dynamo.reset()
    norm = layer(name)
    compiled = torch.compile(copy.deepcopy(norm), backend="aot_eager", fullgraph=True)
    x, grad, found = images().to(dtype), images().to(dtype), []
    for run in (norm, compiled):
        a = x.clone().requires_grad_()
        run(a).backward(grad)
        found.append(a.grad)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(compiled.state_dict()["_orig_mod.running_mean"], norm.running_mean)


@pytest.mark.parametrize("name", NAMES)
def test_buffers_cast_behind_the_layers_back_are_an_error(name):
    # As FullyShardedDataParallel does with MixedPrecision(buffer_dtype=torch.bfloat16).
    norm = layer(name)
    for buffer in norm.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"whitening_matrix is torch.bfloat16.*buffer_dtype=torch.float32"):
        norm(images().bfloat16())
    norm.eval()(images().bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_counters_start_at_zero_where_a_layer_is_materialised_and_then_loaded(name):
    norm = layer(name)
    norm(images())
    with torch.device("meta"):
        other = layer(name)
    torch.use_deterministic_algorithms(True)  # fills new memory, so that what is left shows
    try:
        other.to_empty(device="cpu").load_state_dict(norm.state_dict())
    finally:
        torch.use_deterministic_algorithms(False)
    assert other.num_batches_rejected == other.num_batches_small == 0 and not check_norms(other)


@pytest.mark.parametrize("name", NAMES)
def test_a_batchnorms_state_loads_into_a_parametrised_layer(name):
    norm, batchnorm = layer(name), nn.BatchNorm2d(4)
    batchnorm(images())
    batchnorm.weight.data.uniform_()
    for each in (norm, batchnorm):
        parametrize.register_parametrization(each, "weight", nn.Identity())
    norm.load_state_dict(batchnorm.state_dict())
    x = images()
    torch.testing.assert_close(norm.eval()(x), batchnorm.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*NAMES, "bn"])
def test_statistics_taken_away_by_hand(name):
    norm, x = layer(name), images()
    norm.running_mean = norm.running_var = None
    expected = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    if name == "iternorm":
        assert norm(x).isfinite().all()
    else:  # W has stepped once
        torch.testing.assert_close(norm(x), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("merge", ["moments", "mean"])
def test_merging_copies_nothing_from_the_host(merge, monkeypatch):
    """On a device such a copy makes the host wait, and no step that has one can be captured in a CUDA graph."""
    gather = "swbn_lightning.norms.passes.processes._all_gather"
    monkeypatch.setattr(gather, lambda values: torch.stack([values, values]))
    called = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.randn(6, 4)
    with Recorded():
        mean = x.mean(0)
        merged = merge_moments(mean, x.var(0), 6) if merge == "moments" else merge_mean(mean, 6)
    torch.testing.assert_close(merged[0], x.mean(0))
    assert "cat" in called and not {"lift_fresh", "_to_copy", "detach_"} & set(called)
