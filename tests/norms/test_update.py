"""Statistics made anew for averaged weights, by the function and by the callback beside Lightning's averaging."""

import copy
import functools

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swbn_lightning import NormFactory, SWBN1d, freeze_norms, unfreeze_norms, update_norms
from swbn_lightning.training.callbacks.update_norms import UpdateNorms
from tests.norms.networks import lived, same_state
from tests.norms.reference import ReferenceSWBN

NAMES = ["swbn-fro", "swbn-kl", "iternorm", "dbn", "bn"]


def options(name):
    return {"step_size": 0.1} if name.startswith("swbn") else {}


def network(name):
    return lived(nn.Sequential(nn.Linear(8, 6), NormFactory(name, **options(name))(6, 1), nn.Dropout(0.5))).train()


def data(batches=4):
    torch.manual_seed(3)
    return [torch.randn(16, 8) * 3 + 2 for _ in range(batches)]


@pytest.mark.parametrize("name", NAMES)
def test_plain_averages_of_statistics_and_matrices(name):
    model = network(name).double()
    norm, loader = model[1], [x.double() for x in data()]
    features = [model[0](x).detach().numpy() for x in loader]
    w0 = norm.whitening_matrix.clone() if name != "bn" else None
    momentum = norm.momentum
    update_norms(loader, model)
    expected = np.mean([f.mean(0) for f in features], axis=0)
    np.testing.assert_allclose(norm.running_mean.numpy(), expected, rtol=1e-10)
    if norm.__dict__["_buffers"].get("running_var") is not None:
        expected = np.mean([f.var(0, ddof=1) for f in features], axis=0)
        np.testing.assert_allclose(norm.running_var.numpy(), expected, rtol=1e-10)
    if name.startswith("swbn"):
        alone, matrices = ReferenceSWBN(6, norm.criterion, 0.1), []
        alone.w = [w0[0].numpy()]
        for f in features:
            alone.train(f.T)
            matrices.append(alone.w[0])
        np.testing.assert_allclose(norm.whitening_matrix[0].numpy(), np.mean(matrices, axis=0), rtol=1e-10, atol=1e-12)
        assert (norm.whitening_matrix - w0).abs().max() > 1e-3
    elif name != "bn":
        alone = copy.deepcopy(norm).train()
        alone.momentum = 1.0
        matrices = []
        for f in features:
            alone(torch.from_numpy(f))
            matrices.append(alone.whitening_matrix.numpy().copy())
        np.testing.assert_allclose(norm.whitening_matrix.numpy(), np.mean(matrices, axis=0), rtol=1e-10)
    assert norm.num_batches_tracked == 4 and norm.momentum == momentum
    assert model.training and norm.training and model[2].training


def test_dropout_is_off_and_modes_stay():
    model = nn.Sequential(nn.Dropout(0.9), SWBN1d(8)).eval()
    model[0].train()
    update_norms(data(), model)
    torch.testing.assert_close(model[1].running_mean, torch.stack(data()).mean((0, 1)))
    assert [m.training for m in model.modules()] == [False, True, False]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_is_not_finite_does_not_count(name):
    good = network(name)
    model = copy.deepcopy(good)
    update_norms(data(3), good)
    bad = torch.full((16, 8), float("nan"))
    x, y, z = data(3)
    update_norms([bad, x, bad, y, z, bad], model)
    assert same_state(model, good.state_dict())


class WithTeacher(nn.Module):
    """Layers that a forward does not reach, one of them in training alone, and one under a compiled name."""

    def __init__(self):
        super().__init__()
        self.norm = SWBN1d(8)
        self.compiled = torch.compile(self.norm, backend="eager")
        self.teacher = lived(nn.Sequential(nn.BatchNorm1d(8), SWBN1d(8)))
        self.aux = lived(nn.BatchNorm1d(8))

    def forward(self, x):
        return self.aux(self.norm(x)) if self.training else self.norm(x)


