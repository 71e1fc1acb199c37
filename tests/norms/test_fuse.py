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
    FlagBehind,
    KeepsFeatures,
    Net,
    NormElsewhere,
    Optional,
    OptionalOtherWay,
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


@pytest.mark.parametrize("name", ["swbn-kl", "iternorm", "bn"])
@pytest.mark.parametrize("ndim", CONVOLUTIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_kind_of_convolution_before_every_norm(ndim, transposed, name):
    convolution = CONVOLUTIONS[ndim][transposed]
    shapes = [{"stride": 2, "dilation": 2, "padding": 3}, {"stride": (1, 2, 3)[:ndim], "padding": 1}]
    modes = ["zeros"] if transposed else ["zeros", "reflect", "replicate", "circular"]
    for shape, mode, bias, groups in itertools.product(shapes, modes, [True, False], [1, 2]):
        options = {**shape, "padding_mode": mode, "bias": bias, "groups": groups}
        if transposed:
            options["output_padding"] = (0, 1, 2)[:ndim] if shape["stride"] != 2 else 1
        torch.manual_seed(0)
        norm = NormFactory(name, **({} if name == "bn" else {"num_groups": 2}))(6, ndim)
        model = nn.Sequential(convolution(4, 6, 3, **options), norm)
        fused = check(model, torch.randn(6, 4, *[(), (9,), (9, 8), (7, 7, 7)][ndim], dtype=torch.float64), folded=1)
        assert isinstance(fused[1], nn.Identity) and fused[0].groups == groups


@pytest.mark.parametrize("name", ["swbn-kl", "iternorm", "dbn", "bn"])
def test_linear(name):
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Identity(), NormFactory(name)(6, 1))
    check(model, torch.randn(30, 5, dtype=torch.float64), folded=1)


def test_a_folded_linear_refuses_what_was_normalised_over_another_dimension():
    model = nn.Sequential(nn.Linear(5, 6), NormFactory("swbn")(6, 1)).eval()
    x = torch.randn(3, 6, 5)  # the norm's channels are dimension 1, the linear's the last: 6 both
    model(x)
    with pytest.raises(AssertionError, match="fused for 2D input here"):
        fuse_norms(model)(x)
    model = nn.Sequential(nn.Conv1d(3, 4, 1), NormFactory("swbn")(4, 1)).eval()
    x = torch.randn(3, 4)  # one sample [C, L] to the convolution, whose [4, 4] is four of them to the norm
    model(x)
    with pytest.raises(AssertionError, match="fused for 3D input here"):
        fuse_norms(model)(x)


@pytest.mark.parametrize(("groups", "norm_groups", "kernel", "expected"), [
    (12, 12, 3, 12),  # depthwise, and a norm as narrow: stays depthwise
    (12, 1, 3, None),  # depthwise before full whitening: dense would cost 1296, apart 252
    (12, 1, 1, 1),  # but a depthwise convolution of size 1 is no dearer as a dense one
    (2, 4, 3, 2),  # blocks of the norm within those of the convolution: nothing changes
    (4, 2, 3, None),  # two and two are merged: 12*6*9 = 648 against 324 + 72
    (4, 2, 1, 2),  # 72 against 36 + 72
    (4, 6, 1, None),  # 3 and 2 channels a block: merged to 6, 72 against 36 + 24
    (1, 3, 3, 1),
])  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
def test_groups_are_merged_only_where_that_is_no_dearer(groups, norm_groups, kernel, expected, transposed):
    convolution = CONVOLUTIONS[2][transposed](12, 12, kernel, groups=groups)
    model = nn.Sequential(convolution, NormFactory("swbn-kl", num_groups=norm_groups)(12), nn.ReLU())
    x = torch.randn(8, 12, 5, 5, dtype=torch.float64)
    folded = expected is not None
    fused = check(model, x, folded=int(folded), convolutions=int(not folded))
    assert fused[0].groups == (expected or groups)
    if not folded:
        assert type(fused[1]) is nn.Conv2d and fused[1].groups == norm_groups


def test_groups_that_do_not_nest_are_merged_to_their_common_multiple():
    # 3 channels a group of the convolution, 2 of the norm: 6 of both, 12 * 2 products against 12 + 24.
    model = nn.Sequential(nn.Conv2d(4, 12, 1, groups=4), NormFactory("dbn", num_groups=6)(12))
    assert check(model, X, folded=1)[0].groups == 2


