"""Measure Paceline against what else there is, alternating in one run.

bench step: samples per second of a BERT with one process, Paceline, raw DDP, one flat all_reduce by
hand, no communication at all (the ceiling), Hugging Face Accelerate and Lightning Fabric; and the time from
the command to the first step against torchrun.

bench jobs: whole jobs of a small GPT (108,000 parameters) on two ranks, through Paceline, torchrun with DDP and with
Accelerate, and Lightning Fabric: on the machine as it is, and beside --busy processes that only compute.

bench strategies: the time of a step under shard, tensor and pipeline on two ranks, each against the same by hand
in raw torch (fully_shard, parallelize_module, PipelineStage); both sides must compute the same losses.

bench restart: the time from `kill -9` of a rank to the next finished step under `paceline run --max-restarts`, against
torchrun with the same file and the same checkpoints, and with DDP in plain torch.

bench observe: what it costs to measure where a step's time goes: ten steps with and ten without in turn, in one job.

bench planner: predicted memory against torch's profiler in real jobs, against a GPU of this host (--device cuda) and
against a table of published measurements (--published FILE); the time of a profile of seven billion parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.bench import jobs, observe, planner, restart, strategies
from paceline.bench.step import run_bench
from paceline.nouns.table import aligned

SUBJECTS = ("step", "jobs", "strategies", "restart", "observe", "planner")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    subjects = ", ".join(SUBJECTS)
    parser.add_argument("subject", choices=SUBJECTS, metavar="SUBJECT", help=f"what to measure: {subjects}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default 5; not of planner)")
    parser.add_argument("--startup-rounds", type=int, default=3, help="step: starts of each launcher (default 3)")
    parser.add_argument("--steps", type=int, default=300, help="jobs: steps of each job (default 300)")
    parser.add_argument(
        "--busy", type=int, default=3, metavar="N", help="jobs: busy processes beside the job (default 3)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="planner: also measure on a GPU (default cpu)"
    )
    parser.add_argument(
        "--published",
        metavar="FILE",
        help="planner: predict a table of published measurements, too (docs/published.md)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        if arguments.subject == "planner":
            published = Path(arguments.published) if arguments.published else None
            result = planner.run_planner(folder, arguments.device, published, tell)
            shown = planner.table
        elif arguments.subject == "jobs":
            result = jobs.run_jobs(folder, arguments.rounds, arguments.steps, arguments.busy, tell)
            shown = jobs.table
        elif arguments.subject == "strategies":
            result = strategies.run_strategies(folder, arguments.rounds, tell)
            shown = strategies.table
        elif arguments.subject == "restart":
            result = restart.run_restarts(folder, arguments.rounds, tell)
            shown = restart.table
        elif arguments.subject == "observe":
            result = observe.run_observe(folder, arguments.rounds, tell)
            shown = observe.table
        else:
            result = run_bench(folder, arguments.rounds, arguments.startup_rounds, tell)
            shown = table
    print(json.dumps(result) if arguments.json else shown(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """Return the result of `bench step` as aligned lines."""
    rows = [("", "ranks", "samples/s", "min", "max")]
    for row in result["rows"]:
        rates = (f"{row['samples_per_s']:.1f}", f"{row['min']:.1f}", f"{row['max']:.1f}")
        rows.append((row["name"], row["ranks"], *rates))
    ratios = [(name, f"{value:.3f}") for name, value in result["ratios"].items()]
    return "\n".join([*aligned(rows, "{:<24}{:>6}{:>12}{:>10}{:>10}"), "", *aligned(ratios, "{:<40}{:>8}")])
