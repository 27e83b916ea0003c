"""`paceline why` names what is injected into real jobs; tests/run/test_causes.py injects more."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from paceline.run import causes as judgement
from paceline.run.causes import Cause, causes
from paceline.run.job_facts import collect

from support.jobs import start, wait_for

pytestmark = pytest.mark.integration
FILE = """
import os, pathlib, time
import torch, paceline

WANTED = pathlib.Path(os.environ["TEST_WANTED"])
RANK = int(os.environ["PACELINE_RANK"])

def wanted(name, rank=None):
    if rank not in (None, RANK):
        return False
    try:
        return WANTED.read_text() == name
    except OSError:
        return False

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if wanted("slow data", 1) or wanted("slow data everywhere"):
            time.sleep(0.01)
        while wanted("stuck loader", 1):
            time.sleep(0.02)
        return torch.ones(256) * (index % 5)

def loss(model, batch):
    if wanted("longer batch", 1):
        with torch.no_grad():
            for _ in range(40):
                torch.ones(256, 256) @ torch.ones(256, 256)
    if wanted("much to compute"):
        for _ in range(50):
            batch = torch.tanh(model(batch))
    return (model(batch) ** 2).sum(), len(batch)

workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))), loss=loss, data=Numbers(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6), batch_size=8, epochs=1_000_000,
    loader_workers=int(os.environ.get("TEST_WORKERS", "0")),
)

if __name__ == "__main__":
    clock, fsync, fault = time.time_ns, os.fsync, 0
    def slow_fsync(descriptor):
        if wanted("slow disk"):
            time.sleep(0.15)
        if wanted("bad disk"):
            raise OSError(5, "Input/output error")
        fsync(descriptor)
    os.fsync = slow_fsync
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if wanted("clock", 0) and time.time_ns is clock:
            time.time_ns = lambda: clock() + 3600 * 10**9
        if not wanted("clock", 0):
            time.time_ns = clock
        if wanted("slow loop everywhere"):
            time.sleep(0.03)
        if wanted("read", 1):
            with open(os.environ["TEST_PIPE"]) as pipe:
                pipe.read()
        if wanted("shapes"):
            paceline.all_reduce(torch.zeros(2 + RANK))
        if wanted("leave", 1):
            break
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that trains, and where its faults are asked for."""

    folder: Path
    process: subprocess.Popen[str]
    runs: Path

    @property
    def run(self) -> Path:
        """Its run directory."""
        return self.runs / "a"

    def rank(self, rank: int) -> psutil.Process:
        """Return the process of a rank."""
        line = json.loads((self.run / f"times/{rank}.jsonl").read_text().splitlines()[0])
        return psutil.Process(line["pid"])

    def inject(self, name: str) -> None:
        """Have the ranks find a fault's name."""
        draft = self.folder / "draft"
        draft.write_text(name)
        draft.replace(self.folder / "wanted")

    def let_go_on(self, steps: int) -> None:
        """End the fault, and wait until the job has taken more steps: they must not be judged by it."""
        (self.folder / "wanted").unlink(missing_ok=True)
        path = self.run / "events.jsonl"
        before = path.stat().st_size
        assert wait_for(lambda: path.read_bytes()[before:].count(b'"event": "step"') >= steps, 40)

    def found(self, name: str, seconds: float = 25.0) -> Cause:
        """Return the cause of that name, or what was named last in its place."""
        until = time.monotonic() + seconds
        newest = Cause("nothing", (), "", "")
        while time.monotonic() < until:
            found = causes(collect(self.run))
            newest = next((cause for cause in found if cause.name == name), found[0] if found else newest)
            if newest.name == name:
                break
            time.sleep(0.3)
        return newest