def test_a_transposed_convolution_counts_its_output_positions():
    # 144 weights in four groups, 288 in two; a 1x1 convolution has 72 at each output, of which stride 2 makes four.
    for stride, folded in ((1, 0), (2, 1)):
        convolution = nn.ConvTranspose2d(12, 12, 2, stride=stride, groups=4)
        model = nn.Sequential(convolution, NormFactory("swbn", num_groups=2)(12))
        check(model, torch.randn(8, 12, 5, 5, dtype=torch.float64), folded=folded, convolutions=1 - folded)


@pytest.mark.parametrize(("net", "folded", "convolutions"), [
    (AfterAddition, 0, 1), (UsedTwice, 0, 1), (TwoCalls, 1, 0), (NormElsewhere, 0, 1), (WeightUsed, 0, 1),
    (Optional, 0, 1), (OptionalOtherWay, 0, 1), (Flag, 0, 1), (Untraceable, 0, 1), (KeepsFeatures, 0, 1),
    (Plain, 1, 0), (Counting, 1, 0), (FlagBehind, 1, 0),
])  # fmt: skip
def test_only_what_comes_directly_before_and_feeds_nothing_else(net, folded, convolutions):
    model = net(conv=nn.Conv2d(4, 4, 1), norm=SWBN(4))
    fused = check(model, X, folded, convolutions)
    if net in (Optional, OptionalOtherWay):
        torch.testing.assert_close(fused(X, X), model(X, X))
    if net is Flag:
        torch.testing.assert_close(fused(X, features=True), model(X, features=True))
    if net is Untraceable:
        torch.testing.assert_close(fused(X, [1]), model(X, [1]))


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
    norm = SWBN(4)
    block = Plain(conv=nn.Conv2d(4, 4, 1), norm=norm)
    check(Controlled(conv=norm, block=block), X, folded=0, convolutions=1)


def test_layers_that_use_their_weight_in_their_own_way_are_left():
    class Standardized(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    hooked = nn.Conv2d(4, 4, 1)
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    patched = nn.Conv2d(4, 4, 1)
    patched.forward = lambda x: torch.relu(nn.Conv2d.forward(patched, x))
    for layer in (Standardized(4, 4, 1), parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), hooked, patched):
        check(nn.Sequential(layer, SWBN(4)), X, folded=0, convolutions=1)


def test_hooks_between_the_two_go_on_seeing_what_they_saw():
    seen = []

    def tap(module, inputs, output):
        seen.append(output)
        return output + 1

    between = nn.Identity()
    between.register_forward_hook(tap)
    check(nn.Sequential(nn.Conv2d(4, 4, 1), between, SWBN(4)), X, folded=0, convolutions=1)
    around = nn.Sequential(nn.Conv2d(4, 4, 1))
    around.register_forward_hook(tap)
    check(nn.Sequential(around, SWBN(4)), X, folded=0, convolutions=1)
    block = Plain(conv=nn.Conv2d(4, 4, 1), norm=SWBN(4))  # around both they change nothing inside
    block.register_forward_hook(tap)
    check(nn.Sequential(block, nn.Conv2d(4, 4, 1), SWBN(4)), X, folded=2)
    assert all(isinstance(value, torch.Tensor) for value in seen)  # tracing ran none of them


def test_parameters_that_the_network_reads_elsewhere_are_an_error():
    class Read(Net):
        def forward(self, x):
            return self.norm(torch.relu(x)) + self.norm.bias.view(1, -1, 1, 1)

    with pytest.raises(ValueError, match="'norm': the network uses this layer's parameters outside of it"):
        fuse_norms(Read(norm=SWBN(4)))


def test_a_forward_set_on_a_norm_is_an_error():
    model = nn.Sequential(SWBN(4))
    model[0].forward = lambda x: x * 2
    with pytest.raises(ValueError, match="'0' has a forward set on the instance"):
        fuse_norms(model)


def test_fusing_draws_no_random_numbers_and_trains_what_was_trained():
    model = nn.Sequential(nn.ReLU(), SWBN(4), nn.ReLU(), SWBN(4).requires_grad_(False))
    torch.manual_seed(0)
    fused = fuse_norms(model)
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), after)
    assert fused[1].weight.requires_grad and not fused[3].weight.requires_grad


