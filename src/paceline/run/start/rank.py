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
from paceline.checkpoint.owner import DESCRIPTOR, LAUNCH, TOKEN, Ownership, wait_until_taken
from paceline.launch.plan_choice import choose_plan
from paceline.launch.workload_file import read_workload_file
from paceline.nouns import module_names
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.rendezvous.launcher_env import LauncherPosition, joined_address, variables_of
from paceline.run import directory
from paceline.run.request import RunRequest
from paceline.run.start.plain_job import plain_rank
from paceline.run.supervise.stalls import TIMEOUT_VARIABLE as STALL_TIMEOUT


def become_rank(request: RunRequest, position: LauncherPosition, notice: Callable[[str], None]) -> NoReturn:
    """Become the file: with a job's name as a rank that keeps a run directory, else as plain Python.

    Raises:
        UsageError: the job exists and is not to be resumed, or a living one has its run directory.
        MeshError: the plan does not cover the ranks that were started.
    """
    plan = choose_plan(request.plan.with_ranks(position.size), notice)
    Mesh.parse(plan.mesh).check_fits(position.size)
    file = read_workload_file(request.file, plan.data_size, plan, request.module)
    file.check_flags(request.flags)
    is_torchruns = position.has_own_store
    os.environ.update(plain_rank(request, file.path, file.plain, is_torchruns))
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))
    program = [sys.executable, *(["-m", request.module] if request.module else [request.file])]
    if request.run.job is not None:
        run_dir = request.run.folder
        os.environ.update(_enter(request, plan, file.path, position))
        if request.run.must_go_on and has_resume_point(run_dir / "checkpoints"):
            os.environ["PACELINE_RESUME"] = str(run_dir.resolve() / "checkpoints")
        os.environ["PACELINE_RUN_DIR"] = str(run_dir.resolve())
        os.environ[STALL_TIMEOUT] = str(request.stall_timeout_s)
        program = [sys.executable, "-m", module_names.EXTERNAL_RANK, request.file]
        os.environ.update({**variables_of(position), **request.environment})
    sys.stdout.flush()  # exec drops the output that Python has buffered
    # exec, not a child: the launcher's signals and its wait are for this process.
    os.execv(sys.executable, [*program, *request.arguments])


def _enter(request: RunRequest, plan: Plan, script: Path, position: LauncherPosition) -> dict[str, str]:
    """Take the run directory as rank 0, or wait for that; return the variables of the program that this becomes."""
    for name in (TOKEN, DESCRIPTOR):  # variables of a job around this one
        os.environ.pop(name, None)
    launch = position.file or (joined_address(*position.master) if position.master else "")
    if position.rank == 0:
        if plan.copy_to:
            directory.check_copies(request.run, plan.copy_to)
        return _write_start(request, plan, script, launch).variables
    wait_until_taken(request.run.folder, launch, f"rank {position.rank}", _report)
    if plan.copy_to:  # rank 0 may still read it: of several processes one does, and the others wait
        directory.fetch_copies(request.run, script, lambda text: None, plan.copy_to)
    return {LAUNCH: launch}


def _write_start(request: RunRequest, plan: Plan, script: Path, launch: str) -> Ownership:
    run_dir = request.run.folder
    if request.run.must_go_on:
        directory.check_version(run_dir)
        owned = directory.take_folder(request.run, run_dir, _report, launch)
    else:
        owned = directory.new_run(request.run, script, _report, launch)
    try:
        if plan.copy_to:
            directory.fetch_copies(request.run, script, lambda text: None, plan.copy_to)
        if not (run_dir / "plan.json").exists():
            directory.check_writable(run_dir)
        directory.write_start(run_dir, plan, script, request.arguments)
    except BaseException:
        owned.release()
        raise
    owned.share()
    return owned


def _report(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
