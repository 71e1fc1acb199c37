"""What ``swbn COMMAND --help`` says of the command's own: checkpoints, norms and backbones."""

from typing import Any

from pytorch_lightning.cli import LightningArgumentParser

from swbn_lightning import NormFactory
from swbn_lightning.backbones import available_backbones
from swbn_lightning.command.overview import COMMANDS
from swbn_lightning.training.lightning_internals import set_help

# Of options of the trainer's methods, whose own help is true of Lightning's Python interface only.
_HELP = {
    "ckpt_path": "a .ckpt file, an export's folder, or a run's: runs/NAME (its newest version with a checkpoint) or "
    "runs/NAME/version_N. Of a folder fit takes the last checkpoint, the other commands the best one. The words best "
    "and last mean a checkpoint of the newest run in --run.root and --run.name",
    "weights_only": "without effect: a checkpoint is always read as tensors and plain values, and runs no code",
    "verbose": "show all that was logged; of this package's models it always stands in one table",
}


class CommandParser(LightningArgumentParser):
    """Lightning's parser with help that is true of this command."""

    def add_method_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added = super().add_method_arguments(*args, **kwargs)
        set_help(self, {f"--{name}": words for name, words in _HELP.items() if name in added})
        return added


def about(command: str) -> dict[str, str]:
    """What stands before and after a command's options."""
    norms, backbones = ", ".join(NormFactory.names()), ", ".join(available_backbones())
    names = (
        f"Norms (--model.norm): {norms}. Backbones (--model.backbone): {backbones}, torchvision/<model>, timm/<model>. "
        "A model's own options: --model.help fewshot.PrototypicalNetwork and so on."
    )
    return {"description": COMMANDS[command], "epilog": names}
