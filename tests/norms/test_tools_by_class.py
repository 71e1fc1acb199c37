"""Tools made for BatchNorm, that know it by its class: what each does to a whitening layer."""

import copy

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.func import replace_all_batch_norm_modules_
from torch.fx.experimental import optimization
from torch.nn.utils import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.optim.swa_utils import update_bn
from torchvision.ops._utils import split_normalization_params

from swbn_lightning import NormFactory, WhiteningNorm, fuse_norms

NAMES = ["swbn-fro", "online", "dbn"]


def network(name):
    model = nn.Sequential(nn.Conv2d(3, 6, 1), NormFactory(name)(6), nn.ReLU(), nn.BatchNorm2d(6))
    for _ in range(3):
        model(torch.randn(8, 3, 5, 5) + 1)
    return model.eval()


def test_classes_for_weight_decay():
    norm = NormFactory("swbn-fro")(6)
    spared, others = split_normalization_params(nn.Sequential(nn.Linear(6, 6), norm), [WhiteningNorm])
    assert [id(p) for p in spared] == [id(p) for p in norm.parameters()] and len(others) == 2
    assert not isinstance(norm, nn.modules.batchnorm._NormBase)  # so no tool of theirs leaves out W silently


@pytest.mark.parametrize("name", NAMES)
def test_torchs_fusers_are_refused(name):
    norm = network(name)[1]
    for fuse, layer in ((fuse_conv_bn_eval, nn.Conv2d(3, 6, 1)), (fuse_linear_bn_eval, nn.Linear(3, 6))):
        with pytest.raises(ValueError, match=rf"no {type(norm).__name__}: .*swbn_lightning\.fuse_norms"):
            fuse(layer.eval(), norm)


@pytest.mark.filterwarnings("ignore")
def test_fusing_for_quantisation_refuses_the_layers_and_takes_fused_networks():
    model = network("swbn-fro")
    with pytest.raises(AssertionError, match="did not find fuser method"):
        quantization.fuse_modules(model, [["0", "1"]])
    x, fused = torch.randn(8, 3, 5, 5), fuse_norms(model)
    torch.testing.assert_close(quantization.quantize_dynamic(fused, {nn.Linear})(x), model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(torch.fx.proxy.TraceError):
        optimization.fuse(model)


@pytest.mark.parametrize("tool", [replace_all_batch_norm_modules_, nn.SyncBatchNorm.convert_sync_batchnorm])
@pytest.mark.parametrize("name", NAMES)
def test_tools_that_leave_the_layers_as_they_are(name, tool):
    model = network(name)
    changed = tool(copy.deepcopy(model)).eval()
    x = torch.randn(8, 6, 5, 5)
    torch.testing.assert_close(changed[1](x), model[1](x))


@pytest.mark.parametrize("name", NAMES)
def test_update_bn_makes_batchnorms_statistics_anew_and_only_trains_the_layers_on(name):
    model = network(name)
    update_bn([torch.randn(8, 3, 5, 5)], model)
    assert model[3].num_batches_tracked == 1 and model[1].num_batches_tracked == 4
