"""learn2learn's tasks for our methods, and our episodes for its algorithms."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cli import main
from fewshot import (
    EpisodeSettings,
    EpisodeTaskset,
    EpisodicDataModule,
    Learn2LearnDataModule,
    PrototypicalNetwork,
)
from fewshot.learn2learn import TaskEpisodes, TaskSplit
from swbn_lightning.backbones import build_backbone

if "SWBN_REQUIRE_LEARN2LEARN" in os.environ:
    import learn2learn as l2l
else:
    l2l = pytest.importorskip("learn2learn", reason="`make learn2learn` builds it")

SETTINGS = EpisodeSettings(ways=3, shots=2, queries=4, episodes=6)


def numbered_images(classes=8, each=10, channels=1, side=8):
    """Images that tell their own number, with labels that are not 0, 1, 2…"""
    numbers = torch.arange(classes * each)
    images = numbers.float().view(-1, 1, 1, 1).expand(-1, channels, side, side).clone()
    return TensorDataset(images, 10 * (numbers // each) + 5)


class Colours(Dataset):
    """Noise around a colour of the class; any kind of image."""

    def __init__(self, kind="tensor", classes=8, each=12, side=8):
        generator = np.random.default_rng(classes)
        hue = generator.integers(0, 200, (classes, 3))
        noise = generator.integers(0, 56, (classes * each, side, side, 3))
        self.images = (hue.repeat(each, 0)[:, None, None] + noise).astype(np.uint8)
        self.labels, self.kind = np.arange(classes).repeat(each), kind

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image = self.images[number]
        if self.kind == "pil":
            image = Image.fromarray(image)
        elif self.kind == "tensor":
            image = torch.from_numpy(image).movedim(-1, 0)
        return image, int(self.labels[number])


def a_taskset(dataset, ways=3, images=6, num_tasks=-1, **kshots):
    meta = l2l.data.MetaDataset(dataset)
    transforms = l2l.data.transforms
    made = [transforms.NWays(meta, ways), transforms.KShots(meta, images, **kshots), transforms.LoadData(meta)]
    made += [transforms.RemapLabels(meta), transforms.ConsecutiveLabels(meta)]
    return l2l.data.TaskDataset(meta, made, num_tasks=num_tasks)


def data_module(train=None, val=None, **options):
    few = EpisodeSettings(ways=3, shots=2, queries=4, episodes=6)
    options = {"train_episodes": few, "val_episodes": few, "test_episodes": few, "episodes_per_step": 2} | options
    return Learn2LearnDataModule(train or Colours(), val or Colours(classes=5), Colours(classes=4), **options)


def a_trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**quiet | {"enable_checkpointing": False, "max_epochs": 1, "num_sanity_val_steps": 0} | options)


def a_network(**options):
    return PrototypicalNetwork(backbone="resnet20", norm="swbn-fro", **options)


@pytest.mark.parametrize("given", ["data set", "MetaDataset", "Taskset"])
def test_tasks_become_episodes(given):
    dataset = numbered_images()
    source = {"data set": lambda: dataset, "MetaDataset": lambda: l2l.data.MetaDataset(dataset)}
    source = source.get(given, lambda: a_taskset(dataset))()
    episodes = TaskEpisodes(TaskSplit("train", source, SETTINGS), seed=3, numbered=False)
    batch = episodes.__getitems__([0, 4])
    assert batch.support.shape == (2, 3, 2, 1, 8, 8) and batch.query.shape == (2, 12, 1, 8, 8)
    assert batch.classes.shape == (2, 3) and len(episodes) == 6
    for e in range(2):
        support, query = batch.support[e, ..., 0, 0, 0].long(), batch.query[e, :, 0, 0, 0].long()
        assert len({*support.flatten().tolist(), *query.tolist()}) == 18  # every image once
        # The number of an image tells its class: ten a class.
        assert torch.equal(support // 10, batch.classes[e][:, None].expand(3, 2))
        assert torch.equal(query // 10, batch.classes[e].repeat_interleave(4))
        assert len(set(batch.classes[e].tolist())) == 3


def test_a_task_in_any_order_becomes_class_after_class():
    meta = l2l.data.MetaDataset(numbered_images())
    transforms = l2l.data.transforms
    drawn = []

    def dealt(description):
        """One image of each class in turn."""
        dealt = [place for start in range(6) for place in description[start::6]]
        drawn.append([place.index for place in dealt])
        return dealt

    chosen = [transforms.NWays(meta, 3), transforms.KShots(meta, 6), dealt, transforms.LoadData(meta)]
    images, classes = TaskSplit("train", l2l.data.TaskDataset(meta, chosen), SETTINGS).draw(0, 0)
    numbers = images[:, :, 0, 0, 0].long().tolist()
    assert classes.tolist() == sorted({number // 10 for number in drawn[0]})
    assert numbers == [[number for number in drawn[0] if number // 10 == label] for label in classes.tolist()]


def test_task_i_is_a_function_of_seed_epoch_and_i():
    def draw(numbers, seed=3, epoch=0, num_tasks=-1):
        split = TaskSplit("train", a_taskset(numbered_images(), num_tasks=num_tasks), SETTINGS)
        return [split.draw(number, seed, epoch)[0][:, :, 0, 0, 0].tolist() for number in numbers]

    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = draw([0, 1, 2])
    assert states[0] == random.getstate() and states[1] == np.random.get_state()[1].tolist()
    assert torch.equal(states[2], torch.get_rng_state())
    random.random(), torch.rand(1)
    assert draw([2, 0]) == [first[2], first[0]]
    assert draw([0], seed=4) != [first[0]] and draw([0], epoch=1) != [first[0]] and first[0] != first[1]
    # A Taskset that keeps its tasks goes round them: six episodes an epoch, of four tasks.
    kept = draw([0, 1, 2, 3, 4, 5], num_tasks=4)
    assert kept[4:] == kept[:2] and draw([0, 1], epoch=1, num_tasks=4) == kept[2:4]
    assert draw([3], num_tasks=4) == kept[3:4]  # whoever comes to it first


@pytest.mark.parametrize("kind", ["pil", "array", "tensor"])
def test_images_of_any_kind_become_the_same_batch(kind):
    data = data_module(Colours(kind), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    data.setup("fit")
    assert data.channels == 3 and data.image_size == 8 and data.num_training_classes == 8
    raw = next(iter(data.train_dataloader()))
    batch = data.on_after_batch_transfer(raw, 0)
    assert raw.support.dtype == torch.uint8
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    torch.testing.assert_close(batch.support, (raw.support / 255 - mean) / std)
    reference = data_module(Colours("tensor")).train_dataloader()
    assert torch.equal(next(iter(reference)).support, raw.support)


def test_float_images_are_taken_as_they_are_or_normalised_in_their_unit():
    images = numbered_images()
    plain, scaled = data_module(images, images), data_module(images, images, mean=(10.0,), std=(4.0,))
    raw = next(iter(plain.train_dataloader()))
    assert torch.equal(plain.on_after_batch_transfer(raw, 0).support, raw.support)
    torch.testing.assert_close(scaled.on_after_batch_transfer(raw, 0).support, (raw.support - 10) / 4)


def test_episodes_are_scored_by_the_nearest_mean():
    pl.seed_everything(0)
    data, model = data_module(eval_episodes_per_step=4), a_network()
    a_trainer().fit(model, datamodule=data)
    a_trainer().test(model, datamodule=data, verbose=False)
    result = model.episode_results["test"]
    split = data.task_split("test")
    model.eval()
    for number in range(6):
        images, _ = split.draw(number, seed=0)
        with torch.no_grad():
            features = model.embed(data.normalize(images.flatten(0, 1))).unflatten(0, (3, 6))
        prototypes, queries = features[:, :2].mean(1), features[:, 2:].flatten(0, 1)
        nearest = torch.cdist(queries.double(), prototypes.double()).argmin(1)
        right = (nearest == torch.arange(3).repeat_interleave(4)).double().mean()
        assert result.accuracies[number].item() == pytest.approx(right.item())
    assert result.classes.tolist() == [0, 1, 2, 3]
    many = data_module(test_episodes=EpisodeSettings(3, 2, 4, 9), eval_episodes_per_step=1)
    a_trainer().test(model, datamodule=many, verbose=False)
    # A longer evaluation begins with a shorter one's episodes, whatever the size of its steps.
    assert torch.equal(model.episode_results["test"].accuracies[:6], result.accuracies)


class Classes(pl.Callback):
    def __init__(self):
        self.drawn = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.drawn.append((trainer.current_epoch, batch.classes.tolist(), batch.query.mean().item()))


def drawn_in_training(workers=0, seed=0):
    pl.seed_everything(seed)
    recorder = Classes()
    trainer = a_trainer(max_epochs=2, callbacks=[recorder], limit_val_batches=0)
    trainer.fit(a_network(), datamodule=data_module(num_workers=workers))
    return recorder.drawn


def test_workers_draw_what_one_process_draws_and_epochs_differ():
    first = drawn_in_training()
    assert [epoch for epoch, *_ in first] == [0, 0, 0, 1, 1, 1]
    assert len({json.dumps(classes) for _, classes, _ in first}) == 6
    assert drawn_in_training(workers=2) == first
    assert drawn_in_training(seed=1) != first


def test_in_the_command_with_a_class_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split, classes in (("train", 6), ("val", 5), ("test", 4)):
        colours = Colours("pil", classes, 8)
        for number in range(len(colours)):
            image, label = colours[number]
            folder = Path(split) / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
    few = {"ways": 3, "shots": 1, "queries": 3, "episodes": 4}
    source = {split: {"class_path": "torchvision.datasets.ImageFolder", "init_args": {"root": split}} for split in
              ("train", "val", "test")}  # fmt: skip
    content = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        "whiteness": {"num_images": 20},
        "model": {"class_path": "fewshot.MatchingNetwork", "init_args": {"backbone": "resnet20"}},
        "data": {
            "class_path": "fewshot.Learn2LearnDataModule",
            "init_args": {**source, **{f"{s}_episodes": few for s in source}, "mean": [0.4] * 3, "std": [0.3] * 3},
        },
    }
    Path("tasks.yaml").write_text(json.dumps(content))
    main(["fit", "--config", "tasks.yaml"])
    main(["test", "--config", "tasks.yaml", "--ckpt_path", "runs/default"])
    shown = capsys.readouterr().out
    assert "learn2learn, one by one" in shown and "accuracy ± 95%" in shown
    with pytest.raises(SystemExit):
        main(["predict", "--config", "tasks.yaml", "--ckpt_path", "runs/default"])
    assert "use EpisodicDataModule" in capsys.readouterr().err


def test_without_validation_and_with_parts_missing():
    few = EpisodeSettings(3, 2, 4, 6)
    data = Learn2LearnDataModule(Colours(), train_episodes=few, episodes_per_step=2)
    assert not data.has_validation and data.val_dataloader() == []
    a_trainer().fit(a_network(), datamodule=data)
    assert data.sample_images(20).shape == (20, 3, 8, 8) and torch.equal(data.sample_images(20), data.sample_images(20))
    for stage, split in (("validate", "val"), ("test", "test")):
        with pytest.raises(ValueError, match=f"was given no {split} data"):
            data.setup(stage)
    with pytest.raises(ValueError, match="its train split is not in memory"):
        data.image_set("train")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": lambda: [1, 2]}, "train must be a learn2learn Taskset, a MetaDataset or a data set .*, got list"),
        ({"train": lambda: Colours(classes=2)}, "3 ways asked of 2 classes"),
        ({"train": lambda: a_taskset(Colours(), ways=4)}, "train: a task has 4 classes of 6 images, but 3 ways"),
        ({"train": lambda: a_taskset(Colours(each=3), replacement=True)}, "an image twice.*leave out replacement"),
        ({"train": lambda: a_taskset(Colours("pil"))}, "Images must be tensors of one size"),
        ({"val": lambda: a_taskset(Colours(), num_tasks=5)}, "val: a Taskset of 5 tasks has no 6 episodes"),
        ({"val": lambda: Colours(side=9)}, r"val: images are \[3, 9, 9\], those of another split \[3, 8, 8\]"),
        ({"mean": (0.5,) * 2, "std": (0.5,) * 2}, "mean and std are of 2 channels, the images of 3"),
        ({"mean": (0.5,) * 3}, "mean and std belong together"),
        ({"test_episodes": EpisodeSettings(ways=(2, 3))}, "test_episodes: .* number of ways .* got ways=2-3, shots=1"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said(options, words):
    made = {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.raises(ValueError, match=words):
        data_module(**made).setup("fit")


def test_our_episodes_in_learn2learns_maml():
    data = EpisodicDataModule(train=EpisodeSettings(ways=3, shots=2, queries=4, episodes=10), crop_padding=2, seed=0)
    taskset = EpisodeTaskset(data)
    torch.manual_seed(0)
    backbone = build_backbone("resnet20", "swbn-fro", {"step_size": 1e-3}, in_channels=1)
    network = torch.nn.Sequential(backbone, torch.nn.Linear(backbone.num_features, 3))
    maml = l2l.algorithms.MAML(network, lr=0.05, first_order=False)
    images, labels = taskset.sample()
    (support, support_labels), (query, query_labels) = l2l.data.partition_task(images, labels, shots=2)
    learner = maml.clone()
    start = F.cross_entropy(learner(support), support_labels)
    learner.adapt(start)
    assert F.cross_entropy(learner(support), support_labels) < start
    loss = F.cross_entropy(learner(query), query_labels)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
