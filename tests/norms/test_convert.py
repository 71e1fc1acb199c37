"""Another norm in a finished network, and back."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.ops.misc import FrozenBatchNorm2d

from swbn_lightning import NormFactory, SWBN1d, SWBN2d, append_norm, convert_norms, revert_norms
from swbn_lightning.backbones import build_backbone
from swbn_lightning.norms import named_norms
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.surgery.wrappers import AppendedNorm, NormAct
from tests.norms.networks import FAMILIES, TORCHVISION, lived, relative_error, same_state

TIMM = {"mobilenetv3_small_050": 64, "ghostnet_050": 64}
SWBN = NormFactory("swbn-fro", step_size=1e-3)


def count(model, kind=WhiteningNorm):
    return sum(isinstance(module, kind) for module in model.modules())


def train_a_step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    output = model.train()(x)
    torch.nn.functional.cross_entropy(output, torch.arange(len(x)) % 10).backward()
    optimizer.step()
    return all(parameter.isfinite().all() for parameter in model.parameters())


def round_trip(model, size):
    """Old output, a step, old state: for a network as it is after training."""
    torch.manual_seed(0)
    lived(model)
    state = copy.deepcopy(model.state_dict())
    layers = {name: type(m) for name, m in model.named_modules()}
    norms = count(model, nn.modules.batchnorm._BatchNorm)
    x = torch.randn(4, 3, size, size)
    with torch.no_grad():
        before = model(x)
        assert convert_norms(model, SWBN) is model
        assert count(model) == norms > 0 and not count(model, nn.modules.batchnorm._BatchNorm)
        assert relative_error(model(x), before) < 1e-5
    trained = copy.deepcopy(model)
    assert train_a_step(trained, x)
    assert all((m.whitening_matrix != torch.eye(m.num_features)).any() for m in trained.modules()
               if isinstance(m, WhiteningNorm))  # fmt: skip
    assert revert_norms(model) is model
    assert same_state(model, state) and layers == {name: type(m) for name, m in model.named_modules()}
    with torch.no_grad():
        assert torch.equal(model(x), before)
    revert_norms(trained)
    assert count(trained) == 0 and train_a_step(trained, x)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_torchvision_family(family):
    make, size = TORCHVISION[family]
    round_trip(make(), size)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    round_trip(timm.create_model(name, num_classes=10), TIMM[name])


@pytest.mark.parametrize("name", ["swbn-kl", "iternorm", "dbn", "bn"])
def test_every_family_of_norms_takes_over_the_function_and_gives_it_back(name):
    make, size = TORCHVISION["resnet"]
    model = lived(make()).double()
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        before = model(x)
        assert relative_error(convert_norms(model, NormFactory(name))(x), before) < 1e-12
    assert same_state(revert_norms(model), state)


@pytest.mark.parametrize("name", ["gn", "ln", "in", "none"])
def test_other_norms_keep_what_they_have_no_place_for(name):
    make, size = TORCHVISION["resnet"]
    model = lived(make())
    state = copy.deepcopy(model.state_dict())
    convert_norms(model, NormFactory(name))
    model(torch.randn(2, 3, 2 * size, 2 * size))
    assert count(model, nn.BatchNorm2d) == 0
    if name != "none":
        assert torch.equal(model.bn1.weight, state["bn1.weight"])
    assert same_state(revert_norms(model), state)


def test_paper_placements():
    # ResNetV1-32's (appendix E): all but projection shortcuts; ours and torchvision's names.
    model = convert_norms(build_backbone("resnet20"), SWBN, exclude=["*shortcut*"])
    shortcuts = [name for name, module in named_norms(model) if type(module) is nn.BatchNorm2d]
    assert len(shortcuts) == 2 and all("shortcut" in name for name in shortcuts) and count(model) == 19
    # ResNet-50's on ImageNet (section 4.2.2): the first one, and one more before the last linear.
    model = lived(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10))
    state = copy.deepcopy(model.state_dict())
    convert_norms(model, SWBN, include=["bn1"])
    append_norm(model, "fc", SWBN)
    assert count(model) == 2 and type(model.bn1) is SWBN2d
    assert isinstance(model.fc, AppendedNorm) and type(model.fc.norm) is SWBN1d and model.fc.norm.num_features == 2048
    assert not model.fc.norm.training  # as the layer it stands before
    assert train_a_step(model, torch.randn(4, 3, 32, 32))
    revert_norms(model)
    assert list(model.state_dict()) == list(state) and count(model) == 0 and isinstance(model.fc, nn.Linear)


def test_patterns():
    model = TORCHVISION["resnet"][0]()
    convert_norms(model, SWBN, include=["layer1.*", "bn1"], exclude=["*.bn2"])
    assert [name for name, m in named_norms(model) if isinstance(m, SWBN2d)] == ["bn1", "layer1.0.bn1"]
    with pytest.raises(ValueError, match=r"no BatchNorm layer fits 'layer9.\*'; the model's: layer1.0.bn2"):
        convert_norms(model, SWBN, include=["layer9.*"])
    with pytest.raises(ValueError, match=r"no BatchNorm layer fits 'shortcut'"):
        convert_norms(model, SWBN, exclude=["shortcut"])
    for nothing in ({"include": []}, {"exclude": "*"}):
        with pytest.raises(ValueError, match="leave no BatchNorm layer to convert"):
            convert_norms(model, SWBN, **nothing)
    convert_norms(model, SWBN, include="layer2.*")  # one pattern by itself
    assert isinstance(model.layer2[0].bn1, SWBN2d)


def test_eps_and_momentum_stay_unless_the_factory_names_them():
    old = nn.BatchNorm1d(4, eps=0.5, momentum=None)
    kept = convert_norms(copy.deepcopy(old), NormFactory("swbn"))
    assert (kept.eps, kept.momentum) == (0.5, None)
    named = convert_norms(copy.deepcopy(old), NormFactory("swbn", eps=1e-8, momentum=0.05))
    assert (named.eps, named.momentum) == (1e-8, 0.05)
    back = revert_norms(named)
    assert type(back) is nn.BatchNorm1d and (back.eps, back.momentum) == (0.5, None)


@pytest.mark.parametrize("options", [
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
    {"dtype": torch.float16},
    {"dtype": torch.float64},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["swbn", "iternorm", "dbn", "gn"])
def test_options_dtype_and_mode_of_a_layer_are_kept(name, options):
    old = nn.BatchNorm2d(6, **options).eval()
    if old.affine:
        old.weight.requires_grad_(False)
        nn.init.normal_(old.weight)
    state = copy.deepcopy(old.state_dict())
    new = convert_norms(old, NormFactory(name))
    assert not new.training
    assert getattr(new, "affine", None) == old.affine
    if name != "gn":
        assert new.track_running_stats == old.track_running_stats
    if old.affine:
        assert new.weight is old.weight and not new.weight.requires_grad
    x = torch.randn(4, 6, 3, 3, dtype=options.get("dtype"))
    assert new(x).dtype == x.dtype
    back = revert_norms(new)
    assert same_state(back, state) and not back.training and back.affine == options.get("affine", True)


def test_a_batchnorm_without_beta():
    old = nn.BatchNorm1d(4)
    old.register_parameter("bias", None)  # as bias=False makes it where PyTorch has that argument
    for name in ("swbn", "dbn", "gn"):
        new = convert_norms(old, NormFactory(name))
        assert new.bias is None and new.weight is old.weight
        new(torch.randn(8, 4))
        assert revert_norms(new).bias is None


def test_an_optimiser_made_before_goes_on_and_training_reaches_the_old_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_norms(model, NormFactory("swbn", step_size=0.1))
    x = torch.randn(8, 3, 5, 5)
    (model(x) ** 3).sum().backward()
    optimizer.step()
    norm = model[1]
    assert (norm.weight != 1).any()
    revert_norms(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert torch.equal(model[1].weight, norm.weight) and torch.equal(model[1].running_var, norm.running_var)
    assert torch.equal(model[1].running_mean, norm.running_mean) and model[1].num_batches_tracked == 1
    assert model[1].training and not revert_norms(convert_norms(model, SWBN).eval())[1].training


@pytest.mark.parametrize("name", ["iternorm", "dbn"])
def test_the_variance_after_training_is_that_of_the_matrix(name):
    torch.manual_seed(0)
    scale = torch.tensor([0.5, 1, 2, 3], dtype=torch.float64)
    x = torch.randn(5000, 4, dtype=torch.float64) * scale
    x = x + 0.3 * x.roll(1, 1)
    options = {"num_iterations": 20} if name == "iternorm" else {}
    norm = convert_norms(nn.BatchNorm1d(4, momentum=None).double(), NormFactory(name, **options))
    norm(x)
    torch.testing.assert_close(revert_norms(norm).running_var, x.var(0), rtol=1e-3, atol=0)


def test_the_variance_of_a_nearly_singular_matrix_is_not_lost_to_rounding():
    torch.manual_seed(0)
    x = torch.randn(2000, 1) * 30 + torch.randn(2000, 16) * 0.03
    norm = convert_norms(nn.BatchNorm1d(16, momentum=None), NormFactory("dbn"))
    norm(x)
    torch.testing.assert_close(revert_norms(norm).running_var, x.var(0), rtol=0.05, atol=0)


def test_dtypes_that_differ_are_kept_and_a_cast_is_followed():
    mixed = nn.BatchNorm2d(4)
    mixed.weight.data, mixed.bias.data = mixed.weight.data.half(), mixed.bias.data.half()
    state = copy.deepcopy(mixed.state_dict())
    assert same_state(revert_norms(convert_norms(mixed, SWBN)), state)
    bare = convert_norms(nn.Sequential(nn.BatchNorm2d(4, affine=False)), SWBN).double()
    revert_norms(bare)(torch.randn(2, 4, 3, 3, dtype=torch.float64))


def test_converted_twice_reverts_to_the_first():
    model = nn.Sequential(nn.BatchNorm2d(4, eps=0.5))
    first = model[0]
    convert_norms(convert_norms(model, NormFactory("bn")), SWBN)
    assert revert_norms(model)[0] is first


def test_an_activation_set_on_the_converted_layer_stays():
    model = convert_norms(timm.create_model("mobilenetv3_small_050", num_classes=10), SWBN)
    model.bn1.act = nn.GELU()
    assert isinstance(revert_norms(model).bn1.act, nn.GELU)


def test_copies_and_pickles_of_a_converted_network_revert_too():
    model = lived(TORCHVISION["resnet"][0]())
    state = copy.deepcopy(model.state_dict())
    convert_norms(model, SWBN)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        revert_norms(twin)
        assert same_state(twin, state)
        assert twin.bn1.weight is not model.bn1.weight


def test_a_layer_that_is_used_in_two_places_stays_one():
    shared = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(nn.Conv2d(4, 4, 1), shared)})
    convert_norms(model, SWBN, include=["b.*"])
    assert model["a"][0] is model["b"][1] and isinstance(model["a"][0], SWBN2d)
    revert_norms(model)
    assert model["a"][0] is model["b"][1] is shared


def test_hooks_move_along_and_their_handles_work():
    calls = []
    old = nn.BatchNorm1d(3)
    handle = old.register_forward_hook(lambda *_: calls.append("forward"))
    old.register_full_backward_hook(lambda *_: calls.append("backward"))
    new = convert_norms(old, SWBN)
    new(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert calls == ["forward", "backward"]
    handle.remove()
    back = revert_norms(new)
    back(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert calls == ["forward", "backward", "backward"]


def test_sync_batchnorm_becomes_a_layer_for_any_input():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5))
    lived(model)
    x = torch.randn(2, 3, 3, 3)
    before = model(x)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    convert_norms(model, SWBN)
    assert count(model) == 2
    torch.testing.assert_close(model(x), before)
    assert type(revert_norms(model)[1]) is nn.SyncBatchNorm
    with pytest.raises(ValueError, match="no layer for None spatial dimensions; it has: 1, 2, 3"):
        convert_norms(model, NormFactory("in"))


def test_frozen_and_other_norms_are_left():
    model = nn.Sequential(nn.BatchNorm2d(4), FrozenBatchNorm2d(4), nn.GroupNorm(2, 4))
    convert_norms(model, SWBN)
    assert [type(m) for m in model] == [SWBN2d, FrozenBatchNorm2d, nn.GroupNorm]


def test_checkpoints_from_before_load_strictly_after_converting():
    for make in (TORCHVISION["resnet"][0], lambda: timm.create_model("mobilenetv3_small_050", num_classes=10)):
        model = lived(make())
        converted = convert_norms(make().eval(), NormFactory("iternorm"))
        loaded = converted.load_state_dict(model.state_dict())
        assert not loaded.missing_keys and not loaded.unexpected_keys
        x = torch.randn(2, 3, 64, 64)
        with torch.no_grad():
            assert relative_error(converted(x), model(x)) < 1e-4
    assert count(converted, NormAct) == count(converted)


def test_meta_networks_convert():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    convert_norms(model, SWBN)
    assert all(value.is_meta for value in model.state_dict().values())
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    revert_norms(model)(torch.randn(2, 3, 4, 4))
    assert torch.equal(model[1].running_mean * 0, torch.zeros(4)) and model[1].num_batches_tracked == 1
