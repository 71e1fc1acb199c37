"""The base of few-shot and classification training: optimiser and schedule, backbone, training step."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import OptimizerCallable
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from swbn_lightning.backbones import Backbone, build_backbone
from swbn_lightning.data.image_data import ImageDataModule
from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms import named_norms, norm_parameter_groups
from swbn_lightning.norms.health import check_running_statistics
from swbn_lightning.runs.checkpoints import load_backbone
from swbn_lightning.training.captured_step import CapturedTraining
from swbn_lightning.training.not_finite import any_process, first_not_finite, not_finite, state_of
from swbn_lightning.training.resumed_settings import ResumableModule, optimizer_settings
from swbn_lightning.training.schedules import (
    ScheduleCallable,
    WarmUp,
    epochs_between_values,
    schedule_for_trainer,
    watched_by,
)
from swbn_lightning.training.step_size import set_step_size

INTERVALS = ("epoch", "step")
AUTO = "auto"


class TrainingModule(CapturedTraining, ResumableModule):
    """A LightningModule with a backbone that can use any normalisation layer.

    A subclass sets its head and defines :meth:`training_loss`, which returns the loss to minimise and the accuracy (a
    fraction) of one batch, and the evaluation. Arguments are plain data, so a
    checkpoint contains them and loads without running code.

    Args:
        backbone: a name from :func:`~swbn_lightning.backbones.available_backbones`; or, in Python, a
            :class:`~swbn_lightning.backbones.Backbone`, which is not saved with the hyperparameters.
        norm: a name from :meth:`~swbn_lightning.NormFactory.names`.
        norm_args: options of the norm, such as ``{step_size: 0.001}``. ``step_size: auto`` is set before training to
            ``step_budget`` divided by the run's number of training forwards, at most 1e-2; a checkpoint has the number.
        backbone_args: options of the backbone, such as ``{in_channels: 1}``.
        optimizer: makes the optimiser from the parameters.
        lr_scheduler: makes the schedule from the optimiser; None for a constant rate.
        lr_interval: unit of the schedule, ``"epoch"`` or ``"step"``.
        warmup_steps: number of steps over which the rate rises linearly; 0 for none.
        channels_last: run the backbone in channels_last layout, in which the whitening layers need no copy (a ResNet-20
            step on two CPU cores: 1.2 to 1.3 times as fast, with any norm).
        step_budget: for ``step_size: auto``; None for 0.5 (KL) or 5 (Frobenius), see docs/step-size.md.
        spare_norms_and_biases: no weight decay for gamma, beta and biases. By default everything decays, as in the
            experiments that the paper repeats.
        compile: run the backbone through ``torch.compile``.
        cuda_graph: capture forward, backward and optimiser step once as a CUDA graph, and replay it. This helps small
            networks on a GPU, where launching kernels takes most of the time.
        backbone_checkpoint: start from the backbone in this checkpoint of any of this package's models. The file is
            read only here; a checkpoint of this model does not need it.
        backbone_names: for a ``backbone_checkpoint`` from elsewhere, a file of weights (``.pt``, ``.pth``,
            ``.safetensors``): what stands for the beginnings of its names, or None for weights to leave out, such as
            ``{"module.encoder.": "", "fc.": None}`` (:func:`~swbn_lightning.runs.foreign_weights.load_foreign`). ``{}``
            for names that fit as they are.

    Raises:
        InputError: an unknown name or option; options for a backbone that is given as a module; a negative warm-up; a
            checkpoint of another backbone; names without a checkpoint, or that do not fit; before training, with
            ``cuda_graph``, a step that cannot be captured.
    """

    head: nn.Module
    #: Whether the head can be used as it is made, so that an evaluation only needs a trained backbone.
    head_needs_no_training: bool = False
    #: Whether :meth:`embed` gives the backbone's maps, not their averages.
    embeds_maps = False
    not_in_checkpoint: tuple[str, ...] = (
        "optimizer", "lr_scheduler", "backbone_checkpoint", "backbone_names", "compile", "cuda_graph",
        "backbone_args.pretrained",
    )  # fmt: skip
    #: Arguments with options of a norm, in each of which ``step_size`` may be ``auto``.
    norm_arguments: tuple[str, ...] = ("norm_args",)

    def __init__(
        self,
        backbone: str | Backbone = "resnet12",
        norm: str = "bn",
        *,
        norm_args: dict[str, Any] | None = None,
        backbone_args: dict[str, Any] | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3),
        lr_scheduler: ScheduleCallable | None = None,
        lr_interval: str = "epoch",
        warmup_steps: int = 0,
        channels_last: bool = True,
        step_budget: float | None = None,
        spare_norms_and_biases: bool = False,
        compile: bool = False,
        cuda_graph: bool = False,
        backbone_checkpoint: str | None = None,
        backbone_names: dict[str, str | None] | None = None,
    ) -> None:
        super().__init__()
        if backbone_names is not None and backbone_checkpoint is None:
            raise InputError("backbone_names are for a backbone_checkpoint, a file of weights; give that, too.")
        if lr_interval not in INTERVALS:
            raise unknown_name("lr_interval", lr_interval, INTERVALS)
        if warmup_steps < 0:
            raise InputError(f"warmup_steps must be at least 0, got {warmup_steps}.")
        given = isinstance(backbone, nn.Module)
        self.save_hyperparameters(ignore=[*self.not_in_checkpoint, *(["backbone"] if given else [])])
        self.forget_inner_hyperparameters()
        self._auto_step_sizes = {
            name for name in self.norm_arguments if (self.hparams.get(name) or {}).get("step_size") == AUTO
        }
        if step_budget is not None and not self._auto_step_sizes:
            raise InputError("step_budget is for norm_args: {step_size: auto}; this step size is given.")
        self.backbone = _resolve_backbone(backbone, norm, without_auto(norm_args), backbone_args)
        if "norm_args" in self._auto_step_sizes:
            set_step_size(self.backbone, 1, step_budget)  # its errors now; the number before training
        #: The file of ``backbone_checkpoint``.
        self.backbone_file = None
        if backbone_checkpoint is not None:
            self.backbone_file = load_backbone(self.backbone, backbone_checkpoint, backbone_names)
        self._backbone_is_trained = self.backbone_file is not None or bool((backbone_args or {}).get("pretrained"))
        if channels_last:
            self.backbone = self.backbone.to(memory_format=torch.channels_last)
        if compile:
            # In place, so that the names of the parameters stay; forward_features does not go through forward, so
            # compile its parts.
            for part in self.backbone.children() if self.embeds_maps else (self.backbone,):
                part.compile()
        self.channels_last, self.compiled = channels_last, compile
        self._step_budget, self._spare_norms_and_biases = step_budget, spare_norms_and_biases
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self._lr_interval, self._warmup_steps = lr_interval, warmup_steps
        self.cuda_graph = cuda_graph
        self._not_finite: str | None = None  # where an evaluation's first such output began
        #: What the last evaluation of each split gave, for tables and files; plain data.
        self.results: dict[str, dict[str, Any]] = {}
        #: Names of the classes whose probabilities :meth:`predict_step` gives; known when a prediction starts.
        self.prediction_classes: tuple[str, ...] = ()

    @property
    def can_be_evaluated_as_made(self) -> bool:
        """Whether it needs no checkpoint of its own: its backbone has trained weights, and its head needs none."""
        return self._backbone_is_trained and self.head_needs_no_training

    def evaluation_files(self, split: str) -> dict[str, str]:
        """Text of the files that the last evaluation of a split leaves beside ``results.json``, by their names."""
        return {}

    def prediction_files(self, numbers: Tensor, probabilities: Tensor) -> dict[str, str]:
        """Text of the files that ``predict`` leaves beside ``predictions.csv``, by their names.

        Args:
            numbers: ``[M]``, of the images of all batches, in their order; on the CPU.
            probabilities: ``[M, W]``, what :meth:`predict_step` gave for them.
        """
        return {}

    def embed(self, images: Tensor) -> Tensor:
        """Return features ``[N, C]``, or maps ``[N, C, h, w]``, of images ``[N, in_channels, H, W]``."""
        images = images.to(next(self.backbone.parameters()).dtype)  # precision: bf16-true and the like
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        images = images.contiguous(memory_format=layout)
        return self.backbone.forward_features(images) if self.embeds_maps else self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(images)

    def watch_finite(self, outputs: Tensor, images: Tensor) -> Tensor:
        """Return the ``outputs`` of an evaluation; if they are not finite, note where in the network that begins."""
        if self._not_finite is None and not_finite({"outputs": outputs}):
            layer = first_not_finite(self, lambda: self(images)) or "the head"
            bad = [name for name in not_finite(state_of(self)) if name.startswith(f"{layer.partition(' ')[0]}.")]
            self._not_finite = f"it begins in {layer}" + (f", for {bad[0]} is not finite" if bad else "")
        return outputs

    def stop_unless_finite(self, split: str) -> None:
        """Stop an evaluation with non-finite outputs; every process must call it.

        Raises:
            InputError: names the layer where it begins.
        """
        found, self._not_finite = self._not_finite, None
        if found is None:  # an infinite factor or variance leaves finite outputs that say nothing
            weights: dict[str, Tensor] = dict(self.named_parameters())
            weights |= {f"{n}.{k}": b for n, m in named_norms(self) for k, b in m.named_buffers()}
            bad = not_finite(weights)
            found = f"{bad[0]} is not finite" if bad else None
        if any_process(self.trainer, found is not None):
            raise InputError(
                f"{split}: the network's outputs are not finite ({found or 'in another process'}), so no accuracy can "
                "be read off them. Take an earlier checkpoint, or a wider precision (bf16-mixed, 32-true)."
            )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.image_data()
        if data.channels != self.backbone.in_channels:
            raise InputError(
                f"the images have {data.channels} channel(s), but the backbone takes {self.backbone.in_channels}: "
                f"set backbone_args: {{in_channels: {data.channels}}}. A network that is trained already takes data of "
                f"{self.backbone.in_channels} channel(s) only (few-shot class folders are read as RGB)."
            )
        size = getattr(data, "image_size", None)
        if size is not None:
            self.backbone.check_image_size(size, size)
        if stage == "fit":
            self.resolve_step_size("norm_args", self.backbone)

    def resolve_step_size(self, argument: str, module: nn.Module, forwards_per_batch: int = 1) -> None:
        """Set the step size of this run in the layers of ``module``, if ``argument`` has ``step_size: auto``.

        Args:
            argument: one of :attr:`norm_arguments`.
            module: contains the SWBN layers.
            forwards_per_batch: how often a batch goes through these layers.
        """
        if argument not in self._auto_step_sizes:
            return
        batches = self.trainer.estimated_stepping_batches * self.trainer.accumulate_grad_batches
        forwards = batches * forwards_per_batch
        value = set_step_size(module, forwards, self._step_budget)
        self.hparams[argument] = {**self.hparams[argument], "step_size": value}
        self.hparams["step_budget"] = None
        where = "" if argument == "norm_args" else f" of {argument}"
        rank_zero_info(f"step_size: auto{where} is {value:.3g} for {forwards} training forwards")

    def on_predict_start(self) -> None:
        super().on_predict_start()
        if self.trainer.world_size > 1:
            raise InputError("predict names images in one process; give --trainer.devices 1.")
        check_running_statistics(self)

    def image_data(self) -> ImageDataModule:
        """Return the trainer's data module.

        Raises:
            InputError: it is not one of this package's.
        """
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, ImageDataModule):
            raise InputError(
                f"{type(self).__name__} needs one of this package's data modules, as in "
                f"trainer.fit(model, datamodule=...); got {type(data).__name__}."
            )
        return data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, accuracy = self.step_on(batch)
        # Plain values, which Lightning averages on the device: a metric object would look at each for NaN.
        values = {"train/loss": loss.detach(), "train/accuracy": accuracy}
        for name, value in values.items():
            prog_bar = name == "train/accuracy"
            self.log(name, value, on_step=False, on_epoch=True, prog_bar=prog_bar, sync_dist=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        try:
            optimizer = self._optimizer(self._parameters_to_train())
            made = optimizer_settings(optimizer)
            schedule = None if self._lr_scheduler is None else self._lr_scheduler(optimizer)
        except InputError:
            raise
        except (ValueError, TypeError) as error:  # torch checks rates and numbers there
            raise InputError(f"optimizer or lr_scheduler cannot be made: {error}") from error
        self.settings_made(optimizer, made, schedule)
        return [optimizer], schedule_for_trainer(schedule, optimizer, self._lr_interval, self._warmup_steps, self)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if isinstance(scheduler, WarmUp):
            scheduler.step(epoch_ended=self.trainer.is_last_batch)
        else:
            super().lr_scheduler_step(scheduler, metric)

    def on_train_epoch_end(self) -> None:
        warm_up = self.lr_schedulers()
        plateau = warm_up.schedule if isinstance(warm_up, WarmUp) else None
        if isinstance(plateau, ReduceLROnPlateau):
            metric = self.trainer.callback_metrics.get(watched_by(plateau))
            due = (self.current_epoch + 1) % epochs_between_values(plateau, self.trainer) == 0
            if due and metric is not None:  # there may be no validation yet
                warm_up.look(metric)

    def _parameters_to_train(self) -> Any:
        if not self._spare_norms_and_biases:
            return [p for p in self.parameters() if p.requires_grad]
        decayed, spared = norm_parameter_groups(self, 0.0)
        del decayed["weight_decay"]  # the optimiser's own
        return [group for group in (decayed, spared) if group["params"]]


def tested_file(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Return the file with the weights that an evaluation tests: the trainer's checkpoint, or else the backbone's."""
    found = trainer.ckpt_path or getattr(module, "backbone_file", None)
    return None if found is None else str(found)


def without_auto(norm_args: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a norm's options without ``step_size: auto``, which is not a number yet."""
    if (norm_args or {}).get("step_size") != AUTO:
        return norm_args
    return {key: value for key, value in (norm_args or {}).items() if key != "step_size"}


def training_forward(module: pl.LightningModule, batch: Any) -> Any:
    """Run the network on a batch as it arrives in ``training_step``, without logging.

    This package's modules compute their training loss. Other modules are called with the batch, or with its first
    element if it is a list or tuple.
    """
    if isinstance(module, TrainingModule):
        return module.training_loss(batch)
    return module(batch[0] if isinstance(batch, list | tuple) else batch)


def _resolve_backbone(
    backbone: str | Backbone,
    norm: str,
    norm_args: Mapping[str, Any] | None,
    backbone_args: Mapping[str, Any] | None,
) -> Backbone:
    if isinstance(backbone, str):
        return build_backbone(backbone, norm, norm_args, **(backbone_args or {}))
    if not isinstance(backbone, nn.Module):
        raise InputError(f"backbone must be a name (such as resnet20) or a network, got {backbone!r}.")
    if norm_args or backbone_args:
        raise InputError("norm_args and backbone_args are for a backbone given by name; this one is built already.")
    return backbone
