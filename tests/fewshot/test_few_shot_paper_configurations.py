"""The few-shot configurations of the paper's table: a step of each, the sources' settings, figures beside them."""

from pathlib import Path

import pytest
import torch
import yaml

from cli import main
from fewshot.datasets import registry
from swbn_lightning.data import ImageSet
from swbn_lightning.runs.paper import find_paper_figure, paper_figures
from swbn_lightning.runs.study.cells import Experiment, grid
from swbn_lightning.training.schedules import PiecewiseConstantLR

PAPER = Path(__file__).parents[2] / "configs" / "paper"
TABLE = sorted((PAPER / "few_shot").glob("*.yaml"))
NORMS = ["bn", "iternorm", "swbn-kl", "swbn-fro"]


def a_few_images(split, root, image_size, **options):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (32, 3, image_size, image_size), generator=generator, dtype=torch.uint8)
    return ImageSet(images, torch.arange(32) // 8, tuple("abcd"), f"few/{split}")


@pytest.mark.parametrize(
    "config", [*TABLE, PAPER / "probe" / "cifar_fs_resnet20.yaml"], ids=lambda path: path.stem
)  # fmt: skip
def test_it_takes_a_step(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = registry.FewShotDataset(a_few_images, 32, (0.5,) * 3, (0.25,) * 3)
    for name in ("mini-imagenet", "cifar-fs"):
        monkeypatch.setitem(registry._DATASETS, name, few)
    ways = [f"--data.{split}.{what}=2" for split in ("train", "val") for what in ("ways", "queries")]
    arguments = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--whiteness.num_images=8"]
    main(["fit", "--config", str(config), *arguments, *ways, "--data.episodes_per_step=1"])


def test_the_table_is_there_and_its_figures_stand_beside():
    experiments = [Experiment.read(str(path)) for path in TABLE]
    cells = grid(experiments, [], NORMS, [0], [1, 5], [], None, Path("runs"))
    assert len(TABLE) == 6 and len(cells) == 24
    found = {
        find_paper_figure(
            metric="accuracy", dataset=cell.dataset, network=cell.network.name, norm=cell.norm.name,
            setting=f"5W{shots}S", method=cell.experiment.method,
        )
        for cell in cells
        for shots in (1, 5)
    }  # fmt: skip
    assert found == {figure for figure in paper_figures() if figure.table == "table:fs_results"} and len(found) == 48


def test_the_rates_of_cross_attention_are_the_public_codes():
    model = yaml.safe_load((PAPER / "few_shot" / "cifar_fs_cross_attention.yaml").read_text())["model"]["init_args"]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, **model["optimizer"]["init_args"])
    schedule = PiecewiseConstantLR(optimizer, **model["lr_scheduler"]["init_args"])
    rates = []
    for _ in range(90):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    expected = [0.1] * 60 + [0.006] * 10 + [0.0012] * 10 + [0.00024] * 10
    assert [rate for rate, _ in rates] == pytest.approx(expected)
    assert [rate for _, rate in rates] == pytest.approx([2 * rate for rate in expected])


@pytest.mark.parametrize(("milestones", "rates"), [([4, 2], [0.5, 0.3]), ([2], [0.5, 0.3]), ([2], [-1.0])])
def test_wrong_schedules_are_refused(milestones, rates):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="rising milestones and a rate from 0 for each"):
        PiecewiseConstantLR(optimizer, milestones, rates)