@contextlib.contextmanager
def training(folder: Path, *words: str, runs: Path | None = None, **environment: str) -> Iterator[Job]:
    """Train until the block ends."""
    (folder / "train.py").write_text(FILE)
    os.mkfifo(folder / "pipe")
    place = runs or folder / "runs"
    known = {"TEST_WANTED": str(folder / "wanted"), "TEST_PIPE": str(folder / "pipe"), **environment}
    process = start(folder, "run", "-n", "2", "--runs", place, "--job", "a", *words, "train.py", **known)
    try:
        job = Job(folder, process, place)
        ready = [job.run / f"times/{rank}.jsonl" for rank in (0, 1)]
        assert wait_for(lambda: all(path.exists() and path.read_text().count("\n") > 20 for path in ready), 60)
        yield job
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Judge after half a second, and wait less for answers."""
    monkeypatch.setattr(judgement, "_STILL_S", 0.5)
    monkeypatch.setattr(judgement, "_GRACE_S", 0.5)
    monkeypatch.setattr(judgement, "_RESTARTS_S", 0.5)
    monkeypatch.setattr("paceline.run.job_facts.ANSWER_S", 2.0)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job that saves nothing."""
    with training(tmp_path_factory.mktemp("causes"), "--checkpoint-every", "0") as trained:
        yield trained


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    """A job with a process that loads data on each rank, and checkpoints on a small disk of its own."""
    folder = tmp_path_factory.mktemp("causes")
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with training(folder, "--checkpoint-every", "2", runs=disk, TEST_WORKERS="1") as trained:
            yield trained
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# What is asked for, the name of the cause, whose it is, and what its text says.
ASKED = {
    "slow data": ("slow data", (1,), ["rank 1 is waited for", "its data takes"]),
    "slow data everywhere": ("much data", (), ["waiting for data, on every rank"]),
    "longer batch": ("uneven work", (1,), ["rank 1 is waited for", "its forward takes"]),
    "slow loop everywhere": ("much other", (), ["the loop's own code"]),
    "clock": ("clock jump", (0,), ["jumped by +3600 s"]),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_job_of_two_ranks_does(name, job):
    expected, ranks, words = ASKED[name]
    job.inject(name)
    cause = job.found(expected)
    is_answered = [rank.answer is not None for rank in collect(job.run).ranks]
    job.let_go_on(60)
    assert (cause.name, cause.ranks) == (expected, ranks), cause.text
    assert is_answered == [True, True], "also with a clock that is an hour ahead"
    assert [word for word in words if word not in cause.text] == []


@pytest.mark.complete
def test_a_rank_that_shares_its_only_core(job):
    rank = job.rank(1)
    before = os.sched_getaffinity(rank.pid)
    core = min(before)
    if len(before) < 2:
        pytest.skip("a rank has one core here anyway")
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    with contextlib.suppress(PermissionError):  # other tests keep rank 0's cores busy too: this rank's must be busier
        os.setpriority(os.PRIO_PROCESS, burner.pid, -10)
    job.inject("much to compute")
    try:
        os.sched_setaffinity(burner.pid, {core})
        on_cores(rank.pid, {core})
        cause = job.found("fewer cores", 60)
    finally:
        burner.kill()
        burner.wait()
        on_cores(rank.pid, before)
    job.let_go_on(60)
    assert (cause.name, cause.ranks) == ("fewer cores", (1,)), cause.text
    assert f"it may use 1 core, the others {len(before)}" in cause.text


def on_cores(pid, cores):
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def test_a_read_from_a_process_that_is_stopped(job):
    """A file system whose server stands still looks the same to a rank that reads from it."""
    writer = subprocess.Popen([sys.executable, "-c", "import sys; open(sys.argv[1], 'w').read()", job.folder / "pipe"])
    time.sleep(0.3)
    writer.send_signal(signal.SIGSTOP)
    job.inject("read")
    try:
        cause = job.found("idle")
    finally:
        (job.folder / "wanted").unlink()
        writer.kill()
        writer.wait()
        with contextlib.suppress(OSError):  # lets a rank go on that still opens the pipe
            os.close(os.open(job.folder / "pipe", os.O_WRONLY | os.O_NONBLOCK))
    job.let_go_on(60)
    assert (cause.name, cause.ranks) == ("idle", (1,)), cause.text
    assert "rank 1" in cause.text
    assert "pipe" in cause.text
    # For the gradients, or for the facts of a step, as rank 1 reads before or within it.
    assert re.search(r"rank 0 waits for it in all_(reduce|gather)", cause.text)


def test_a_process_under_a_debugger(job):
    libc = ctypes.CDLL(None, use_errno=True)
    attach, detach, of_any_thread = 16, 17, 0x40000000
    threads = [int(path.name) for path in Path(f"/proc/{job.rank(1).pid}/task").iterdir()]
    attached = [thread for thread in threads if libc.ptrace(attach, thread, 0, 0) == 0]
    if not attached:
        pytest.skip("this process may not debug another here")
    for thread in attached:
        os.waitpid(thread, of_any_thread)
    try:
        cause = job.found("traced")
    finally:
        for thread in attached:
            libc.ptrace(detach, thread, 0, 0)
    job.let_go_on(60)
    assert (cause.name, cause.ranks) == ("traced", (1,)), cause.text


def test_shapes_that_differ(job):
    """Last of this job's: it ends by it."""
    job.inject("shapes")
    line = 1 + FILE.splitlines().index("            paceline.all_reduce(torch.zeros(2 + RANK))")
    assert wait_for(lambda: any(f"train.py:{line}" in cause.text for cause in causes(collect(job.run))), 30)
    (cause,) = [cause for cause in causes(collect(job.run)) if f"train.py:{line}" in cause.text]
    # gloo lets the rank with the shorter tensor go on, so that the other waits alone.
    assert cause.name in ("same call", "different calls", "failed")
    assert f"all_reduce at {job.folder}/train.py:{line}" in cause.text


STUCK = {
    "stuck loader": ("data loader", (1,), ["rank 1", "waits for its data loader", "rank 0 waits for it"]),
    "slow disk": ("slow checkpoint", (0,), ["rank 0 is waited for", "its checkpoint takes"]),
    "bad disk": ("checkpoint failed", (), ["could not be written", "Input/output error"]),
}


@pytest.mark.parametrize("name", STUCK)
def test_what_a_job_that_loads_and_saves_does(name, saving):
    expected, ranks, words = STUCK[name]
    saving.inject(name)
    cause = saving.found(expected, 40)
    saving.let_go_on(60)
    assert (cause.name, cause.ranks) == (expected, ranks), cause.text
    assert [word for word in words if word not in cause.text] == []


def test_a_loaders_process_that_is_stopped(saving):
    loaders = saving.rank(1).children()
    for loader in loaders:
        loader.suspend()
    try:
        cause = saving.found("data loader")
    finally:
        for loader in loaders:
            loader.resume()
    saving.let_go_on(60)
    assert (cause.name, cause.ranks) == ("data loader", (1,)), cause.text
    assert f"{len(loaders)} of its processes stopped" in cause.text
    assert "kill -CONT" in cause.fix


def test_a_full_disk(saving):
    filler = saving.runs / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    try:
        cause = saving.found("full disk")
    finally:
        filler.unlink()
    saving.let_go_on(60)
    assert cause.name == "full disk", cause.text
    assert str(saving.run) in cause.text


def test_parameter_servers_that_are_stopped(tmp_path):
    with training(tmp_path, "--checkpoint-every", "0", "--plan", "server=1") as job:
        ranks = {job.rank(rank).pid for rank in (0, 1)}
        others = [each for each in job.rank(0).parent().children() if each.pid not in ranks]
        assert others
        for process in others:
            process.suspend()
        cause = job.found("servers", 15)
        assert cause.name == "servers", cause.text
        assert "parameter servers" in cause.text
        for process in others:
            process.resume()
        job.let_go_on(5)


def test_a_rank_that_leaves_its_loop(tmp_path):
    with training(tmp_path, "--checkpoint-every", "0") as job:
        job.inject("leave")
        cause = job.found("failed", 15)  # the ranks have noticed by themselves
        assert cause.name == "failed", cause.text
        assert "should be reached by all ranks after the same step: rank 1 is there after step" in cause.text


def test_a_rank_that_was_killed_where_nobody_could_say_so(tmp_path):
    """The supervisor of another host dies with it; here it is stopped."""
    with training(tmp_path, "--checkpoint-every", "0") as job:
        job.process.send_signal(signal.SIGSTOP)
        job.rank(1).kill()
        cause = job.found("gone", 30)
        assert cause.name == "gone", cause.text
        assert 1 in cause.ranks
