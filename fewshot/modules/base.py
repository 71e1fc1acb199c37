"""The part of few-shot training and evaluation that all methods share."""

from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot.datamodule import EpisodeBatch, EpisodicDataModule
from fewshot.episodes import in_words
from fewshot.evaluation import EpisodeResult, Scored, episode_result, evaluate_episodes, query_targets, score
from fewshot.heads import EpisodeHead
from fewshot.learn2learn import Learn2LearnDataModule, TaskBatch
from fewshot.prediction import PAGE_FILE, nearest_images, prediction_page
from fewshot.saving import episode_files, episodes_identity
from swbn_lightning.data.image_data import ImageBatch
from swbn_lightning.data.order import each_once
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms.health import norm_by_batch
from swbn_lightning.training.module import TrainingModule

# What Lightning's sanity check and fast_dev_run evaluate at most: whether it works, not how well.
_PROBE_EPISODES = 20


class EpisodicModule(TrainingModule):
    """Train a backbone and a head on episodes, and evaluate them on episodes over cached features.

    Data from :class:`~fewshot.Learn2LearnDataModule` are evaluated episode by episode instead.

    A method is a subclass that sets ``self.head`` (:class:`~fewshot.heads.EpisodeHead`), which maps support
    ``[E, W, K, C]`` and query ``[E, W*Q, C]`` to logits ``[E, W*Q, W]``. Training minimises the cross-entropy of the
    queries. For another loss, override :meth:`episode_loss`.

    Validation and test always use evaluation statistics. Norms that keep no statistics are evaluated episode by
    episode: each episode is normalised by its own images, and the results table says so.

    Each evaluation logs ``<split>/accuracy`` and ``<split>/loss`` and, for two or more episodes,
    ``<split>/accuracy_ci95`` (half-width of the 95% interval over episodes). Accuracies are fractions.

    Args:
        kwargs: arguments of :class:`~swbn_lightning.training.module.TrainingModule`.
    """

    head: EpisodeHead
    classifier: nn.Linear | None  # of methods that call `_make_classifier`
    #: What results call the head, where the same training can be tested with several.
    head_label: str | None = None
    #: Whether training batches hold labelled images, not episodes.
    trains_on_images = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._by_batch: str | None = None  # a norm without statistics for evaluation
        self._embedded: list[tuple[Tensor, Tensor]] = []  # index and features of this process's batches
        # Of this process's tasks of learn2learn.
        self._scored: list[Scored] = []
        #: Accuracy of every episode of the last evaluation of each split.
        self.episode_results: dict[str, EpisodeResult] = {}
        self._support: tuple[Tensor, ...] = ()  # of `predict`: features of each class's support images
        self._nearest: list[tuple[Tensor, Tensor]] = []  # of the batches of `predict`, as nearest_images gives it

    def episodic_data(self) -> EpisodicDataModule | Learn2LearnDataModule:
        """The trainer's data module."""
        data = self.image_data()
        if not isinstance(data, EpisodicDataModule | Learn2LearnDataModule):
            raise InputError(
                f"{type(self).__name__} needs an EpisodicDataModule or a Learn2LearnDataModule, got "
                f"{type(data).__name__}."
            )
        return data

    def class_names(self, split: str) -> tuple[str, ...]:
        """Class names of a split, ordered by class number."""
        data = self.episodic_data()
        if isinstance(data, Learn2LearnDataModule):
            return tuple(str(label) for label in data.task_split(split).class_numbers)
        return data.image_set(split).class_names

    def evaluation_files(self, split: str) -> dict[str, str]:
        found = self.episode_results.get(split)
        return {} if found is None else episode_files(found, self.class_names(split))

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.episodic_data()
        if stage == "fit" and getattr(data, "trains_on_images", False) != self.trains_on_images:
            wanted = "a BaseClassesDataModule" if self.trains_on_images else "an EpisodicDataModule"
            raise InputError(f"{type(self).__name__} trains with {wanted}, got {type(data).__name__}.")
        self._by_batch = norm_by_batch(self)
        if self._by_batch is not None and stage != "predict":
            rank_zero_warn(
                f"{self._by_batch} keeps no running statistics: every episode is evaluated by itself and normalised by "
                "its own support and query images, which is slow and classifies its queries together. Leave out "
                "track_running_stats: false for the usual evaluation."
            )

    def episode_loss(self, support: Tensor, query: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss to minimise and the accuracy (a fraction) of training episodes.

        Args:
            support: features ``[E, W, K, ...]``.
            query: features ``[E, W*Q, ...]``, class after class.
            classes: ``[E, W]``, class numbers in the training split.
        """
        logits = self.head(support, query)
        target = query_targets(support, query)
        loss = F.cross_entropy(logits.mT, target.expand(len(logits), -1))
        return loss, (logits.argmax(-1) == target).float().mean()

    def training_loss(self, batch: EpisodeBatch) -> tuple[Tensor, Tensor]:
        return self.episode_loss(*self._embed_episodes(batch), batch.classes)

    def _embed_episodes(self, batch: EpisodeBatch) -> tuple[Tensor, Tensor]:
        """Features of support ``[E, W, K, ...]`` and query ``[E, W*Q, ...]``."""
        episodes, ways, shots = batch.support.shape[:3]
        # One forward for support and query: the batch statistics are those of all of them.
        images = torch.cat([batch.support.flatten(0, 2), batch.query.flatten(0, 1)])
        support, query = self.embed(images).split([episodes * ways * shots, images.shape[0] - episodes * ways * shots])
        support, query = support.unflatten(0, (episodes, ways, shots)), query.unflatten(0, (episodes, -1))
        return support, query

    def validation_step(self, batch: ImageBatch | TaskBatch, batch_idx: int) -> None:
        self._keep(batch)

    def on_validation_epoch_start(self) -> None:
        self._embedded.clear()  # an evaluation that was broken off may have left some
        self._scored.clear()

    def on_validation_epoch_end(self) -> None:
        self._evaluate("val")

    test_step, on_test_epoch_start = validation_step, on_validation_epoch_start

    def on_test_epoch_end(self) -> None:
        self._evaluate("test")

    def on_predict_start(self) -> None:
        super().on_predict_start()
        if getattr(self.head, "transductive", False):
            raise InputError(
                f"predict names each image by itself, but {type(self.head).__name__} classifies all of them together. "
                "Take a head that is not transductive, or leave out transductive: true."
            )
        data = self.episodic_data()
        assert isinstance(data, EpisodicDataModule) and data.prediction is not None
        support = data.prediction.support
        self.prediction_classes = support.class_names
        with torch.no_grad():
            features = torch.cat([self._embed_pixels(part) for part in support.images.split(data.eval_batch_size)])
        self._support = features.split(data.prediction.shots)
        self._nearest.clear()

    def predict_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Probabilities ``[B, W]`` of the support folder's classes."""
        query = self.embed(batch.images)
        if len(set(map(len, self._support))) == 1:
            logits = self.head(torch.stack(self._support)[None], query[None])[0]
        else:
            logits = self.head.uneven_logits(self._support, query)
        self.watch_finite(logits, batch.images)
        self.stop_unless_finite("predict")
        self._nearest.append(nearest_images(torch.cat(self._support), query))
        return logits.softmax(-1)

    def prediction_files(self, numbers: Tensor, probabilities: Tensor) -> dict[str, str]:
        data = self.episodic_data()
        assert isinstance(data, EpisodicDataModule) and data.prediction is not None
        nearest, cosines = (torch.cat(parts).cpu() for parts in zip(*self._nearest, strict=True))
        return {PAGE_FILE: prediction_page(data.prediction, numbers, probabilities, nearest, cosines)}

    def _keep(self, batch: ImageBatch | TaskBatch) -> None:
        if isinstance(batch, TaskBatch):
            # With a norm by batch each by its own images.
            size = len(batch.numbers) if self._by_batch is None else 1
            parts = (part.split(size) for part in (batch.numbers, *batch.episodes))
            for numbers, *episode in zip(*parts, strict=True):
                episodes = EpisodeBatch(*episode)
                self._scored.append(
                    Scored(numbers, episodes.classes, *score(self.head, *self._embed_episodes(episodes)))
                )
            return
        if self._by_batch is not None:  # only which images: their features are made anew in every episode
            self._embedded.append((batch.numbers, batch.numbers.new_empty(len(batch.numbers), 0)))
            return
        self._embedded.append((batch.numbers, self.watch_finite(self.embed(batch.images), batch.images)))

    def _evaluate(self, split: str) -> None:
        self.stop_unless_finite(split)
        data = self.episodic_data()
        if isinstance(data, Learn2LearnDataModule):
            result, facts = self._result_of_tasks(data, split)
        else:
            found = self._result_over_features(data, split)
            if found is None:
                return
            result, facts = found
        self.episode_results[split] = result
        self.results[split] = {
            "split": split,
            **facts,
            "episodes": result.num_episodes,
            "ways": in_words(result.ways),
            "shots": in_words(result.shots),
            "queries": result.queries,
            "seed": result.seed,
            "accuracy": result.mean,
            "ci95": result.ci95,
            "std": result.std,
            "macro_f1": result.confusion.macro_f1,
            "loss": result.loss,
            **({"head": self.head_label} if self.head_label is not None else {}),
            **({"inference": "transductive"} if result.transductive else {}),
            **({"inference": "batch statistics"} if self._by_batch is not None else {}),
        }
        # Every process has the whole result; `sync_dist` only tells Lightning that they agree.
        self.log(f"{split}/accuracy", result.mean, prog_bar=True, sync_dist=True)
        for name in ("loss", "macro_f1"):
            self.log(f"{split}/{name}", self.results[split][name], sync_dist=True)
        if result.ci95 is not None:
            self.log(f"{split}/accuracy_ci95", result.ci95, sync_dist=True)

    def _result_over_features(
        self, data: EpisodicDataModule, split: str
    ) -> tuple[EpisodeResult, dict[str, Any]] | None:
        """Result over the stored features, with facts about the data; None if a probe holds no episode."""
        index, features = self._gather_embedded()
        image_set, s, names = data.image_set(split), data.settings[split], self.class_names(split)
        labels = image_set.labels[index.cpu()]
        if self._by_batch is not None:
            features = image_set.images[index.cpu()]
        if len(index) < len(image_set):
            whole = torch.bincount(labels)[labels] >= s.images_per_class  # classes that have enough images
            features, labels = features[whole.to(features.device)], labels[whole]
            if not self._may_go_on(split, labels, len(image_set), s.most_ways):
                return None
        episodes = min(s.episodes, _PROBE_EPISODES) if self.is_probe() else s.episodes
        result = evaluate_episodes(
            features,
            labels,
            self.head,
            **s.shape,
            num_episodes=episodes,
            seed=data.eval_seed,
            class_names=names,
            embed=None if self._by_batch is None else self._embed_pixels,
        )
        facts = {
            "data": data.data_name,
            "classes": len(names),
            "images": len(labels),
            "episodes_id": episodes_identity(labels, names, s, data.eval_seed, image_set.content_id),
        }
        return result, facts

    def _result_of_tasks(self, data: Learn2LearnDataModule, split: str) -> tuple[EpisodeResult, dict[str, Any]]:
        """Result of all processes' tasks, each once and ordered by number, with facts about the data."""
        parts = [torch.cat(part) for part in zip(*self._scored, strict=True)]
        self._scored.clear()
        if self.trainer.world_size > 1:
            parts = [self.all_gather(part).flatten(0, 1) for part in parts]  # type: ignore[union-attr]
        first = each_once(parts[0]).cpu()
        scored = Scored(*(part.cpu()[first] for part in parts))
        tasks = data.task_split(split)
        s, labels = tasks.settings, torch.arange(len(tasks.class_numbers))
        if len(first) < s.episodes and not self.is_probe():
            rank_zero_warn(f"evaluated on {len(first)} of {s.episodes} {split} episodes (limit_*_batches).")
        result = episode_result(self.head, labels, [scored], **s.shape, seed=data.eval_seed)
        facts = {
            "classes": len(labels),
            "images": len(tasks.taskset.dataset),
            "tasks": "learn2learn, one by one",
            # The classes drawn stand for the tasks, which the seed does not tell.
            "episodes_id": episodes_identity(scored.classes.flatten(), self.class_names(split), s, data.eval_seed),
        }
        return result, facts

    def _embed_pixels(self, images: Tensor) -> Tensor:
        """Features of uint8 images outside of the trainer's steps, in the precision of these."""
        images = self.episodic_data().normalize(images.to(self.device))
        with self.trainer.precision_plugin.forward_context():
            return self.embed(images)

    def _make_classifier(self, num_classes: int, source: str) -> None:
        """Create the linear classifier of all training classes, or check that it has their number."""
        require_positive(type(self).__name__, num_classes=num_classes)
        if self.classifier is None:
            with torch.device("cpu"):  # the same random numbers whatever the device
                self.classifier = nn.Linear(self.backbone.num_features, num_classes)
        elif self.classifier.out_features != num_classes:
            raise InputError(
                f"the classifier is for {self.classifier.out_features} training classes, but {source} means "
                f"{num_classes}."
            )

    def _may_go_on(self, split: str, labels: Tensor, images: int, ways: int) -> bool:
        """Whether a part of the split can be evaluated.

        Outside a probe, warns that it is only a part, or raises if it holds too few classes.
        """
        available = len(labels.unique())
        if self.is_probe():
            return available >= ways  # a batch or two may hold no episode; nothing is wrong with that here
        remedy = "To make evaluation shorter, lower its number of episodes instead of limit_*_batches."
        if available < ways:
            raise InputError(f"limit_*_batches leaves {available} whole classes of {split} for {ways} ways. {remedy}")
        rank_zero_warn(
            f"evaluated on {len(labels)} of the {split} split's {images} images (limit_*_batches): "
            f"the accuracy is not the split's. {remedy}"
        )
        return True

    def is_probe(self) -> bool:
        """Whether Lightning only tries if everything works (its sanity check, ``fast_dev_run``)."""
        return bool(self.trainer.sanity_checking or self.trainer.fast_dev_run)  # type: ignore[attr-defined]

    def _gather_embedded(self) -> tuple[Tensor, Tensor]:
        """Numbers (sorted, each once) and features of the images that all processes embedded."""
        index = torch.cat([index for index, _ in self._embedded])
        features = torch.cat([features for _, features in self._embedded])
        self._embedded.clear()
        if self.trainer.world_size > 1:
            # The stock sampler pads every process to the same number of images by repeating some.
            index = self.all_gather(index).flatten()  # type: ignore[union-attr]
            features = self.all_gather(features).flatten(0, 1)  # type: ignore[union-attr]
        first = each_once(index)
        return index[first], features[first]
