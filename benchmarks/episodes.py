"""Episodes a second: drawn and scored from cached features, made as training batches, and by learn2learn.

    python -m benchmarks.episodes
    python -m benchmarks.episodes --episodes 10000 --map-episodes 2000 --rounds 1

Random images and features of ``--classes`` overlapping classes of ``--images`` each; episodes of ``--ways``,
``--shots`` and ``--queries``. ``draw`` are only index tensors. All heads are drawn and scored from features of 64
numbers, cross attention from maps of 64x8x8. Their time does not depend on the features, but logistic regression's
does a little. ``images`` are training batches as the model gets them (32x32, gathered, cropped, flipped, normalised);
ResNet20's training step on such a batch stands beside them.

Where they are installed: learn2learn's ``Taskset`` hands out the same images, not scored (``make learn2learn``), and
scikit-learn fits and scores its logistic regression with the same options, one episode after the other.

The passes take turns, and the figures are medians over the rounds. Memory is the peak of tensors and of Python's and
NumPy's objects in a pass of at most ``--memory-episodes`` episodes, what was there before not counted. Prints a
Markdown table and writes the same as JSON.
"""

import argparse
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.memory import PeakMemory
from benchmarks.timing import Pass, installed, markdown, medians, parser, write
from fewshot import (
    CrossAttentionHead,
    EpisodeSettings,
    EpisodicDataModule,
    MatchingHead,
    PrototypicalHead,
    PrototypicalNetwork,
    evaluate_episodes,
)
from fewshot.episodes import EpisodeSampler
from fewshot.heads import FeatureHead, build_head
from swbn_lightning.data import ImageSet

FEATURES, SIDE, IMAGE_SIZE = 64, 8, 32  # ResNet20's features and maps at CIFAR's size
LEARN2LEARN = "learn2learn Taskset"
SKLEARN = "scikit-learn's logistic regression, 64"
STEP = "ResNet20's step"
LIBRARIES = {"learn2learn": LEARN2LEARN, "scikit-learn": SKLEARN}
HEADS = ("nearest-centroid", "soft-kmeans", "laplacian-shot", "ridge", "logistic-regression")


class Piece(NamedTuple):
    """What is measured: a pass over a number of episodes."""

    run: Callable[[int], object]
    episodes: int


