"""Tools made for BatchNorm, that know it by its class or by its attributes: what each does to a whitening layer."""

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

import swbn_lightning
from swbn_lightning import NormFactory, WhiteningNorm, fuse_norms

NAMES = ["swbn-fro", "swbn-kl", "iternorm", "dbn"]
DEFAULTS = [nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm]


def network(name):
    torch.manual_seed(0)
    step = {"step_size": 0.1} if name.startswith("swbn") else {}
    model = nn.Sequential(nn.Conv2d(3, 6, 1), NormFactory(name, **step)(6), nn.ReLU(), nn.BatchNorm2d(6))
    for _ in range(3):
        model(images())
    return model.eval()


def images():
    return torch.randn(8, 3, 5, 5) + torch.randn(8, 1, 5, 5) + 1


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_classes_for_weight_decay(name, dims):
    norm = NormFactory(name)(6, dims)
    model = nn.Sequential(nn.Linear(6, 6), norm)
    spared, others = split_normalization_params(model, [WhiteningNorm, *DEFAULTS])
    assert [id(p) for p in spared] == [id(p) for p in norm.parameters()] and len(others) == 2
    # What the documentation says of its default: gamma and beta are not found.
    assert split_normalization_params(model, DEFAULTS)[0] == []
    assert swbn_lightning.norms.WhiteningNorm is WhiteningNorm and not isinstance(norm, nn.modules.batchnorm._NormBase)


@pytest.mark.parametrize("name", NAMES)
def test_torchs_fusers_are_refused(name):
    norm = network(name)[1]
    for fuse, layer in ((fuse_conv_bn_eval, nn.Conv2d(3, 6, 1)), (fuse_linear_bn_eval, nn.Linear(3, 6))):
        with pytest.raises(ValueError, match=rf"no {type(norm).__name__}: .*swbn_lightning\.fuse_norms"):
            fuse(layer.eval(), norm)
    assert hasattr(norm, "running_var") == name.startswith("swbn")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        norm.nonsense  # noqa: B018


@pytest.mark.parametrize("fuse", [quantization.fuse_modules, quantization.fuse_modules_qat])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_fusing_for_quantisation_refuses_the_layers_and_takes_fused_networks(name, fuse):
    model = network(name).train("qat" in fuse.__name__)
    with pytest.raises(AssertionError, match="did not find fuser method"):
        fuse(model, [["0", "1"]])
    fused = fuse_norms(model.eval())
    x = images()
    torch.testing.assert_close(quantization.quantize_dynamic(fused, {nn.Linear})(x), model(x), rtol=1e-4, atol=1e-4)


class LeafTracer(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, WhiteningNorm) or super().is_leaf_module(module, name)


def fuse_by_fx(model):
    graph = LeafTracer().trace(model)
    return optimization.fuse(torch.fx.GraphModule(model, graph), no_trace=True)


PASSING_BY = {
    "fx": fuse_by_fx,
    "functorch": replace_all_batch_norm_modules_,
    "sync": nn.SyncBatchNorm.convert_sync_batchnorm,
}


@pytest.mark.parametrize("tool", PASSING_BY)
@pytest.mark.parametrize("name", NAMES)
def test_tools_that_leave_the_layers_as_they_are(name, tool):
    model = network(name)
    changed = PASSING_BY[tool](copy.deepcopy(model)).eval()
    found = next(module for module in changed.modules() if isinstance(module, WhiteningNorm))
    x = model[0](images())
    torch.testing.assert_close(found(x), model[1](x))


@pytest.mark.parametrize("name", NAMES)
def test_update_bn_makes_batchnorms_statistics_anew_and_only_trains_the_layers_on(name):
    model = network(name)
    images_seen = images()
    trained = copy.deepcopy(model).train()
    trained(images_seen)
    update_bn([images_seen], model)
    for key, value in model[1].state_dict().items():
        torch.testing.assert_close(value, trained[1].state_dict()[key])
    assert model[3].num_batches_tracked == 1 and model[1].num_batches_tracked == 4


@pytest.mark.parametrize("name", NAMES)
def test_fusing_by_fx_stops_where_the_layers_are_no_leaves(name):
    with pytest.raises(torch.fx.proxy.TraceError):
        optimization.fuse(network(name))
