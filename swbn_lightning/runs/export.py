"""``swbn export``: a checkpoint as one folder to publish.

    swbn export runs/NAME
    swbn export runs/NAME/version_0 --output my_model

The folder holds the weights as safetensors, the settings as JSON, and a card (README.md) with figures, data, settings
and how to load it; the licence is left for you to fill in. Nothing in it runs code. `--ckpt_path DIR` and
`--model.backbone_checkpoint DIR` take it in the place of a run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.runs.card import card_of
from swbn_lightning.runs.checkpoints import find_checkpoint, read_checkpoint
from swbn_lightning.runs.exported import README_FILE, SETTINGS_FILE, WEIGHTS_FILE, is_exported, write_exported
from swbn_lightning.runs.folders import run_folder_of

FOLDER = "export"  # in the run's


def main(args: Sequence[str]) -> None:
    """Write the folder and say where.

    Raises:
        InputError: as :func:`export`.
        SystemExit: 2 for arguments that cannot be understood, 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="swbn export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="runs/NAME (its best checkpoint), one of its versions, a .ckpt file")
    parser.add_argument("--output", metavar="DIR", help=f"the folder; {FOLDER}/ in the run's, or here without a run")
    options = parser.parse_args(args)
    print(f"exported: {printable(export(options.run, options.output))}")


def export(run: str | Path, output: str | Path | None = None) -> Path:
    """Write an export of a run's best checkpoint.

    Args:
        run: as :func:`~swbn_lightning.runs.checkpoints.find_checkpoint`.
        output: the folder; by default ``export/`` in the run's folder, or here if the checkpoint is in none.

    Returns:
        The folder.

    Raises:
        InputError: no checkpoint; an export, which is one already; a folder that holds other files, or cannot be
            written; a checkpoint with more than weights and plain settings.
    """
    checkpoint = find_checkpoint(run)
    if is_exported(checkpoint):
        raise InputError(f"{checkpoint.parent} is an export already; copy the folder.")
    folder = Path(output).expanduser() if output else (run_folder_of(checkpoint) or Path()).absolute() / FOLDER
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder for the export.")
    own = {WEIGHTS_FILE, SETTINGS_FILE, README_FILE}
    if folder.is_dir() and (others := sorted({path.name for path in folder.iterdir()} - own)):
        raise InputError(f"{folder} holds {others[0]} and may not be mixed with it; give a folder of its own.")
    write_exported(read_checkpoint(checkpoint), card_of(checkpoint, exported=True), folder)
    return folder
