"""`bench restart`: what it makes of the steps that a job notes, how it is refused, and one whole round."""

from __future__ import annotations

import json
import subprocess

import pytest

from compare.command import main
from compare.restart import CONTESTANTS, command_of, ratios, run_restarts, table, went_on
from paceline.nouns.errors import UsageError

from support.benchmarks import SCRIPT
from support.jobs import leftovers, marked, wait_for


def test_restart_time_is_from_the_kill_to_the_new_first_step():
    old = [(10**9 * second, step, 7) for step, second in ((1, 1), (2, 2), (3, 4))]
    new = [(10**9 * second, step, 8) for step, second in ((3, 9), (4, 10))]
    assert went_on([*old, *new], 3 * 10**9) == (6.0, 1)
    assert went_on([*old, *new[1:]], 3 * 10**9) == (7.0, 0)


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    seconds = {"paceline": [1.0, 3.0, 2.0], "torchrun": [2.0, 4.0, 2.0], "torchrun_ddp": [4.0, 4.0, 4.0]}
    assert ratios(seconds) == {"paceline_over_torchrun": 0.75, "paceline_over_torchrun_ddp": 0.5}


def test_the_table_aligns():
    rows = [{"name": name, "seconds": 12.345, "min": 1.0, "max": 2.0, "repeated": 5} for name in CONTESTANTS]
    machine = {"cores": 2, "load_before": 0.25, "load_after": 2.0}
    lines = table({"rows": rows, "ratios": {"paceline_over_torchrun": 0.5}, "machine": machine}).splitlines()
    assert len({len(line) for line in lines[: 1 + len(rows)]}) == 1
    assert lines[-1] == "2 cores, load 0.2 before, 2.0 after"


def test_restart_bench_gives_both_launchers_equal_commands(tmp_path):
    ours, torchrun, _ = (command_of(name, tmp_path) for name in CONTESTANTS)
    assert ours[-4:] == torchrun[-4:]
    for command in (ours, torchrun):
        assert command[command.index("--max-restarts") + 1] == "3"
        assert command[command.index("--checkpoint-every") + 1] == "10"


def test_no_round_is_refused(tmp_path, capsys):
    with pytest.raises(UsageError, match="write --rounds 1 or more"):
        run_restarts(tmp_path, 0, print)
    assert main(["restart", "--steps", "3"]) == 2
    assert "--steps is for bench jobs" in capsys.readouterr().err


@pytest.mark.complete
def test_one_round_prints_one_object(tmp_path):
    words = [SCRIPT, "restart", "--rounds", "1", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=400, env=marked(tmp_path, {}))
    assert done.returncode == 0, done.stderr
    assert wait_for(lambda: not leftovers(tmp_path)), f"left behind: {leftovers(tmp_path)}"
    result = json.loads(done.stdout)
    assert [row["name"] for row in result["rows"]] == list(CONTESTANTS)
    assert all(0 < row["seconds"] < 100 and 0 <= row["repeated"] <= 40 for row in result["rows"])
    assert set(result["ratios"]) == {"paceline_over_torchrun", "paceline_over_torchrun_ddp"}
