"""SIGTERM to every process of a job, as SLURM, Kubernetes and ``timeout`` send it, with data workers and without."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="no sender of a signal is known here")
KINDS = {
    "classification": [
        "--model=ImageClassifier", "--model.num_classes=10", "--data=MNISTDataModule", "--data.batch_size=32",
        "--data.eval_batch_size=4", "--model.backbone_args={hidden: [16]}",
    ],
    "few-shot": [
        "--model=PrototypicalNetwork", "--model.backbone_args={hidden: [16], in_channels: 3, image_size: 32}",
        "--data=EpisodicDataModule", "--data.dataset=cifar-fs", "--data.episodes_per_step=2",
        "--data.train={ways: 3, shots: 2, queries: 3, episodes: 10}",
        "--data.val={ways: 3, shots: 1, queries: 2, episodes: 600}",
    ],
}  # fmt: skip
MORE = [
    "--model.backbone=mlp", "--model.norm=swbn-fro", "--trainer.max_epochs=2", "--trainer.accelerator=cpu",
    "--run.name=run", "--whiteness.every_n_epochs=0", "--trainer.enable_model_summary=false",
    "--trainer.enable_progress_bar=false",
]  # fmt: skip
TWO = ["--trainer.devices=2", "--trainer.strategy=ddp"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cli"]


class Job:
    """``swbn fit`` in a session of its own, five steps an epoch; what it says is in ``folder/output.txt``."""

    def __init__(self, folder, kind, root, *arguments, pause=None, program=("-m", "cli"), command="fit"):
        self.folder = folder
        callbacks = []
        if pause is not None:
            where, number = pause
            given = f"{{class_path: tests.reliability.tiny_runs.Pause, init_args: {{where: {where}, number: {number}"
            callbacks = [f"--trainer.callbacks={given}, folder: {folder}}}}}"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        given = [*KINDS[kind], f"--data.root={root}", *MORE, *callbacks, *arguments]
        with (folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, command, *given], cwd=folder, env=environment, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_for(self, name="here", seconds=60):
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            assert self.process.poll() is None and time.monotonic() < end, self.output
            time.sleep(0.01)

    def stop(self, times=1):
        """SIGTERM to all its processes at the moment it pauses; the exit code."""
        self.wait_for()
        for _ in range(times):
            os.killpg(self.process.pid, signal.SIGTERM)
            time.sleep(0.2)  # for those that die of it to be dead
        (self.folder / "go").touch()
        return self.end()

    def end(self):
        """The exit code; that nothing is left of the job."""
        code = self.process.wait(timeout=60)
        end = time.monotonic() + 15  # a worker looks every five seconds whether its training is still there
        while processes_of(self.process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not processes_of(self.process.pid)
        return code

    @property
    def output(self):
        return (self.folder / "output.txt").read_text()

    @property
    def step(self):
        """In ``last.ckpt``; None without one."""
        found = sorted(self.folder.glob("runs/run/version_*/checkpoints/last.ckpt"))
        return torch.load(found[-1], weights_only=True)["global_step"] if found else None

    @property
    def half_done(self):
        return [path.name for path in self.folder.glob("runs/run/version_*/checkpoints/*") if "tmp" in path.name]

    def __enter__(self):
        return self

    def __exit__(self, *args):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def processes_of(group):
    """Those of a process group that are not dead, as ``(pid, parent)``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, own = path.read_text().rpartition(")")[2].split()[:3]
            if int(own) == group and state not in "ZX":
                found.append((int(path.parent.name), int(parent)))
    return found


@pytest.fixture(scope="module")
def roots(tiny_mnist, tiny_cifar100):
    return {"classification": tiny_mnist, "few-shot": tiny_cifar100}


def in_one_process(kind, workers, where, number, step, more=(), times=1, *, slow=True):
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(kind, workers, where, number, step, more, times, marks=marks)


@pytest.mark.parametrize(("kind", "workers", "where", "number", "step", "more", "times"), [
    in_one_process("classification", 2, "train", 6, 7, slow=False),
    in_one_process("few-shot", 2, "train", 6, 7, times=2, slow=False),  # `timeout` sends two
    in_one_process("few-shot", 0, "train", 6, 7),
    in_one_process("classification", 2, "on_fit_start", 0, None),  # before Lightning listens
    in_one_process("classification", 2, "sanity", 1, 1),  # the last batch there: a step is trained and kept
    in_one_process("classification", 2, "validation", 1, 5),
    in_one_process("classification", 2, "on_save_checkpoint", 0, 5, times=2),
    in_one_process("classification", 2, "train", 5, 3, ["--trainer.accumulate_grad_batches=2"]),
])  # fmt: skip
def test_the_step_is_saved_whatever_the_workers(kind, workers, where, number, step, more, times, roots, tmp_path):
    arguments = [f"--data.num_workers={workers}", *more]
    with Job(tmp_path, kind, roots[kind], *arguments, pause=(where, number)) as job:
        assert job.stop(times) == 143, job.output
        assert job.step == step and not job.half_done
        assert "Traceback" not in job.output


@pytest.mark.slow
def test_a_training_that_is_done_is_done(roots, tmp_path):
    pause = ("on_train_end", 0)
    with Job(tmp_path, "classification", roots["classification"], "--data.num_workers=2", pause=pause) as job:
        assert job.stop() == 0, job.output
        assert job.step == 10 and not job.half_done


@pytest.mark.parametrize("program", [
    pytest.param(("-m", "cli"), id="lightning"),
    pytest.param(TORCHRUN, marks=pytest.mark.slow, id="torchrun"),
])  # fmt: skip
@pytest.mark.parametrize(("where", "number", "step"), [
    pytest.param("train", 2, 4),  # seen one batch later
    pytest.param("sanity", 0, 2, marks=pytest.mark.slow),
    pytest.param("validation", 0, 7, marks=pytest.mark.slow),
])  # fmt: skip
def test_two_processes_save_one_step(program, where, number, step, roots, tmp_path):
    arguments = [*TWO, "--data.num_workers=2", "--data.batch_size=16"]
    with Job(
        tmp_path, "classification", roots["classification"], *arguments, pause=(where, number), program=program
    ) as job:
        code = job.stop()
        assert job.step == step and not job.half_done, job.output
        assert code == (1 if "torch.distributed.run" in program else 143), job.output  # torchrun's own


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error(roots, tmp_path):
    with Job(tmp_path, "classification", roots["classification"], "--data.num_workers=2", pause=("train", 6)) as job:
        job.wait_for()
        workers = [pid for pid, parent in processes_of(job.process.pid) if parent == job.process.pid]
        assert len(workers) >= 2
        os.kill(workers[0], signal.SIGKILL)
        time.sleep(0.2)
        (tmp_path / "go").touch()
        assert job.end() == 1
        assert "is killed by signal" in job.output and job.step == 5
