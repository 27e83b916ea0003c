"""Flags that several commands have: those of the plan, and those of a job's start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.launch.plan_choice import PlanRequest
from paceline.launch.source_files import find_module
from paceline.nouns.plan import Plan
from paceline.nouns.reading import number
from paceline.nouns.user_program import MODULE
from paceline.run.directory import RunChoice
from paceline.run.request import stall_timeout_of
from paceline.run.supervise.stalls import VARIABLE as STALL_NOTICE

RUNS = Path("runs")
OWN_ARGUMENTS = "arguments of FILE, after `--` if flags clash"


class OneLineHelp(argparse.RawDescriptionHelpFormatter):
    """argparse's help, with a flag and what it does on one line where they fit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, str(action.metavar or action.dest.upper()))
        return f"{', '.join(action.option_strings)} {value}"  # and not the value after each of them


def print_notice(text: str) -> None:
    """Print what people should know on standard error."""
    print(text, file=sys.stderr)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide a plan."""
    parser.add_argument("-n", type=int, metavar="N", help="ranks (default: as many as --plan has, or 1)")
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="axes and options, such as tensor=2, or replicate=2,compression=bf16; or a plan.json",
    )


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about a job's checkpoints."""
    default = Plan()
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help=f"between saves; 0: at the end (default {default.checkpoint_every})",
    )
    parser.add_argument("--keep", type=int, metavar="K", help=f"checkpoints that stay (default {default.keep})")
    parser.add_argument("--copy-to", metavar="URL", help="copies of checkpoints, as s3://bucket/runs")


def add_check_argument(parser: argparse.ArgumentParser) -> None:
    """Add --no-check."""
    what = "the first step is not compared with one process"
    parser.add_argument("--no-check", action="store_true", help=what)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the run directory."""
    parser.add_argument("--job", metavar="NAME", help="of the run (default: the file's and the time)")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="where runs are kept (default runs)")
    parser.add_argument("--resume", action="store_true", help="go on with --job, or with this file's last run")
    parser.add_argument("--resume-or-start", action="store_true", help="go on with --job if there is one, or start it")


def add_stall_timeout(parser: argparse._ActionsContainer) -> None:
    """Add --stall-timeout."""
    what = "ends a job without progress (default: never)"
    parser.add_argument("--stall-timeout", type=number, metavar="SECONDS", help=what)


def stall_timeout(arguments: argparse.Namespace, notice_s: float) -> float:
    """Return the seconds without progress until the job is ended; 0: it never is."""
    is_flag = getattr(arguments, "stall_notice", None) is not None  # `submit` has none
    return stall_timeout_of(arguments.stall_timeout, notice_s, "--stall-notice" if is_flag else STALL_NOTICE)


def add_place_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the arguments about a job's ranks, wherever they start."""
    parser.add_argument("-j", metavar="NODESxRANKS", dest="shape", help="hosts and ranks on each, such as 2x8")
    parser.add_argument(
        "-x", "--env", metavar="NAME[=VALUE]", action="append", default=[], help="variable for the ranks; may repeat"
    )


def add_cluster_argument(parser: argparse._ActionsContainer) -> None:
    """Add --cluster."""
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="settings of what starts the ranks (TOML)")


def add_module_argument(parser: argparse.ArgumentParser) -> None:
    """Add -m."""
    what = "FILE is a module's name, as in python -m"
    parser.add_argument("-m", dest="is_module", action="store_true", help=what)


def find_program(arguments: argparse.Namespace) -> None:
    """Set `module` to the name of the module that -m asks for, or "", and `workload` to its file.

    Raises:
        UsageError: there is no such module.
    """
    arguments.module = ""
    if getattr(arguments, "is_module", False):  # not every command has the flag
        arguments.module = arguments.workload
        arguments.workload = str(find_module(arguments.module))


def module_variable(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variable that tells a process which module the user's file is; none where it is run as a file."""
    return {MODULE: arguments.module} if arguments.module else {}


def add_file(parser: argparse.ArgumentParser, help: str = "the Python file that declares the workload") -> None:
    """Add FILE, and what stands after it."""
    parser.add_argument("workload", metavar="FILE", help=help)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=OWN_ARGUMENTS)


def plan_request(arguments: argparse.Namespace, ranks: int | None = None) -> PlanRequest:
    """Make the plan's request.

    Args:
        arguments: of the command.
        ranks: in place of -n.
    """
    return PlanRequest(
        ranks=arguments.n if ranks is None else ranks,
        text=arguments.plan or "",
        checkpoint_every=getattr(arguments, "checkpoint_every", None),  # not every command has it
        keep=getattr(arguments, "keep", None),
        copy_to=getattr(arguments, "copy_to", None),
        check="off" if getattr(arguments, "no_check", False) else None,
    )


def run_choice(arguments: argparse.Namespace) -> RunChoice:
    """Make the run directory's request."""
    return RunChoice(
        runs=arguments.runs,
        job=arguments.job,
        resume=arguments.resume,
        resume_or_start=arguments.resume_or_start,
    )
