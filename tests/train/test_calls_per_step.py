"""How much of the product a steady step runs: benchmarks/calls_per_step.py counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "calls_per_step.py"
FUNCTIONS, FILES = 110, 16


def test_a_steady_step_calls_few_functions_in_few_files():
    printed = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=True).stdout
    rows = {row["step"]: row for row in json.loads(printed)}
    assert rows.keys() == {"declared", "own loop", "FSDP2", "DDP"}
    assert rows["FSDP2"]["functions"] > 0  # the counter sees other packages too
    for step in ("declared", "own loop"):
        assert rows[step]["functions"] <= FUNCTIONS, rows
        assert rows[step]["files"] <= FILES, rows
