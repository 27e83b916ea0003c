"""`benchmarks/host_time.py` times its contestants on two ranks each, and compares like with like."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_time.py"


@pytest.mark.integration
def test_host_time_compares_each_contestant_with_fsdp2_or_ddp(tmp_path):
    out = tmp_path / "times.json"
    options = ["--starts", "1", "--rounds", "2", "--steps", "3", "--blocks", "1", "--out", out]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["contestant", "ms", "of", "host", "time", "against", "ratio"]
    assert len(rows) == 8
    for row in rows:
        peer, ratio = row.split()[-2:]
        assert peer == ("FSDP2" if row.startswith(("FSDP2", "shard")) else "DDP")
        assert 0.2 < float(ratio) < 10
    seconds = json.loads(out.read_text())["seconds_by_round"]
    assert all(len(rounds) == 2 and all(0 < each < 1 for each in rounds) for rounds in seconds.values())
