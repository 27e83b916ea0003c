"""Prove, on CPU processes, that a plan's step is the single-process step, on your own model.

One process takes the steps by your plain code; the plan's ranks take them as they would in training. In float64,
where rounding is 2e-16, every loss, gradient, parameter, buffer and optimizer state must agree within what rounding was
measured to do in this model; then again in the workload's own precision. What was sent is compared with what was
predicted. Where something differs, the first module that does is named, and the collective next to it.

Evaluations (job.evaluate) are not compared.

Exit codes: 0 equal, or different only by rounding; 1 a bug; 2 it can't be verified (the error says why).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from paceline.cli.plan_flags import add_job_settings, plan_request, print_notice
from paceline.launch.plan_choice import choose_plan
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import UsageError
from paceline.run.supervise.progress import WorkProgress
from paceline.verify.loops import LoopProof
from paceline.verify.prove import ALL_CHECKS, STEPS, USUAL, VerifyRequest, as_json, check_what, prove
from paceline.verify.workloads import WorkloadProof


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, on either side of the file; the file's own come after `--`."""
    add_job_settings(parser, "n", "plan")
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="K", help=f"optimizer steps to compare (default {STEPS})"
    )
    parser.add_argument(
        "--what",
        default=",".join(USUAL),
        metavar="WORDS",
        help=f"what to verify: {', '.join(ALL_CHECKS)}, or all (default {','.join(USUAL)})",
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the processes' tensors and traces there")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON on stdout")
    add_job_settings(parser, "is_module")
    parser.add_argument(
        "workload", metavar="FILE", help="the Python file that declares `workload`; its own arguments after --"
    )


def run(arguments: argparse.Namespace) -> int:
    """Verify, and print the table."""
    plan = choose_plan(plan_request(arguments), print_notice)
    if arguments.steps < 2:
        raise UsageError(
            "verify needs at least 2 steps",
            "errors in what a step leaves behind (optimizer state, stale copies) show in the next step",
            "write --steps 2 or more",
        )
    file = read_workload_file(arguments.workload, plan.data_size, plan, arguments.module)
    file.check_batches("verify")
    subjects = check_what([word.strip() for word in arguments.what.split(",")])
    request = VerifyRequest(
        file.path.resolve(),
        arguments.arguments,
        plan,
        arguments.steps,
        subjects,
        file.imports,
        arguments.folder,
        arguments.module,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that folders and children go
    kind = LoopProof if file.is_loop else WorkloadProof
    with WorkProgress("runs") as progress:
        progress.is_most = file.is_loop  # the last is left out where nothing is drawn

        def say(text: str) -> None:
            progress.screen.say(text)
            progress.begin_anew("ranks take the steps")

        verdict = prove(request, kind, say, progress.counts)
    if arguments.json:
        print(json.dumps(as_json(verdict, request), allow_nan=False))
    else:
        print("\n".join(verdict.lines()))
        print(f"{verdict.seconds:.1f} s", file=sys.stderr)
    return int(verdict.word == "bug")