def test_layers_that_no_batch_reaches_stay_as_they_are():
    model = WithTeacher().train()
    teacher, aux = copy.deepcopy(model.teacher.state_dict()), copy.deepcopy(model.aux.state_dict())
    update_norms(data(), model)
    assert same_state(model.teacher, teacher) and same_state(model.aux, aux)
    assert model.norm.num_batches_tracked == 4
    assert all(module.training for module in (model, model.norm, model.compiled, model.aux))


def test_batches_as_loaders_give_them():
    plain = network("iternorm")
    pairs, dicts, own = (copy.deepcopy(plain) for _ in range(3))
    update_norms(data(), plain)
    update_norms(DataLoader(TensorDataset(torch.cat(data()), torch.zeros(64)), batch_size=16), pairs)

    class OfDicts(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, batch):
            return self.model(batch["x"])

    update_norms(({"x": x} for x in data()), OfDicts(dicts))
    update_norms(data(), own, forward=own)
    for model in (pairs, dicts, own):
        assert same_state(model, plain.state_dict())


def test_frozen_layers_and_errors():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), SWBN1d(4))
    freeze_norms(model[1])
    before = copy.deepcopy(model[1].state_dict())
    update_norms(data(), model)
    assert same_state(model[1], before) and model[2].num_batches_tracked == 4
    state = copy.deepcopy(model.state_dict())
    for nothing in ([], [torch.full((16, 8), float("nan"))]):
        with pytest.raises(ValueError, match="the loader gave no batch that is finite"):
            update_norms(nothing, model)
    lazy = nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"'1' \(LazyBatchNorm1d\) has seen no input yet"):
        update_norms(data(), lazy)
    thawed = copy.deepcopy(model)
    unfreeze_norms(thawed)
    for other in (model, thawed):
        with pytest.raises(RuntimeError, match="expected 4 channels|shapes cannot be multiplied"):
            update_norms([*data(), torch.randn(16, 7)], other)
        assert same_state(other, state)
    assert model[2].training and model[2].momentum == 0.05
    for other in (nn.Linear(3, 4), freeze_norms(model), SWBN1d(3, track_running_stats=False)):
        with pytest.raises(ValueError, match="no whitening layer or BatchNorm with running statistics"):
            update_norms(data(), other)


class Regression(pl.LightningModule):
    def __init__(self, name):
        super().__init__()
        self.model = nn.Sequential(network(name), nn.Linear(6, 1))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.off_in_validation = off(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(name, *averaging, **trainer):
    module = Regression(name).train()
    loader = DataLoader(TensorDataset(torch.cat(data()), torch.ones(64, 1)), batch_size=16)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=4, callbacks=list(averaging), logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"enable_checkpointing": False, **trainer},
    )  # fmt: skip
    trainer.fit(module, loader)
    return module, trainer


AVERAGING = {
    "WeightAveraging": WeightAveraging,
    "without buffers": functools.partial(WeightAveraging, use_buffers=False),
    "EMA": functools.partial(EMAWeightAveraging, decay=0.8),
    "SWA": functools.partial(StochasticWeightAveraging, swa_lrs=0.05, swa_epoch_start=2),
    "none": pl.Callback,
}


def off(module):
    """How far the layer's statistics are from those of the features that it gets."""
    linear, norm = module.model[0][0], module.model[0][1]
    features = linear(torch.cat(data())).detach()
    return ((norm.running_mean - features.mean(0)) / features.std(0)).abs().max().item()


