"""Pickles of decoded images, in the two forms that few-shot benchmarks are passed on in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swbn_lightning.data.images import ImageSet
from swbn_lightning.data.safe_pickle import load_pickle
from swbn_lightning.errors import InputError

MAX_NAME = 1000
"""Characters in the name of a class."""


def load_labelled_arrays(path: Path, name: str, image_size: int) -> ImageSet:
    """``data`` and ``labels``, and if it is there ``catname2label``: as gidariss's and MetaOptNet's code reads them.

    ``data`` is uint8 ``[N, S, S, 3]``, ``labels`` are N integers of any values, of which ``catname2label`` gives the
    names. Without it a class is called ``"label <value>"``.

    Args:
        path: the pickle.
        name: as :class:`~swbn_lightning.data.ImageSet`.
        image_size: ``S``; decoded images are not resized a second time.

    Raises:
        InputError: an unreadable file, with where a good one has to be placed; other content; images of another size.
    """
    content = _load(path, name)
    images = _images(content, "data", path, name, image_size)
    labels = _labels(content.get("labels"), len(images), path, name)
    values, places = np.unique(labels, return_inverse=True)
    names = _names(content.get("catname2label"), values, path, name)
    # Labels follow the sorted names, as they do in every other form; without names, the values.
    order = list(range(len(names)))
    if content.get("catname2label") is not None:
        order.sort(key=names.__getitem__)
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    class_names = tuple(names[place] for place in order)
    return ImageSet(images, torch.from_numpy(position[places]), class_names, name, f"decoded images of {path}")


def load_class_arrays(path: Path, name: str, image_size: int) -> ImageSet:
    """``image_data`` and ``class_dict``, of each class the numbers of its images: as learn2learn reads them.

    The arguments and errors of :func:`load_labelled_arrays`; an image in no class or in two is an error too.
    """
    content = _load(path, name)
    images = _images(content, "image_data", path, name, image_size)
    classes = content.get("class_dict")
    if not isinstance(classes, Mapping) or not classes:
        raise InputError(f"{name}: {path} has no 'class_dict' of class names with their images. {_by_hand(path)}")
    by_name = {text_from(key, path): numbers for key, numbers in classes.items()}
    if len(by_name) < len(classes):
        raise InputError(f"{name}: {path} has two classes of one name.")
    labels = np.full(len(images), -1, dtype=np.int64)
    names = tuple(sorted(by_name))
    for label, class_name in enumerate(names):
        # One at a time: many classes may name the same list, of which the second is an error below.
        numbers = as_array(by_name[class_name])
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or not len(numbers):
            raise InputError(f"{name}: {path} lists no image numbers for the class {class_name}.")
        if numbers.min() < 0 or numbers.max() >= len(images):
            raise InputError(f"{name}: {path} lists images {numbers.min()} to {numbers.max()} of {len(images)}.")
        if (labels[numbers] >= 0).any() or len(np.unique(numbers)) < len(numbers):
            raise InputError(f"{name}: {path} lists an image of the class {class_name} twice.")
        labels[numbers] = label
    if (labels < 0).any():
        raise InputError(f"{name}: {path} lists no class for {int((labels < 0).sum())} of its {len(images)} images.")
    return ImageSet(images, torch.from_numpy(labels), names, name, f"decoded images of {path}")


def _by_hand(path: Path) -> str:
    return f"Download it with a browser and place it at {path}."


def _load(path: Path, name: str) -> dict[str, Any]:
    try:
        content = load_pickle(path)
    except InputError as error:
        raise InputError(f"{name}: {error} {_by_hand(path)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{name}: {path} holds a {type(content).__name__}, not a dict of images. {_by_hand(path)}")
    return {text_from(key, path): value for key, value in content.items() if isinstance(key, str | bytes)}


def text_from(value: Any, path: Path) -> str:
    """A name out of a pickle. It will be printed and written to files of UTF-8.

    Args:
        value: a string, or bytes: a Python 2 pickle that was loaded with ``encoding="bytes"`` and saved again has them.
        path: of the pickle, for messages.

    Raises:
        InputError: anything else, very long text, or text with half a surrogate pair.
    """
    if not isinstance(value, str | bytes):
        raise InputError(f"{path} holds a {type(value).__name__} where a name should be; names are text.")
    if len(value) > MAX_NAME:
        raise InputError(f"{path} holds a name of {len(value)} characters; at most {MAX_NAME} are accepted.")
    text = value.decode("latin1") if isinstance(value, bytes) else value
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{path} holds the name {text!r}, which is no valid text; name it otherwise.") from None
    return text


def _images(content: dict[str, Any], key: str, path: Path, name: str, image_size: int) -> Tensor:
    data = as_array(content.pop(key, None))  # popped: a list of images is then not held beside the array
    if data.dtype != np.uint8 or data.ndim != 4 or data.shape[-1] != 3 or not len(data):
        raise InputError(
            f"{name}: {path} should hold {key!r}, uint8 [N, {image_size}, {image_size}, 3], but that is "
            f"{data.dtype} {list(data.shape)}. {_by_hand(path)}"
        )
    if data.shape[1:3] != (image_size, image_size):
        raise InputError(
            f"{name}: {path} holds decoded images of {data.shape[1]}x{data.shape[2]}; got image_size={image_size}. "
            "Only image files are resized."
        )
    if not data.flags.writeable:  # a tensor must be
        data = data.copy()
    return torch.from_numpy(data).permute(0, 3, 1, 2)  # a view: channels_last, and not held twice


def _labels(value: Any, count: int, path: Path, name: str) -> np.ndarray:
    labels = as_array(value)
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise InputError(
            f"{name}: {path} should hold 'labels', a whole number for each of {count} images, but has "
            f"{labels.dtype} {list(labels.shape)}. {_by_hand(path)}"
        )
    return labels


def _names(names_to_labels: Any, values: np.ndarray, path: Path, name: str) -> list[str]:
    if names_to_labels is None:
        return [f"label {value}" for value in values]
    if not isinstance(names_to_labels, Mapping):
        raise InputError(f"{name}: {path} has a 'catname2label' that is no dict.")
    if not all(_is_whole(label) for label in names_to_labels.values()):
        raise InputError(f"{name}: {path} has a 'catname2label' with labels that are no whole numbers.")
    by_label = {int(label): text_from(key, path) for key, label in names_to_labels.items()}
    unnamed = [int(value) for value in values if value not in by_label]
    if unnamed or len(set(by_label.values())) < len(names_to_labels):
        what = f"no name for the labels {unnamed[:5]}" if unnamed else "two names for one label, or one name twice,"
        raise InputError(f"{name}: {path} has {what} in its 'catname2label'.")
    return [by_label[int(value)] for value in values]


def as_array(value: Any) -> np.ndarray:
    """``value`` out of a pickle as an array: an array, a flat list of numbers, or a list of arrays of one kind.

    Of anything else the result is an array of dtype ``object`` and no dimension. numpy would follow nested lists, and
    ten levels of a list that holds another ten times make ten thousand million numbers out of a hundred.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list) and value:
        if all(_is_whole(item) or isinstance(item, float) for item in value):
            return np.array(value)
        first = value[0]
        alike = isinstance(first, np.ndarray) and all(
            isinstance(item, np.ndarray) and item.shape == first.shape and item.dtype == first.dtype for item in value
        )
        if alike and len({id(item) for item in value}) == len(value):
            return np.stack(value)
    return np.asarray(None)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
