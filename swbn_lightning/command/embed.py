"""``swbn embed``: features of images by a trained network, in a file for other tools.

    swbn embed runs/NAME
    swbn embed runs/NAME --split val --output features.npz
    swbn embed runs/NAME --images DIR --output features.parquet

The file holds features, labels and class names, with the numbers of the images in their split or, of a folder, the
names of their files. Nothing that the run's files name is imported or called: a model or data module of your own is
known after `--imports`.
"""

import argparse
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from classification.datamodules.base import ClassificationDataModule, LabelledDataset, NumberedBatch
from classification.datamodules.imagenet import ImageNetDataModule
from fewshot.base_classes import HELD_OUT, BaseClassesDataModule
from fewshot.datamodule import EpisodicDataModule
from fewshot.episodes import EpisodeSettings
from swbn_lightning.command.settings import import_modules
from swbn_lightning.data.decode import read_images
from swbn_lightning.data.folders import class_folders, image_files, list_class_folders
from swbn_lightning.data.image_data import ImageDataModule, ImageDataset
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import has_file, printable
from swbn_lightning.files.writing import output_file, write_output
from swbn_lightning.norms.health import check_running_statistics
from swbn_lightning.runs.checkpoints import find_checkpoint, read_checkpoint
from swbn_lightning.runs.folders import RUN_FILE, run_folder_of
from swbn_lightning.runs.read import read_runs
from swbn_lightning.runs.record import record_of
from swbn_lightning.training.hyperparameters import MODEL_CLASS, class_name
from swbn_lightning.training.module import TrainingModule

_EPISODES = ("train", "val", "test")  # arguments of data modules, as plain mappings
_NOT_NEEDED = ("download", "support", "query", "num_workers")
Kind = TypeVar("Kind")


class Embedded(NamedTuple):
    """Features of images, and which they are."""

    features: np.ndarray  # float32 [N, C], or maps [N, C, h, w]
    labels: np.ndarray | None  # int64 [N]; None where the images have none
    class_names: Sequence[str]
    images: np.ndarray  # [N] numbers in the split (int64), or names of files (text)


def main(args: Sequence[str]) -> None:
    """Write the features and say where.

    Raises:
        InputError: no checkpoint or data, or what cannot be read or written.
        SystemExit: 2 for arguments that cannot be understood, 0 after ``--help``.
    """
    options = _parser().parse_args(args)
    import_modules(options.imports)
    checkpoint = find_checkpoint(options.run)
    usual = f"features_{'images' if options.images else options.split}.npz"
    output = output_file(options.output or (run_folder_of(checkpoint) or Path()) / usual, "the features", usual)
    write = {".npz": _as_npz, ".parquet": _as_parquet}.get(output.suffix)
    if write is None:
        raise InputError(f"{output}: features are written as .npz or .parquet.")
    if write is _as_parquet and find_spec("pyarrow") is None:
        raise InputError("Parquet needs pyarrow: pip install pyarrow, or write .npz.")
    model, data = _model(checkpoint), _data(checkpoint, options.root)
    found = embed_folder(model, data, options.images) if options.images else embed_split(model, data, options.split)
    write_output(output, write(found))
    print(f"{len(found.features)} x {found.features[0].size} features: {printable(output)}")


def embed_split(model: TrainingModule, data: ImageDataModule, split: str) -> Embedded:
    """Features of a split of the data, without augmentation, in its order."""
    if split == HELD_OUT and not isinstance(data, BaseClassesDataModule):
        raise InputError(f"{type(data).__name__} has no split {HELD_OUT}; that is BaseClassesDataModule's.")
    dataset: Any = (
        data.evaluation_dataset(split)
        if isinstance(data, ClassificationDataModule)
        else LabelledDataset(data.image_set(split))
    )
    labels: list[Tensor] = []

    def images(batch: NumberedBatch) -> Tensor:
        labels.append(batch.labels)
        return batch.images

    features = _features(model, data, data.loader(dataset, getattr(data, "eval_batch_size", 256)), images)
    splits = data.facts()["splits"]
    names = splits.get(split, next(iter(splits.values())))["classes"]
    return Embedded(features, torch.cat(labels).numpy(), names, np.arange(len(features)))


def embed_folder(model: TrainingModule, data: ImageDataModule, path: str | Path) -> Embedded:
    """Features of image files: a folder of class folders, a folder of images, or one image."""
    if isinstance(data, ImageNetDataModule):
        raise InputError(f"--images makes squares of images, which {type(data).__name__} does not; take a --split.")
    path = Path(path).expanduser()
    if not path.exists():
        raise InputError(f"images {path} do not exist; give a folder of images or of class folders, or one image.")
    labels, names = None, []
    if path.is_dir() and class_folders(path):
        listing = list_class_folders(path, "images")
        files, labels, names = listing.files, listing.labels.numpy(), list(listing.classes)
    else:
        files = image_files(path) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no images.")
    pixels = read_images(files, data.image_size, data.channels, "images")
    if isinstance(data, EpisodicDataModule):
        pixels = data.spec.from_file(pixels)
    loader = data.loader(ImageDataset(pixels, torch.arange(len(files))), getattr(data, "eval_batch_size", 256))
    features = _features(model, data, loader, lambda batch: batch.images)
    shown = [printable(file.relative_to(path) if path.is_dir() else file.name) for file in files]
    return Embedded(features, labels, names, np.array(shown))


