"""A file that fails after a step has not lost the step: a checkpoint is written before the error leaves the process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import distribute
from paceline.checkpoint.export import plan_export
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train import open_jobs as jobs
from paceline.train import step_board
from paceline.train.step_board import CLOSE, FAILED

from support.jobs import LOOP, paceline, write_workload
from support.ranks import run_ranks
from support.verified_workloads import make

PLAIN = """
import os, sys
import torch
import paceline
from torch.nn import functional as F

torch.manual_seed(0)
x = torch.randn(40, 4, dtype=torch.float64)
model = torch.nn.Linear(4, 1, dtype=torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
job, model, optimizer, scheduler, loader = paceline.prepare(model, optimizer, scheduler, loader)
for epoch in {passes}:
    for inputs, targets in loader:
        optimizer.zero_grad()
        job.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        {within}
    {after}
    scheduler.step()
{end}
"""
NO_PICTURE = "raise ValueError('no picture')"


def plain(folder, passes="job.epochs(2)", within="pass", after="pass", end="pass"):
    path = folder / "plain.py"
    path.write_text(PLAIN.format(passes=passes, within=within, after=after, end=end))
    return path


def declared(folder, end):
    return write_workload(folder, loop=LOOP + end)


# The file, and the step that is saved. All train on two ranks and save nothing before their end.
SAVED = {
    "every rank": (lambda folder: declared(folder, f"    {NO_PICTURE}\n"), 20),
    "one rank": (lambda folder: declared(folder, f"    if job.rank == 1:\n        {NO_PICTURE}\n"), 20),
    "an exit": (lambda folder: declared(folder, "    sys.exit(3)\n"), 20),
    "an error of ours": (lambda folder: declared(folder, "    job.generate([[1]], 3)\n"), 20),
    "one rank, in a call of all": (
        lambda folder: declared(
            folder, "    job.evaluate(Numbers(), lambda model, batch: {'a': (1 / job.rank, 1)}), print('no word')\n"
        ),
        20,
    ),
    "in the turn of the last step": (
        lambda folder: declared(folder, f"        if job.step_number == 20:\n            {NO_PICTURE}\n"),
        20,
    ),
    "between two steps": (
        lambda folder: declared(folder, f"        if job.step_number == 7:\n            {NO_PICTURE}\n"),
        7,
    ),
    "after a loop": (lambda folder: plain(folder, end=NO_PICTURE), 10),
    "one rank, after a loop": (lambda folder: plain(folder, end=f"if job.rank == 0: {NO_PICTURE}"), 10),
    "one rank, after a loop that counts its passes itself": (
        lambda folder: plain(folder, passes="range(2)", end=f"if job.rank == 0: {NO_PICTURE}"),
        10,
    ),
    "after the last pass": (lambda folder: plain(folder, after=f"if epoch == 1: {NO_PICTURE}"), 10),
    "after a pass, where the loop evaluates": (
        lambda folder: plain(folder, end="job.evaluate([torch.ones(4).double()] * 8, lambda model, batch: 3)"),
        10,
    ),
}


@pytest.mark.parametrize("case", SAVED)
def test_the_last_step_is_saved(case, tmp_path):
    make, step = SAVED[case]
    failed = paceline(tmp_path, "run", "-n", "2", "--checkpoint-every", "0", "--job", "a", make(tmp_path))
    assert failed.code in (1, 2), failed.err
    assert f"Last checkpoint: runs/a/checkpoints/step-{step:08}; go on with --resume --job a" in failed.err
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert result["checkpoint"] == str(tmp_path / "runs" / "a" / "checkpoints" / f"step-{step:08}")
    assert plan_export(tmp_path / "runs" / "a", "safetensors", print).step == step


# Where a job could not go on from a checkpoint as if nothing had happened: the scheduler has not stepped.
NOT_OF_THE_RUN = {
    "within a step": ({"within": f"if job.step_number == 3: {NO_PICTURE}"}, False),
    "before the scheduler": ({"after": f"if epoch == 0: {NO_PICTURE}"}, False),
    "where only the loop knows its end": ({"passes": "range(2)", "after": f"if epoch == 1: {NO_PICTURE}"}, True),
    "after a loop that counts its passes itself": ({"passes": "range(2)", "end": NO_PICTURE}, True),
}


@pytest.mark.parametrize("case", NOT_OF_THE_RUN)
def test_a_step_that_lacks_something_is_no_checkpoint_of_the_run(case, tmp_path):
    parts, is_elsewhere = NOT_OF_THE_RUN[case]
    failed = paceline(tmp_path, "run", "-n", "2", "--checkpoint-every", "0", "--job", "a", plain(tmp_path, **parts))
    assert failed.code == 1
    assert "Last checkpoint" not in failed.err
    saved = list(tmp_path.glob("runs/a/paceline-a-*/step-*"))
    assert [path.name for path in saved] == ["step-00000010"] * is_elsewhere
    for path in saved:
        assert f"step 10 is saved in {path}" in failed.out
        assert plan_export(path, "safetensors", print).step == 10


def test_after_failure_checkpoint_is_a_normal_one_and_resumes(tmp_path):
    for job, end in (("a", f"    {NO_PICTURE}\n"), ("b", "")):
        paceline(tmp_path, "run", "-n", "2", "--job", job, declared(tmp_path, end))
    one, other = (tmp_path / "runs" / job / "checkpoints" / "step-00000020" for job in "ab")
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes()
    shutil.rmtree(tmp_path / "runs" / "b")
    resumed = paceline(tmp_path, "run", "-n", "2", "--job", "a", "--resume", declared(tmp_path, ""))
    assert resumed.code == 0, resumed.err


def meet(rank, calls):
    """Where a rank of three is: failed, at its end, in its next step, or anywhere else."""
    os.environ.pop("PACELINE_RUN_DIR", None)
    api.init()
    step_board.WAIT_S = 0.5
    board = step_board.StepBoard(api.world().rank_info)
    board.begin_step()
    api.world().comm.barrier()
    call, found = calls[rank], None
    if call == FAILED:
        found = board.meet_after_failure()
    elif call == CLOSE:
        board.meet(CLOSE, 1)
    elif call == "steps":
        board.begin_step()
    api.world().comm.barrier()
    return found


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ((FAILED, FAILED, FAILED), {FAILED}),
        ((FAILED, CLOSE, CLOSE), {CLOSE}),
        ((FAILED, FAILED, CLOSE), {FAILED, CLOSE}),
        ((FAILED, FAILED, "steps"), None),
        ((FAILED, CLOSE, "elsewhere"), None),
    ],
    ids=str,
)
def test_after_failure_a_rank_learns_if_all_are_at_their_end(calls, found):
    assert run_ranks(3, meet, calls)[0] == found


def fail_between_steps(rank, run_dir, differs):
    """The checkpoints of a job that fails between two steps, after a first step that was or was not as it should be."""
    os.environ["PACELINE_RUN_DIR"] = run_dir
    Plan().write(Path(run_dir, "plan.json"))
    job = distribute(make("decoder"))
    job.step(next(job.batches()))
    answer = {"reason": ""} if not differs else {"kind": "gradient", "name": "a", "distance": 0.5}
    job.first_step.process = SimpleNamespace(answer=lambda: answer, end=lambda: None, cpu_s=lambda: 0.0)
    try:
        job.first_step.poll(job)
        raise ValueError("no picture")
    except Exception as error:
        jobs.save_after_failure(error)
    return sorted(path.name for path in (Path(run_dir) / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("differs", "saved"), [(False, ["step-00000001"]), (True, [])])
def test_after_failure_nothing_is_saved_if_first_step_differs(tmp_path, differs, saved):
    assert run_ranks(1, fail_between_steps, str(tmp_path), differs)[0] == saved
