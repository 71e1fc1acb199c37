"""What an optimiser, a schedule and a callback were made with, as plain data, and in what two such differ."""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from swbn_lightning.hyperparameters import class_name
from swbn_lightning.run_files import printable

#: Instead of a value that is no plain data.
LEFT_OUT: Any = object()
#: Of a setting: what it is, its old value, its new one.
Changes = list[tuple[str, Any, Any]]
_DEEPEST, _MOST = 12, 100_000
_PATHS = {"dirpath"}  # a run that goes on has its own
# What follows from other settings, and is named only where nothing else differs.
_DERIVED = {"base_lrs", "_last_lr", "T_i", "best", "mode_worse", "default_min_lr", "initial_lr"}


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """An optimiser's class and the plain options of its parameter groups; to be called before a schedule is made."""
    return {"class": class_name(type(optimizer)), "groups": [_plain_values(group) for group in optimizer.param_groups]}


def schedule_settings(schedule: Any, optimizer: Optimizer, before: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schedule's class and fresh state, and what it wrote into the optimiser's groups.

    Args:
        schedule: just made, or None.
        optimizer: that it was made for.
        before: :func:`optimizer_settings` of it before.
    """
    if schedule is None:
        return None
    pairs = zip(optimizer_settings(optimizer)["groups"], before["groups"], strict=True)
    written = [{k: v for k, v in now.items() if k not in old or old[k] != v} for now, old in pairs]
    inner = [class_name(type(one)) for one in getattr(schedule, "_schedulers", ())]
    state = _plain_values(schedule.state_dict())
    return {"class": class_name(type(schedule)), "inner": inner, "state": state, "groups": written}


def constructor_values(thing: Any) -> dict[str, Any]:
    """The plain values of an object's constructor arguments, as far as it has attributes of their names."""
    names: set[str] = set()
    for kind in type(thing).__mro__[:-1]:
        if "__init__" in vars(kind):
            names |= inspect.signature(vars(kind)["__init__"]).parameters.keys()
    kept = vars(thing)
    return _plain_values({n: kept.get(n, kept.get(f"_{n}", LEFT_OUT)) for n in names - _PATHS})


def plain(value: Any) -> Any:
    """Numbers, words, None, lists and mappings of them; a tensor of one element is a number.

    Whatever else is in a list is None, and in a mapping it is left out. :data:`LEFT_OUT` for anything else, and for
    what is nested too deeply or has more values than anybody sets.
    """
    try:
        return _plain(value, 0, iter(range(_MOST)))
    except RecursionError:
        return LEFT_OUT


def changes(told: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """In what an optimiser and its schedule differ from what a checkpoint tells.

    Args:
        told: as :func:`plain` left it; what has another form was not told, and differs in nothing.
        now: ``optimizer`` and ``schedule``, as the functions above describe them.
    """
    if not told_settings(told):
        return []
    found = [*_of_part("optimiser", told["optimizer"], now["optimizer"])]
    found += _of_part("schedule", told["schedule"], now["schedule"])
    return [change for change in found if change[0].split(" of ")[0].split(".")[-1] not in _DERIVED] or found


def told_settings(told: Mapping[str, Any]) -> bool:
    """Whether a checkpoint tells of an optimiser and a schedule at all."""
    return isinstance(told.get("optimizer"), dict) and isinstance(told.get("schedule", 0), dict | None)


def same(told: Any, now: Any) -> bool:
    """Whether two plain values are one setting: NaN is NaN, and a rate that was a tensor has seven digits."""
    if isinstance(told, list) and isinstance(now, list):
        return len(told) == len(now) and all(map(same, told, now))
    if isinstance(told, int | float) and isinstance(now, int | float) and {type(told), type(now)} != {int}:
        # Not of two whole numbers, which no float may be large enough for.
        return told == now or (told != told and now != now) or abs(told - now) <= 1e-6 * min(abs(told), abs(now))
    return bool(told == now)


def _plain_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    found = {key: plain(value) for key, value in values.items() if isinstance(key, str) and key != "params"}
    return {key: value for key, value in found.items() if value is not LEFT_OUT}


def _plain(value: Any, depth: int, budget: Iterator[int]) -> Any:
    if next(budget, None) is None or depth > _DEEPEST:
        raise RecursionError
    if isinstance(value, torch.Tensor):
        readable = value.layout is torch.strided and not value.is_meta and value.numel() == 1 and not value.is_complex()
        return value.item() if readable else LEFT_OUT
    if isinstance(value, float):  # numpy's are
        return float(value)
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Counter):
        value = sorted(value.items(), key=str)
    if isinstance(value, list | tuple):
        found = [_plain(inner, depth + 1, budget) for inner in value]
        return [None if inner is LEFT_OUT else inner for inner in found]
    if isinstance(value, Mapping):
        kept = {k: _plain(v, depth + 1, budget) for k, v in value.items() if type(k) is str}
        return {k: v for k, v in kept.items() if v is not LEFT_OUT}
    return LEFT_OUT


def _of_part(part: str, told: Any, now: Any) -> Changes:
    """Of the optimiser or the schedule, either of which is a mapping or, where there is none, None."""
    kinds = [[one.get("class"), one.get("inner")] if isinstance(one, dict) else None for one in (told, now)]
    if kinds[0] != kinds[1] or now is None:
        return [] if kinds[0] == kinds[1] else [(f"the {part}", *map(_kind, kinds))]  # type: ignore[list-item]
    name = f" of {str(now['class']).rpartition('.')[2]}"
    found = [(f"{what}{name}", old, new) for what, old, new in _differences(told.get("state"), now.get("state"), "")]
    groups = told.get("groups")
    if not isinstance(groups, list) or len(groups) != len(now["groups"]):
        number = len(groups) if isinstance(groups, list) else None
        return [*found, (f"the number of parameter groups{name}", number, len(now["groups"]))]
    alike: dict[str, list[Any]] = {}
    for place, pair in enumerate(zip(groups, now["groups"], strict=True), 1):
        for change in _differences(*pair, ""):
            alike.setdefault(repr(change), [change]).append(place)
    for (what, old, new), *places in alike.values():
        whose = "" if len(places) == len(groups) else f", parameter group {', '.join(map(str, places))}"
        found.append((f"{what}{name}{whose}", old, new))
    return found


def _kind(kind: list[Any] | None) -> str:
    if kind is None:
        return "none"
    return printable(kind[0]) + (f" of {', '.join(map(printable, kind[1]))}" if kind[1] and _is_list(kind[1]) else "")


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _differences(told: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Where both have a value and the two are not the same; another version may know more of them."""
    if isinstance(told, dict) and isinstance(now, dict):
        for key in (key for key in now if key in told):
            yield from _differences(told[key], now[key], f"{path}.{key}" if path else key)
    elif _is_list(told) and _is_list(now) and len(told) == len(now) and any(isinstance(one, dict) for one in now):
        for number, pair in enumerate(zip(told, now, strict=True)):
            yield from _differences(*pair, f"{path}[{number}]")
    elif not same(told, now):
        yield path, told, now
