"""A whole training step as one CUDA graph.

A small network's step is bound by the launches of its hundreds of kernels, and a whitening layer has more of them
than batch normalisation. Captured once and replayed, they cost one launch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from swbn_lightning.errors import InputError
from swbn_lightning.training.not_finite import tensors_in

WARM_UP = 3  # eager steps before capture, as PyTorch's notes on CUDA graphs ask; they are steps of the training


class CapturedStep:
    """Forward, backward and optimiser step of a batch of one shape, replayed from a CUDA graph.

    The first three batches are trained on as usual, on a stream of their own; the fourth is captured. From then on a
    call copies its batch into the tensors that the graph reads, and replays it. Every call is one step. Learning rates
    may change between calls, since the graph reads them from the device; nothing else of the optimiser may.

    Args:
        module: whose parameters and buffers the step reads and writes.
        loss: from a batch to the loss and further tensors that the caller wants to see.
        optimizer: SGD, or any with a ``capturable`` option. The rates are on the device only while it steps.

    Raises:
        InputError: an optimiser or a step that cannot be captured; a batch of another shape; a changed hyperparameter.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any], tuple[Tensor, ...]], optimizer: Optimizer) -> None:
        self.module, self.loss, self.optimizer = module, loss, optimizer
        self._flag = _capture_flag(optimizer)
        self._forget()

    def __call__(self, batch: Any) -> tuple[Tensor, ...]:
        """Train on ``batch``, any nest of tensors on the device; what ``loss`` gave, valid until the next call."""
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        if self._seen < WARM_UP:
            self._seen += 1
            return on_side_stream(lambda: self._step(batch))
        if self._replay is None:
            self._capture(batch)
        self._check(batch)
        for static, value in zip(tensors_in(self._batch), tensors_in(batch), strict=True):
            static.copy_(value)
        assert self._replay is not None
        return self._replay()

    def check_state(self) -> None:
        """Capture anew if a parameter, a buffer or a mode is not the one captured: the graph would not know."""
        if self._replay is not None and self._state != _state(self.module):
            self._forget()

    def _forget(self) -> None:
        self._seen = 0
        self._replay: Callable[[], tuple[Tensor, ...]] | None = None
        self._batch: Any = None  # what the graph reads
        groups = self.optimizer.param_groups
        self._rates = [torch.zeros((), device=group["params"][0].device) for group in groups]
        _move_step_counts(self.optimizer)

    def _capture(self, batch: Any) -> None:
        self._batch, self._state = apply_to_collection(batch, Tensor, torch.clone), _state(self.module)
        self._constants = [_constants(group) for group in self.optimizer.param_groups]
        try:
            self._replay = record(lambda: self._step(self._batch))
        except RuntimeError as error:
            raise InputError(
                f"cuda_graph: this training step cannot be captured: {error} Something in it needs the host, such as "
                "a value read back from the device; train with cuda_graph: false."
            ) from error

    def _check(self, batch: Any) -> None:
        captured, given = _forms(self._batch), _forms(batch)
        if type(batch) is not type(self._batch) or given != captured:
            raise InputError(
                f"cuda_graph: the step was captured for a batch of {captured}, this one has {given}; give batches of "
                "one shape (drop_last: true) or cuda_graph: false."
            )
        for captured, group in zip(self._constants, self.optimizer.param_groups, strict=True):
            changed = [key for key, value in _constants(group).items() if value != captured.get(key)]
            if changed:
                raise InputError(
                    f"cuda_graph: {', '.join(changed)} of the optimiser changed during training, but a captured step "
                    "follows only the learning rate; use cuda_graph: false."
                )

    def _step(self, batch: Any) -> tuple[Tensor, ...]:
        self.optimizer.zero_grad(set_to_none=True)
        with _autocast_without_cache():
            outputs = self.loss(batch)
        device_type = outputs[0].device.type
        with torch.autocast(device_type, enabled=False):  # as without manual optimisation: it is for the forward
            outputs[0].backward()
        with self._rates_on_device():
            self.optimizer.step()
        return tuple(value.detach() for value in outputs)

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        groups = self.optimizer.param_groups
        before = [{key: group.get(key) for key in ("lr", "foreach", self._flag)} for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"], group[self._flag] = rate, True
            if self._flag == "fused":
                group["foreach"] = False
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


class CapturedTraining(pl.LightningModule):
    """The part of a LightningModule that trains by a :class:`CapturedStep` where :attr:`cuda_graph` says so.

    A subclass gives :meth:`training_loss` and calls :meth:`step_on` in its ``training_step``, which does all of a step;
    the hooks by which Lightning would do its parts then do nothing. (Manual optimisation would count no steps, and
    leave the schedules to the module.)
    """

    #: Whether to capture the training step.
    cuda_graph = False
    _captured: CapturedStep | None = None  # while it trains

    def training_loss(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the loss to minimise, and other tensors that are wanted of one batch."""
        raise NotImplementedError

    def step_on(self, batch: Any) -> tuple[Tensor, ...]:
        """What :meth:`training_loss` gives; with a captured step, after the step."""
        return self.training_loss(batch) if self._captured is None else self._captured(batch)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.cuda_graph:
            check_graph_can_be_captured(self.trainer)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.cuda_graph:
            if torch.is_anomaly_enabled():  # as Lightning does from here on for detect_anomaly
                raise _impossible("detect_anomaly looks at every value")
            optimizer = self.optimizers(use_pl_optimizer=False)
            self._captured = CapturedStep(self, self.training_loss, optimizer)  # type: ignore[arg-type]

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self._captured is not None:
            self._captured.check_state()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._captured = None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._captured is None:
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if self._captured is None:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self._captured is None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


def on_side_stream(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Run a step that is to be captured later where capturing will find nothing of the default stream in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outputs = step()
    torch.cuda.current_stream().wait_stream(side)
    return outputs


def record(step: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Capture a step without running it; what is returned runs it and gives its (always the same) outputs."""
    graph = torch.cuda.CUDAGraph()
    # A thread that pins the next batch's memory meanwhile does no harm.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return outputs

    return replay


def _capture_flag(optimizer: Optimizer) -> str:
    """The option with which this optimiser reads its rate from the device."""
    if all("capturable" in group for group in optimizer.param_groups):
        return "capturable"
    if isinstance(optimizer, torch.optim.SGD):
        return "fused"
    raise InputError(
        f"cuda_graph: {type(optimizer).__name__} cannot be captured; use SGD, Adam, AdamW or another optimiser of "
        "PyTorch's with a 'capturable' option, or cuda_graph: false."
    )


def _move_step_counts(optimizer: Optimizer) -> None:
    """Counts of steps that an eager run kept on the host, in a checkpoint, belong beside the parameters."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


def _constants(group: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter group, what a graph has written into it."""
    return {key: value for key, value in group.items() if key != "params" and not key.endswith("lr")}


def _state(module: nn.Module) -> list[Any]:
    parameters = [(p.data_ptr(), p.requires_grad) for p in module.parameters()]
    buffers = [b.data_ptr() for b in module.buffers()]
    return [*parameters, *buffers, *(m.training for m in module.modules())]


def _forms(batch: Any) -> Any:
    """The batch with the shape, type and device of each tensor in its place."""
    return apply_to_collection(batch, Tensor, lambda value: (tuple(value.shape), value.dtype, value.device))


@contextmanager
def _autocast_without_cache() -> Iterator[None]:
    """Weights that autocast has cast once must be cast again by every replay."""
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    torch.clear_autocast_cache()
    with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
        yield


def check_graph_can_be_captured(trainer: pl.Trainer) -> None:
    """Raise InputError for what a captured step would leave out or cannot do."""
    device = trainer.strategy.root_device  # where the model will be
    problems = {
        f"it needs a GPU, the device is {device}": device.type != "cuda",
        f"it works in one process, there are {trainer.world_size}": trainer.world_size > 1,
        f"gradient_clip_val={trainer.gradient_clip_val} is not part of it": trainer.gradient_clip_val,
        f"accumulate_grad_batches={trainer.accumulate_grad_batches} takes several": trainer.accumulate_grad_batches
        != 1,
        "precision 16-mixed scales the loss on the host; use bf16-mixed": trainer.precision == "16-mixed",
    }
    for problem, found in problems.items():
        if found:
            raise _impossible(problem)


def _impossible(problem: str) -> InputError:
    return InputError(f"cuda_graph: {problem}; or train with cuda_graph: false.")
