"""The tutorial runs, and shows its outputs and nothing of the machine that made them.

``python tests/test_tutorial.py`` runs it and stores the outputs.
"""

import base64
import importlib.util
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

REPOSITORY = Path(__file__).parents[1]
NOTEBOOK = REPOSITORY / "docs" / "tutorial.ipynb"
FIGURES = {"data", "curves", "heatmaps"}  # the cells that end in one
# Runs first: the kernel talks to the test through sockets that are not Python's.
NO_NETWORK = """
import socket

def _refuse(*args, **kwargs):
    raise OSError("the tutorial must not use the network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = _refuse
"""
WHERE = "import sys, swbn_lightning\nprint(sys.executable, swbn_lightning.__file__, sep='\\n')"


def read():
    return nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)


def run(notebook, folder):
    """Run all cells, by this Python and with this repository's package, whatever kernels are installed."""
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, km=kernel, resources=resources, timeout=600, record_timing=False)
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    client.execute(env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(cells):
    """No error, nothing on stderr, and a figure that is not blank in each cell that ends in one."""
    outputs = [(cell["id"], output) for cell in cells for output in cell.outputs]
    assert [found for found in outputs if found[1].output_type == "error" or found[1].get("name") == "stderr"] == []
    pictures = {name: output.data["image/png"] for name, output in outputs if "image/png" in output.get("data", {})}
    assert set(pictures) == FIGURES
    for picture in pictures.values():
        image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("L")
        assert min(image.size) > 200 and image.getextrema() == (0, 255)


@pytest.mark.slow
def test_it_runs_in_an_empty_folder_without_network(tmp_path, monkeypatch):
    folder, foreign = tmp_path / "empty", tmp_path / "share" / "kernels" / "python3"
    folder.mkdir()
    foreign.mkdir(parents=True)  # a kernel of the same name that belongs to another Python
    (foreign / "kernel.json").write_text('{"argv": ["/another/python"], "display_name": "", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = read()
    first, last = (nbformat.v4.new_code_cell(source) for source in (NO_NETWORK, WHERE))
    cells = code_cells(notebook)
    notebook.cells = [first, *notebook.cells, last]
    run(notebook, folder)
    python, package = last.outputs[0].text.split("\n")[:2]
    assert python == sys.executable and Path(package).is_relative_to(REPOSITORY)
    check_outputs(cells)
    assert [path.name for path in folder.iterdir()] == ["conv4.pt2"]


def test_the_file_shows_its_outputs_and_nothing_of_a_machine():
    notebook = read()
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5) and NOTEBOOK.stat().st_size < 500_000
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.language_info == {"name": "python"}
    assert all(not cell.metadata for cell in notebook.cells)
    names = [cell["id"] for cell in notebook.cells]
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-z-]+", name) for name in names)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    check_outputs(cells)
    for cell in cells:
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
    text = nbformat.writes(notebook).replace("\\n", "\n")
    assert re.findall(r"(?<![\w.:/<])/\w[\w.-]*/[\w./-]*|\b[A-Za-z]:\\\\\w+|file:", text) == []


@pytest.mark.parametrize(
    ("installed", "inside", "edited", "expected"),
    [
        (True, True, "", None),
        (False, True, "", "checkout"),
        (False, True, "git+URL", "git+URL"),
        (False, False, "git+URL", "git+URL"),
        (False, False, "", RuntimeError),
    ],
)
def test_the_first_cell_installs_what_is_missing(installed, inside, edited, expected, tmp_path, monkeypatch):
    checkout = tmp_path / "a checkout"
    for folder in (checkout / "docs", checkout / "swbn_lightning", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(checkout / "docs" if inside else tmp_path / "elsewhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if installed else None)
    source = code_cells(read())[0].source
    assert source.count('PACKAGE = ""') == 1
    source = source.replace('PACKAGE = ""', f'PACKAGE = "{edited}"')
    called, names = [], {}

    class Shell:
        def run_line_magic(self, name, line):
            called.append((name, line.format(**names)))

    names["get_ipython"] = Shell
    program = TransformerManager().transform_cell(source)
    if expected is RuntimeError:
        with pytest.raises(RuntimeError, match="set PACKAGE"):
            exec(program, names)
        return
    exec(program, names)
    wanted = str(checkout) if expected == "checkout" else expected
    assert called == ([] if wanted is None else [("pip", f'install --quiet "{wanted}"')])


def store():
    """Run the tutorial and keep its outputs in the file."""
    notebook = read()
    with tempfile.TemporaryDirectory() as folder:
        run(notebook, folder)
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    store()
