"""Normalisation gone at inference: the same function, exactly, and the count of what was done."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from swbn_lightning import NormFactory, append_norm, convert_norms, fuse_norms, revert_norms
from swbn_lightning.norms.base import WhiteningNorm
from tests.norms.dataflow_networks import (
    AfterAddition,
    Controlled,
    Counting,
    Flag,
    KeepsFeatures,
    Net,
    Optional,
    Plain,
    TwoCalls,
    Untraceable,
    UsedTwice,
    WeightUsed,
)
from tests.norms.networks import FAMILIES, TORCHVISION, lived, relative_error

SWBN = NormFactory("swbn-kl", step_size=0.02)
X = torch.randn(6, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5


def check(model, x, folded, convolutions=0, kept=0):
    """Fuse, compare in float64, count, for a model as after training; it stays as it is."""
    lived(model.double())
    state, mode = copy.deepcopy(model.state_dict()), model.train().training
    fused = fuse_norms(model)
    assert model.training is mode and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not fused.training and not any(isinstance(m, WhiteningNorm) for m in fused.modules())
    with torch.no_grad():
        error = relative_error(fused(x), model.eval()(x))
    assert error < 1e-10
    report = fused.fusion_report
    assert (len(report.folded), len(report.convolutions), len(report.kept)) == (folded, convolutions, kept), str(report)
    return fused


CONVOLUTIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}


@pytest.mark.parametrize(("ndim", "name"), [(1, "swbn-kl"), (2, "iternorm"), (3, "dbn"), (2, "bn")])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_kind_of_convolution_before_every_norm(ndim, transposed, name):
    shapes = [{"stride": 2, "dilation": 2, "padding": 3}, {"stride": (1, 2, 3)[:ndim], "padding": 1}]
    modes = ["zeros"] if transposed else ["zeros", "reflect", "circular"]
    for shape, mode, groups in itertools.product(shapes, modes, [1, 2]):
        options = {**shape, "padding_mode": mode, "bias": mode != "reflect", "groups": groups}
        if transposed:
            options["output_padding"] = (0, 1, 2)[:ndim] if shape["stride"] != 2 else 1
        norm = NormFactory(name, **({} if name == "bn" else {"num_groups": 2}))(6, ndim)
        model = nn.Sequential(CONVOLUTIONS[ndim][transposed](4, 6, 3, **options), norm)
        fused = check(model, torch.randn(6, 4, *[(), (9,), (9, 8), (7, 7, 7)][ndim], dtype=torch.float64), folded=1)
        assert isinstance(fused[1], nn.Identity) and fused[0].groups == groups


def test_a_linear_layer_and_the_shape_that_it_holds_to():
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Identity(), NormFactory("swbn")(6, 1))
    check(model, torch.randn(30, 5, dtype=torch.float64), folded=1)
    # The norm's channels are dimension 1, the linear's the last: 6 both. And [C, L] is one sample to a convolution.
    for layer, shape, dims in ((nn.Linear(5, 6), (3, 6, 5), 2), (nn.Conv1d(3, 6, 1), (3, 6), 3)):
        model = nn.Sequential(layer, NormFactory("swbn")(6, 1)).eval()
        model(torch.randn(shape))
        with pytest.raises(AssertionError, match=f"fused for {dims}D input here"):
            fuse_norms(model)(torch.randn(shape))


@pytest.mark.parametrize(("groups", "norm_groups", "folded"), [
    (12, 12, True), (2, 4, True), (1, 3, True),  # blocks of the norm within those of the convolution
    (12, 1, False), (4, 2, False), (4, 6, False),
])  # fmt: skip
def test_groups_are_not_merged(groups, norm_groups, folded):
    norm = NormFactory("swbn-kl", num_groups=norm_groups)(12)
    model = nn.Sequential(nn.Conv2d(12, 12, 3, groups=groups), norm, nn.ReLU())
    x = torch.randn(8, 12, 5, 5, dtype=torch.float64)
    fused = check(model, x, folded=int(folded), convolutions=int(not folded))
    assert fused[0].groups == groups
    if not folded:
        assert type(fused[1]) is nn.Conv2d and fused[1].groups == norm_groups


@pytest.mark.parametrize(("net", "folded", "convolutions"), [
    (AfterAddition, 0, 1), (UsedTwice, 0, 1), (TwoCalls, 1, 0), (WeightUsed, 0, 1),
    (Optional, 0, 1), (Flag, 0, 1), (Untraceable, 0, 1), (KeepsFeatures, 0, 1),
    (Plain, 1, 0), (Counting, 1, 0),
])  # fmt: skip
def test_only_what_comes_directly_before_and_feeds_nothing_else(net, folded, convolutions):
    model = net(conv=nn.Conv2d(4, 4, 1), norm=SWBN(4))
    fused = check(model, X, folded, convolutions)
    if net is Optional:
        torch.testing.assert_close(fused(X, X), model(X, X))


def test_what_cannot_be_traced_is_looked_at_child_by_child():
    block = Plain(conv=nn.Conv2d(4, 4, 1), norm=SWBN(4))
    fused = check(Controlled(conv=nn.Conv2d(4, 4, 1), block=nn.Sequential(SWBN(4), block)), X, folded=1, convolutions=1)
    assert fused.fusion_report.folded == {"block.1.norm": "block.1.conv"}
    text = "1 folded into the layer before, 1 left as a 1x1 convolution; could not be traced: (the model)"
    assert str(fused.fusion_report) == text


def test_a_sequential_of_an_untraced_parent_is_not_folded_within():
    class Taps(Net):
        def forward(self, x):
            taps = 1.0 if x.sum() > 0 else 2.0  # cannot be traced
            for layer in self.features:
                x = layer(x)
                taps = taps + x.mean()
            return taps * x

    features = nn.Sequential(nn.Conv2d(4, 4, 1), SWBN(4))
    check(Taps(features=features), X, folded=0, convolutions=1)


def test_a_layer_shared_with_what_cannot_be_traced_is_left():
    shared = nn.Conv2d(4, 4, 1)
    check(Controlled(conv=shared, block=nn.Sequential(shared, SWBN(4))), X, folded=0, convolutions=1)


def test_layers_that_use_their_weight_in_their_own_way_are_left():
    patched = nn.Conv2d(4, 4, 1)
    patched.forward = lambda x: torch.relu(nn.Conv2d.forward(patched, x))
    for layer in (parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), patched):
        check(nn.Sequential(layer, SWBN(4)), X, folded=0, convolutions=1)


def test_hooks_go_on_seeing_what_they_saw():
    seen = []

    def tap(module, inputs, output):
        seen.append(output)
        return output + 1

    between, around, norm = nn.Identity(), nn.Sequential(nn.Conv2d(4, 4, 1)), SWBN(4)
    for module in (between, around, norm):
        module.register_forward_hook(tap)
    check(nn.Sequential(nn.Conv2d(4, 4, 1), between, SWBN(4)), X, folded=0, convolutions=1)
    check(nn.Sequential(around, SWBN(4)), X, folded=0, convolutions=1)
    check(nn.Sequential(nn.Conv2d(4, 4, 1), norm), X, folded=0, convolutions=1)
    block = Plain(conv=nn.Conv2d(4, 4, 1), norm=SWBN(4))  # around both they change nothing inside
    block.register_forward_hook(tap)
    check(nn.Sequential(block, nn.Conv2d(4, 4, 1), SWBN(4)), X, folded=2)
    assert all(isinstance(value, torch.Tensor) for value in seen)  # tracing ran none of them


def test_a_fused_network_is_fused_again_and_traced_by_others():
    model = nn.Sequential(SWBN(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4), SWBN(4, 1), SWBN(4, 1))
    fused = check(model, X, folded=1, convolutions=2)
    traced = torch.fx.symbolic_trace(fused)
    torch.testing.assert_close(traced(X), fused(X))
    again = fuse_norms(nn.Sequential(fused, nn.Linear(4, 4), SWBN(4, 1).double()))
    assert again.fusion_report.folded == {"2": "1"} and not again.fusion_report.untraced


def test_in_16_bit_a_large_mean_leaves_no_offset():
    # Alone the layer is one rounded matrix: its bias must be made of that one.
    norm = NormFactory("swbn", momentum=None, affine=False)(8)
    norm(torch.randn(64, 8, 8, 8) + 30)
    nn.init.normal_(norm.whitening_matrix, std=0.2)
    norm = norm.eval().bfloat16()
    fused = fuse_norms(nn.Sequential(nn.Conv2d(8, 8, 1).bfloat16(), nn.ReLU(), norm))[2]
    x = (torch.randn(64, 8, 8, 8) + 30).bfloat16()
    offset = (fused.double()(x.double()) - norm(x.double())).mean((0, 2, 3)).abs().max()
    assert offset < 0.02 * 30 / 8


def test_batchnorm_beside_ours_is_folded_or_kept():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), SWBN(4))
    fused = check(model, X, folded=1, convolutions=1, kept=1)
    assert fused.fusion_report.kept == ("3",) and "1 BatchNorm kept" in str(fused.fusion_report)


@pytest.mark.parametrize(("name", "ndim"), [("swbn-kl", 1), ("iternorm", 2), ("dbn", 3), ("swbn-kl", None)])
def test_a_norm_alone_is_one_convolution(name, ndim):
    norm = NormFactory(name, num_groups=2)(4, ndim)
    for dims in {None: (0, 3), 1: (0, 1)}.get(ndim, (ndim,)):
        check(norm, torch.randn(9, 4, *[5] * dims, dtype=torch.float64), folded=0, convolutions=1)


def test_without_gamma_and_beta():
    factory = NormFactory("swbn-kl", step_size=0.05, affine=False)
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), factory(4), nn.ReLU(), factory(4)).double()
    model(X)
    fused = fuse_norms(model)
    assert relative_error(fused(X), model.eval()(X)) < 1e-10 and fused[3].weight.dtype == torch.float64


@pytest.mark.parametrize("family", FAMILIES)
def test_torchvision_networks(family):
    make, size = TORCHVISION[family]
    model = lived(convert_norms(make(), SWBN).double())
    norms = sum(isinstance(m, WhiteningNorm) for m in model.modules())
    x = torch.randn(3, 3, size, size, dtype=torch.float64)
    fused = fuse_norms(model)
    with torch.no_grad():
        assert relative_error(fused(x), model(x)) < 1e-10
    report = fused.fusion_report
    assert len(report.folded) + len(report.convolutions) == norms > 0 and not report.kept
    assert not any(isinstance(m, WhiteningNorm) for m in fused.modules())
    # Depthwise and pre-activation networks have norms with nothing to go into; all others have none.
    apart = {"densenet", "shufflenet_v2", "mobilenet_v2", "mobilenet_v3", "efficientnet", "regnet_y", "maxvit"}
    assert bool(report.convolutions) == (family in apart)


def test_layout_dtype_and_requires_grad_of_the_layer_stay():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), SWBN(4)).to(memory_format=torch.channels_last).bfloat16()
    model[0].weight.requires_grad_(False)
    fused = fuse_norms(model)[0]
    assert fused.weight.is_contiguous(memory_format=torch.channels_last) and not fused.weight.requires_grad
    assert fused.weight.dtype == fused.bias.dtype == torch.bfloat16


class Read(Net):
    def forward(self, x):
        return self.norm(torch.relu(x)) + self.norm.bias.view(1, -1, 1, 1)


def test_errors():
    patched = nn.Sequential(SWBN(4))
    patched[0].forward = lambda x: x * 2
    for model, words in (
        (
            nn.Sequential(NormFactory("swbn", track_running_stats=False)(4)),
            "'0': SWBN2d with track_running_stats=False",
        ),
        (nn.Sequential(nn.LazyConv2d(4, 1)), r"'0' \(LazyConv2d\) has seen no input yet; run the network once first"),
        (patched, "'0' has a forward set on the instance"),
        (Read(norm=SWBN(4)), "'norm': the network uses this layer's parameters outside of it"),
    ):
        with pytest.raises(ValueError, match=words):
            fuse_norms(model)
    model = append_norm(convert_norms(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), SWBN), "1", SWBN)
    with pytest.raises(ValueError, match="this network was fused"):
        revert_norms(nn.Sequential(fuse_norms(model)))
