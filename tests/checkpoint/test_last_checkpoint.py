"""A run's last checkpoint is its last step: whatever else was saved, and also when it can't be written at once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from test_checkpoint import make, steps

from paceline.checkpoint import save
from paceline.checkpoint.export import plan_export
from paceline.checkpoint.manifest import list_checkpoints, read_manifest
from paceline.comm import words
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.train import last_checkpoint
from paceline.train.job import Job

from jobs import LOOP, events, losses, paceline, send, start, wait_for, write_workload
from ranks import run_ranks


def job_of_run(folder, mesh=None, **plan):
    """A job of two steps in the run directory `folder`, as `paceline run` starts it, alone or on a mesh."""
    os.environ["PACELINE_RUN_DIR"] = str(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    words.init()
    last_checkpoint.RETRY_AFTER_S = 0.01
    job = Job(make(), Plan(mesh=mesh or f"replicate={words.size()}", **plan))
    steps(job, 2)
    return job


def names(folder):
    return [path.name[-2:] for path in list_checkpoints(Path(folder, "checkpoints"))]


def save_another_and_end(rank, folder):
    job = job_of_run(folder)
    job.save(Path(folder, "out"))
    job.close()
    return names(folder), plan_export(Path(folder), "safetensors", print).step


def test_another_save_at_the_last_step_is_not_the_runs(tmp_path):
    assert run_ranks(1, save_another_and_end, str(tmp_path / "a")) == [(["02"], 2)]
    kinds = [event["event"] for event in events(tmp_path / "a", "checkpoint") + events(tmp_path / "a", "saved")]
    assert kinds == ["checkpoint", "saved"]


def go_back_and_end(rank, folder, inside):
    job = job_of_run(folder, checkpoint_every=1, keep=3)
    best = Path(folder, "checkpoints", "step-00000002") if inside else Path(folder, "best")
    if not inside:
        job.save(best)
    steps(job, 4)
    job.finish_save()
    assert names(folder) == ["06", "05", "04"]
    if inside:
        best = Path(folder, "checkpoints", "step-00000004")
    job.load(best)
    job.close()
    return names(folder), job.step_number


@pytest.mark.parametrize("inside", [False, True])
def test_a_job_that_ends_after_going_back_ends_with_that_step(tmp_path, inside):
    (left, step) = run_ranks(1, go_back_and_end, str(tmp_path / "a"), inside)[0]
    assert left == [f"{step:02d}"], "what the job has left by going back is still newer"


def keep_after_going_back(rank, folder):
    job = job_of_run(folder, checkpoint_every=1, keep=2)
    job.save(Path(folder, "best"))
    steps(job, 4)
    job.load(Path(folder, "best"))
    steps(job, 1)
    job.finish_save()
    return names(folder)


def test_after_going_back_the_newest_is_kept_not_the_highest(tmp_path):
    assert run_ranks(1, keep_after_going_back, str(tmp_path / "a")) == [["03"]]


# What becomes of the folder of checkpoints after the second step, and where the state then is.
def become_a_file(checkpoints):
    checkpoints.rmdir()
    checkpoints.touch()


def be_removed(checkpoints):
    checkpoints.rmdir()


def fail_once(checkpoints):
    publish, failed = save._publish, []

    def once(*arguments):
        if not failed:
            failed.append(True)
            raise OSError(5, "Input/output error")
        publish(*arguments)

    save._publish = once


def fail_for_the_run(checkpoints):
    """As a disk that is full: the run directory takes no file, the folder for temporary files does."""
    write = save.write_durably

    def full(path, content):
        if checkpoints.parent in path.parents:
            raise OSError(28, "No space left on device")
        write(path, content)

    save.write_durably = full


def fail_everywhere(checkpoints):
    def full(path, content):
        raise OSError(28, "No space left on device")

    save.write_durably = full


def fail_on_rank_1(checkpoints):
    """The disk of rank 1 takes no byte, so not even the note that it failed."""

    def full(path, content):
        raise OSError(28, "No space left on device")

    if words.rank() == 1:
        save.write_durably = full
        Path.write_text = full


def end_badly(rank, folder, change, mesh):
    job = job_of_run(folder, mesh)
    job.finish_save()
    job.world.barrier()
    if rank == 0 or change not in (become_a_file, be_removed):
        change(Path(folder, "checkpoints"))
    job.world.barrier()
    try:
        job.close()
    except CheckpointError as error:
        return str(error), error.exit_code
    return "done", 0


def ends(tmp_path, change, ranks=1, mesh=None):
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    os.environ["TMPDIR"], before = str(tmp), os.environ.get("TMPDIR")
    try:
        return run_ranks(ranks, in_folder, str(tmp), end_badly, (str(tmp_path / "a"), change, mesh))
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)


def in_folder(rank, tmp, function, arguments):
    import tempfile

    tempfile.tempdir = tmp
    return function(rank, *arguments)


@pytest.mark.parametrize("change", [be_removed, fail_once])
def test_a_failure_that_passes_is_survived(tmp_path, change):
    assert ends(tmp_path, change) == [("done", 0)]
    assert names(tmp_path / "a") == ["02"]


WAYS = [(1, None), (2, None), (2, "shard=2")]


@pytest.mark.parametrize(
    ("ranks", "mesh"), [WAYS[0], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[1:])]
)
@pytest.mark.parametrize(("change", "place"), [(become_a_file, "a"), (fail_for_the_run, "tmp")])
def test_what_cant_be_written_where_it_should_is_saved_elsewhere(tmp_path, change, place, ranks, mesh):
    for text, code in ends(tmp_path, change, ranks, mesh):
        assert code == 1
        assert "the job's last checkpoint" in text
        assert "two attempts failed" in text
        saved = next((tmp_path / place).glob("paceline-a-*")) / "step-00000002"
        assert f"the state was saved to {saved}" in text
        assert plan_export(saved, "safetensors", print).step == 2
        assert read_manifest(saved)["world_size"] == ranks


@pytest.mark.slow
def test_a_rank_that_can_not_even_say_that_it_failed_is_not_waited_for(tmp_path):
    for text, code in ends(tmp_path, fail_on_rank_1, 2):
        assert code == 1
        assert "rank 1: it could not be written, nor could the reason" in text


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_can_be_saved_nowhere_is_an_error_without_a_promise(tmp_path, ranks):
    for text, code in ends(tmp_path, fail_everywhere, ranks):
        assert code == 1
        assert "No space left on device" in text
        assert "was saved to" not in text
        assert [path.name for path in (tmp_path / "tmp").iterdir()] == []
        assert names(tmp_path / "a") == []


NO_FOLDER = """
        if job.step_number == 3 and job.rank == 0:
            checkpoints = os.environ["PACELINE_RUN_DIR"] + "/checkpoints"
            os.rmdir(checkpoints)
            open(checkpoints, "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_job_whose_last_step_is_not_saved_has_failed(tmp_path, is_stopped):
    file = write_workload(tmp_path, loop=LOOP.replace("        time.sleep", NO_FOLDER + "        time.sleep"))
    if is_stopped:
        job = start(tmp_path, "run", "-n", "2", "--job", "a", file, TEST_PAUSE="0.2")
        assert wait_for(lambda: len(losses(tmp_path / "runs" / "a")) >= 5, 60)
        send(job, signal.SIGTERM)
        _, told = job.communicate(timeout=60)
        code = job.returncode
    else:
        ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", file)
        code, told = ended.code, ended.err
    assert code == 1
    assert "the state was saved to" in told
    assert told.count("Fix: ") == 1
    assert "Traceback" not in told
    assert "done" not in told
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["checkpoint"]) == ("failed", 1, None)


def test_a_start_tries_the_folder_of_checkpoints(tmp_path):
    folder = directory.new_run(tmp_path, "a", Path("train.py"))
    become_a_file(folder / "checkpoints")
    with pytest.raises(UsageError, match="checkpoints, but it can't be written"):
        directory.check_writable(folder)
    words.init()
    os.environ["PACELINE_RUN_DIR"] = str(folder)
    try:
        with pytest.raises(CheckpointError, match="it can't be written"):
            Job(make(), Plan(mesh="replicate=1"))
    finally:
        del os.environ["PACELINE_RUN_DIR"]
