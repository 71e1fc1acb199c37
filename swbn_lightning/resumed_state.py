"""Whether a checkpoint holds the state that a training needs to go on: nothing starts afresh without a word."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, StochasticWeightAveraging
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swbn_lightning.errors import InputError
from swbn_lightning.resuming import STREAMS, RandomStreams
from swbn_lightning.run_files import printable

_BY_GROUP = {"base_lrs", "_last_lr", "rates", "min_lrs", "max_lrs", "betas"}  # lists that keep their length


def source(trainer: pl.Trainer) -> str:
    """The checkpoint that a trainer goes on from, for messages."""
    return printable(trainer.ckpt_path or "the checkpoint")


def check_callbacks(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """To be called before callbacks load their state.

    What a callback has no state for is a warning, since it may be new; so are random streams that are missing.

    Raises:
        InputError: a state that is none of its callback.
    """
    states = checkpoint.get("callbacks")
    states = states if isinstance(states, dict) else {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind, state = type(callback), states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) or kind.state_dict is pl.Callback.state_dict:
            continue  # of files that a checkpoint remembers none counts
        if state is None:
            rank_zero_warn(f"{source(trainer)} holds no state of {kind.__name__}, which begins anew.")
        elif kind.__module__.startswith("pytorch_lightning."):
            _check(trainer, "callbacks", state, callback.state_dict(), kind.__name__)
        else:
            _check(trainer, "callbacks", state, {}, kind.__name__)
    streams = checkpoint.get(STREAMS)
    number = len(streams) if isinstance(streams, list) else 0
    keeps = any(isinstance(callback, RandomStreams) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if keeps and number < trainer.world_size:
        rank_zero_warn(
            f"{source(trainer)} holds {STREAMS} for {number} of {trainer.world_size} process(es). The others go on as "
            "they are seeded now, so that the end is not that of a training which nothing stopped."
        )


def check_training_state(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """To be called once the optimisers are made, and before they load their state.

    Raises:
        InputError: ``loops``, ``optimizer_states`` or ``lr_schedulers`` that are missing, of another number than the
            training has, or of another form than this training's own.
    """
    loops = checkpoint.get("loops")
    if not isinstance(loops, dict) or not isinstance(loops.get("fit_loop"), dict):
        raise _missing(trainer, "loops")
    _check(trainer, "loops", loops["fit_loop"], trainer.fit_loop.state_dict(), "fit_loop", loop=True)
    if not trainer.strategy.lightning_restore_optimizer:
        return  # the strategy has its own way
    states = checkpoint.get("optimizer_states")
    if not isinstance(states, list) or (not states and trainer.optimizers):
        raise _missing(trainer, "optimizer_states")
    if len(states) != len(trainer.optimizers):
        raise _refused(trainer, "optimizer_states", f"it is of {len(states)} optimisers, not {len(trainer.optimizers)}")
    for optimizer, state in zip(trainer.optimizers, states, strict=True):
        found = _check_optimizer(trainer, optimizer, state)
        steps = loops["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
        if not found and steps["total"]["completed"]:
            raise _missing(trainer, "optimizer_states")
    schedules, states = [config.scheduler for config in trainer.lr_scheduler_configs], checkpoint.get("lr_schedulers")
    if not isinstance(states, list) or (not states and schedules):
        raise _missing(trainer, "lr_schedulers")
    # Weight averaging has one of its own, and restores that itself.
    averaging = any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks)  # type: ignore[attr-defined]
    if len(states) != len(schedules) and not (averaging and len(states) > len(schedules)):
        raise _refused(trainer, "lr_schedulers", f"it is of {len(states)} schedules, not {len(schedules)}")
    for schedule, state in zip(schedules, states, strict=False):
        _check(trainer, "lr_schedulers", state, schedule.state_dict(), type(schedule).__name__)
        try:
            schedule.load_state_dict(copy.deepcopy(state))
        except Exception as error:  # of a schedule of any kind
            raise _refused(
                trainer, "lr_schedulers", f"{type(schedule).__name__} does not take it: {error!r}"
            ) from error


def _check_optimizer(trainer: pl.Trainer, optimizer: Optimizer, state: Any) -> bool:
    """Whether there is the state of any parameter, or none to be expected."""
    part, name = "optimizer_states", type(optimizer).__name__
    _check(trainer, part, state, {"state": {}, "param_groups": []}, name)
    groups, kept = state["param_groups"], state["state"]
    if len(groups) != len(optimizer.param_groups):
        raise _refused(trainer, part, f"{name} has {len(optimizer.param_groups)} parameter groups, it {len(groups)}")
    found = 0
    for number, (group, now) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        here = f"{name}.param_groups[{number}]"
        # Those that are on or off may be newer than the checkpoint, and torch adds them.
        numbers = {k: v for k, v in now.items() if k != "params" and not isinstance(v, bool | None)}
        _check(trainer, part, group, {"params": [], **numbers}, here)
        if len(group["params"]) != len(now["params"]) or any(type(key) is not int for key in group["params"]):
            raise _refused(trainer, part, f"{here} is not of {len(now['params'])} parameters")
        expected = _state_of_one(optimizer, now)
        for key, parameter in zip(group["params"], now["params"], strict=True):
            if key not in kept or (isinstance(kept[key], dict) and not kept[key]):
                found += not expected  # a parameter that has had no gradient has none
                continue
            found += 1
            _check(trainer, part, kept[key], {k: 0 for k, number in expected.items() if number}, f"{name}.state[{key}]")
            for entry in (entry for entry, number in expected.items() if not number):
                value = kept[key].get(entry)
                if not isinstance(value, Tensor) or value.shape != parameter.shape or value.is_meta:
                    raise _refused(
                        trainer, part, f"{name}.state[{key}].{entry} is no tensor of shape {tuple(parameter.shape)}"
                    )
    return bool(found)


def _state_of_one(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """What one of torch's optimisers keeps of a parameter, and whether that is a number; else it has its shape."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    parameter = torch.zeros(2, 3, requires_grad=True)
    parameter.grad = torch.ones(2, 3)
    options: dict[str, Any] = {key: value for key, value in group.items() if key in optimizer.defaults}
    options |= {key: False for key in ("capturable", "fused", "foreach") if key in options}
    options |= {key: float(value) for key, value in options.items() if isinstance(value, Tensor) and value.numel() == 1}
    try:
        probe = type(optimizer)([parameter], **options)
        probe.step()
    except (AssertionError, RuntimeError, TypeError, ValueError):  # one that wants more than a gradient
        return {}
    kept = probe.state[parameter]
    shapes = {key: value.shape if isinstance(value, Tensor) else () for key, value in kept.items() if value is not None}
    return {key: shape == () for key, shape in shapes.items() if shape in ((), parameter.shape)}


