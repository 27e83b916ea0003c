"""Train as planned: start the ranks on this host, show how they get on, end them together.

The workload file runs as it would with `python FILE`, once per rank. What the job decides and does is
written to RUNS/JOB: plan.json, events.jsonl, failures, checkpoints, result.json.

Exit codes: 0 done, or stopped by SIGTERM with a checkpoint; 130 stopped by Ctrl-C with a checkpoint;
1 the job failed; 2 the request can't be met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import AXES, SHORT, Mesh
from paceline.nouns.plan import COMPRESSIONS, SHORT_OPTIONS, TRANSPORTS, Plan
from paceline.run import directory
from paceline.run.failures import told
from paceline.run.job import run_job
from paceline.run.progress import Progress, Screen
from paceline.run.supervisor import GRACE_S, Ending, JobRequest

RUNS = Path("runs")
# Flags of the run directory and its supervisor, and what they are when nobody wrote them.
_NEEDS_SUPERVISOR = {
    "resume": False,
    "job": None,
    "runs": RUNS,
    "checkpoint_every": None,
    "keep": None,
    "grace": GRACE_S,
    "json": False,
}
PLAN_FLAGS = ("transport", "compression", "bucket_bytes", "checkpoint_every", "keep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; those after the file are the file's own."""
    add_plan_arguments(parser)
    default = Plan()
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help=f"save every so many steps (default {default.checkpoint_every}; 0: only at the end)",
    )
    parser.add_argument("--keep", type=int, metavar="K", help=f"checkpoints that stay (default {default.keep})")
    parser.add_argument("--job", metavar="NAME", help="the run's name (default: the file's name and the time)")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="where runs are kept (default runs)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with --job, or with this file's last run, at its newest whole checkpoint",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="SECONDS",
        help=f"time to save after Ctrl-C or SIGTERM (default {GRACE_S:g})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout; all else goes to stderr"
    )
    parser.add_argument("workload", metavar="FILE", help="the Python file that declares the workload")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the file")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What decides a plan."""
    parser.add_argument("-n", type=int, metavar="N", help="ranks to start (default: as many as --plan covers, else 1)")
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="axes with sizes and options, such as replicate=2 or pipeline=2,tensor=2,schedule=gpipe, or a plan.json",
    )
    parser.add_argument(
        "--transport",
        metavar="WORD",
        help=f"{', '.join(TRANSPORTS)} (default auto: shared memory on one host, else gloo; nccl on GPUs)",
    )
    parser.add_argument("--compression", metavar="WORD", help=f"of gradients on the wire: {', '.join(COMPRESSIONS)}")
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        metavar="BYTES",
        help=f"gradients that travel together (default {Plan().bucket_bytes})",
    )


def decide_plan(arguments: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for.

    Raises:
        UsageError: N is below 1.
        MeshError: the mesh names no axis, or does not cover N ranks.
        PlanError: a value is none that a plan can have.
    """
    if arguments.n is not None and arguments.n < 1:
        raise UsageError(f"to start {arguments.n} ranks", "a job has at least one", "write -n 1 or more")
    text = arguments.plan or f"replicate={arguments.n or 1}"
    plan = Plan.read(Path(text)) if text.endswith(".json") else Plan.parse(_with_workers(text, arguments.n))
    given = {name: getattr(arguments, name, None) for name in PLAN_FLAGS}
    mesh = Mesh.parse(plan.mesh)
    mesh.check_fits(arguments.n or mesh.world_size)
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(plan, **changes, mesh=str(mesh))


def _with_workers(text: str, ranks: int | None) -> str:
    """A plan of servers that does not say how many workers they have: -n says it."""
    names = [item.partition("=")[0].strip() for item in text.split(",")]
    has_servers = any(SHORT_OPTIONS.get(name, name) == "server" for name in names)
    return f"replicate={ranks},{text}" if has_servers and ranks and not {*names} & {*AXES, *SHORT} else text


def run(arguments: argparse.Namespace) -> int:
    """Run the job."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _be_torchruns_rank(arguments)
    plan = decide_plan(arguments)
    file = read_workload_file(arguments.workload, plan.data_size)
    screen = Screen(sys.stderr if arguments.json else sys.stdout, sys.stderr)
    if plan.world_size > (os.cpu_count() or 1):
        screen.say(f"paceline: {plan.world_size} ranks share {os.cpu_count()} cores: they will take turns")
    resume = None
    if arguments.resume:
        folder = directory.find_run(arguments.runs, arguments.job, file.path)
        resume = directory.find_resume_point(folder, lambda text: screen.say(f"paceline: {text}"))
        screen.say(f"paceline: {folder.name} goes on" + (f" at {resume.name}" if resume else ""))
    else:
        folder = directory.new_run(arguments.runs, arguments.job, file.path)
    parts = (file.path, arguments.arguments, plan.world_size, folder, resume, file.imports, arguments.grace)
    request = JobRequest(*parts, plan.server)
    ending, progress, result = run_job(plan, request, screen)
    _tell(folder, ending, progress)
    if arguments.json:
        print(json.dumps(result))
    return ending.exit_code


def _tell(folder: Path, ending: Ending, progress: Progress) -> None:
    if ending.status == "failed" and ending.cause is not None:
        print(f"paceline run: {told(ending.cause, ending.others)}", file=sys.stderr)
        if progress.checkpoint:
            print(f"  Last checkpoint: {progress.checkpoint}; go on with --resume --job {folder.name}", file=sys.stderr)
    elif ending.status == "stopped":
        kept = f"saved as {progress.checkpoint}" if progress.checkpoint else "nothing had been saved"
        print(f"paceline run: stopped; {kept}; go on with --resume --job {folder.name}", file=sys.stderr)
    else:
        print(f"paceline run: done; {folder}", file=sys.stderr)


def _be_torchruns_rank(arguments: argparse.Namespace) -> int:
    """Under torchrun the ranks are there already: this process is one of them, and becomes the file.

    Raises:
        UsageError: an argument is about what `paceline run` does itself, and torchrun does here.
    """
    for name, otherwise in _NEEDS_SUPERVISOR.items():
        if getattr(arguments, name) != otherwise:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} under torchrun",
                "torchrun starts and ends the ranks there, so there is no run directory",
                f"leave {flag} out, or start the job with `paceline run -n N` in torchrun's place",
            )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    arguments.n = arguments.n or world_size
    plan = decide_plan(arguments)
    Mesh.parse(plan.mesh).check_fits(world_size)
    read_workload_file(arguments.workload, plan.data_size)
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, arguments.workload, *arguments.arguments])
