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
from swbn_lightning.files.writing import replacing
from swbn_lightning.runs.checkpoint_content import plain_content
from swbn_lightning.runs.checkpoints import read_checkpoint

# In the folder of a sharded checkpoint: Lightning's own file, and torch's.
_SHARDED = ("meta.pt", ".metadata")
_SAVED: set[str] = set()  # paths of checkpoints that this process saved


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all, and reads none that would run code.

    Lightning 2.6 writes to the system's temporary folder and moves what is there: between two file systems a kill in
    the middle leaves neither. Here the new file grows beside the old one, is brought to the disk, and takes its name in
    one step. Files that are not local are written as Lightning does.

    What is read is tensors, numbers, strings and containers of them (``weights_only=True``), whatever the caller or
    ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` says; of local files no more than
    :func:`~swbn_lightning.runs.checkpoints.read_checkpoint` takes. What is removed is a file that this process saved,
    or a folder that a sharded checkpoint is in.

    Raises:
        InputError: a file that cannot be written, as of a full disk, with the reason.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        _SAVED.add(str(path))
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch hides what the file said
            if not isinstance(reason, OSError):
                raise
            raise InputError(
                f"the checkpoint {path} could not be written ({reason.strerror or reason}). What was there before is "
                "as it was: make room, then go on from it with --ckpt_path."
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if "://" not in str(path):
            return read_checkpoint(path, mmap=False)  # an optimiser keeps the tensors of its state
        return plain_content(super().load_checkpoint(path, map_location, weights_only=True), str(path))

    def remove_checkpoint(self, path: Any) -> None:
        path = str(path)
        if path in _SAVED and "://" in path:
            super().remove_checkpoint(path)
        elif path in _SAVED and not Path(path).is_dir():
            Path(path).unlink(missing_ok=True)
        elif (
            Path(path).is_dir() and not Path(path).is_symlink() and any(Path(path, name).is_file() for name in _SHARDED)
        ):
            shutil.rmtree(path)  # which no plugin writes, but the strategy
        else:
            rank_zero_warn(f"{path} was not saved by this process, and is left as it is.")


def _sync_folder(folder: Path) -> None:
    """Bring the folder's new entry to the disk too; some file systems cannot, and need not."""
    if os.name == "nt":  # where a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