@pytest.mark.parametrize(
    ("name", "averaging"), [*(("swbn-fro", averaging) for averaging in AVERAGING), ("iternorm", "EMA"), ("bn", "SWA")]
)
@pytest.mark.filterwarnings("ignore:.*max_epochs.*")
def test_a_lightning_run_with_averaged_weights_ends_with_their_statistics(name, averaging, tmp_path):
    made = AVERAGING[averaging]
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    torch.manual_seed(0)
    module, _ = fit(name, made(), UpdateNorms(), checkpoint, enable_checkpointing=True)
    assert off(module) < 1e-5
    saved = torch.load(tmp_path / "averaged.ckpt", weights_only=True)["state_dict"]
    assert same_state(module, saved)
    fresh = Regression(name)
    fresh.load_state_dict(saved)
    if averaging not in ("SWA", "none"):
        torch.manual_seed(0)
        without, _ = fit(name, made())
        assert off(without) > 1e-2  # what this is for
        torch.testing.assert_close(without.model[0][0].weight, module.model[0][0].weight)


def test_number_of_batches_own_forward_and_order():
    seen = []
    update = UpdateNorms(num_batches=3, forward=lambda module, batch: seen.append(batch[0]) or module(batch[0]))
    module, _ = fit("swbn-fro", update)
    assert len(seen) == 3 and module.model[0][1].num_batches_tracked == 3
    with pytest.raises(ValueError, match="UpdateNorms must come after EMAWeightAveraging"):
        fit("swbn-fro", UpdateNorms(), EMAWeightAveraging())
    with pytest.raises(ValueError, match="num_batches must be"):
        UpdateNorms(num_batches=0)


def run(module, callbacks, loaders, **trainer):
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": 2, "enable_checkpointing": False, **trainer},
    )  # fmt: skip
    trainer.fit(module.train(), loaders)
    return trainer


def loader(batch_size=16):
    return DataLoader(TensorDataset(torch.cat(data()), torch.ones(64, 1)), batch_size=batch_size)


class Once(torch.utils.data.IterableDataset):
    def __init__(self):
        self.batches = iter(data())

    def __iter__(self):
        return ((x, torch.ones(len(x), 1)) for x in self.batches)


def test_nothing_is_lost_where_there_is_nothing_to_do(tmp_path):
    module = Regression("swbn-fro")
    kept = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, every_n_epochs=10)
    with pytest.warns(UserWarning, match="UpdateNorms has left the statistics as they were: the loader gave no batch"):
        run(module, [UpdateNorms(), kept], DataLoader(Once(), batch_size=None), max_epochs=1, enable_checkpointing=True)
    assert (tmp_path / "last.ckpt").exists() and module.model[0][1].num_batches_tracked == 7 + 4
    with pytest.raises(ValueError, match="has no whitening layer or BatchNorm"):
        run(Regression("gn"), [UpdateNorms()], loader())
    run(module, [UpdateNorms(), ModelCheckpoint(tmp_path)], loader(), fast_dev_run=True, enable_checkpointing=True)
    assert not (tmp_path / "averaged.ckpt").exists()


def test_checkpoints_of_the_run_hold_the_average_and_later_ones_the_update(tmp_path):
    module = Regression("swbn-fro")
    every = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    trainer = run(module, [EMAWeightAveraging(decay=0.9), UpdateNorms(), every], loader(), enable_checkpointing=True)
    states = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("epoch*.ckpt"))]
    assert not torch.equal(
        states[-1]["state_dict"]["model.1.weight"], states[-1]["current_model_state"]["model.1.weight"]
    )
    trainer.validate(module, loader(), verbose=False)  # which takes the callback's copy of the average
    assert module.off_in_validation < 1e-5 and off(module) < 1e-5
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert same_state(module, torch.load(tmp_path / "later.ckpt", weights_only=True)["state_dict"])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())  # once more with the same callbacks: the average first, the update at its end
    assert off(module) < 1e-5


class OfBytes(Regression):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen = (batch[0] / 255).dtype
        return batch


def test_transfer_hooks_run_as_in_training():
    module = OfBytes("swbn-fro")
    images = TensorDataset(torch.randint(0, 255, (64, 8), dtype=torch.uint8), torch.ones(64, 1))
    module.forward = lambda x: module.model((x / 255).to(torch.bfloat16))
    run(module, [UpdateNorms()], DataLoader(images, batch_size=16), precision="bf16-true")
    assert module.seen == torch.float32
