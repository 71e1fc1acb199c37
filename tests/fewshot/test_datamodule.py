"""Episodes as Lightning gets them."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from fewshot import EpisodeSettings, EpisodicDataModule, PrototypicalNetwork, sample_episodes
from fewshot.datamodule import EpisodeBatch, EpisodeDataset, _whole_episodes_first
from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip

SETTINGS = EpisodeSettings(ways=3, shots=2, queries=4, episodes=6)


@pytest.fixture(scope="module")
def image_set():
    # The image tells its own number, so that a batch tells which images it holds.
    numbers = torch.arange(80)
    images = numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    return ImageSet(images, numbers // 10, tuple("abcdefgh"), "numbers")


def test_items_are_the_sampled_episodes(image_set):
    dataset = EpisodeDataset(image_set, SETTINGS, seed=4, augment=CropFlip())
    dataset.set_epoch(3)
    episodes = sample_episodes(image_set.labels, 3, 2, 4, 6, seed=4, epoch=3)
    batch = dataset.__getitems__([5, 0, 2])
    assert torch.equal(batch.classes, episodes.classes[[5, 0, 2]])
    assert torch.equal(batch.support[..., 0, 0, 0].long(), episodes.support[[5, 0, 2]])
    assert torch.equal(batch.query[:, :, 0, 0, 0].long(), episodes.query[[5, 0, 2]].flatten(1))


class Recorder(pl.Callback):
    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch: EpisodeBatch, batch_idx):
        self.batches.append((trainer.current_epoch, batch.classes.flatten().tolist(), batch.query.mean().item()))


def record(epochs=2, seed=0, workers=0, **data):
    pl.seed_everything(seed)
    recorder = Recorder()
    settings = EpisodeSettings(ways=4, shots=1, queries=2, episodes=4)
    module = EpisodicDataModule(
        train=settings, val=EpisodeSettings(ways=2, queries=2, episodes=5), episodes_per_step=2, num_workers=workers,
        **data,
    )  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, callbacks=[recorder], limit_val_batches=0, num_sanity_val_steps=0,
    )  # fmt: skip
    model = PrototypicalNetwork(backbone="resnet20", backbone_args={"in_channels": 1})
    trainer.fit(model, datamodule=module)
    return recorder.batches


def test_training_episodes_are_new_each_epoch_and_the_same_for_the_same_seed():
    # Frozen tasks give too good results; the same augmentation each epoch is Lightning issue 20412.
    first = record(crop_padding=2)
    assert [epoch for epoch, *_ in first] == [0, 0, 1, 1]
    assert len({tuple(classes) for _, classes, _ in first}) == 4 and len({mean for *_, mean in first}) == 4
    assert record(crop_padding=2) == first
    assert record(crop_padding=2, workers=2) == first  # workers that outlive the epoch see its number
    assert record(seed=1, crop_padding=2) != first


def test_evaluation_order_starts_with_whole_episodes():
    labels = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat(np.arange(5), [9, 7, 8, 12, 7])))
    order = _whole_episodes_first(labels, per_class=3)
    assert sorted(order.tolist()) == list(range(43))
    assert labels[order[:15]].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_the_module_needs_its_data_module_and_matching_images():
    trainer = pl.Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    model = PrototypicalNetwork(backbone="resnet20")
    loader = torch.utils.data.DataLoader(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="needs one of this package's data modules"):
        trainer.fit(model, loader)
    with pytest.raises(ValueError, match="1 channel.*takes 3"):
        trainer.fit(model, datamodule=EpisodicDataModule())


def test_an_evaluation_cut_short_says_so_and_a_probe_without_an_episode_passes():
    data = EpisodicDataModule(val=EpisodeSettings(ways=5, queries=15, episodes=5), eval_batch_size=100)
    model = PrototypicalNetwork(backbone="resnet20", backbone_args={"in_channels": 1})
    options = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    with pytest.warns(UserWarning, match="evaluated on 96 of the val split's 3024 images"):
        pl.Trainer(limit_val_batches=1, **options).validate(model, datamodule=data, verbose=False)
    assert model.results["val"]["images"] == 96
    model.results.clear()
    data = EpisodicDataModule(val=EpisodeSettings(ways=50, queries=15, episodes=5), eval_batch_size=100)
    pl.Trainer(fast_dev_run=True, **options).validate(model, datamodule=data, verbose=False)
    assert not model.results


def test_erasing_is_the_episodes_own_and_leaves_the_mean_colour():
    few = EpisodeSettings(ways=3, shots=2, queries=4, episodes=6)
    plain, erasing = (
        EpisodicDataModule(train=few, episodes_per_step=2, crop_padding=2, seed=1, erasing=p) for p in (0.0, 1.0)
    )
    first, second = (next(iter(data.train_dataloader())) for data in (plain, erasing))
    assert torch.equal(first.augmentation, second.augmentation[..., :3])  # crops as without
    whole, erased = (data.on_after_batch_transfer(batch, 0) for data, batch in ((plain, first), (erasing, second)))
    images, others = (torch.cat([b.support.flatten(1, 2), b.query], 1).flatten(0, 1) for b in (whole, erased))
    for image, other, (top, left, height, width) in zip(
        images, others, second.augmentation[..., 3:].flatten(0, 1).tolist(), strict=True
    ):
        assert 0 < height < 28 and 0 < width < 28
        expected = image.clone()
        expected[:, top : top + height, left : left + width] = 0
        assert torch.equal(other, expected)
    with pytest.raises(ValueError, match="probability of erasing"):
        EpisodicDataModule(erasing=1.5)
