"""Checkpoint files that are whole, whenever the process that writes them is killed, and that run no code."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from swbn_lightning.errors import InputError

# In the folder of a sharded checkpoint: Lightning's own file, and torch's.
_SHARDED = ("meta.pt", ".metadata")


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all, and reads none that would run code.

    Lightning 2.6 writes to the system's folder for temporary files and moves what is there: between two file systems
    that is a copy over the old checkpoint, and a kill in the middle of it leaves neither. Here the new file grows
    beside the old one, is brought to the disk, and takes its name in one step; where there is no room, the old one
    stays. Files that are not local are written as Lightning does.

    What is read is tensors, numbers, strings and containers of them (``weights_only=True``), whatever the caller or
    ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` says. Of the files that a checkpoint's ``ModelCheckpoint`` remembers, which it
    would remove as better ones come, only those in the checkpoint's own folder are believed. What is removed is a
    checkpoint: a file, or a folder that a sharded one is in, never another folder.

    Raises:
        InputError: a file that cannot be written, as of a full disk, with the reason.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch hides what the file said
            if not isinstance(reason, OSError):
                raise
            raise InputError(
                f"the checkpoint {path} could not be written ({reason.strerror or reason}). What was there before is "
                "as it was: make room, then go on from it with --ckpt_path."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)  # by its own name it is gone already

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(path, map_location, weights_only=True)
        _forget_foreign_files(checkpoint, Path(path).resolve().parent)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        if "://" in str(path):
            super().remove_checkpoint(path)
            return
        path = Path(path)
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif any((path / name).is_file() for name in _SHARDED):
            shutil.rmtree(path)
        else:
            rank_zero_warn(f"{path} is a folder without a sharded checkpoint in it, and is left as it is.")


def _forget_foreign_files(checkpoint: Any, folder: Path) -> None:
    """Have every ``ModelCheckpoint`` begin anew whose files lie elsewhere than in the checkpoint's own folder."""
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    if isinstance(callbacks, dict):
        for key, state in callbacks.items():
            if isinstance(state, dict) and "best_model_path" in state and not _all_inside(state, folder):
                callbacks[key] = {"best_model_path": "", "best_model_score": None, "dirpath": ""}


def _all_inside(state: dict[str, Any], folder: Path) -> bool:
    """Whether all files that a ``ModelCheckpoint`` remembers lie in a folder, wherever links lead."""
    best = state.get("best_k_models")
    if not isinstance(best, dict):
        return False
    named = [*best, *(state.get(name, "") for name in ("best_model_path", "kth_best_model_path", "last_model_path"))]
    try:
        return all(type(path) is str and Path(path).resolve().parent == folder for path in named if path != "")
    except (OSError, ValueError, RuntimeError):  # a null byte, a loop of links
        return False


def _sync_folder(folder: Path) -> None:
    """Bring the folder's new entry to the disk too; some file systems cannot, and need not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
