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

NAMES = ["swbn-fro", "online", "iternorm", "dbn", "bn"]


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
    momentum, alone = norm.momentum, copy.deepcopy(norm).train()
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
        alone.momentum = 1.0
        matrices = []
        for f in features:
            alone(torch.from_numpy(f))
            matrices.append(alone.whitening_matrix.numpy().copy())
        np.testing.assert_allclose(norm.whitening_matrix.numpy(), np.mean(matrices, axis=0), rtol=1e-10)
    assert norm.num_batches_tracked == 4 and norm.momentum == momentum
    assert model.training and norm.training and model[2].training  # dropout was off: the means are exact


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_is_not_finite_does_not_count(name):
    good = network(name)
    model = copy.deepcopy(good)
    update_norms(data(3), good)
    bad = torch.full((16, 8), float("nan"))
    x, y, z = data(3)
    update_norms([bad, x, bad, y, z, bad], model)
    assert same_state(model, good.state_dict())


def test_layers_that_no_batch_reaches_stay_as_they_are():
    model = nn.ModuleDict({"norm": SWBN1d(8), "teacher": lived(nn.Sequential(nn.BatchNorm1d(8), SWBN1d(8)))})
    teacher = copy.deepcopy(model["teacher"].state_dict())
    update_norms(data(), model, forward=model["norm"])
    assert same_state(model["teacher"], teacher) and model["norm"].num_batches_tracked == 4


def test_batches_as_loaders_give_them():
    plain = network("iternorm")
    pairs, own = copy.deepcopy(plain), copy.deepcopy(plain)
    update_norms(data(), plain)
    update_norms(DataLoader(TensorDataset(torch.cat(data()), torch.zeros(64)), batch_size=16), pairs)
    update_norms(({"x": x} for x in data()), own, forward=lambda batch: own(batch["x"]))
    assert same_state(pairs, plain.state_dict()) and same_state(own, plain.state_dict())


def test_frozen_layers_and_errors():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), SWBN1d(4))
    freeze_norms(model[1])
    before = copy.deepcopy(model[1].state_dict())
    update_norms(data(), model)
    assert same_state(model[1], before) and model[2].num_batches_tracked == 4
    unfreeze_norms(model)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="the loader gave no batch that is finite"):
        update_norms([torch.full((16, 8), float("nan"))], model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        update_norms([*data(), torch.randn(16, 7)], model)
    assert same_state(model, state) and model[2].training and model[2].momentum == 0.05
    with pytest.raises(ValueError, match=r"'1' \(LazyBatchNorm1d\) has seen no input yet"):
        update_norms(data(), nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d()))
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

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(module, *callbacks, loader=None, **trainer):
    if loader is None:
        loader = DataLoader(TensorDataset(torch.cat(data()), torch.ones(64, 1)), batch_size=16)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"max_epochs": 4, "enable_checkpointing": False, **trainer},
    )  # fmt: skip
    trainer.fit(module.train(), loader)
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
    torch.manual_seed(0)
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    module, _ = fit(Regression(name), made(), UpdateNorms(), checkpoint, enable_checkpointing=True)
    assert off(module) < 1e-5
    assert same_state(module, torch.load(tmp_path / "averaged.ckpt", weights_only=True)["state_dict"])
    if averaging not in ("SWA", "none"):
        torch.manual_seed(0)
        without, _ = fit(Regression(name), made())
        assert off(without) > 1e-2  # what this is for
        torch.testing.assert_close(without.model[0][0].weight, module.model[0][0].weight)


def test_number_of_batches_own_forward_and_order():
    seen = []
    update = UpdateNorms(num_batches=3, forward=lambda module, batch: seen.append(batch[0]) or module(batch[0]))
    module, _ = fit(Regression("swbn-fro"), update)
    assert len(seen) == 3 and module.model[0][1].num_batches_tracked == 3
    with pytest.raises(ValueError, match="UpdateNorms must come after EMAWeightAveraging"):
        fit(module, UpdateNorms(), EMAWeightAveraging())
    with pytest.raises(ValueError, match="num_batches must be"):
        UpdateNorms(num_batches=0)


class Once(torch.utils.data.IterableDataset):
    def __init__(self):
        self.batches = iter(data())

    def __iter__(self):
        return ((x, torch.ones(len(x), 1)) for x in self.batches)


def test_nothing_is_lost_where_there_is_nothing_to_do(tmp_path):
    module = Regression("swbn-fro")
    last = {"max_epochs": 1, "enable_checkpointing": True}
    kept = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, every_n_epochs=10)
    with pytest.warns(UserWarning, match="UpdateNorms has left the statistics as they were: the loader gave no batch"):
        fit(module, UpdateNorms(), kept, loader=DataLoader(Once(), batch_size=None), **last)
    assert (tmp_path / "last.ckpt").exists() and module.model[0][1].num_batches_tracked == 7 + 4
    with pytest.warns(UserWarning, match="UpdateNorms has left the statistics as they were: KeyError: 'images'"):
        fit(Regression("swbn-fro"), UpdateNorms(forward=lambda module, batch: {}["images"]), max_epochs=1)
    with pytest.raises(ValueError, match="has no whitening layer or BatchNorm"):
        fit(Regression("gn"), UpdateNorms())
    fit(module, UpdateNorms(), ModelCheckpoint(tmp_path), fast_dev_run=True, enable_checkpointing=True)
    assert not (tmp_path / "averaged.ckpt").exists()


def test_later_checkpoints_hold_the_update(tmp_path):
    module, trainer = fit(Regression("swbn-fro"), EMAWeightAveraging(decay=0.9), UpdateNorms(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert same_state(module, torch.load(tmp_path / "later.ckpt", weights_only=True)["state_dict"])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, trainer.train_dataloader)  # with the same callbacks: the average first, the update at its end
    assert off(module) < 1e-5
