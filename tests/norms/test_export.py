"""torch.export and ONNX, with the layers and with them fused."""

import onnxruntime
import pytest
import torch
from torch import nn

from swbn_lightning import NormFactory, fuse_norms
from tests.norms.networks import lived, relative_error

X = {1: (4, 3, 8), 2: (4, 3, 8, 8), 3: (4, 3, 8, 4, 4)}
CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH = torch.export.Dim("batch")


def network(name, ndim):
    """Behind a convolution, by itself, and behind a linear layer."""
    norm = NormFactory(name, num_groups=2)
    width = 8 * torch.zeros(X[ndim])[0, 0].numel()
    model = nn.Sequential(
        CONVOLUTION[ndim](3, 8, 1), norm(8, ndim), nn.ReLU(), norm(8, ndim),
        nn.Flatten(), nn.Linear(width, 6), norm(6, 1),
    )  # fmt: skip
    return lived(model)


def onnx_output(model, x, path):
    """Exported with a batch of any size, run by onnxruntime on twice the batch."""
    torch.onnx.export(model, (x,), path, dynamic_shapes=({0: BATCH},), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: torch.cat([x, x]).numpy()})
    return torch.from_numpy(output)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "ndim"), [("swbn", 2), ("iternorm", 3), ("dbn", 1)])
def test_torch_export_holds_plain_operators_and_any_batch(name, ndim, fused):
    torch.manual_seed(0)
    model = network(name, ndim)
    if fused:
        model = fuse_norms(model)
    x = torch.randn(X[ndim])
    program = torch.export.export(model, (x,), dynamic_shapes=({0: BATCH},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert all(target.startswith("aten.") for target in targets)
    assert fused == (not any("batch_norm" in target or "sub" in target for target in targets))
    torch.testing.assert_close(program.module()(torch.cat([x, x])), model(torch.cat([x, x])), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the exporter, about itself
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "ndim"), [("swbn", 1), ("iternorm", 2), ("dbn", 3)])
def test_onnx(name, ndim, fused, tmp_path):
    torch.manual_seed(0)
    model = network(name, ndim)
    if fused:
        model = fuse_norms(model)
    x = torch.randn(X[ndim])
    assert relative_error(onnx_output(model, x, tmp_path / "model.onnx"), model(torch.cat([x, x]))) < 1e-5
