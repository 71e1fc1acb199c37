"""What happens where learn2learn is not installed, or cannot be imported."""

import random
import sys

import pytest
import torch

from fewshot import EpisodeSettings, EpisodeTaskset, EpisodicDataModule, Learn2LearnDataModule, sample_episodes


def test_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    with pytest.raises(ValueError, match="learn2learn cannot be imported .*`make learn2learn` builds it"):
        Learn2LearnDataModule()


def test_our_episodes_as_a_taskset():
    settings = EpisodeSettings(ways=3, shots=2, queries=4, episodes=5)
    data = EpisodicDataModule(train=settings, val=settings, seed=7, eval_seed=9, episodes_per_step=1, crop_padding=2)
    taskset = EpisodeTaskset(data, "val")
    image_set = data.image_set("val")
    episodes = sample_episodes(image_set.labels, 3, 2, 4, 5, seed=9)
    assert len(taskset) == len(list(taskset)) == 5
    for number, (images, labels) in enumerate(taskset):
        assert labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6
        expected = torch.cat([episodes.support[number], episodes.query[number]], dim=1).flatten()
        assert torch.equal(images, data.normalize(image_set.images[expected]))  # K support images, then Q queries
    taskset.set_epoch(3)
    assert torch.equal(taskset[4][0], images)  # validation episodes stay
    for wrong in (5, -1):
        with pytest.raises(IndexError):
            taskset[wrong]
    random.seed(0)
    drawn = {float(taskset.sample()[0].sum()) for _ in range(50)}
    assert drawn == {float(images.sum()) for images, _ in taskset}
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'valid'"):
        EpisodeTaskset(data, "valid")


def test_training_episodes_are_those_of_training_augmented():
    settings = EpisodeSettings(ways=3, shots=2, queries=4, episodes=5)
    data = EpisodicDataModule(train=settings, seed=7, episodes_per_step=1, crop_padding=2, flip=True)
    taskset = EpisodeTaskset(data, epoch=1)
    loader = data.train_dataloader()
    loader.sampler.set_epoch(1)
    for (images, _), raw in zip(taskset, loader, strict=True):
        batch = data.on_after_batch_transfer(raw, 0)
        tasks = images.unflatten(0, (3, 6))
        assert torch.equal(tasks[:, :2], batch.support[0]) and torch.equal(tasks[:, 2:].flatten(0, 1), batch.query[0])
    first = taskset[0][0]
    taskset.set_epoch(2)
    assert not torch.equal(taskset[0][0], first)