def main() -> None:
    """Measure, print, write."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    found = pieces(options, device)
    passes: dict[str, Pass] = {name: _bound(piece.run, piece.episodes) for name, piece in found.items()}
    seconds = medians(passes, options.rounds, device)
    rows = []
    for name, piece in found.items():
        row: dict[str, Any] = {"piece": name, "episodes": piece.episodes, "seconds": seconds[name]}
        row["episodes_per_second"] = piece.episodes / seconds[name]
        row["peak_bytes"] = peak(_bound(piece.run, min(piece.episodes, options.memory_episodes)))
        rows.append(row)
    base = next((row["episodes_per_second"] for row in rows if row["piece"] == LEARN2LEARN), None)
    for row in rows:
        row["times_learn2learn"] = row["episodes_per_second"] / base if base else None
    print(table(rows))
    print(f"\n{share(rows)}")
    write(options, rows, *(name for name, piece in LIBRARIES.items() if piece in found))


def pieces(options: argparse.Namespace, device: torch.device) -> dict[str, Piece]:
    """All that is measured, by name."""
    labels = torch.arange(options.classes).repeat_interleave(options.images)
    shape = {"ways": options.ways, "shots": options.shots, "queries": options.queries}
    features = torch.randn(options.classes, FEATURES)[labels] + 2 * torch.randn(len(labels), FEATURES)
    features = features.to(device)
    maps = torch.randn(len(labels), FEATURES, SIDE, SIDE, device=device)
    pixels = torch.randint(0, 256, (len(labels), 3, IMAGE_SIZE, IMAGE_SIZE), dtype=torch.uint8)

    def scoring(head: nn.Module, of: Tensor) -> Callable[[int], object]:
        head.to(device)
        if isinstance(head, FeatureHead):
            head.set_base_mean(features.mean(0))
        return lambda count: evaluate_episodes(of, labels, head, num_episodes=count, seed=options.seed, **shape)

    sampler = EpisodeSampler(labels, **shape)
    many, few, library = options.episodes, options.map_episodes, options.library_episodes
    context = MatchingHead(full_context=True, num_features=FEATURES)
    training = Training(pixels, labels, options, device)
    found = {
        "draw": Piece(lambda count: sampler.draw(range(count), options.seed), many),
        "prototypes, 64": Piece(scoring(PrototypicalHead(), features), many),
        **{f"{name}, 64": Piece(scoring(build_head(name), features), many) for name in HEADS},
        "matching, 64": Piece(scoring(MatchingHead(), features), many),
        "matching, full context, 64": Piece(scoring(context, features), options.context_episodes),
        "cross attention, 64x8x8": Piece(scoring(CrossAttentionHead(SIDE**2), maps), few),
        "images": Piece(training.batches, library),
        STEP: Piece(training.steps, options.step_episodes),
    }
    dataset = TensorDataset(pixels, labels)
    if installed("sklearn"):
        found[SKLEARN] = Piece(sklearn_regressions(features.cpu(), sampler, options), library)
    if installed("learn2learn"):
        found[LEARN2LEARN] = Piece(learn2learn_tasks(dataset, options), library)
    return found


class Training:
    """Training batches out of the data module, and a network's step on one."""

    def __init__(self, pixels: Tensor, labels: Tensor, options: argparse.Namespace, device: torch.device) -> None:
        settings = EpisodeSettings(options.ways, options.shots, options.queries, options.step_episodes)
        self.step_episodes, self.device = options.step_episodes, device
        self.data = InMemory(
            ImageSet(pixels, labels, tuple(map(str, range(options.classes))), "images"),
            train=settings,
            episodes_per_step=options.step_episodes,
            crop_padding=4,
            flip=True,
            seed=options.seed,
        )
        self.loader: Any = self.data.train_dataloader()
        self.loader.pin_memory = device.type == "cuda"
        self.model = PrototypicalNetwork(backbone="resnet20").to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.epoch = 0
        self.batch = self._next()

    def batches(self, count: int) -> None:
        """``count`` episodes, in batches."""
        for _ in range(-(-count // self.step_episodes)):
            self._next()

    def steps(self, count: int) -> None:
        """``count`` episodes in one step: forward, loss, backward, SGD."""
        self.optimizer.zero_grad()
        loss, _ = self.model.training_loss(self.batch)
        loss.backward()
        self.optimizer.step()

    def _next(self) -> Any:
        self.epoch += 1  # an epoch is one batch, so that every batch is a new one
        self.loader.sampler.set_epoch(self.epoch)
        raw = next(iter(self.loader))
        moved = type(raw)(*(tensor.to(self.device, non_blocking=True) for tensor in raw))
        return self.data.on_after_batch_transfer(moved, 0)


class InMemory(EpisodicDataModule):
    """Images in memory, normalised as CIFAR's."""

    def __init__(self, images: ImageSet, **options: Any) -> None:
        super().__init__("cifar-fs", **options)
        self._images = images

    def load(self, split: str) -> ImageSet:
        return self._images


def learn2learn_tasks(dataset: TensorDataset, options: argparse.Namespace) -> Callable[[int], object]:
    """Tasks of ``Taskset`` with the transforms of its own examples."""
    import learn2learn

    meta, transforms = learn2learn.data.MetaDataset(dataset), learn2learn.data.transforms
    chosen = [
        transforms.NWays(meta, options.ways),
        transforms.KShots(meta, options.shots + options.queries),
        transforms.LoadData(meta),
        transforms.RemapLabels(meta),
        transforms.ConsecutiveLabels(meta),
    ]
    taskset = learn2learn.data.TaskDataset(meta, chosen)

    def run(count: int) -> None:
        for _ in range(count):
            taskset.sample()

    return run


def sklearn_regressions(
    features: Tensor, sampler: EpisodeSampler, options: argparse.Namespace
) -> Callable[[int], object]:
    """Logistic regression as RFS's public code calls it: normalised features, C = 1, L-BFGS."""
    from sklearn.linear_model import LogisticRegression

    normalised = F.normalize(features, dim=1).numpy()
    of_support, of_query = (np.arange(options.ways).repeat(each) for each in (options.shots, options.queries))

    def run(count: int) -> list[float]:
        episodes = sampler.draw(range(count), options.seed)
        accuracies = []
        for support, query in zip(episodes.support.flatten(1), episodes.query.flatten(1), strict=True):
            fitted = LogisticRegression(C=1.0, max_iter=1000).fit(normalised[support], of_support)
            accuracies.append(fitted.score(normalised[query], of_query))
        return accuracies

    return run


def peak(run: Pass) -> int:
    """Bytes: tensors at their peak and Python's objects (NumPy's arrays among them) at theirs."""
    tracemalloc.start()
    try:
        with PeakMemory([]) as tensors:
            run()
        return tensors.peak + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def table(rows: list[dict[str, Any]]) -> str:
    """A line a piece."""
    lines = []
    for row in rows:
        times = row["times_learn2learn"]
        figures = [f"{row['episodes']:,}", f"{row['seconds']:.3g}", f"{row['episodes_per_second']:,.0f}"]
        lines.append([row["piece"], *figures, f"{times:,.1f}" if times else "", f"{row['peak_bytes'] / 2**20:,.1f}"])
    head = ["piece", "episodes", "seconds", "episodes a second", "times learn2learn", "peak memory, MiB"]
    return markdown(head, lines)


def share(rows: list[dict[str, Any]]) -> str:
    """How much of a training step's time its batch takes."""
    rate = {row["piece"]: row["episodes_per_second"] for row in rows}
    return f"Making a training batch takes {100 * rate[STEP] / rate['images']:.1f} % of the time of {STEP} on it."


def _bound(run: Callable[[int], object], count: int) -> Pass:
    return lambda: run(count)


def _options() -> argparse.Namespace:
    made = parser(__doc__, "episodes", rounds=3, dtype=False)
    sizes = {
        "episodes": (10_000, "drawn; scored from features"),
        "context_episodes": (1000, "scored by matching with full context"),
        "map_episodes": (200, "scored from maps"),
        "library_episodes": (200, "handed out as images; scored by scikit-learn"),
        "step_episodes": (4, "of a training step"),
        "memory_episodes": (200, "at most, to measure memory"),
        "classes": (20, ""),
        "images": (600, "of each class"),
        "ways": (5, ""),
        "shots": (5, "a class"),
        "queries": (15, "a class"),
        "threads": (torch.get_num_threads(), "of the processor"),
    }
    smoke = {"episodes": 40, "context_episodes": 10, "map_episodes": 4, "library_episodes": 4, "step_episodes": 1}
    smoke |= {"memory_episodes": 4, "classes": 6, "images": 25, "rounds": 1}
    for name, (default, text) in sizes.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=text)
    made.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    options = made.parse_args()
    if options.smoke:
        vars(options).update(smoke)
    if (least := min(vars(options)[name] for name in sizes)) < 1:
        made.error(f"all numbers must be at least 1, got {least}")
    return options


if __name__ == "__main__":
    main()