def _check(trainer: pl.Trainer, part: str, told: Any, now: Any, path: str, loop: bool = False) -> None:
    forbidden: Callable[[str], bool] = (lambda key: True) if loop else _LIVES_IN_A_SCHEDULE.__contains__
    reason = _misfit(told, now, path, loop, forbidden if part in ("loops", "lr_schedulers") else lambda key: False)
    if reason:
        raise _refused(trainer, part, reason)


_LIVES_IN_A_SCHEDULE = {"optimizer", *dir(LRScheduler)}  # a state that has it would replace it


def _misfit(told: Any, now: Any, path: str, whole: bool, forbidden: Callable[[str], bool]) -> str | None:
    """Why a state does not stand for the one that is there now, whose form it must have; None if it does."""
    if isinstance(now, dict):
        if not isinstance(told, dict):
            return f"{path} is a {type(told).__name__}"
        if not (whole and path.endswith("state_dict")):  # of a loop: what its loaders and metrics keep
            for key in now:
                if isinstance(key, str) and key not in told and (whole or not key.startswith("_")):
                    return f"{path} lacks {key}"
            for key in told:
                if key not in now and forbidden(key):
                    return f"{path} has {key!r}"
        inner = [
            _misfit(told[key], value, f"{path}.{key}", whole, forbidden) for key, value in now.items() if key in told
        ]
        return next(filter(None, inner), None)
    if isinstance(now, list | tuple):
        if not isinstance(told, list | tuple) or (path.rpartition(".")[2] in _BY_GROUP and len(told) != len(now)):
            return f"{path} is no list" + (f" of {len(now)}" if isinstance(told, list | tuple) else "")
        inner = [
            _misfit(*pair, f"{path}[{i}]", whole, forbidden) for i, pair in enumerate(zip(told, now, strict=False))
        ]
        return next(filter(None, inner), None)
    if _is_number(now):
        fits = type(told) is type(now) and told >= 0 if whole else _is_number(told)
        return None if fits else f"{path} is no {'count' if whole else 'number'}"
    return f"{path} is no text" if isinstance(now, str) and not isinstance(told, str) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta and not value.is_complex() and value.layout is torch.strided
    return isinstance(value, bool | int | float)


def _missing(trainer: pl.Trainer, part: str) -> InputError:
    return InputError(
        f"{source(trainer)} holds no {part}, without which a training cannot go on, as one that was saved with "
        "save_weights_only. Give a whole checkpoint (last.ckpt of the run), or start a new training from these weights "
        "(--model.backbone_checkpoint)."
    )


def _refused(trainer: pl.Trainer, part: str, reason: str) -> InputError:
    return InputError(
        f"{source(trainer)}: its {part} are not those of this training ({printable(reason)[:300]}). Go on with the "
        "settings of the training that left it, or start a new one from these weights (--model.backbone_checkpoint)."
    )
