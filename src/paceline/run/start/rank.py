"""Become one rank of a job that another launcher started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from paceline.checkpoint.manifest import has_resume_point
from paceline.launch.plan_choice import choose_plan
from paceline.launch.workload_file import read_workload_file
from paceline.nouns import module_names
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.rendezvous.launcher_env import LauncherPosition
from paceline.rendezvous.rank_variables import variables_of
from paceline.run import directory
from paceline.run.request import RunRequest
from paceline.run.supervise.stalls import TIMEOUT_VARIABLE as STALL_TIMEOUT


def become_rank(request: RunRequest, position: LauncherPosition, notice: Callable[[str], None]) -> NoReturn:
    """Become the file: with a job's name as a rank that keeps a run directory, else as plain Python.

    Raises:
        UsageError: the job exists and is not to be resumed.
        MeshError: the plan does not cover the ranks that were started.
    """
    plan = choose_plan(request.plan.with_ranks(position.size), notice)
    Mesh.parse(plan.mesh).check_fits(position.size)
    file = read_workload_file(request.file, plan.data_size, plan, request.module)
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))
    program = [sys.executable, *(["-m", request.module] if request.module else [request.file])]
    if request.run.job is not None:
        run_dir = request.run.folder
        if plan.copy_to:
            _read_copies(request, plan, file.path, position.rank == 0)
        if position.rank == 0:
            _write_start(request, plan, file.path)
        if request.run.must_go_on and has_resume_point(run_dir / "checkpoints"):
            os.environ["PACELINE_RESUME"] = str(run_dir.resolve() / "checkpoints")
        os.environ["PACELINE_RUN_DIR"] = str(run_dir.resolve())
        os.environ[STALL_TIMEOUT] = str(request.stall_timeout_s)
        program = [sys.executable, "-m", module_names.EXTERNAL_RANK, request.file]
        os.environ.update({**variables_of(position), **request.environment})
    sys.stdout.flush()  # exec drops what Python has buffered
    # exec, not a child: the launcher's signals and its wait are for this process.
    os.execv(sys.executable, [*program, *request.arguments])


def _read_copies(request: RunRequest, plan: Plan, script: Path, is_first: bool) -> None:
    """Read the newest copy of a run that goes on; every rank comes here, and one of them reads."""
    if is_first:
        directory.check_copies(request.run, plan.copy_to)
    directory.fetch_copies(request.run, script, lambda text: None, plan.copy_to)


def _write_start(request: RunRequest, plan: Plan, script: Path) -> None:
    run_dir = request.run.folder
    if not request.run.must_go_on or not (run_dir / "plan.json").exists():
        directory.new_run(request.run.runs, request.run.job, script)
    directory.write_start(run_dir, plan, script, request.arguments)
