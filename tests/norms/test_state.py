"""What a layer's state is, and how it is loaded, cast, copied and reset."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.norms.test_contract import BATCH_NORM, NAMES, PER_DIM, like, make, state


@pytest.mark.parametrize(("affine", "tracking"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("name", "ndim"), PER_DIM)
def test_a_batchnorm_checkpoint_loads_strictly_and_gives_the_same_output(name, ndim, affine, tracking):
    batch_norm = BATCH_NORM[ndim](5, eps=1e-5, affine=affine, track_running_stats=tracking)
    shape = (8, 5, *[4] * ndim)
    for _ in range(3):
        batch_norm(torch.randn(shape) * torch.rand(5).view(1, 5, *[1] * ndim) * 3 + 1)
    if affine:
        nn.init.normal_(batch_norm.weight)
    norm = make(name, ndim, 5, eps=1e-5, affine=affine, track_running_stats=tracking)
    norm(torch.randn(shape))
    loaded = norm.load_state_dict(batch_norm.state_dict())
    assert not loaded.missing_keys and not loaded.unexpected_keys
    if tracking:
        x = torch.randn(shape)
        torch.testing.assert_close(norm.eval()(x), batch_norm.eval()(x), atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError, match="running_mean"):
            norm.load_state_dict({k: v for k, v in batch_norm.state_dict().items() if k != "running_mean"})
    # Before PyTorch 0.4.1 a BatchNorm did not count its batches.
    norm.load_state_dict(
        {k: v for k, v in batch_norm.state_dict().items() if k != "num_batches_tracked"}, tracking or affine
    )
    whole = nn.Sequential(nn.Conv2d(5, 5, 1), norm)  # as a part of a network too
    whole.load_state_dict(nn.Sequential(nn.Conv2d(5, 5, 1), batch_norm).state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_meta_layers_take_a_state_in_place_of_theirs(name):
    batch_norm = nn.BatchNorm2d(6, eps=0.1)
    batch_norm(like(batch_norm, (8, 6, 5, 5)).float())
    x = like(batch_norm, (4, 6, 5, 5)).float()
    for source in (batch_norm, make(name, eps=0.1)):
        norm = make(name, eps=0.1, device="meta")
        norm.load_state_dict(source.state_dict(), assign=True)
        assert not any(tensor.is_meta for tensor in (*norm.parameters(), *norm.buffers()))
        torch.testing.assert_close(norm.eval()(x), source.eval()(x))
        norm.train()(x * float("nan"))
        assert norm.num_batches_rejected == 1
        # A 16-bit state becomes float32 on the way.
        half = {key: value.half() if value.is_floating_point() else value for key, value in source.state_dict().items()}
        norm.load_state_dict(half, assign=True)
        assert all(value.dtype == torch.float32 for value in state(norm).values())
    assert make(name, device="meta")(x.to("meta")).is_meta


@pytest.mark.parametrize("name", NAMES)
def test_state_is_what_the_documentation_names(name):
    own = {"running_var"} if name.startswith("swbn") else {"online_matrix"} if name == "online" else set()
    kept = {"running_mean", "num_batches_tracked", "whitening_matrix"} | own
    norm = make(name, num_groups=2)
    assert set(norm.state_dict()) == {"weight", "bias"} | kept
    assert norm.whitening_matrix.shape == (2, 3, 3)
    assert set(make(name, bias=False).state_dict()) == {"weight"} | kept
    bare = make(name, affine=False, track_running_stats=False)
    learnt = {"running_var": "whitening_matrix"}  # of the layers that learn, also without running statistics
    assert set(bare.state_dict()) == {learnt.get(name, name) for name in own}
    x = like(bare, (8, 6, 5, 5))
    torch.testing.assert_close(bare.eval()(x), bare(x))  # the batch's own statistics


@pytest.fixture(params=[False, True], ids=["data", "swapped"])
def _conversion(request):
    """Conversions put new data into a tensor, or a new tensor in its place."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_conversion")
@pytest.mark.parametrize("name", NAMES)
def test_casting_to_half_and_back_keeps_the_state_to_the_bit(name):
    norm = make(name)
    norm(like(norm, (8, 6, 5, 5)).float())
    before = copy.deepcopy(state(norm))
    norm.half()
    assert norm.weight.dtype == torch.float16
    assert all(torch.equal(value, before[key]) for key, value in state(norm.float()).items())
    assert all(value.dtype == torch.float64 for value in state(norm.double()).values())
    made = make(name, dtype=torch.bfloat16)
    assert made.weight.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in state(made).values())


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_state_dicts_are_their_own(name):
    norm = make(name, num_groups=2)
    held = dict(norm.named_buffers())
    norm(torch.randn(8, 6, 5, 5))
    assert all(buffer is held[key] for key, buffer in norm.named_buffers())  # which a CUDA graph may hold
    other = make(name, num_groups=2)
    other.load_state_dict(norm.state_dict())
    twins = copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), other
    learnt = norm.whitening_matrix.clone()
    norm(torch.randn(8, 6, 5, 5) * torch.arange(1, 7).view(1, 6, 1, 1))
    assert not torch.equal(norm.whitening_matrix, learnt)
    for twin in twins:
        assert torch.equal(twin.whitening_matrix, learnt)
        twin.load_state_dict(norm.state_dict())
        assert torch.equal(twin.whitening_matrix, norm.whitening_matrix)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_state_leaves_w_alone(name):
    norm = make(name, 1)
    norm(torch.randn(16, 6))
    w = norm.whitening_matrix.clone()
    norm.load_state_dict({"weight": torch.ones(6)}, strict=False)
    assert torch.equal(norm.whitening_matrix, w) and norm.num_batches_tracked == 1


@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_reset_and_meta_device(name, tracking):
    norm = make(name, track_running_stats=tracking)
    fresh = copy.deepcopy(norm)
    norm(torch.randn(8, 6, 5, 5))
    nn.init.normal_(norm.weight)
    norm.reset_parameters()
    with torch.device("meta"):
        meta = make(name, track_running_stats=tracking)
    for made in (make(name, track_running_stats=tracking, device="meta"), meta):
        assert all(value.is_meta for value in made.state_dict().values())
        made.to_empty(device="cpu").reset_parameters()
        for key, value in fresh.state_dict().items():
            assert torch.equal(made.state_dict()[key], value) and torch.equal(norm.state_dict()[key], value)
    assert torch.equal(made(like(made, (8, 6, 3, 3)).float()), fresh(like(fresh, (8, 6, 3, 3)).float()))