@torch.inference_mode()
def _features(
    model: TrainingModule,
    data: ImageDataModule,
    batches: DataLoader[Any],
    images: Callable[[Any], Tensor],
) -> np.ndarray:
    check_running_statistics(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    parts = [model.embed(data.normalize(images(batch).to(device))).float().cpu() for batch in batches]
    found = torch.cat(parts).contiguous().numpy()
    if bad := int((~np.isfinite(found)).reshape(len(found), -1).any(1).sum()):
        raise InputError(f"the features of {bad} of {len(found)} images are not finite; take an earlier checkpoint.")
    return found


def _model(checkpoint: Path) -> TrainingModule:
    told = read_checkpoint(checkpoint).get(MODEL_CLASS)
    kind = _known(TrainingModule, told)
    if kind is None:
        raise InputError(
            f"{checkpoint} is a checkpoint of {printable(told)}, which is no model of this package; --imports MODULE "
            "makes yours known."
        )
    return kind.load_from_checkpoint(checkpoint)


def _data(checkpoint: Path, root: str | None) -> ImageDataModule:
    """The data module as the training's settings say; only the root is not kept in a checkpoint."""
    record = record_of(checkpoint)
    settings = record.settings if record else {}
    kind = _known(ImageDataModule, settings.get("data.class_path"))
    if kind is None:
        raise InputError(
            f"{checkpoint} does not say with which data of this package it was trained, but "
            f"{printable(settings.get('data.class_path', 'nothing'))}; --imports MODULE makes yours known."
        )
    given = _nested(settings, "data.init_args.")
    folder = run_folder_of(checkpoint)
    if root is None and folder and has_file(folder, (RUN_FILE,)):
        root = read_runs([folder])[0].settings.get("data.init_args.root")
    if root is not None:
        given["root"] = root
    try:
        for name in _EPISODES:
            if isinstance(given.get(name), dict):
                given[name] = EpisodeSettings(**given[name])
        return kind(**{name: value for name, value in given.items() if name not in _NOT_NEEDED})
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # of settings that are anybody's
        raise InputError(f"{checkpoint}: no {kind.__name__} can be made as it says: {error}.") from error


def _known(base: type[Kind], name: Any) -> type[Kind] | None:
    """A class that is imported, by its own name or the short one of its package; nothing is imported for it."""
    kinds, found = [base], None
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if name in (class_name(kind), f"{kind.__module__.partition('.')[0]}.{kind.__name__}"):
            found = kind
    return found


def _nested(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Flat settings below ``prefix`` as mappings in each other."""
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if key.startswith(prefix):
            *above, last = key.removeprefix(prefix).split(".")
            place = made
            for name in above:
                place = place.setdefault(name, {})
                if not isinstance(place, dict):
                    raise InputError(f"the settings say {printable(key)} twice.")
            place[last] = value
    return made


def _as_npz(found: Embedded) -> bytes:
    arrays: dict[str, Any] = {"files" if found.images.dtype.kind == "U" else "numbers": found.images}
    if found.labels is not None:
        arrays |= {"labels": found.labels, "class_names": np.array(found.class_names)}
    file = io.BytesIO()
    np.savez(file, features=found.features, **arrays)
    return file.getvalue()


def _as_parquet(found: Embedded) -> bytes:
    """A row an image, with a column for each feature."""
    columns: dict[str, Any] = {"file" if found.images.dtype.kind == "U" else "number": found.images}
    if found.labels is not None:
        columns |= {"label": found.labels, "class": [found.class_names[label] for label in found.labels]}
    flat = found.features.reshape(len(found.features), -1)
    columns |= {f"feature_{number}": column for number, column in enumerate(flat.T)}
    file = io.BytesIO()
    pd.DataFrame(columns).to_parquet(file, engine="pyarrow", index=False)
    return file.getvalue()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swbn embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="runs/NAME, one of its versions, a .ckpt file, or an export")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--split", choices=(*_EPISODES, HELD_OUT), default="test", help="of the data; %(default)s")
    which.add_argument("--images", metavar="PATH", help="instead: a folder of images or class folders, or one image")
    parser.add_argument("--output", metavar="FILE", help=".npz or .parquet; features_SPLIT.npz in the run's folder")
    parser.add_argument("--root", metavar="DIR", help="folder of the data set's files, if it is not the training's")
    parser.add_argument("--imports", nargs="+", default=[], metavar="MODULE", help="modules to import first")
    return parser
