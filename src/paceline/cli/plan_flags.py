"""Flags that several commands have: those of the plan, and those of a job's start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.launch.plan_choice import PlanRequest
from paceline.launch.source_files import find_module
from paceline.nouns.reading import number
from paceline.nouns.user_program import MODULE
from paceline.run.directory import RunChoice
from paceline.run.job_settings import JOB, Setting
from paceline.run.request import stall_timeout_of
from paceline.run.supervise.stalls import VARIABLE as STALL_NOTICE

_READERS = {str: str, int: int, float: number, Path: Path}
OWN_ARGUMENTS = "arguments of FILE, after `--` if flags clash"


class OneLineHelp(argparse.RawDescriptionHelpFormatter):
    """argparse's help, with a flag and its description on one line where they fit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, str(action.metavar or action.dest.upper()))
        return f"{', '.join(action.option_strings)} {value}"  # and not the value after each of them


def print_notice(text: str) -> None:
    """Print a message to the user on standard error."""
    print(text, file=sys.stderr)


def add_settings(
    parser: argparse.ArgumentParser,
    settings: Iterable[Setting],
    place: str = "",
    titles: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each of some settings, under the titles of their headings.

    Args:
        parser: of the command.
        settings: in the order of the command's help.
        place: what starts the ranks of the command's jobs, for descriptions that only it has.
        titles: titles in place of some headings; "": the flags stand under no title.
    """
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for setting in settings:
        title = (titles or {}).get(setting.heading, setting.heading)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        description = setting.other_help.get(place, setting.help)
        action = groups[title].add_argument(
            *(setting.flags or [setting.flag]), dest=setting.name, help=description, **_options(setting)
        )
        if setting.choices:
            action.completer = partial(_choices, setting)  # type: ignore[attr-defined]


def _options(setting: Setting) -> dict[str, Any]:
    """Return argparse's arguments for the value of a setting."""
    if setting.kind is bool:
        return {"action": "store_true"}
    if setting.kind is tuple:
        return {"action": "append", "metavar": setting.metavar, "default": list(setting.default)}
    reader = setting.reader or _READERS[setting.kind]
    return {"type": reader, "metavar": setting.metavar, "default": setting.default}


def _choices(setting: Setting, **_: object) -> tuple[str, ...]:
    """Return the words that argcomplete offers for the value of a setting."""
    return setting.choices


def add_job_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags of some settings of a job, under no title."""
    add_settings(parser, [JOB[name] for name in names], titles={"hosts": ""})


def stall_timeout(arguments: argparse.Namespace, notice_s: float) -> float:
    """Return the seconds without progress until the job is ended; 0: it is never ended."""
    is_flag = getattr(arguments, "stall_notice", None) is not None  # `submit` has none
    return stall_timeout_of(arguments.stall_timeout, notice_s, "--stall-notice" if is_flag else STALL_NOTICE)


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
    """Return the variable that names the user's module to a process; empty where the file is run as a file."""
    return {MODULE: arguments.module} if arguments.module else {}


def add_file(parser: argparse.ArgumentParser, help: str = "the Python file that declares the workload") -> None:
    """Add FILE, and the arguments after it."""
    parser.add_argument("workload", metavar="FILE", help=help)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=OWN_ARGUMENTS)


def plan_request(arguments: argparse.Namespace, ranks: int | None = None) -> PlanRequest:
    """Make the plan's request.

    Args:
        arguments: the parsed arguments of the command.
        ranks: the number of ranks, in place of -n; None: that of -n.
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
