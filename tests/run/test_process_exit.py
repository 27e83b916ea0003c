"""How a rank's process ends: what the file still has to do is done, and no thread of torch's aborts the process."""

from __future__ import annotations

import json

import pytest

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


def test_the_line_of_a_failure_is_the_users_and_not_that_of_pythons_library(tmp_path):
    with pytest.raises(TypeError) as caught:
        json.dumps(object())
    worker.failed(caught.value, tmp_path)
    file, _, line = json.loads((tmp_path / "failures" / "0.json").read_text())["where"].rpartition(":")
    assert (file, int(line)) == (__file__, caught.traceback[0].lineno + 1)
