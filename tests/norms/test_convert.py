"""Another norm in a finished network, and back."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrize
from torchvision.models.resnet import Bottleneck, ResNet

from swbn_lightning import NormFactory, SWBN1d, SWBN2d, append_norm, convert_norms, revert_norms
from swbn_lightning.backbones import build_backbone
from swbn_lightning.norms import named_norms
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.surgery.wrappers import AppendedNorm, NormAct
from tests.norms.networks import FAMILIES, TORCHVISION, lived, relative_error, same_state

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


def test_timms_layers_with_an_activation():
    round_trip(timm.create_model("mobilenetv3_small_050", num_classes=10), 64)


@pytest.mark.parametrize("name", ["swbn-kl", "online", "iternorm", "dbn", "bn"])
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
    # ResNetV1-32's (appendix E): all but projection shortcuts.
    model = convert_norms(build_backbone("resnet20"), SWBN, exclude=["*shortcut*"])
    shortcuts = [name for name, module in named_norms(model) if type(module) is nn.BatchNorm2d]
    assert len(shortcuts) == 2 and all("shortcut" in name for name in shortcuts) and count(model) == 19
    # ResNet-50's on ImageNet (section 4.2.2): the first one, and one more before the last linear.
    model = lived(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10))
    state = copy.deepcopy(model.state_dict())
    append_norm(convert_norms(model, SWBN, include="bn1"), "fc", SWBN)
    assert count(model) == 2 and type(model.bn1) is SWBN2d and type(model.fc.norm) is SWBN1d
    assert not model.fc.norm.training  # as the layer it stands before
    assert train_a_step(model, torch.randn(4, 3, 32, 32))
    revert_norms(model)
    assert list(model.state_dict()) == list(state) and count(model) == 0


def test_patterns_and_options_of_the_factory():
    model = TORCHVISION["resnet"][0]()
    convert_norms(model, NormFactory("swbn", eps=1e-3), include=["layer1.*", "bn1"], exclude=["*.bn2"])
    assert [name for name, m in named_norms(model) if isinstance(m, SWBN2d)] == ["bn1", "layer1.0.bn1"]
    assert model.bn1.eps == 1e-3 and revert_norms(model).bn1.eps == 1e-5
    with pytest.raises(ValueError, match=r"no BatchNorm layer fits 'layer9.\*'; the model's: bn1, layer1.0.bn1"):
        convert_norms(model, SWBN, exclude=["layer9.*"])
    with pytest.raises(ValueError, match="leaves no BatchNorm layer"):
        convert_norms(model, SWBN, exclude="*")


@pytest.mark.parametrize("options", [
    {"affine": False, "eps": 0.5}, {"track_running_stats": False}, {"momentum": None}, {"dtype": torch.float16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["swbn", "dbn", "gn"])
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
        assert (new.track_running_stats, new.momentum) == (old.track_running_stats, old.momentum)
    assert new.eps == old.eps
    if old.affine:
        assert new.weight is old.weight and not new.weight.requires_grad
    x = torch.randn(4, 6, 3, 3, dtype=options.get("dtype"))
    assert new(x).dtype == x.dtype
    back = revert_norms(new)
    assert same_state(back, state) and not back.training and back.affine == options.get("affine", True)


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


def test_what_was_cast_or_converted_twice_comes_back():
    bare = convert_norms(nn.Sequential(nn.BatchNorm2d(4, affine=False)), SWBN).double()
    revert_norms(bare)(torch.randn(2, 4, 3, 3, dtype=torch.float64))
    first = nn.BatchNorm2d(4)
    assert revert_norms(convert_norms(convert_norms(first, NormFactory("bn")), SWBN)) is first


@pytest.mark.parametrize(("name", "batches"), [("online", 300), ("iternorm", 1), ("dbn", 1)])
def test_the_variance_after_training_is_that_of_the_matrix(name, batches):
    torch.manual_seed(0)
    scale = torch.tensor([0.5, 1, 2, 3], dtype=torch.float64)
    x = torch.randn(5000, 4, dtype=torch.float64) * scale
    x = x + 0.3 * x.roll(1, 1)
    options = {"num_iterations": 20} if name == "iternorm" else {}
    norm = convert_norms(nn.BatchNorm1d(4).double(), NormFactory(name, **options, momentum=0.2 if batches > 1 else 1.0))
    for _ in range(batches):  # the online matrix converges
        norm(x)
    torch.testing.assert_close(revert_norms(norm).running_var, x.var(0), rtol=1e-3, atol=0)


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


class Clamped(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).clamp(-1, 1)


class Frozen(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


def patched():
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x * 0
    return layer


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


@pytest.mark.parametrize(("layer", "words"), [
    (Clamped(3), r"is a Clamped that does something of its own.*exclude"), (Frozen(3), "forward or train"),
    (patched(), "forward or train"), (parametrized(nn.BatchNorm2d(3)), "parametrised"),
    (nn.SyncBatchNorm(3, process_group=object()), "process group of its own"),
    (nn.LazyBatchNorm2d(), r"\(LazyBatchNorm2d\) has seen no input yet; run one forward first"),
    (nn.BatchNorm2d(4), "num_groups=3 does not divide num_features=4"),
])  # fmt: skip
def test_what_cannot_be_converted_is_refused_by_name_and_nothing_is_done_by_halves(layer, words):
    model = nn.Sequential(nn.BatchNorm2d(3), layer)
    with pytest.raises(ValueError, match=rf"'1'.*{words}"):
        convert_norms(model, NormFactory("swbn", num_groups=3))
    assert type(model[0]) is nn.BatchNorm2d


def test_other_errors():
    model = convert_norms(nn.Sequential(nn.BatchNorm2d(3)), SWBN)
    with pytest.raises(ValueError, match="has no BatchNorm layer to convert .*revert_norms first"):
        convert_norms(model, SWBN)
    with pytest.raises(ValueError, match="is parametrised; make that permanent before reverting"):
        revert_norms(nn.Sequential(parametrized(model[0])))
    with pytest.raises(ValueError, match="holds no layer that convert_norms or append_norm put there"):
        revert_norms(nn.Sequential(nn.BatchNorm2d(3)))


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Linear(6, 2), (8, 6)),
    (nn.Conv2d(6, 2, 3), (8, 6, 5, 5)),
    (nn.ConvTranspose3d(6, 2, 3), (8, 6, 3, 3, 3)),
], ids=str)  # fmt: skip
def test_appending_in_front_of_each_kind_of_layer(layer, shape):
    model = append_norm(nn.Sequential(nn.Identity(), layer.double()), "1", SWBN)
    x = torch.randn(shape, dtype=torch.float64)
    norm = NormFactory("swbn-fro", step_size=1e-3)(6, max(len(shape) - 2, 1)).double()
    torch.testing.assert_close(model(x), layer(norm(x)))
    append_norm(model, "1.layer", SWBN)
    assert model.state_dict()["1.layer.norm.whitening_matrix"].dtype == torch.float64
    assert revert_norms(model)[1] is layer


def test_an_appended_norm_takes_vectors_alone_and_old_checkpoints():
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 2))
    state = copy.deepcopy(model.state_dict())
    append_norm(model, "1", SWBN)
    with pytest.raises(ValueError, match="expected 2D input"):
        model(torch.randn(3, 6, 6))  # [N, T, C] with T = C: dimension 1 is not the channels
    loaded = model.load_state_dict(state, strict=False)
    assert not loaded.unexpected_keys and all(key.startswith("1.norm.") for key in loaded.missing_keys)
    assert torch.equal(model[1].layer.weight, state["1.weight"])
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared})
    append_norm(model, "b", SWBN)
    assert isinstance(model["a"], AppendedNorm) and model["a"] is model["b"]


def test_appending_to_nothing_is_an_error():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"unknown layer 'fc'.*Known: 0"):
        append_norm(model, "fc", SWBN)
    for name, kind in (("1", "ReLU"), ("2", "LazyLinear")):
        with pytest.raises(ValueError, match=f"'{name}' is a {kind}; a norm can be put in front of a linear"):
            append_norm(model, name, SWBN)
