"""Options beyond the paper: the covariance of some of the samples, and a step of W at some of the batches."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swbn_lightning import SWBN1d, SWBN2d
from swbn_lightning.norms import functional as WF
from tests.norms.reference import ReferenceSWBN, to_columns


def w_of(norm):
    return norm.whitening_matrix.detach().clone()


def test_the_covariance_of_some_samples():
    x = torch.randn(16, 6, 8, 8, dtype=torch.float64) @ torch.randn(8, 8, dtype=torch.float64)
    norm = SWBN2d(6, step_size=0.1, cov_samples=100).double()
    norm(x)
    columns = to_columns(x.numpy())
    xs = (columns - columns.mean(1, keepdims=True)) / np.sqrt(columns.var(1, ddof=1, keepdims=True) + 1e-8)
    # n = 1024: every 10th would be every 10th place of an image of 64; 9 has no factor in common with 64.
    chosen = to_columns_by_sample(x.numpy(), xs)[:, ::9]
    assert 100 <= chosen.shape[1] <= 128
    paper = ReferenceSWBN(6, "fro", 0.1)
    w = paper.w[0] - 0.1 * paper._delta(paper.w[0], chosen @ chosen.T / chosen.shape[1])
    np.testing.assert_allclose(norm.whitening_matrix[0].numpy(), (w + w.T) / 2, rtol=1e-10, atol=1e-12)
    # Statistics, output and gradient are those of the whole batch.
    whole = SWBN2d(6, step_size=0.1).double()
    whole(x)
    torch.testing.assert_close(norm.running_var, whole.running_var)


def to_columns_by_sample(x, xs):
    """Columns image after image, place after place: the order of samples in memory with the channels last."""
    return xs.reshape(x.shape[1], x.shape[0], -1).reshape(x.shape[1], -1)


def test_few_samples_are_all_taken_and_places_vary():
    norm = SWBN2d(4, cov_samples=32)
    rows = torch.arange(64.0).view(-1, 1).expand(64, 4)
    assert len(norm._samples_of(rows[:32], 16)) == 32
    for positions in (1, 16, 49, 64, 12 * 15):
        for n in (positions * 7, positions * 32):
            taken = norm._samples_of(torch.arange(float(n)).view(-1, 1).expand(n, 4), positions)[:, 0]
            assert len(taken) >= min(32, n)
            if len(taken) >= 4 * positions:
                assert len(set((taken % positions).tolist())) == positions


def test_whitening_with_a_quarter_of_the_samples_gets_as_far():
    torch.manual_seed(0)
    mix = torch.eye(8) + torch.randn(8, 8) / 3
    results = []
    for options in ({}, {"cov_samples": 256}):
        torch.manual_seed(1)
        norm = SWBN2d(8, step_size=0.02, **options)
        for _ in range(300):
            y = norm(torch.einsum("oc,nchw->nohw", mix, torch.randn(16, 8, 8, 8)))
        results.append((WF.covariance(y) - torch.eye(8)).norm().item())
    start = (WF.covariance(torch.einsum("oc,nchw->nohw", mix, torch.randn(64, 8, 8, 8))) - torch.eye(8)).norm()
    assert max(results) < 0.2 * start and results[1] < 1.5 * results[0], results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_w_steps_at_every_third_batch_and_statistics_at_each(dtype):
    torch.manual_seed(0)
    batches = [torch.randn(16, 4) for _ in range(7)]
    norm, every = SWBN1d(4, step_size=0.1, update_every=3), SWBN1d(4, step_size=0.1)
    for i, x in enumerate(batches):
        before = w_of(norm)
        y = norm(x.to(dtype))
        assert torch.equal(norm.whitening_matrix, before) == (i % 3 != 0)
        assert torch.isfinite(y).all()
        if i % 3 == 0:
            with torch.no_grad():
                every.whitening_matrix.copy_(before)
        every(x.to(dtype))
        torch.testing.assert_close(norm.running_mean, every.running_mean)
        if i % 3 == 0:
            torch.testing.assert_close(norm.whitening_matrix, every.whitening_matrix)
    assert norm.num_batches_tracked == 7


def test_what_was_counted_goes_on_after_loading_and_ends_with_a_reset():
    torch.manual_seed(0)
    batches = torch.randn(9, 16, 4)
    whole = SWBN1d(4, step_size=0.1, update_every=4)
    for x in batches:
        whole(x)
    first = SWBN1d(4, step_size=0.1, update_every=4)
    for x in batches[:6]:
        first(x)
    second = SWBN1d(4, step_size=0.1, update_every=4)
    second.load_state_dict(first.state_dict())
    for x in batches[6:]:
        second(x)
    assert torch.equal(second.whitening_matrix, whole.whitening_matrix)
    second.reset_running_stats()
    second(batches[0])
    assert not torch.equal(second.whitening_matrix[0], torch.eye(4))


def test_checkpointing_counts_a_batch_once():
    plain = nn.Sequential(nn.Linear(4, 4), SWBN1d(4, step_size=0.1, update_every=2))
    model = copy.deepcopy(plain)
    for _ in range(4):
        x = torch.randn(16, 4)
        plain(x).pow(3).sum().backward()
        checkpoint(model, x, use_reentrant=False).pow(3).sum().backward()
    torch.testing.assert_close(model[1].whitening_matrix, plain[1].whitening_matrix)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


def test_replicas_share_the_count():
    norm = SWBN1d(4, step_size=0.1, update_every=3)
    steps = []
    for _ in range(6):
        before = w_of(norm)
        replica = norm._replicate_for_data_parallel()
        replica._buffers, replica._parameters = norm._buffers, norm._parameters
        replica(torch.randn(16, 4))
        steps.append(not torch.equal(before, norm.whitening_matrix))
    assert steps == [True, False, False] * 2


def test_float16_takes_all_samples_for_its_range():
    norm = SWBN2d(4, cov_samples=64, step_size=1e-6, affine=False)
    norm.whitening_matrix.mul_(2000)
    x = torch.randn(64, 4, 32, 32) * 1e-2
    x[5, :, 3, 4] = torch.tensor([300.0, -300, 200, 100])  # a place that the subset may miss
    assert norm(x.half()).isfinite().all()


def test_errors():
    with pytest.raises(ValueError, match="cov_samples must be at least 128, 8 times the channels .* got 100"):
        SWBN2d(16, cov_samples=100)
    SWBN2d(16, cov_samples=100, num_groups=2)
    with pytest.raises(ValueError, match="cov_samples must be at least"):
        SWBN2d(16, cov_samples=1e4)
    with pytest.raises(ValueError, match="update_every must be an integer of at least 1, got 0"):
        SWBN2d(16, update_every=0)
    compiled = torch.compile(SWBN1d(4, update_every=2), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="update_every=2 counts batches on the host"):
        compiled(torch.randn(16, 4))
    with pytest.raises(RuntimeError, match="update_every=2 counts batches on the host"):
        torch.jit.trace(SWBN1d(4, update_every=2), torch.randn(16, 4), check_trace=False)
    assert "update_every=2" in repr(SWBN1d(4, update_every=2)) and "cov_samples=64" in repr(SWBN1d(4, cov_samples=64))
    assert "cov_samples" not in repr(SWBN1d(4))
