"""Studies small enough for a test."""

from pathlib import Path

from swbn_lightning.runs.study.cells import Experiment, grid

CONFIGS = Path(__file__).parents[2] / "configs"
GLYPHS, CIFAR_FS = CONFIGS / "classification" / "glyphs.yaml", CONFIGS / "fewshot" / "cifar_fs_prototypical.yaml"
TINY = [
    "trainer.max_epochs=2", "trainer.accelerator=cpu", "data.images_per_class=8", "data.num_classes=4",
    "model.num_classes=4", "data.batch_size=8", "whiteness.num_images=8", "model.warmup_steps=0",
    "trainer.enable_model_summary=false", "trainer.enable_progress_bar=false",
]  # fmt: skip
TINY_FEW_SHOT = [
    "trainer.max_epochs=1", "trainer.accelerator=cpu", "data.train.ways=5", "data.train.episodes=2",
    "data.val.episodes=20", "data.test.episodes=30", "data.val.queries=5", "data.test.queries=5",
    "whiteness.num_images=8", "trainer.enable_model_summary=false", "trainer.enable_progress_bar=false",
]  # fmt: skip


def cells_of(path, *, networks=(), norms=("bn",), seeds=(0,), shots=(), settings=(), root=None, runs="runs"):
    return grid([Experiment.read(str(path))], networks, norms, seeds, shots, settings, root, Path(runs))