def test_a_fused_network_is_fused_again_and_traced_by_others():
    model = nn.Sequential(SWBN(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4), SWBN(4, 1), SWBN(4, 1))
    fused = check(model, X, folded=1, convolutions=2)
    traced = torch.fx.symbolic_trace(fused)
    torch.testing.assert_close(traced(X), fused(X))
    again = fuse_norms(nn.Sequential(fused, nn.Linear(4, 4), SWBN(4, 1).double()))
    assert again.fusion_report.folded == {"2": "1"} and not again.fusion_report.untraced


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 2e-3)])
def test_in_16_bit_a_large_mean_leaves_no_offset(dtype, tolerance):
    # Alone the layer is one rounded matrix: its bias must be made of that one.
    torch.manual_seed(0)
    norm = NormFactory("swbn", momentum=None, affine=False)(8)
    norm(torch.randn(64, 8, 8, 8) + 30)
    nn.init.normal_(norm.whitening_matrix, std=0.2)
    norm = norm.eval().to(dtype)
    fused = fuse_norms(nn.Sequential(nn.Conv2d(8, 8, 1).to(dtype), nn.ReLU(), norm))[2]
    x = (torch.randn(64, 8, 8, 8) + 30).to(dtype)
    offset = (fused.double()(x.double()) - norm(x.double())).mean((0, 2, 3)).abs().max()
    assert offset < tolerance * 30 / 8


def test_hooks_on_a_norm_go_on_seeing_its_input_and_output():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), SWBN(4))
    seen = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    fused = check(model, X, folded=0, convolutions=1)
    seen.clear()
    model.eval()(X), fused(X)
    torch.testing.assert_close(seen[1], seen[0])


def test_batchnorm_beside_ours_is_folded_or_kept():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), SWBN(4))
    fused = check(model, X, folded=1, convolutions=1, kept=1)
    assert fused.fusion_report.kept == ("3",) and "1 BatchNorm kept" in str(fused.fusion_report)


@pytest.mark.parametrize(("name", "ndim"), [("swbn-kl", 1), ("iternorm", 2), ("dbn", 3), ("swbn-kl", None)])
def test_a_norm_alone_is_one_convolution(name, ndim):
    norm = NormFactory(name, num_groups=2)(4, ndim)
    for dims in {None: (0, 1, 2, 3), 1: (0, 1)}.get(ndim, (ndim,)):
        check(norm, torch.randn(9, 4, *[5] * dims, dtype=torch.float64), folded=0, convolutions=1)


@pytest.mark.parametrize("options", [{"affine": False}, {"bias": False}])
def test_without_gamma_or_beta(options):
    factory = NormFactory("swbn-kl", step_size=0.05, **options)
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
    apart = {"densenet", "shufflenet_v2", "mobilenet_v2", "mobilenet_v3", "mnasnet", "efficientnet", "efficientnet_v2",
             "resnext", "regnet_x", "regnet_y", "maxvit"}  # fmt: skip
    assert bool(report.convolutions) == (family in apart)


def test_layout_dtype_and_requires_grad_of_the_layer_stay():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), SWBN(4)).to(memory_format=torch.channels_last).bfloat16()
    model[0].weight.requires_grad_(False)
    fused = fuse_norms(model)[0]
    assert fused.weight.is_contiguous(memory_format=torch.channels_last) and not fused.weight.requires_grad
    assert fused.weight.dtype == fused.bias.dtype == torch.bfloat16


def test_errors():
    with pytest.raises(ValueError, match="'0': SWBN2d with track_running_stats=False"):
        fuse_norms(nn.Sequential(NormFactory("swbn", track_running_stats=False)(4)))
    untracked = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    assert fuse_norms(untracked).fusion_report.kept == ("1",)
    lazy = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"'0' \(LazyConv2d\) has seen no input yet; run the network once first"):
        fuse_norms(lazy)
    model = append_norm(convert_norms(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), SWBN), "1", SWBN)
    with pytest.raises(ValueError, match="this network was fused"):
        revert_norms(nn.Sequential(fuse_norms(model)))
    revert_norms(model)
