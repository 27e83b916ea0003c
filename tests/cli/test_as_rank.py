"""`paceline run` as a rank of somebody else's job, and as the ranks of one node."""

from __future__ import annotations

import json
import socket
import subprocess

import pytest

from support.jobs import STEPS, command, losses, marked, paceline, wait_for, write_workload

pytestmark = pytest.mark.slow


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def task(rank: int, port: str) -> dict[str, str]:
    return {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
        **{"SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
    }


def run_tasks(folder, *words, **more):
    port = free_port()
    started = [
        subprocess.Popen(
            command("run", *words),
            cwd=folder,
            env=marked(folder, {**task(rank, port), **more}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    # As srun does with --kill-on-bad-exit: when one fails, the others have a moment and are ended.
    assert wait_for(lambda: any(one.poll() for one in started) or all(one.poll() == 0 for one in started), 120)
    wait_for(lambda: all(one.poll() is not None for one in started), 5)
    for one in started:
        one.kill()
    outs = [one.communicate()[0] for one in started]
    return [one.returncode for one in started], "".join(outs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    file = write_workload(folder)
    assert paceline(folder, "run", "-n", "2", "--job", "local", file).code == 0
    return losses(folder / "runs" / "local")


def test_tasks_of_slurm_keep_one_run_directory(tmp_path, alone):
    file = write_workload(tmp_path)
    codes, out = run_tasks(tmp_path, "--job", "a", file)
    assert codes == [0, 0], out
    assert losses(tmp_path / "runs" / "a") == alone
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", STEPS)
    codes, out = run_tasks(tmp_path, "--job", "a", file)
    assert codes[0] == 2
    assert "it exists" in out


def test_a_task_that_fails_leaves_its_cause(tmp_path):
    file = write_workload(tmp_path, "    if job and job.step_number == 3 and job.rank == 1: raise ValueError('mine')")
    codes, out = run_tasks(tmp_path, "--job", "a", file)
    assert codes[1] == 1, out
    failure = json.loads((tmp_path / "runs" / "a" / "failures" / "1.json").read_text())
    assert (failure["type"], failure["rank"], failure["step"]) == ("ValueError", 1, 4)


def test_what_was_cut_short_goes_on(tmp_path, alone):
    file = write_workload(tmp_path)
    words = ("--job", "a", "--resume-or-start", "--checkpoint-every", "2", file)
    cut = file.read_text().replace(
        "    job.step(batch)", "    job.step(batch)\n        job.step_number == 7 and os._exit(9)"
    )
    whole = file.read_text()
    file.write_text(cut)
    codes, out = run_tasks(tmp_path, *words)
    assert codes == [9, 9], out
    file.write_text(whole)
    codes, out = run_tasks(tmp_path, *words)
    assert codes == [0, 0], out
    assert losses(tmp_path / "runs" / "a") == alone


def test_a_node_starts_its_ranks(tmp_path, alone):
    file = write_workload(tmp_path)
    pod = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}
    done = paceline(tmp_path, "run", "--job", "a", "--resume-or-start", "-j", "1x2", file, **pod)
    assert done.code == 0, done.err
    assert losses(tmp_path / "runs" / "a") == alone
    assert wait_for(lambda: json.loads((tmp_path / "runs/a/result.json").read_text())["status"] == "done")


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--grace", "3"], task(0, "1"), "--grace under Slurm"),
        (["--resume"], task(0, "1"), "--resume under Slurm"),
        (["-n", "3"], task(0, "1"), "2 ranks"),
        ([], {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, "srun"),
        (["--job", "a", "-j", "2x2"], {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, "1x2"),
        ([], {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, "write --job NAME"),
    ],
)
def test_what_a_launcher_leaves_no_room_for(tmp_path, words, environment, said):
    done = paceline(tmp_path, "run", *words, write_workload(tmp_path), **environment)
    assert done.code == 2, done.out + done.err
    assert said in done.err
    assert "fix: " in done.err
