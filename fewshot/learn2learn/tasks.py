"""Tasks of learn2learn by number, independent of earlier draws and of the process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as tv

from fewshot.datamodule import EpisodeBatch
from fewshot.episodes import EpisodeSampler, EpisodeSettings
from swbn_lightning.data.order import EpochDataset, stream_seed
from swbn_lightning.errors import InputError


class TaskBatch(NamedTuple):
    """Episodes to evaluate, with their numbers in the split."""

    numbers: Tensor  # [E]
    episodes: EpisodeBatch


class TaskSplit:
    """Tasks of one split by number, independent of earlier draws and of the process.

    The source is a learn2learn ``Taskset``, used as it is, or a data set of ``(image, label)``.
    """

    def __init__(self, name: str, source: Any, settings: EpisodeSettings) -> None:
        self.name, self.settings = name, settings
        data = require_learn2learn().data
        if isinstance(source, data.TaskDataset):
            self.taskset = source
        elif isinstance(source, Dataset):
            self.taskset = _make_taskset(source, settings)
        else:
            raise InputError(
                f"{name} must be a learn2learn Taskset, a MetaDataset or a data set of (image, label), got "
                f"{type(source).__name__}."
            )
        #: Numbers of the classes, ``0 .. L-1`` in the order of the data set's labels.
        self.class_numbers = {label: number for number, label in enumerate(sorted(self.taskset.dataset.labels))}

    @property
    def num_tasks(self) -> int | None:
        """Number of tasks of a Taskset that keeps them; None for one that draws a new task each time."""
        return None if self.taskset.num_tasks == -1 else self.taskset.num_tasks

    def draw(self, number: int, seed: int, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Draw one task: images ``[W, K+Q, C, H, W]`` and class numbers ``[W]``.

        Classes are in the order of the labels that the task gives them (random with ``RemapLabels``). The images of a
        class are in the order in which they were drawn.

        Raises:
            InputError: a task that cannot be drawn, or does not fit ``settings``.
        """
        try:
            description, task = self._describe_and_load(number, seed, epoch)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: of stacking images of several sizes
            raise InputError(
                f"{self.name}: learn2learn cannot make task {number}: {error}. Images must be tensors of one size "
                "(transform=ToTensor()), every class must have enough of them, and task_transforms must hold LoadData."
            ) from error
        images, given = self._checked(task)
        places = [place.index for place in description]
        if len(set(places)) < len(places):
            raise InputError(
                f"{self.name}: a task holds an image twice, so that queries may be support images too; leave out "
                "replacement=True."
            )
        order = torch.argsort(given, stable=True)
        labels = self.taskset.dataset.indices_to_labels
        numbers = torch.tensor([self.class_numbers[labels[places[i]]] for i in order.tolist()])
        ways = self.settings.most_ways  # the only number: ranges are refused
        return images[order].unflatten(0, (ways, -1)), numbers.unflatten(0, (ways, -1))[:, 0]

    def _describe_and_load(self, number: int, seed: int, epoch: int) -> tuple[Any, Any]:
        taskset = self.taskset
        if self.num_tasks is None:
            with _random_streams(seed, epoch, number):
                description = taskset.sample_task_description()
                return description, taskset.get_task(description)
        # Kept by number: the same in every epoch, and in every process that comes to it first.
        place = (epoch * self.settings.episodes + number) % self.num_tasks
        if place not in taskset.sampled_descriptions:
            with _random_streams(seed, 0, place):
                taskset.sampled_descriptions[place] = taskset.sample_task_description()
        with _random_streams(seed, epoch, number):  # of what the data set does at random to its images
            return taskset.sampled_descriptions[place], taskset.get_task(taskset.sampled_descriptions[place])

    def _checked(self, task: Any) -> tuple[Tensor, Tensor]:
        pair = isinstance(task, tuple | list) and len(task) == 2 and all(isinstance(part, Tensor) for part in task)
        if not pair or task[0].dim() != 4 or task[1].dim() != 1:
            shown = [f"{list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__ for part in task]
            raise InputError(
                f"{self.name}: a task must be images [n, C, H, W] and labels [n], got {', '.join(shown)}; does "
                "task_transforms hold LoadData?"
            )
        images, labels = task
        s, counts = self.settings, labels.unique(return_counts=True)[1].tolist()
        if counts != [s.images_per_class] * s.most_ways:
            most, least = max(counts), min(counts)
            each = f"{most}" if most == least else f"{least} to {most}"
            raise InputError(
                f"{self.name}: a task has {len(counts)} classes of {each} images, but {s.ways} ways of {s.shots} shots "
                f"+ {s.queries} queries need {s.ways} of {s.images_per_class}: NWays n={s.ways}, KShots "
                f"k={s.images_per_class}, or other settings of {self.name}_episodes."
            )
        return images, labels


class TaskEpisodes(EpochDataset[Any]):
    """Tasks of a split as episodes: in each class, the first K images are support and the other Q are queries."""

    def __init__(self, split: TaskSplit, seed: int, numbered: bool) -> None:
        super().__init__()
        self.split, self.seed, self.numbered = split, seed, numbered

    def __len__(self) -> int:
        return self.split.settings.episodes

    def __getitems__(self, numbers: list[int]) -> EpisodeBatch | TaskBatch:
        epoch, shots = self.epoch, self.split.settings.most_shots
        drawn = [self.split.draw(number, self.seed, epoch) for number in numbers]
        images, classes = (torch.stack(parts) for parts in zip(*drawn, strict=True))  # [E, W, K+Q, C, H, W], [E, W]
        untouched = torch.zeros(len(numbers), images.shape[1:3].numel(), 3, dtype=torch.int64)
        batch = EpisodeBatch(images[:, :, :shots], images[:, :, shots:].flatten(1, 2), classes, untouched)
        return TaskBatch(torch.tensor(numbers), batch) if self.numbered else batch


class TensorImages:
    """Task transform after ``LoadData``: turns PIL images and arrays into uint8 tensors; keeps tensors unchanged."""

    def __call__(self, description: Any) -> Any:
        for place in description:
            place.transforms.append(_with_tensor_image)
        return description


def _with_tensor_image(item: Any) -> list[Any]:
    image, *rest = item
    return [image if isinstance(image, Tensor) else tv.to_image(image).as_subclass(Tensor), *rest]


def _make_taskset(source: Dataset[Any], settings: EpisodeSettings) -> Any:
    data = require_learn2learn().data
    dataset = source if isinstance(source, data.MetaDataset) else data.MetaDataset(source)
    labels = sorted(dataset.labels)
    numbers = np.repeat(np.arange(len(labels)), [len(dataset.labels_to_indices[label]) for label in labels])
    names = [str(label) for label in labels]
    EpisodeSampler(numbers, **settings.shape, class_names=names)  # its errors
    transforms = [
        data.transforms.NWays(dataset, n=settings.ways),
        data.transforms.KShots(dataset, k=settings.images_per_class),
        data.transforms.LoadData(dataset),
        TensorImages(),
        data.transforms.RemapLabels(dataset),
        data.transforms.ConsecutiveLabels(dataset),
    ]
    return data.TaskDataset(dataset, task_transforms=transforms)


@contextmanager
def _random_streams(*numbers: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU) from ``numbers``; restore their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    seed = stream_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what transforms draw from)
    torch.default_generator.manual_seed(seed)  # not the GPU's, which torch.manual_seed would seed too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def require_learn2learn() -> Any:
    try:
        import learn2learn
    except ImportError as error:
        raise InputError(
            f"learn2learn cannot be imported ({error}): `make learn2learn` builds it for this Python; as published it "
            "does not install on Python 3.11 and newer."
        ) from error
    return learn2learn
