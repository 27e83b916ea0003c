"""Make the rows of `paceline explain` about a job's run directory, its stops and its checkpoints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.kubernetes.kubernetes_request import name_of_job
from paceline.nouns.plan import Plan
from paceline.run.cluster_file import Source, source_of_flag, source_without_flag
from paceline.run.job_settings import JOB, KUBERNETES, RANK, RUNS, Setting
from paceline.run.request import stall_notice_of

Row = tuple[str, str, str]  # the setting, its value, where it comes from
NEW_RUN: Row = ("run directory", f"{RUNS}/FILE-DATE-TIME", "default")
_OF_A_RUN = ("max_restarts", "grace", "stall_notice", "stall_timeout")
_OF_CHECKPOINTS = ("checkpoint_every", "keep", "copy_to")


@dataclass(frozen=True, slots=True)
class PlanSource:
    """The place that the plan comes from.

    Args:
        row: its name in the rows of `paceline explain`.
        has_all_options: the plan was read from JSON, which has every option; a line has those that it names.
    """

    row: str
    has_all_options: bool = False


def run_rows(parsed: argparse.Namespace, place: str) -> tuple[Row, ...]:
    """Return the rows of a job's run directory, and of the settings about its stops and restarts.

    Args:
        parsed: the arguments of the command that starts the job.
        place: the program or launcher that starts the ranks.
    """
    if place == RANK:
        return ()  # a rank of a job without a name keeps no run directory
    flags = [source_of_flag(parsed.flags[name]).row for name in ("runs", "job", "resume") if name in parsed.flags]
    rows: list[Row] = [("run directory", _folder(parsed, place), ", ".join(flags) or "default")]
    for setting in (JOB[name] for name in _OF_A_RUN):
        if place in setting.places:
            value = getattr(parsed, setting.name)
            if setting.name == "stall_notice":  # what the ranks read: a variable can set it too
                value = stall_notice_of(value, parsed.env)
            rows.append(_row(setting, value, _source(setting, parsed.flags, parsed.env).row))
    return tuple(rows)


def saving_rows(plan: Plan, flags: Mapping[str, str], plan_source: PlanSource) -> tuple[Row, ...]:
    """Return the rows of a job's checkpoints.

    Args:
        plan: the plan of the job.
        flags: the command's flags, by the names of their settings.
        plan_source: the source of the plan.
    """
    default = plan_source.row if plan_source.has_all_options else "default"
    rows = []
    for setting in (JOB[name] for name in _OF_CHECKPOINTS):
        source = source_of_flag(flags[setting.name]).row if setting.name in flags else default
        rows.append(_row(setting, getattr(plan, setting.name), source))
    return tuple(rows)


def _row(setting: Setting, value: object, source: str) -> Row:
    label, form, text_of_none = setting.row
    return label, form.format(value) if value else text_of_none, source


def _source(setting: Setting, flags: Mapping[str, str], definitions: Sequence[str]) -> Source:
    """Return the source of a setting's value; -x defines variables for the ranks, which win over this process's."""
    if setting.name in flags:
        return source_of_flag(flags[setting.name])
    if any(definition.partition("=")[0] == setting.variable for definition in definitions):
        return source_of_flag(JOB["env"].flag)
    return source_without_flag(setting, os.environ)


def _folder(parsed: argparse.Namespace, place: str) -> str:
    if place == KUBERNETES:
        return f"/runs/{parsed.job or name_of_job(parsed.workload)} in the pods"
    if parsed.job is None and parsed.resume:
        return f"{parsed.runs}, the last of {parsed.workload}"
    return str(parsed.runs / (parsed.job or f"{Path(parsed.workload).stem}-DATE-TIME"))
