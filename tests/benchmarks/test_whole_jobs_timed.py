"""`bench jobs`: what it makes of its times, how it is refused, and that each rank has a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from compare.command import main
from compare.jobs import LIBRARIES, SETTINGS, busy_processes, last_lines_of, ratios, run_jobs, table
from paceline.nouns.errors import UsageError

from support.jobs import paceline

RATES = {"paceline": [4.0, 6.0, 5.0], "ddp": [2.0, 3.0, 10.0], "accelerate": [4.0] * 3, "lightning": [8.0] * 3}


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    found = ratios({"quiet": RATES, "busy": RATES})
    assert found["quiet_over_ddp"] == 2.0
    assert found["busy_over_accelerate"] == 1.25
    assert len(found) == len(SETTINGS) * (len(LIBRARIES) - 1)


def test_the_table_aligns():
    row = {"samples_per_s": 1234.5, "min": 1.0, "max": 2.0, "whole_s": 12.34}
    rows = [{"setting": setting, "library": library, **row} for setting in SETTINGS for library in LIBRARIES]
    machine = {"cores": 2, "load_before": 0.25, "load_after": 2.0}
    lines = table({"rows": rows, "ratios": {"quiet_over_ddp": 1.0}, "busy": 3, "machine": machine}).splitlines()
    assert len({len(line) for line in lines[: 1 + len(rows)]}) == 1
    assert lines[-1] == "2 cores, load 0.2 before, 2.0 after"


def test_the_error_has_the_last_lines_with_a_word():
    assert last_lines_of("why\n  exitcode: -6 (SIGABRT)\n=====\n\n") == "why\n  exitcode: -6 (SIGABRT)"
    assert last_lines_of("\n".join(map(str, range(100)))).splitlines() == [str(number) for number in range(88, 100)]
    assert last_lines_of("====\n") == "it printed nothing"


@pytest.mark.parametrize("numbers", [(0, 300, 3), (1, 1, 3), (1, 300, 0)])
def test_too_small_a_number_is_refused(tmp_path, numbers):
    with pytest.raises(UsageError, match="or more"):
        run_jobs(tmp_path, *numbers, tell=print)


def test_busy_processes_have_their_own_sessions_and_end():
    before = set(psutil.Process().children())  # other tests of this process may have started ranks
    with busy_processes(2):
        started = set(psutil.Process().children()) - before
        assert len(started) == 2
        assert all(os.getsid(process.pid) == process.pid for process in started)
    assert not any(process.is_running() for process in started)


def test_busy_processes_end_when_the_benchmark_is_killed():
    lines = "import time\nfrom compare.jobs import busy_processes\n"
    lines += "with busy_processes(2): print(flush=True); time.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE) as benchmark:
        benchmark.stdout.readline()
        started = psutil.Process(benchmark.pid).children()
        assert len(started) == 2
        benchmark.kill()
    _, alive = psutil.wait_procs(started, timeout=10)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.parametrize(
    "options",
    [
        ["step", "--steps", "3"],
        ["step", "--busy", "2"],
        ["jobs", "--startup-rounds", "2"],
        ["strategies", "--device", "cpu"],
        ["planner", "--rounds", "2"],
    ],
)
def test_an_option_of_another_subject_is_refused(options, capsys):
    assert main(options) == 2
    assert f"{options[1]} is for bench" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sessions share the CPU on Linux alone")
def test_each_rank_has_its_own_session(tmp_path):
    # Linux gives each session an equal share of the CPU (autogroup): ranks that share one lose beside other programs.
    file = tmp_path / "train.py"
    file.write_text("import os, paceline\npaceline.init()\nprint('session', os.getsid(0) == os.getpid())\n")
    ended = paceline(tmp_path, "run", "-n", "2", file)
    assert ended.out.count("session True") == 2, ended.out + ended.err
