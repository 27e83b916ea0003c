"""Verifies architectures of transformers that a seed chooses, under several plans, and says of each what came out.

A cell, an architecture under a plan, is one of
    verified   the plan's step is that of one process, in float64 and in float32, and its traffic the predicted one
    refused    by an error that says why
    wrong      a bug, by the verifier's word, or no answer within the time
Architectures that their configuration alone does not build small are left out, and listed.

    python benchmarks/trials/architectures.py --seed 23 --count 60 --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from console import Progress, table
from small_families import FAMILIES

PLANS = ("tensor=2", "pipeline=2", "replicate=2,tensor=2")
LIMIT_S = 600.0  # of one command
VERIFIED, REFUSED, WRONG = "verified", "refused", "wrong"
_FILE = Path(__file__).with_name("small_architecture.py")
_BUILD_S = 60
_BUILDER = """
import json, signal, sys
sys.path.insert(0, {folder!r})
import small_architecture as small

def too_long(*arguments):
    raise small.NotBuiltError("it takes too long")

signal.signal(signal.SIGALRM, too_long)
built = 0
for name in {names!r}:
    signal.alarm({limit})
    try:
        found = [name, small.build(name)[0], ""]
        built += 1
    except small.NotBuiltError as error:
        found = [name, "", str(error)]
    signal.alarm(0)
    print(json.dumps(found), flush=True)
    if built == {count}:
        break
"""
_ALL = """
import sys
sys.path.insert(0, {folder!r})
import small_architecture as small
print(*sorted(name for name in small.transformers.CONFIG_MAPPING if any(True for _ in small.classes_of(name))))
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """What came out of one architecture under one plan.

    Attributes:
        name, model: of the architecture, and of its class.
        plan: under which.
        outcome: VERIFIED, REFUSED or WRONG.
        said: the verdict, or why it is refused.
        seconds: that the command took.
    """

    name: str
    model: str
    plan: str
    outcome: str
    said: str
    seconds: float


def main(words: Sequence[str] | None = None) -> int:
    """Verify, print the table, and return 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="chooses the architectures (default 0)")
    parser.add_argument("--count", type=int, default=60, help="architectures (default 60)")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="these, in place of chosen ones")
    parser.add_argument("--plans", nargs="+", default=PLANS, metavar="PLAN", help=f"(default {' '.join(PLANS)})")
    parser.add_argument("--processes", type=int, default=2, help="commands at a time (default 2)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep the cells there, one by one; a second run goes on"
    )
    parser.add_argument("--families", action="store_true", help="those of small_families.py, in place of transformers'")
    arguments = parser.parse_args(words)
    if arguments.families and arguments.names:
        parser.error("--families with --names: choose one")
    built, left_out = _chosen(arguments)
    kept = _read(arguments.json)
    missing = [
        (name, model, plan) for plan in arguments.plans for name, model in built.items() if (name, plan) not in kept
    ]
    progress = Progress("cells", len(missing))
    with ThreadPoolExecutor(arguments.processes) as pool:
        for number, cell in enumerate(pool.map(lambda job: _verify(*job), missing)):
            kept[cell.name, cell.plan] = cell
            if arguments.json is not None:
                _write(arguments.json, arguments.seed, kept, left_out)
            progress.show(number + 1, sum(cell.outcome == WRONG for cell in kept.values()))
    cells = [kept[name, plan] for name in built for plan in arguments.plans]
    print(report(cells, left_out))
    return int(any(cell.outcome == WRONG for cell in cells))


def _chosen(arguments: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return the classes of the models that are verified, and why others are left out, by name."""
    if arguments.families or arguments.names:
        families = {name: name for name in arguments.names or FAMILIES if name in FAMILIES}
        others = [name for name in arguments.names or () if name not in FAMILIES]
        built, left_out = _built(others, len(others)) if others else ({}, {})
        return {**families, **built}, left_out
    names = _every_name()
    random.Random(arguments.seed).shuffle(names)
    return _built(names, arguments.count)


def report(cells: Sequence[Cell], left_out: dict[str, str]) -> str:
    """Return the table of outcomes, and the reasons of those that are not verified."""
    plans = list(dict.fromkeys(cell.plan for cell in cells))
    rows = []
    for plan in plans:
        counts = Counter(cell.outcome for cell in cells if cell.plan == plan)
        total = sum(counts.values())
        rows.append((plan, total, counts[VERIFIED], counts[REFUSED], counts[WRONG], f"{counts[VERIFIED] / total:.0%}"))
    lines = [table(("plan", "cells", VERIFIED, REFUSED, WRONG, "share"), rows), ""]
    for cell in cells:
        if cell.outcome != VERIFIED:
            lines.append(f"{cell.name} under {cell.plan}: {cell.outcome}: {cell.said}")
    lines += ["", f"{len(left_out)} left out, which their configuration alone does not build small"]
    return "\n".join(lines)


def _run(code: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s)


def _every_name() -> list[str]:
    return _run(_ALL.format(folder=str(_FILE.parent)), 300).stdout.split()


def _built(names: Sequence[str], count: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the classes of the first `count` architectures that can be built, and why others can't, by name."""
    code = _BUILDER.format(folder=str(_FILE.parent), names=list(names), limit=_BUILD_S, count=count)
    built: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for line in _run(code, _BUILD_S * len(names)).stdout.splitlines():
        if line.startswith("["):  # models print too
            name, model, reason = json.loads(line)
            (built if model else left_out)[name] = model or reason
    return built, left_out


def _verify(name: str, model: str, plan: str) -> Cell:
    command = [
        sys.executable,
        "-m",
        "paceline",
        "verify",
        "--plan",
        plan,
        "--steps",
        "2",
        "--json",
        str(_FILE),
        "--",
        name,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return Cell(name, model, plan, WRONG, f"no answer within {LIMIT_S:.0f} s", LIMIT_S)
    answer = _last_object(done.stdout)
    seconds = float(answer.get("seconds", 0.0))
    if "verdict" in answer:
        outcome = WRONG if answer["verdict"] == "bug" else VERIFIED
        return Cell(name, model, plan, outcome, str(answer["verdict"]), seconds)
    error = answer.get("error")
    if done.returncode == 2 and isinstance(error, dict):
        return Cell(name, model, plan, REFUSED, f"{error['asked']}: {error['found']}", seconds)
    return Cell(name, model, plan, WRONG, done.stderr[-500:], seconds)


def _last_object(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _read(path: Path | None) -> dict[tuple[str, str], Cell]:
    if path is None or not path.exists():
        return {}
    cells = [Cell(**fields) for fields in json.loads(path.read_text())["cells"]]
    return {(cell.name, cell.plan): cell for cell in cells}


def _write(path: Path, seed: int, cells: dict[tuple[str, str], Cell], left_out: dict[str, str]) -> None:
    draft = path.with_suffix(".draft")
    content = {"seed": seed, "cells": [asdict(cell) for cell in cells.values()], "left_out": left_out}
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
