"""What a checkpoint says of its model, taken as plain values only: nothing that it names is imported or called."""

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytorch_lightning as pl

from swbn_lightning.errors import InputError
from swbn_lightning.runs.checkpoints import find_checkpoint, read_checkpoint

KEY = "hyper_parameters"
MODEL_CLASS = "model_class"

# By these keys Lightning and jsonargparse know what to import and call.
_CALLS = frozenset({"class_path", "init_args", "dict_kwargs", "_class_path", "_instantiator"})
# Names, numbers and words. With ":", "{" or a line break a string could be YAML, and would be parsed as such where a
# run's settings are written down and read again.
_WORDS = re.compile(r"[\w .,+/=()\-*?\[\]!]{0,500}")
_DEEPEST, _MOST = 8, 1000
_FITS: dict[Any, tuple[type, ...]] = {float: (float, int), list: (list, tuple), tuple: (list, tuple)}


def class_name(kind: type) -> str:
    """A class by its module and name, as a checkpoint holds it; compared as a string only."""
    return f"{kind.__module__}.{kind.__qualname__}"


def kept_hyperparameters(checkpoint: Mapping[str, Any], model_class: type, source: str) -> dict[str, Any]:
    """The arguments of ``model_class`` that a checkpoint kept.

    Args:
        checkpoint: as ``torch.load`` with ``weights_only=True`` gave it.
        model_class: decides what may be kept: the arguments of its constructor without its ``not_in_checkpoint``.
        source: the file, for messages.

    Raises:
        InputError: a checkpoint of another class; a hyperparameter that the class does not take or does not keep, that
            names something to be called, that is no plain value or of another type.
    """
    told = checkpoint.get(MODEL_CLASS, class_name(model_class))
    if told != class_name(model_class):
        raise InputError(
            f"{source} is a checkpoint of {told if isinstance(told, str) else type(told).__name__}, the configuration "
            f"says {class_name(model_class)}; give the configuration of that training (config.yaml in its run folder), "
            "a checkpoint of this model, or only take over that one's backbone (--model.backbone_checkpoint)."
        )
    kept = checkpoint.get(KEY, {})
    if not isinstance(kept, dict):
        raise _refused(source, KEY, f"it is a {type(kept).__name__}, not a mapping")
    _check_plain(kept, source)
    hints, never = _arguments(model_class), getattr(model_class, "not_in_checkpoint", ())
    for name, value in kept.items():
        if name not in hints:
            raise _refused(source, name, f"{model_class.__name__} takes no such argument; a newer version may")
        for path in (name, *(f"{name}.{key}" for key in value)) if isinstance(value, dict) else (name,):
            if path in never:
                raise _refused(source, path, "it is given where a model is made, and no checkpoint keeps it")
        if not _fits(value, hints[name]):
            raise _refused(source, name, f"{value!r} is of the wrong type")
    return kept


class PlainModule(pl.LightningModule):
    """A LightningModule whose checkpoints hold plain arguments, and which is made of nothing else."""

    #: Arguments that a checkpoint does not keep: they are chosen anew when it is loaded. (And for its weights, which it
    #: has, it shall not fetch others first.) ``"a.b"`` is the key ``b`` of the argument ``a``.
    not_in_checkpoint: tuple[str, ...] = ()

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        strict: bool = True,
        weights_only: bool = True,
        **arguments: Any,
    ) -> Self:
        """The model of a checkpoint or run folder; nothing that the file names is imported or called.

        Args:
            checkpoint_path: as :func:`~swbn_lightning.runs.checkpoints.find_checkpoint`.
            map_location: device of the model; None for the CPU.
            strict: whether the checkpoint must hold all weights of the model, and no others.
            weights_only: as Lightning has it; False is an error.
            arguments: of the constructor; they beat those that the checkpoint kept.

        Raises:
            InputError: no such checkpoint; as :func:`kept_hyperparameters`.
        """
        if not weights_only:
            raise InputError("load_from_checkpoint runs no code of a file: weights_only=False is not to be had here.")
        file = find_checkpoint(checkpoint_path)
        checkpoint = read_checkpoint(file)
        model = cls(**{**kept_hyperparameters(checkpoint, cls, str(file)), **arguments})
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"], strict=strict)
        return model.to(map_location or "cpu")

    @property
    def trainer_or_none(self) -> pl.Trainer | None:
        """The trainer; None where there is none, as for a model that is only loaded."""
        try:
            return self.trainer
        except RuntimeError:
            return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[MODEL_CLASS] = class_name(type(self))

    def forget_inner_hyperparameters(self) -> None:
        """After ``save_hyperparameters``, which knows whole arguments only."""
        for argument, _, key in (name.partition(".") for name in self.not_in_checkpoint):
            if key and key in (self.hparams.get(argument) or {}):
                self.hparams[argument] = {k: v for k, v in self.hparams[argument].items() if k != key}


def _refused(source: str, name: object, reason: str) -> InputError:
    return InputError(
        f"{source}: its hyperparameter {str(name)[:80]!r} is refused: {reason}. A checkpoint gives its model plain "
        "values of the model's own arguments only."
    )


def _check_plain(value: Any, source: str, path: str = "", budget: Iterator[int] | None = None) -> None:
    """Refuse whatever is more than numbers, words, None, and lists and mappings of them."""
    budget = iter(range(_MOST)) if budget is None else budget
    if next(budget, None) is None or path.count(".") > _DEEPEST:  # a list may hold itself, or another a thousand times
        raise _refused(source, path, f"it is nested more than {_DEEPEST} deep, or there are more than {_MOST} values")
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if not isinstance(key, str | int) or not _WORDS.fullmatch(str(key)):
                raise _refused(source, path or key, "it has a key that is not a word")
            here = f"{path}.{key}" if path else str(key)
            if key in _CALLS:
                raise _refused(source, here, "it names something to be imported or called")
            _check_plain(inner, source, here, budget)
    elif isinstance(value, str):
        if not _WORDS.fullmatch(value):
            raise _refused(source, path, f"{value[:80]!r} is not a plain word")
    elif value is not None and type(value) not in (bool, int, float):
        raise _refused(source, path, f"it is a {type(value).__name__}")


def _arguments(model_class: type) -> dict[str, Any]:
    """The arguments of a constructor with their types and, where it passes ``**kwargs`` on, of those above it."""
    hints: dict[str, Any] = {}
    for kind in model_class.__mro__[:-1]:
        if "__init__" not in vars(kind):
            continue
        made_by: Any = vars(kind)["__init__"]
        parameters = inspect.signature(made_by).parameters.values()
        resolved = typing.get_type_hints(made_by)
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        hints = {name: resolved.get(name, Any) for name in named[1:]} | hints  # without self
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return hints


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of an annotated type; of a generic type the container counts."""
    origin = typing.get_origin(hint) or hint
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if value is None or isinstance(value, bool):
        return origin is type(value)
    accepted = _FITS.get(origin, origin)
    return isinstance(accepted, tuple | type) and isinstance(value, accepted)
