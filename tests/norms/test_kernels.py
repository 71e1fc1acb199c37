"""The kernels of SWBN's training pass: the switch, what they compute in Triton's interpreter, what they compile to."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from swbn_lightning import SWBN1d, SWBN2d
from swbn_lightning.errors import InputError
from swbn_lightning.norms.passes import kernels

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def interpreter():
    """Skips where the interpreter does not work: Triton 3.6's cannot loop with NumPy 2.4's numbers."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 8) and numpy >= (2, 4):
        pytest.skip(f"Triton {version('triton')}'s interpreter does not work with NumPy {version('numpy')}")


def run_python(*arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), **variables}
    environment.pop("SWBN_KERNELS", None) if "SWBN_KERNELS" not in variables else None
    done = subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


PYTEST = ("-m", "pytest", "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider", "-p", "no:xdist")


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("file", ["alone", pytest.param("in_layers", marks=pytest.mark.slow)])
def test_in_the_interpreter(file):
    run_python(*PYTEST, HERE / f"kernels_{file}.py", TRITON_INTERPRET="1")


def test_importing_the_package_and_training_do_not_load_triton():
    code = (
        "import sys, torch, swbn_lightning\n"
        "before = 'triton' in sys.modules\n"
        "swbn_lightning.SWBN1d(4)(torch.randn(8, 4, requires_grad=True)).sum().backward()\n"
        "import swbn_lightning.norms.passes.kernels\n"
        "print(before, 'triton' in sys.modules)"
    )
    assert run_python("-c", code).split() == ["False", "False"]


@pytest.fixture
def switch(monkeypatch):
    """The switch as nobody has touched it, on a computer that can run no kernel."""
    monkeypatch.setattr(kernels._Switch, "enabled", None)
    monkeypatch.delenv("SWBN_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def test_off_until_switched_on_and_an_error_where_they_cannot_run(switch):
    assert kernels.enabled() is False
    switch.setattr(importlib.util, "find_spec", lambda name: None)
    here = kernels.available()
    assert not here and "Triton is not installed" in here.reason
    with pytest.raises(InputError, match=r"use_kernels\(True\): Triton is not installed"):
        kernels.use_kernels()
    switch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "no NVIDIA GPU" in kernels.available().reason
    with pytest.raises(InputError, match="no NVIDIA GPU.*stock operators"):
        kernels.use_kernels()
    assert kernels.enabled() is False
    switch.setenv("TRITON_INTERPRET", "1")
    with kernels.use_kernels():
        with kernels.use_kernels(False):
            assert not kernels.enabled()
        assert kernels.enabled()
    assert not kernels.enabled()
    kernels.use_kernels()
    assert kernels.enabled()


def test_the_environments_switch(switch):
    switch.setenv("SWBN_KERNELS", "1")
    with pytest.raises(InputError, match="SWBN_KERNELS=1: "):
        SWBN1d(4)(torch.randn(8, 4))
    switch.setenv("SWBN_KERNELS", "yes")
    with pytest.raises(InputError, match="SWBN_KERNELS must be 0 or 1, got 'yes'"):
        kernels.enabled()
    switch.setenv("SWBN_KERNELS", "0")
    assert kernels.enabled() is False


def test_switched_on_tensors_on_a_cpu_and_compiled_layers_use_the_stock_operators(switch):
    switch.setattr(kernels._Switch, "enabled", True)
    x = torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    norm = SWBN2d(8)
    norm(x)
    torch.compile(norm, backend="eager", fullgraph=True)(x)
    assert norm.num_batches_tracked == 2


CHANNELS = (16, 24, 100, 256, 512)
SHARED_MEMORY = 99 * 1024  # bytes a program, of the GPUs from compute capability 8.0 on that have the least
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64"}


def launches(d, dtype, monkeypatch):
    """What a training pass would launch on a GPU: kernels, arguments, constants; nothing runs."""
    from swbn_lightning.norms.passes.kernels import launch

    found = []
    monkeypatch.setattr(
        launch, "_launch", lambda kernel, grid, *args, **constants: found.append((kernel, args, constants))
    )
    x, values, counter = torch.ones(1000, d, dtype=dtype), torch.ones(d), torch.tensor(0)
    w = torch.ones(1, d, d)
    launch.moments(x, 1e-8)
    launch.covariance(x, values, values)
    launch.output(x, values, values, w[0].to(dtype), values)
    launch.gradients(x, x, values, values, w, w[0].to(dtype), (True, torch.float32, torch.float32))
    if d <= kernels.MOST_WIDTH:
        for criterion in ("fro", "kl"):
            running = values, values, counter
            launch.update_state(w, w, values, values, running, counter, counter, False, criterion, 0.1, 0.1)
    return found


def resources(kernel, args, constants, capability):
    """Shared memory and registers in local memory, which is slow: bytes a program, bytes a thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    signature, attributes, remaining = {}, {}, iter(args)
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = next(remaining)
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{DTYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.metadata.shared, _stack(compiled.asm["cubin"])


def _stack(binary):
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


def assert_compiles(capability, d, dtype, monkeypatch):
    found = launches(d, dtype, monkeypatch)
    assert len({kernel.__name__ for kernel, *_ in found}) == (10 if d <= kernels.MOST_WIDTH else 8)
    for kernel, args, constants in found:
        shared, stack = resources(kernel, args, constants, capability)
        assert shared <= SHARED_MEMORY and stack <= 16, (kernel.__name__, d, dtype, capability, shared, stack)


@needs_triton
def test_compiles_for_gpus(monkeypatch):
    assert_compiles(90, 64, torch.bfloat16, monkeypatch)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("d", CHANNELS)
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, torch.float32), (80, torch.bfloat16), (90, torch.float16)], ids=str
)
def test_compiles_at_every_size(capability, d, dtype, monkeypatch):
    assert_compiles(capability, d, dtype, monkeypatch)
