"""The data that a checkpoint's network was trained on, beside those that it is tested on."""

import contextlib
from collections.abc import Mapping
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import plain_mapping, printable
from swbn_lightning.runs.checkpoints import read_checkpoint

DATA = "data"  # of a checkpoint: what was read of each split, as ImageDataModule.facts gives it
_MOST = 1_000_000  # values, names of classes among them


def saved_content(checkpoint: str | None) -> dict[str, Any]:
    """What a checkpoint holds; nothing for None, and of weights from elsewhere, which are no checkpoint."""
    with contextlib.suppress(InputError):
        return read_checkpoint(checkpoint) if checkpoint else {}
    return {}


def plain_part(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A part of a checkpoint's content as plain values; empty where it is none."""
    try:
        return plain_mapping(content.get(key), _MOST)
    except InputError:
        return {}


def data_facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's content tells of its training data; empty if it tells nothing."""
    return plain_part(content, DATA)


def trained_on(trained: Mapping[str, Any], tested: Mapping[str, Any]) -> str | None:
    """The name of the training data, if they are known to be others than those tested; both as ``facts`` gives them."""
    ids = [facts.get("data_id") for facts in (trained, tested)]
    if None in ids or ids[0] == ids[1]:
        return None
    splits = trained.get("splits")
    train = splits.get("train") if isinstance(splits, dict) else None
    name = train.get("name") if isinstance(train, dict) else None
    return printable(str(name).removesuffix("/train"))[:80] if name else "other data"


def seen_otherwise(trained: Mapping[str, Any], tested: Mapping[str, Any]) -> str | None:
    """A sentence, if a network is given images of another size or normalisation than in its training."""
    keys = ("image_size", "mean", "std")
    if any(facts.get(key) is None for facts in (trained, tested) for key in keys):
        return None
    if all(trained[key] == tested[key] for key in keys):
        return None
    then, now = (
        f"{facts['image_size']} pixels a side, mean {facts['mean']} and deviation {facts['std']}"
        for facts in (trained, tested)
    )
    return (
        f"the network was trained on images of {printable(then)[:200]}, and is given images of {now}. Unless that is "
        "meant, give the training's image size, mean and deviation (few-shot: --data.normalize_as)."
    )
