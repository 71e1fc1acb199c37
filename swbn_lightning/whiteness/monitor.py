"""The callback that follows whiteness through a training run."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import check_norms, named_norms
from swbn_lightning.norms.surgery.patterns import as_patterns, check_patterns, fits
from swbn_lightning.whiteness.measure import LayerWhiteness, choose_layers, feature_moments, summarize
from swbn_lightning.whiteness.measures import MEASURES
from swbn_lightning.whiteness.moments import FeatureMoments
from swbn_lightning.whiteness.records import (
    MEAN,
    MOST_CHANNELS,
    WHITENESS_FILE,
    CorrelationMap,
    append_whiteness,
    heatmap_name,
    maps_of,
    measurements,
    write_heatmap,
)


class WhitenessMonitor(pl.Callback):
    """Log how white the normalisation layers' outputs are, before training and after each epoch.

    It measures a fixed sample of validation images in evaluation mode, before gamma and beta, and logs:

    - ``whiteness/<measure>/<layer>``: the measures of :class:`.LayerWhiteness` for every layer;
    - ``whiteness/<measure>/mean``: their means over the layers, without layers where a measure is infinite;
    - ``whiteness/seconds``: the time that the measurement took.

    The model's modes, state and random streams do not change. Compiled networks run uncompiled for it. Every process
    measures the whole sample, so the values do not depend on the number of processes.

    ``whiteness.csv`` in the run's folder receives the same values at every measurement. When training ends or is
    interrupted, the callback draws ``whiteness.png`` and a heatmap of the correlation matrix before and after training,
    and shows them in TensorBoard. The CSV file of the same name has every number in a picture. Checkpoints contain the
    whole history.

    After each epoch it also warns of what :func:`swbn_lightning.check_norms` finds, once per layer and kind.

    It measures nothing in a network without normalisation layers or, with a warning, in one with parameters sharded
    over processes (FSDP, DeepSpeed, tensor parallel).

    Args:
        num_images: validation images in the sample. 512 maps of 7x7 positions already give 25,000 samples per channel.
            The paper's heatmaps use 5,000 images (section 4.1.3).
        layers: pattern of module names, or several, of which a layer must match one; by default all layers.
        every_n_epochs: number of epochs between measurements; the last epoch is always measured. 0: never measure.
        images: ``[N, ...]``, a sample of your own, for a model trained without one of this package's data modules.
        exclude: pattern of module names to leave out, or several.
        batch_size: images per forward.
        pictures: draw pictures when training ends.
        heatmaps: pattern of the layers to draw a heatmap of, or several; None for the last layer, as in the paper.
        heatmap_channels: largest number of channels in a heatmap, at most 1,024; 128 as in the paper.
        signed: draw signed correlations in the heatmaps, not absolute values.
        seed: chooses the channels.

    Raises:
        InputError: a number is out of range. When training starts: there are no ``images`` and the data module has no
            ``sample_images``, or a pattern matches no layer.
    """

    def __init__(
        self,
        num_images: int = 512,
        layers: Sequence[str] | str = ("*",),
        every_n_epochs: int = 1,
        *,
        images: Tensor | None = None,
        exclude: Sequence[str] | str = (),
        batch_size: int = 128,
        pictures: bool = True,
        heatmaps: Sequence[str] | str | None = None,
        heatmap_channels: int = 128,
        signed: bool = False,
        seed: int = 0,
    ) -> None:
        name = type(self).__name__
        require_positive(name, num_images=num_images, batch_size=batch_size, heatmap_channels=heatmap_channels)
        if heatmap_channels > MOST_CHANNELS:
            raise InputError(f"{name}: heatmap_channels must be at most {MOST_CHANNELS}, got {heatmap_channels}.")
        if every_n_epochs != 0:
            require_positive(name, every_n_epochs=every_n_epochs)
        self.num_images = num_images
        self.layers, self.exclude = as_patterns(layers), as_patterns(exclude)
        self.every_n_epochs = every_n_epochs
        self.batch_size = batch_size
        self.pictures = pictures
        self.heatmaps = None if heatmaps is None else as_patterns(heatmaps)
        self.heatmap_channels, self.signed, self.seed = heatmap_channels, signed, seed
        self._images = images
        #: One entry a measurement: ``{"epoch", "step"}`` and the means of the measures over the layers; epoch -1 is
        #: before training.
        self.history: list[dict[str, float]] = []
        #: The rows of ``whiteness.csv``: ``{"epoch", "step", "layer"}``, the measures and the counts.
        self.rows: list[dict[str, Any]] = []
        self._maps: dict[str, dict[str, CorrelationMap]] = {}  # by layer; "before" and "after"
        self._folder: Path | None = None
        self._unmeasured: int | None = None  # the epoch that ended last, if it was not measured
        self._warned: set[tuple[str, str]] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log_dir = trainer.log_dir  # the processes agree on it here
        self._folder = Path(log_dir) if trainer.loggers and log_dir else None
        if not self._measures(trainer, pl_module):
            return
        self._choose_heatmaps(list(choose_layers(pl_module, self.layers, self.exclude)))  # errors now, not at the end
        if not self.history:
            self._measure(trainer, pl_module, epoch=-1)
        elif self._folder is not None and not (self._folder / WHITENESS_FILE).exists():
            self._write(trainer, self.rows)  # resumed in another folder: what the checkpoint knows

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for finding in check_norms(pl_module):
            self._warn_once(finding.name, finding.kind, str(finding))
        if not self._measures(trainer, pl_module):
            return
        # The last one now if it can be told, so that the checkpoint holds it.
        last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        self._unmeasured = trainer.current_epoch
        if last or (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._measure(trainer, pl_module, trainer.current_epoch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._unmeasured is not None:
            self._measure(trainer, pl_module, self._unmeasured)
        self._draw(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        maps = {layer: {k: vars(m).copy() for k, m in maps.items()} for layer, maps in self._maps.items()}
        return {
            "history": [dict(entry) for entry in self.history],
            "rows": [dict(row) for row in self.rows],
            "maps": maps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = measurements(state_dict.get("history"))
        self.rows = measurements(state_dict.get("rows"))
        self._maps = maps_of(state_dict.get("maps"))

    def _measures(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        if self.every_n_epochs == 0 or next(named_norms(pl_module), None) is None:
            return False
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy):
            name = type(trainer.strategy).__name__
            self._warn_once("", "sharded", f"WhitenessMonitor measures nothing: {name} shards the parameters.")
            return False
        return True

    def _measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> None:
        """Measure, keep the values and log them."""
        start = time.perf_counter()
        self._unmeasured = None
        moments = self._moments(trainer, pl_module)
        if not moments:
            self._warn_once("", "unreached", "WhitenessMonitor measures nothing: no layer that it chose was run.")
            return
        measured = {name: summarize(found) for name, found in moments.items()}
        for name in self._choose_heatmaps(list(measured)):
            found = CorrelationMap.of(moments[name], epoch, self.heatmap_channels, self.seed)
            self._maps.setdefault(name, {})["before" if epoch < 0 else "after"] = found
        for name, layer in measured.items():
            if layer.few_samples:
                self._warn_once(name, "small_sample", _few_samples(name, layer))
        step = trainer.global_step
        means = {measure: _mean(measured, measure) for measure in MEASURES}
        self.history.append({"epoch": epoch, "step": step, **means})
        rows: list[dict[str, Any]] = [
            {"epoch": epoch, "step": step, "layer": name, **asdict(layer)} for name, layer in measured.items()
        ]
        seconds = time.perf_counter() - start
        rows.append({"epoch": epoch, "step": step, "layer": MEAN, **means, "seconds": seconds})
        self.rows += rows
        self._write(trainer, rows)
        values = {"whiteness/seconds": seconds}
        for row in rows:
            given = {key: row[key] for key in (*MEASURES, "num_samples", "num_constant") if key in row}
            values |= {f"whiteness/{key}/{row['layer']}": value for key, value in given.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def _moments(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, FeatureMoments]:
        precision = trainer.precision_plugin

        def forward(images: Tensor) -> Any:
            return pl_module(precision.convert_input(images.to(pl_module.device)))

        with precision.forward_context():
            return feature_moments(
                pl_module, self._sample(trainer), forward, self.layers, self.batch_size, self.exclude
            )

    def _sample(self, trainer: pl.Trainer) -> Tensor:
        if self._images is None:
            sample = getattr(getattr(trainer, "datamodule", None), "sample_images", None)
            if sample is None:
                raise InputError(
                    "WhitenessMonitor has no images: train with a data module that has sample_images(count), "
                    "or give WhitenessMonitor(images=...)."
                )
            self._images = sample(self.num_images)
        return self._images[: self.num_images]

    def _choose_heatmaps(self, layers: list[str]) -> list[str]:
        if not self.pictures or self.heatmaps == ():
            return []
        if self.heatmaps is None:
            return layers[-1:]
        check_patterns("measured layer", layers, self.heatmaps)
        return [name for name in layers if fits([name], self.heatmaps)]

    def _write(self, trainer: pl.Trainer, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._folder is None or not trainer.is_global_zero:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        append_whiteness(self._folder / WHITENESS_FILE, rows)
        for layer, maps in self._maps.items():
            write_heatmap(self._folder / f"{heatmap_name(layer)}.csv", maps)

    def _draw(self, trainer: pl.Trainer) -> None:
        try:
            self._draw_all(trainer)
        except OSError as error:  # a full disk: what was trained shall not be lost for pictures
            rank_zero_warn(f"the pictures of whiteness could not be written: {error.strerror or error}")

    def _draw_all(self, trainer: pl.Trainer) -> None:
        if not (self.pictures and self.rows and trainer.is_global_zero and self._folder is not None):
            return
        from swbn_lightning.files.pictures import save
        from swbn_lightning.whiteness.plots import heatmap_pairs, whiteness_by_layer

        figures = {"whiteness": whiteness_by_layer(self.rows)}
        for layer, maps in self._maps.items():
            figures[heatmap_name(layer)] = heatmap_pairs({layer: maps}, self.signed)
        for name, figure in figures.items():
            pixels = save(figure, self._folder / f"{name}.png")
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image(f"whiteness/{name}", pixels, trainer.global_step, dataformats="HWC")

    def _warn_once(self, name: str, kind: str, message: str) -> None:
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            rank_zero_warn(message)


def _few_samples(name: str, layer: LayerWhiteness) -> str:
    channels = layer.num_features - layer.num_constant
    return (
        f"{name}: {layer.num_samples} samples for {channels} channels, so their covariance is singular whatever the "
        f"layer does (log10_condition and kl are infinite, and rms is at least about 1/sqrt(N) = "
        f"{layer.num_samples**-0.5:.2f}). Take more num_images."
    )


def _mean(measured: Mapping[str, LayerWhiteness], measure: str) -> float:
    values = [getattr(layer, measure) for layer in measured.values() if layer.num_constant < layer.num_features]
    finite = [value for value in values if value != math.inf] or values
    return sum(finite) / len(finite) if finite else math.nan
