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


def load_class_arrays(path: Path, name: str, image_size: int) -> ImageSet:
    """``image_data``, uint8 ``[N, S, S, 3]``, and ``class_dict``, of each class the numbers of its images.

    So are learn2learn's. Or ``data``, as that, and ``labels``, N whole numbers, a class then being called "label 7": so
    are gidariss's and MetaOptNet's.

    Args:
        path: the pickle.
        name: as :class:`~swbn_lightning.data.ImageSet`.
        image_size: ``S``; decoded images are not resized a second time.

    Raises:
        InputError: an unreadable file, with where a good one has to be placed; other content; images of another size,
            in no class or in two.
    """
    by_hand = f"Download it with a browser and place it at {path}."
    try:
        content = load_pickle(path)
    except InputError as error:
        raise InputError(f"{name}: {error} {by_hand}") from error
    if not isinstance(content, dict):
        raise InputError(f"{name}: {path} holds a {type(content).__name__}, not a dict of images. {by_hand}")
    key = "data" if "data" in content else "image_data"
    images = _images(as_array(content.pop(key, None)), key, path, name, image_size)
    if key == "data":
        numbers = as_array(content.get("labels"))
        if numbers.shape != (len(images),) or numbers.dtype.kind not in "iu":
            raise InputError(f"{name}: {path} should hold 'labels', a whole number for each of {len(images)} images.")
        values, places = np.unique(numbers, return_inverse=True)
        names = tuple(f"label {value}" for value in values)
        return ImageSet(images, torch.from_numpy(places), names, name, f"decoded images of {path}")
    classes = content.get("class_dict")
    if not isinstance(classes, Mapping) or not classes:
        raise InputError(f"{name}: {path} has no 'class_dict' of class names with their images. {by_hand}")
    labels = np.full(len(images), -1, dtype=np.int64)
    names = tuple(sorted(text_from(key, path) for key in classes))
    for label, class_name in enumerate(names):
        # One at a time: many classes may name the same list, of which the second is an error below.
        numbers = as_array(classes[class_name])
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


def _images(data: np.ndarray, key: str, path: Path, name: str, image_size: int) -> Tensor:
    if data.dtype != np.uint8 or data.ndim != 4 or data.shape[-1] != 3 or not len(data):
        raise InputError(
            f"{name}: {path} should hold {key!r}, uint8 [N, {image_size}, {image_size}, 3], but that is "
            f"{data.dtype} {list(data.shape)}."
        )
    if data.shape[1:3] != (image_size, image_size):
        raise InputError(
            f"{name}: {path} holds decoded images of {data.shape[1]}x{data.shape[2]}; got image_size={image_size}. "
            "Only image files are resized."
        )
    if not data.flags.writeable:  # a tensor must be
        data = data.copy()
    return torch.from_numpy(data).permute(0, 3, 1, 2)  # a view: channels_last, and not held twice


def text_from(value: Any, path: Path) -> str:
    """A name out of a pickle, which will be printed and written to files of UTF-8.

    Raises:
        InputError: anything but a string, very long text, or text with half a surrogate pair.
    """
    if not isinstance(value, str):
        raise InputError(f"{path} holds a {type(value).__name__} where a name should be; names are text.")
    if len(value) > MAX_NAME:
        raise InputError(f"{path} holds a name of {len(value)} characters; at most {MAX_NAME} are accepted.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{path} holds the name {value!r}, which is no valid text; name it otherwise.") from None
    return value


def as_array(value: Any) -> np.ndarray:
    """``value`` out of a pickle as an array: an array, or a flat list of numbers.

    Of anything else the result is an array of dtype ``object`` and no dimension. numpy would follow nested lists, and
    ten levels of a list that holds another ten times make ten thousand million numbers out of a hundred.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list) and value and all(_is_number(item) for item in value):
        return np.array(value)
    return np.asarray(None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer) and not isinstance(value, bool)
