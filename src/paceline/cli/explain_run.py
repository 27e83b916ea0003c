"""Say where a job is kept, and when it saves: the settings of a command that starts one, beside plan and launcher."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from paceline.cli.flags import RUN_FLAGS
from paceline.cli.plan_flags import RUNS
from paceline.launch.kubernetes.request import name_of_job
from paceline.nouns.plan import Plan
from paceline.run.request import RANK, stall_notice_of
from paceline.run.supervise.stalls import VARIABLE

Row = tuple[str, str, str]  # the setting, its value, where it comes from
NEW_RUN: Row = ("run directory", f"{RUNS}/FILE-DATE-TIME", "default")


def run_rows(parsed: argparse.Namespace, place: str) -> tuple[Row, ...]:
    """Return the rows of a job's run directory, and of what `paceline run` does beside it.

    Args:
        parsed: the command that starts the job.
        place: what starts the ranks.
    """
    if place == RANK:
        return ()  # a rank of a job without a name keeps no run directory
    flags = [f"flag {parsed.given[name]}" for name in ("runs", "job", "resume") if name in parsed.given]
    folder: Row = ("run directory", _folder(parsed, place), ", ".join(flags) or "default")
    timeout_s = parsed.stall_timeout
    timeout = (
        "stall timeout",
        f"after {timeout_s:g} s" if timeout_s else "never",
        _origin(parsed.given, "stall_timeout", "default"),
    )
    if place in ("slurm", "kubernetes"):
        return (folder, timeout)
    notice_s = stall_notice_of(parsed.stall_notice, parsed.env)
    in_variable = any(each.partition("=")[0] == VARIABLE for each in parsed.env)
    otherwise = "flag -x" if in_variable else VARIABLE if os.environ.get(VARIABLE) else "default"
    restarts: tuple[Row, ...] = ()
    if place in RUN_FLAGS["max_restarts"]:
        restarts = (("restarts", str(parsed.max_restarts), _origin(parsed.given, "max_restarts", "default")),)
    return (
        folder,
        *restarts,
        ("grace", f"{parsed.grace:g} s", _origin(parsed.given, "grace", "default")),
        (
            "stall notice",
            f"after {notice_s:g} s" if notice_s else "never",
            _origin(parsed.given, "stall_notice", otherwise),
        ),
        timeout,
    )


def saving_rows(plan: Plan, given: Mapping[str, str], plan_origin: str) -> tuple[Row, ...]:
    """Return the rows of a job's checkpoints.

    Args:
        plan: of the job.
        given: the command's flags, by name.
        plan_origin: where the plan comes from; one that is read from a file has these settings too.
    """
    every = f"{plan.checkpoint_every} steps" if plan.checkpoint_every else "the end only"
    otherwise = plan_origin if plan_origin.endswith(".json") else "default"
    return (
        ("checkpoint every", every, _origin(given, "checkpoint_every", otherwise)),
        ("checkpoints kept", str(plan.keep), _origin(given, "keep", otherwise)),
        ("copied to", plan.copy_to or "nowhere", _origin(given, "copy_to", otherwise)),
    )


def _folder(parsed: argparse.Namespace, place: str) -> str:
    if place == "kubernetes":
        return f"/runs/{parsed.job or name_of_job(parsed.workload)} in the pods"
    if parsed.job is None and parsed.resume:
        return f"{parsed.runs}, the last of {parsed.workload}"
    return str(parsed.runs / (parsed.job or f"{Path(parsed.workload).stem}-DATE-TIME"))


def _origin(given: Mapping[str, str], name: str, otherwise: str) -> str:
    return f"flag {given[name]}" if name in given else otherwise
