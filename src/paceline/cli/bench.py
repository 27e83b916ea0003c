"""Measure Paceline against what else there is, alternating in one run.

bench step: samples per second of the demo's BERT with one process, Paceline, raw DDP, one flat all_reduce by
hand, no communication at all (the ceiling), Hugging Face Accelerate and Lightning Fabric; and the time from
the command to the first step against torchrun.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.bench.step import run_bench

SUBJECTS = ("step",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("subject", choices=SUBJECTS, metavar="SUBJECT", help="what to measure: step")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default 5)")
    parser.add_argument("--startup-rounds", type=int, default=3, help="starts of each launcher (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result = run_bench(Path(folder), arguments.rounds, arguments.startup_rounds, tell)
    print(json.dumps(result) if arguments.json else table(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """The result as aligned lines."""
    lines = [f"{'':<24}{'ranks':>6}{'samples/s':>12}{'min':>10}{'max':>10}"]
    for row in result["rows"]:
        lines.append(
            f"{row['name']:<24}{row['ranks']:>6}{row['samples_per_s']:>12.1f}{row['min']:>10.1f}{row['max']:>10.1f}"
        )
    lines.append("")
    lines += [f"{name:<40}{value:>8.3f}" for name, value in result["ratios"].items()]
    return "\n".join(lines)
