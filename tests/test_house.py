"""The package as a house: rooms above each other, doors that lead downwards only, and no climbing through windows."""

import ast
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningCLI, SaveConfigCallback
from torch.utils.data import DataLoader

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("swbn_lightning", "fewshot", "classification")
FILES = [REPOSITORY / "cli.py", *(file for name in PACKAGES for file in sorted((REPOSITORY / name).rglob("*.py")))]
#: From the ground up; rooms of one floor may not lead in a circle either.
FLOORS = (
    {"errors"},
    {"files"},
    {"norms"},
    {"whiteness", "backbones", "data"},
    {"runs"},
    {"training"},
    {"fewshot", "classification"},
    {"command"},
    {"__main__", "cli"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
INTERNALS = {"swbn_lightning/training/lightning_internals.py", "swbn_lightning/norms/torch_internals.py"}
# Documented in spite of the underscore; base classes that others' layers are known by; where a module keeps its own.
DOCUMENTED = {
    "_replace", "_asdict", "_fields", "_exit", "_assert", "_BatchNorm", "_InstanceNorm", "_LazyNormBase", "_NormBase",
    "_modules", "_parameters",
}  # fmt: skip
PRIVATE = {
    # Who asks for an attribute: torch's fusers would take a whitening layer for a BatchNorm and leave W out.
    "swbn_lightning/norms/base.py": {"_getframe"},
    # The unpickler in Python, whose every instruction can be refused.
    "swbn_lightning/data/unpickler.py": {"_Unpickler"},
    # torch keeps the versions of a state's layers there, and nowhere else.
    "swbn_lightning/runs/checkpoint_content.py": {"_metadata"},
}
# Private names that classes of this package inherit, and must not use.
INHERITED = {
    *dir(LightningCLI), *dir(SaveConfigCallback), *dir(ModelCheckpoint()), *dir(pl.LightningDataModule()),
    *dir(pl.LightningModule()), *dir(DataLoader([0])),
}  # fmt: skip


def trees():
    return {str(file.relative_to(REPOSITORY)): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


def defined(tree):
    """Private names that a file gives to its own classes and instances."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_uses(path, tree, everywhere):
    here = set(defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(PACKAGES):
            names = {alias.name for alias in node.names if alias.name.startswith("_") and "__" not in alias.name}
            yield from names - DOCUMENTED
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            known = here | (everywhere - INHERITED) if is_own(node) else here
            if node.attr not in known | DOCUMENTED:
                yield node.attr


def test_private_names_of_lightning_and_torch_are_used_in_one_file_each():
    everything = trees()
    everywhere = {name for tree in everything.values() for name in defined(tree)}
    found = {
        path: set(private_uses(path, tree, everywhere)) for path, tree in everything.items() if path not in INTERNALS
    }
    assert {path: names for path, names in found.items() if names} == PRIVATE


def room(name):
    """Of a module by its dotted name; what ``swbn_lightning`` itself gives comes from ``norms``."""
    first, *rest = name.split(".")
    return first if first != "swbn_lightning" else rest[0] if rest else "norms"


def test_doors_lead_downwards_and_never_in_a_circle():
    doors = set()
    for path, tree in trees().items():
        if path.startswith("swbn_lightning/__"):
            continue
        own = room(path.removesuffix(".py").replace("/", "."))
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            doors |= {(own, room(name), path) for name in names if name.split(".")[0] in PACKAGES}
    doors = {door for door in doors if door[0] != door[1]}
    assert [door for door in doors if FLOOR[door[1]] > FLOOR[door[0]]] == []
    level = {(a, b) for a, b, _ in doors if FLOOR[a] == FLOOR[b]}
    while level:  # rooms into which no door leads are taken away; a circle has none
        entered = {b for _, b in level}
        rest = {(a, b) for a, b in level if a in entered}
        assert rest != level, f"a circle: {level}"
        level = rest


def test_no_file_is_long():
    files = [*FILES, *(REPOSITORY / "benchmarks").rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")]
    lengths = {str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8").count("\n") for file in files}
    assert {file: length for file, length in lengths.items() if length > 350} == {}
