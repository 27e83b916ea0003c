"""How a rank's process ends: what the file still has to do is done, and no thread of torch's aborts the process.

After a failure it ends whatever its exit waits for, and its child processes end with it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.comm import api
from paceline.launch.process_exit import kill_group
from paceline.nouns.errors import UsageError
from paceline.nouns.user_program import UserProgram
from paceline.run.rank import worker

from support.jobs import LOOP, paceline, start, write_workload

RANKS = 2
# Threads that stand in C++ code without the GIL and ask for it again every few milliseconds, as Gloo's do after their
# last collective. In an interpreter that is being finalized one of them aborts the process.
THREADS = """
import atexit, datetime, threading
from torch.distributed import HashStore

def wait_in_torch():
    store = HashStore()
    while True:
        try:
            store.wait(["never"], datetime.timedelta(milliseconds=5))
        except Exception:
            pass

for number in range(8):
    threading.Thread(target=wait_in_torch, daemon=True).start()
"""
# What a Python program may still do after its last line.
LATE = """
def write_late(name, after_s):
    time.sleep(after_s)
    open(f"{name}-{job.rank}", "w").write("whole")

atexit.register(write_late, "registered", 0)
threading.Thread(target=write_late, args=("thread", 1)).start()
"""


def run_alone(folder, file):
    return paceline(folder, "run", "-n", RANKS, "--job", "a", file)


def run_under_a_launcher(folder, file):
    """As Open MPI's mpirun would start the ranks, with nothing above them."""
    jobs = []
    for rank in range(RANKS):
        own = {"RANK": rank, "SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_SIZE": RANKS}
        place = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}
        jobs.append(start(folder, "run", "--job", "a", file, PMIX_NAMESPACE=folder.name, **place))
    written = [job.communicate(timeout=90)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * RANKS, written


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_alone, run_under_a_launcher])
def test_what_the_file_left_to_do_is_done_and_nothing_aborts(tmp_path, run):
    run(tmp_path, write_workload(tmp_path, loop=LOOP + THREADS + LATE))
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert (result["status"], result["failure"]) == ("done", None)
    for rank in range(RANKS):
        assert (tmp_path / f"registered-{rank}").read_text() == "whole"
        assert (tmp_path / f"thread-{rank}").read_text() == "whole"


CHILDREN = """
import multiprocessing, subprocess
recorder = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), name="recorder")
recorder.start()
if job.rank == 1:
    subprocess.Popen(["sleep", "600"])
    raise RuntimeError("boom")
"""
# What the exit of a process waits for, and what is said of it.
WAITS = {
    "child": (
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(LONG,), name='own').start()",
        "own",
    ),
    "atexit": ("atexit.register(time.sleep, LONG)", "process_exit.py"),
    "pool": ("pool = futures.ProcessPoolExecutor(1); pool.submit(time.sleep, LONG)", "Process"),
}
EXIT = """
import atexit, ctypes, multiprocessing, sys, threading, time
from concurrent import futures
from paceline.launch import process_exit
process_exit.FAILED_S = process_exit.TELL_S = 0.2
LONG = float(sys.argv[2])
exec(sys.argv[3])
process_exit.exit_process(int(sys.argv[1]))
"""


def exit_with(folder, code, seconds, wait):
    words = [sys.executable, "-c", EXIT, str(code), str(seconds), wait]
    with (folder / "said").open("w") as file:  # no pipe, which a child process would hold
        process = subprocess.Popen(words, stderr=file, start_new_session=True)
    try:
        code = process.wait(60)
    finally:
        kill_group(process.pid)
        process.wait()
    return code, (folder / "said").read_text()


@pytest.mark.parametrize("name", WAITS)
def test_after_a_failure_no_exit_waits_for_good(tmp_path, name):
    wait, awaited = WAITS[name]
    code, said = exit_with(tmp_path, 3, 600, wait)
    assert code == 3
    assert "after the failure this process is ended; its exit waits for" in said
    assert awaited in said


def test_native_code_that_holds_the_gil_keeps_no_failed_rank(tmp_path):
    code, said = exit_with(tmp_path, 3, 600, "atexit.register(ctypes.PyDLL(None).sleep, 600)")
    assert (code, said.startswith("Timeout")) == (1, True)


@pytest.mark.parametrize(
    ("wait", "awaited"),
    [WAITS["child"], ("threading.Thread(target=time.sleep, args=(LONG,), name='own').start()", "thread own")],
    ids=["child", "thread"],
)
def test_a_normal_exit_waits_and_says_for_what(tmp_path, wait, awaited):
    code, said = exit_with(tmp_path, 0, 2, wait)
    assert code == 0
    assert said.startswith("paceline: the file has ended; the exit of its process waits for")
    assert awaited in said


@pytest.mark.slow
def test_a_rank_that_fails_ends_with_its_child_processes(tmp_path):
    """`paceline` sees to it that none is left."""
    ended = paceline(tmp_path, "run", "-n", RANKS, write_workload(tmp_path, loop=LOOP + CHILDREN))
    assert ended.code == 1
    assert "RuntimeError: boom" in ended.err
    assert "waits for child process recorder" in ended.out + ended.err


def test_a_traceback_shows_the_users_frames_and_none_of_ours(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("def load(index):\n    return {0: 1}[index]\n\n\nload(7)\n")
    with pytest.raises(KeyError) as caught:
        UserProgram(str(file)).run()
    shown = worker._shown(caught.value)
    assert f'File "{file}", line 2, in load' in shown
    assert "user_program.py" not in shown
    assert "runpy" not in shown


def test_a_process_that_a_rank_has_started_is_no_rank(monkeypatch):
    monkeypatch.setattr(api, "_world", [])
    monkeypatch.setenv("PACELINE_RANK", "1")
    monkeypatch.setenv("PACELINE_RANK_PROCESS", "1")
    with pytest.raises(UsageError, match="there would be two ranks 1"):
        api.init()


def test_failure_line_is_of_the_user_and_not_of_the_library(tmp_path):
    with pytest.raises(TypeError) as caught:
        json.dumps(object())
    worker.failed(caught.value, tmp_path)
    file, _, line = json.loads((tmp_path / "failures" / "0.json").read_text())["where"].rpartition(":")
    assert (file, int(line)) == (__file__, caught.traceback[0].lineno + 1)
