"""`paceline run` started by somebody else's launcher: it becomes the rank, or starts the ranks of its node."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from paceline.checkpoint.manifest import has_resume_point
from paceline.launch.workload_file import read_workload_file
from paceline.nouns import module_names
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.rendezvous.launcher_env import LauncherPosition, NodeInfo, find_node, find_position
from paceline.rendezvous.rank_variables import variables_of
from paceline.run import directory

TORCHRUN = "torchrun"


def find_rank_info(arguments: argparse.Namespace) -> LauncherPosition | NodeInfo | None:
    """Return what the environment says that this process is: a rank, or a node of a job; None: neither.

    `--on` says that a job is started from here, whatever the environment has.

    Raises:
        UsageError: two launchers contradict each other, or many ranks were promised and this is one alone.
    """
    if arguments.on is not None:
        return None
    # A node before a rank: the one process of a node may have a rank's variables as well.
    node = find_node(os.environ)
    if node is not None:
        return node
    position = find_position(os.environ)
    # A launcher that says "one rank" is as good as none: the job starts from here. Under torchrun it is a rank anyway.
    if position.size > 1 or position.source == TORCHRUN:
        return position
    return None


def be_rank(
    arguments: argparse.Namespace, position: LauncherPosition, decide: Callable[[argparse.Namespace], Plan]
) -> int:
    """Become the file: with --job as a rank that keeps a run directory, else as plain Python.

    Raises:
        UsageError: the job exists and is not to be resumed.
        MeshError: the plan does not cover the ranks that were started.
    """
    arguments.n = arguments.n or position.size
    plan = decide(arguments)
    Mesh.parse(plan.mesh).check_fits(position.size)
    file = read_workload_file(arguments.workload, plan.data_size)
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))
    program = [sys.executable, arguments.workload]
    if arguments.job is not None:
        run_dir = arguments.runs / arguments.job
        if position.rank == 0:
            _write_start(arguments, plan, file.path)
        must_go_on = arguments.resume or arguments.resume_or_start
        if must_go_on and has_resume_point(run_dir / "checkpoints"):
            os.environ["PACELINE_RESUME"] = str(run_dir.resolve() / "checkpoints")
        os.environ["PACELINE_RUN_DIR"] = str(run_dir.resolve())
        program = [sys.executable, "-m", module_names.EXTERNAL_RANK, arguments.workload]
        os.environ.update(variables_of(position))
    sys.stdout.flush()  # exec drops what Python has buffered
    # exec, not a child: the launcher's signals and its wait are for this process.
    os.execv(sys.executable, [*program, *arguments.arguments])


def _write_start(arguments: argparse.Namespace, plan: Plan, script: Path) -> None:
    run_dir = arguments.runs / arguments.job
    must_go_on = arguments.resume or arguments.resume_or_start
    if not must_go_on or not (run_dir / "plan.json").exists():
        directory.new_run(arguments.runs, arguments.job, script)
    directory.write_start(run_dir, plan, script, arguments.arguments)
