"""Pre-train a small BERT (masked language model) with two processes, from nothing but this Python.

It trains a tokenizer on the standard library's source, holds out files, measures one process, trains with
two, evaluates, saves a model that transformers can load, and prints what came out: how many hidden tokens of the
held-out files it fills in right, and some of these lines. About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("-n", type=int, default=2, metavar="N", help="processes to train with (default 2)")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default 2000)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step over all processes (default 32)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where results go (default runs)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout; all else to stderr")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from paceline.demo.command import DemoFailed, DemoRequest, run_demo
    from paceline.nouns.errors import UsageError
    from paceline.nouns.workload import too_small_batch
    from paceline.run.supervise.progress import Screen

    if min(arguments.n, arguments.steps, arguments.batch_size) < 1:
        raise UsageError(
            "the demo's -n, --steps and --batch-size should be at least 1", "one of them is below 1", "write 1 or more"
        )
    if arguments.batch_size < arguments.n:
        raise too_small_batch(arguments.batch_size, arguments.n)
    out = sys.stderr if arguments.json else sys.stdout
    request = DemoRequest(arguments.steps, arguments.batch_size, arguments.n, arguments.runs)
    try:
        result = run_demo(request, lambda text: print(text, file=out, flush=True), Screen(out, sys.stderr))
    except DemoFailed as failure:
        print(f"paceline demo: {failure}", file=sys.stderr)
        return failure.exit_code
    if arguments.json:
        print(json.dumps(result))
    return 0
