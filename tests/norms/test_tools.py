"""What other tools do with a layer: transforms, exporters, compilers, casts of buffers, parametrisation."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from swbn_lightning import NormFactory, check_norms

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


@pytest.mark.parametrize("name", NAMES)
def test_a_training_program_exported(name):
    model = nn.Sequential(layer(name))
    twin, x = copy.deepcopy(model), images()
    program = torch.export.export(model, (x,))
    assert not [node for node in program.graph.nodes if "swbn_lightning" in str(node.target)]  # stock operators alone
    exported = program.module()
    for _ in range(2):
        torch.testing.assert_close(exported(x), twin(x), rtol=1e-5, atol=1e-5)
    found = dict(exported.named_buffers())
    for key, value in twin.named_buffers():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


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


@pytest.mark.parametrize("name", ["swbn-fro"])
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
