"""Data workers and signals, without a training: who ends them, and who does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pytorch_lightning.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, Dataset, get_worker_info

from swbn_lightning.command.signals import let_sigterm_kill, sigterm_is_143
from swbn_lightning.data.workers import StayingLoader, StayOnSigterm
from tests.reliability.test_signal_to_the_group import REPOSITORY, processes_of

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="no sender of a signal is known here")


class Slow(Dataset[torch.Tensor]):
    def __len__(self):
        return 100

    def __getitem__(self, number):
        time.sleep(0.01)
        return torch.tensor([number, os.getpid()])


class Marks(Dataset[int]):
    """What the ``worker_init_fn`` of a user left in the worker."""

    mark = 0

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return self.mark


def leave_a_mark(worker):
    get_worker_info().dataset.mark = 10 + worker


def work(method, folder):
    """Two epochs with two workers, in a process of its own that counts the signals it gets."""
    counts, folder = {signal.SIGTERM: 0, signal.SIGUSR1: 0}, Path(folder)

    def count(number, frame):
        counts[number] += 1
        (folder / f"answered by {os.getpid()}").touch()

    for number in counts:
        signal.signal(number, count)
    loader = StayingLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context=method)
    (folder / "here").touch()
    for _ in range(2):
        assert [batch[:, 0].tolist() for batch in loader] == [[n, n + 1] for n in range(0, 100, 2)]
        (folder / "epoch").touch()
    assert min(counts.values()) > 5, counts
    start, worker = time.monotonic(), loader._iterator._workers[0]
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0 and time.monotonic() - start < 3


@pytest.fixture
def job(request, tmp_path):
    code = f"from tests.reliability.test_workers import work; work({request.param!r}, {str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    while not (tmp_path / "here").exists():
        assert process.poll() is None, (tmp_path / "output.txt").read_text()
        time.sleep(0.001)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


METHODS = ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]


@pytest.mark.parametrize("job", METHODS, indirect=True)
def test_workers_outlive_a_rain_of_signals_from_their_first_moment(job, tmp_path):
    while job.poll() is None and not (tmp_path / "epoch").exists():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.killpg(job.pid, number)
        time.sleep(0.003)
    assert job.wait(timeout=60) == 0, (tmp_path / "output.txt").read_text()
    # A forked worker would answer with its training's own handler: SLURM's saves a checkpoint.
    assert [path.name for path in tmp_path.glob("answered*")] == [f"answered by {job.pid}"]
    assert "Traceback" not in (tmp_path / "output.txt").read_text()


@pytest.mark.parametrize("job", METHODS[:1], indirect=True)
def test_no_worker_stays_behind_when_its_training_is_killed(job, tmp_path):
    while len(processes_of(job.pid)) < 3:
        time.sleep(0.001)
    job.kill()
    job.wait()
    end = time.monotonic() + 20
    while processes_of(job.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not processes_of(job.pid)


@pytest.mark.parametrize("kind", [StayingLoader, DataLoader])
def test_the_users_own_function_is_called(kind):
    given = leave_a_mark if kind is StayingLoader else StayOnSigterm(leave_a_mark)
    loader = kind(Marks(), num_workers=2, worker_init_fn=given)
    assert [int(batch) for batch in loader] == [10, 11, 10, 11]
    assert loader.worker_init_fn is given  # Lightning sets its own only where there is none
    again = _update_dataloader(loader, loader.sampler)
    assert type(again) is kind and [int(batch) for batch in again] == [10, 11, 10, 11]


@pytest.fixture
def _own_handlers():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_own_handlers")
def test_sigterm_is_143_where_nothing_listens():
    ended = []
    with pytest.raises(SystemExit) as left, sigterm_is_143():
        heard, before = [], signal.getsignal(signal.SIGTERM)
        # As Lightning does, and puts the one before back.
        signal.signal(signal.SIGTERM, lambda *given: (heard.append(given), before(*given)))
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
        assert len(heard) == 1
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # in the midst of its end
            ended.append(True)
    assert left.value.code == 143 and ended
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("_own_handlers")
def test_one_of_several_processes_is_killed_at_once_until_something_listens():
    with sigterm_is_143():
        let_sigterm_kill()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, print)
        let_sigterm_kill()
        assert signal.getsignal(signal.SIGTERM) is print
