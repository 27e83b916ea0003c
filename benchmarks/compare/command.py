"""Measure Paceline against what else there is, alternating in one run.

bench step: samples per second of a BERT with one process, Paceline, raw DDP, one flat all_reduce by
hand, no communication at all (the ceiling), Hugging Face Accelerate and Lightning Fabric; and the time from
the command to the first step against torchrun.

bench jobs: whole jobs of a small GPT (108,000 parameters) on two ranks, through Paceline, torchrun with DDP and with
Accelerate, and Lightning Fabric: on the machine as it is, and beside --busy processes that only compute.

bench strategies: the time of a step under shard, tensor and pipeline on two ranks, each against the same by hand
in raw torch (fully_shard, parallelize_module, PipelineStage); both sides must compute the same losses.

bench accelerate: a script of Accelerate on two ranks, by its own accelerator and by Paceline's.

bench horovod: 100 tensors of a ResNet-50 summed on two ranks by Horovod's names, against torch.distributed.

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
from collections.abc import Sequence
from pathlib import Path

from compare import accelerate_scripts, by_turns, horovod_names, jobs, observe, planner, restart, step, strategies
from paceline.cli.closed_output import guarded
from paceline.cli.flags import written_flags
from paceline.cli.main import INTERRUPTED, Parser
from paceline.nouns.errors import MEETS_NOT, PacelineError, UsageError

COMMAND = "scripts/bench"
SUBJECTS = ("step", "jobs", "strategies", "horovod", "accelerate", "restart", "observe", "planner")
# Of the flags, by the name of the value, the subjects that they are about.
SUBJECTS_OF = {
    "rounds": ("step", "jobs", "strategies", "horovod", "accelerate", "restart", "observe"),
    "startup_rounds": ("step",),
    "steps": ("jobs",),
    "busy": ("jobs",),
    "device": ("planner",),
    "published": ("planner",),
}


def make_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog=COMMAND,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    return parser


def check_flags(subject: str, flags: dict[str, str]) -> None:
    """Raise UsageError where a flag was given that is about other subjects.

    Args:
        subject: what is measured.
        flags: those of the command line, as written, by the name of the value.
    """
    for name, flag in flags.items():
        subjects = SUBJECTS_OF.get(name)
        if subjects is not None and subject not in subjects:
            reason = f"{flag} is for bench {' and '.join(subjects)}"
            raise UsageError(f"the flag {flag}", reason, f"write {subjects[0]}, or leave {flag} out")


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
        elif arguments.subject == "horovod":
            rounds, ratios = arguments.rounds, horovod_names.ratios
            result = by_turns.run_by_turns(horovod_names.JOB, folder, rounds, tell, ratios)
            shown = by_turns.table
        elif arguments.subject == "accelerate":
            rounds, ratios = arguments.rounds, accelerate_scripts.ratios
            result = by_turns.run_by_turns(accelerate_scripts.JOB, folder, rounds, tell, ratios, ["accelerate"])
            shown = by_turns.table
        elif arguments.subject == "restart":
            result = restart.run_restarts(folder, arguments.rounds, tell)
            shown = restart.table
        elif arguments.subject == "observe":
            result = observe.run_observe(folder, arguments.rounds, tell)
            shown = observe.table
        else:
            result = step.run_bench(folder, arguments.rounds, arguments.startup_rounds, tell)
            shown = step.table
    print(json.dumps(result) if arguments.json else shown(result))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. 0: it measured; 1: a comparison is void; 2: the request can't be met; 130: Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _uninterrupted(words))


def _uninterrupted(words: Sequence[str]) -> int:
    try:
        return _main(words)
    except KeyboardInterrupt:
        print(f"{COMMAND}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _main(words: Sequence[str]) -> int:
    parser = make_parser()
    if not words:
        parser.print_help(sys.stderr)
        return MEETS_NOT
    arguments = parser.parse_args(words)
    try:
        check_flags(arguments.subject, written_flags(make_parser(), words))
        return run(arguments)
    except PacelineError as error:
        if arguments.json:  # a program that reads JSON gets JSON for a refusal too
            failure = {"asked": error.asked, "found": error.found, "fix": error.fix}
            print(json.dumps({"status": "refused", "exit_code": error.exit_code, "error": failure}))
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
