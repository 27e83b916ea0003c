"""A run's last checkpoint is its last step: whatever else was saved, and also when it can't be written at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from test_checkpoint import make, steps

from paceline.checkpoint import save
from paceline.checkpoint.export import plan_export
from paceline.checkpoint.manifest import has_resume_point, list_checkpoints, read_manifest, remove_partial_in
from paceline.comm import api
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.run.directory import RunChoice, find_resume_point
from paceline.train import last_checkpoint
from paceline.train.job import Job

from support.jobs import LOOP, events, losses, paceline, send, start, wait_for, write_workload
from support.ranks import run_ranks


def job_of_run(folder, mesh=None, **plan):
    """A job of two steps in the run directory `folder`, as `paceline run` starts it, alone or on a mesh."""
    os.environ["PACELINE_RUN_DIR"] = str(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    api.init()
    last_checkpoint.RETRY_AFTER_S = 0.01
    job = Job(make(), Plan(mesh=mesh or f"replicate={api.size()}", **plan))
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


def listening(job):
    """The notices that the job gives from here on."""
    told = []
    job.notice = lambda text, everywhere=False: told.append(text)
    return told


def load_the_best_and_end(rank, folder, inside, every):
    job = job_of_run(folder, checkpoint_every=every, keep=3)
    best = Path(folder, "best")
    if not inside:
        job.save(best)
    steps(job, 5)
    job.checkpoints.finish()
    if inside:
        best = Path(folder, "checkpoints", "step-00000006")
    told = listening(job)
    job.load(best)
    before = names(folder)
    job.close()
    hidden = [path.name for path in Path(folder, "checkpoints").iterdir() if path.name.startswith(".")]
    return before, names(folder), job.step_number, told, hidden


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("inside", "every", "before", "after"),
    [(True, 1, "765", "765"), (False, 2, "642", "764"), (True, 2, "642", "764"), (False, 0, "", "7")],
)
def test_loading_a_checkpoint_at_the_end_loses_no_step(tmp_path, inside, every, before, after, ranks):
    said = f"the job ends at step {6 if inside else 2}, which it loaded, and took no step from there: step-00000007"
    heard = []
    for was, left, step, told, hidden in run_ranks(ranks, load_the_best_and_end, str(tmp_path / "a"), inside, every):
        assert was == [f"0{digit}" for digit in before], "loading alone changes nothing"
        assert left == [f"0{digit}" for digit in after], "the last step trained is the run's last checkpoint"
        assert step == (6 if inside else 2)
        assert hidden == []
        heard += [said in text for text in told]
    assert heard == [True], "rank 0 says it, once"
    assert plan_export(tmp_path / "a", "safetensors", print).step == 7


def test_a_run_that_ended_with_its_best_goes_on_at_its_last_step(tmp_path):
    loop = LOOP + "    job.load(os.environ['PACELINE_RUN_DIR'] + '/checkpoints/step-00000006')\n"
    file = write_workload(tmp_path, loop=loop)
    words = ("--checkpoint-every", "3", "--keep", "9", "--job", "a", file)
    assert paceline(tmp_path, "run", *words).code == 0
    ended = paceline(tmp_path, "run", "--resume", *words)
    assert ended.code == 0
    assert "goes on at step-00000020" in ended.err
    assert len(events(tmp_path / "runs" / "a", "step")) == 20, "no step is taken twice"


def go_back_and_go_on(rank, folder):
    job = job_of_run(folder, checkpoint_every=2, keep=3)
    steps(job, 3)
    job.checkpoints.finish()
    job.load(Path(folder, "checkpoints", "step-00000002"))
    told = listening(job)
    steps(job, 1)
    after_one = names(folder)
    steps(job, 1)
    job.checkpoints.finish()
    return after_one, names(folder), told, sorted(path.name for path in Path(folder, "checkpoints").iterdir())


def test_going_back_replaces_later_checkpoints_at_the_next_save(tmp_path):
    after_one, after_two, told, everything = run_ranks(1, go_back_and_go_on, str(tmp_path / "a"))[0]
    assert after_one == ["04", "02"], "a step that is in no checkpoint takes no place"
    assert after_two == ["04", "02"]
    assert everything == ["step-00000002", "step-00000004"]
    assert told == ["step-00000004 is saved, so the checkpoints that the job went back from are removed: step-00000005"]


def branch_twice(rank, folder):
    job = job_of_run(folder, checkpoint_every=1, keep=9)
    steps(job, 4)
    job.checkpoints.finish()
    checkpoints = Path(folder, "checkpoints")
    job.load(checkpoints / "step-00000004")
    told = listening(job)
    steps(job, 1)
    job.checkpoints.finish()
    first = names(folder)
    job.load(checkpoints / "step-00000002")
    steps(job, 1)
    job.close()
    return first, names(folder), told


def test_going_back_twice_removes_and_names_later_checkpoints(tmp_path):
    first, second, told = run_ranks(1, branch_twice, str(tmp_path / "a"))[0]
    assert (first, second) == (["05", "04", "03", "02", "01"], ["03", "02", "01"])
    assert [text.rpartition(": ")[2] for text in told] == ["step-00000006", "step-00000004, step-00000005"]


def keep_after_going_back(rank, folder):
    job = job_of_run(folder, checkpoint_every=1, keep=2)
    job.save(Path(folder, "best"))
    steps(job, 4)
    job.load(Path(folder, "best"))
    steps(job, 1)
    job.checkpoints.finish()
    return names(folder)


def test_after_going_back_the_newest_is_kept_not_the_highest(tmp_path):
    assert run_ranks(1, keep_after_going_back, str(tmp_path / "a")) == [["03"]]


def load_again_and_end(rank, folder, keep, last, back_to, again):
    """Train to step `last`, perhaps go back and take another step, load `again`, and end."""
    job = job_of_run(folder, checkpoint_every=2, keep=keep)
    checkpoints = Path(folder, "checkpoints")
    if again == "best":
        job.save(Path(folder, "best"))
    steps(job, last - 2)
    if back_to:
        job.load(checkpoints / f"step-{back_to:08d}")
        steps(job, 1)
    told = listening(job)
    job.load(Path(os.path.relpath(folder), "best" if again == "best" else f"checkpoints/step-{again:08d}"))
    job.close()
    return names(folder), [path.name for path in checkpoints.glob(".*")], told


def test_going_back_then_loading_a_later_step_keeps_that_branch(tmp_path):
    left, hidden, told = run_ranks(1, load_again_and_end, str(tmp_path / "a"), 9, 6, 2, 6)[0]
    assert left == ["06", "04", "02"]
    assert hidden == []
    assert told == ["step-00000003 is not kept: the job left it for step-00000006, which it had gone back from before"]
    assert [event["step"] for event in events(tmp_path / "a", "checkpoint")] == [2, 4, 6]


def test_that_branch_keeps_its_last_step_too(tmp_path):
    left, hidden, _ = run_ranks(1, load_again_and_end, str(tmp_path / "a"), 9, 7, 2, 6)[0]
    assert left == ["07", "06", "04", "02"]
    assert hidden == []


@pytest.mark.slow
def test_all_ranks_agree_on_the_branch_that_stays(tmp_path):
    for left, hidden, _ in run_ranks(2, load_again_and_end, str(tmp_path / "a"), 9, 6, 2, 6):
        assert (left, hidden) == (["06", "04", "02"], [])


def test_keep_limit_spares_the_checkpoint_that_was_loaded_last(tmp_path):
    left, _, _ = run_ranks(1, load_again_and_end, str(tmp_path / "a"), 2, 7, None, 4)[0]
    assert left == ["07", "06", "04"]


def test_what_the_end_of_a_job_removes_is_named(tmp_path):
    left, _, told = run_ranks(1, load_again_and_end, str(tmp_path / "a"), 9, 6, 2, "best")[0]
    assert left == ["03", "02"]
    assert told[0] == (
        "step-00000003 is saved, so the checkpoints that the job went back from are removed: "
        "step-00000004, step-00000006"
    )
    assert events(tmp_path / "a", "checkpoint")[-1]["removed"] == ["step-00000004", "step-00000006"]


def decline_and_load(rank, folder, load_first):
    job = job_of_run(folder, checkpoint_every=0)
    job.save(Path(folder, "best"))
    steps(job, 1)
    if load_first:
        job.load(Path(folder, "best"))
    job.close(save=False)
    job.load(Path(folder, "best"))
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


@pytest.mark.parametrize("load_first", [False, True])
def test_declined_last_checkpoint_is_not_saved_after_a_load(tmp_path, load_first):
    assert run_ranks(1, decline_and_load, str(tmp_path / "a"), load_first) == [[]]


CRASH = """    job.load(os.environ["PACELINE_RUN_DIR"] + "/best")
    raise ValueError("no metric")
"""


@pytest.mark.parametrize("every", ["0", "8"])
def test_a_file_that_fails_after_a_load_loses_no_step(tmp_path, every):
    save = '        if job.step_number == 3:\n            job.save(os.environ["PACELINE_RUN_DIR"] + "/best")\n'
    words = ("--checkpoint-every", every, "--job", "a", write_workload(tmp_path, loop=LOOP + save + CRASH))
    failed = paceline(tmp_path, "run", *words)
    assert failed.code == 1
    assert "Last checkpoint: runs/a/checkpoints/step-00000020;" in failed.err
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert result["checkpoint"] == str(tmp_path / "runs" / "a" / "checkpoints" / "step-00000020")
    assert plan_export(tmp_path / "runs" / "a", "safetensors", print).step == 20


def leave(rank, folder):
    """Train to step 5, and end as a process that is killed after it went back."""
    job = job_of_run(folder, checkpoint_every=2)
    steps(job, 3)
    job.load(Path(folder, "checkpoints", "step-00000002"))


def test_resume_uses_the_last_step_set_aside_by_a_killed_job(tmp_path):
    run_ranks(1, leave, str(tmp_path))
    checkpoints = tmp_path / "checkpoints"
    newest = checkpoints / "step-00000005"
    assert names(tmp_path) == ["04", "02"]
    told = []
    assert has_resume_point(checkpoints)
    assert find_resume_point(tmp_path, told.append) == newest
    assert told == ["step-00000005, the last step that the job trained before it went back, is its newest checkpoint"]
    assert list(checkpoints.glob(".*")) == []


def test_a_start_publishes_a_left_step_where_it_alone_is_there(tmp_path):
    run_ranks(1, leave, str(tmp_path))
    for folder in list_checkpoints(tmp_path / "checkpoints"):
        shutil.rmtree(folder)
    assert has_resume_point(tmp_path / "checkpoints")
    remove_partial_in(tmp_path / "checkpoints")
    assert names(tmp_path) == ["05"]


def test_resume_ignores_a_set_aside_step_if_damaged_or_older(tmp_path):
    run_ranks(1, leave, str(tmp_path))
    checkpoints = tmp_path / "checkpoints"
    older = (checkpoints / "step-00000002").rename(checkpoints / ".left-step-00000002")
    manifest = checkpoints / ".left-step-00000005" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 5', '"step": 6'))
    assert find_resume_point(tmp_path, print) == checkpoints / "step-00000004"
    assert list(checkpoints.glob(".*")) == [older]


def go_back_on_a_full_disk(rank, folder):
    job = job_of_run(folder, checkpoint_every=0)
    job.save(Path(folder, "best"))
    steps(job, 1)
    fail_everywhere(None)
    job.load(Path(folder, "best"))
    try:
        job.close()
    except CheckpointError as error:
        return str(error)


def test_last_step_that_cannot_be_set_aside_is_an_error_at_end(tmp_path):
    (text,) = run_ranks(1, go_back_on_a_full_disk, str(tmp_path / "a"))
    assert "step-00000003" in text
    assert "No space left on device" in text


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

    if api.rank() == 1:
        save.write_durably = full
        Path.write_text = full


def end_badly(rank, folder, change, mesh):
    job = job_of_run(folder, mesh)
    job.checkpoints.finish()
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
def test_save_does_not_wait_for_a_rank_unable_to_report_failure(tmp_path):
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
@pytest.mark.parametrize("is_stopped", [pytest.param(False, marks=pytest.mark.complete), True])
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
    assert told.count("fix: ") == 1
    assert "Traceback" not in told
    assert "done" not in told
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["checkpoint"]) == ("failed", 1, None)


def test_a_start_tries_the_folder_of_checkpoints(tmp_path):
    with directory.new_run(RunChoice(runs=tmp_path, job="a"), Path("train.py"), print) as owned:
        folder = owned.folder
    become_a_file(folder / "checkpoints")
    with pytest.raises(UsageError, match="checkpoints\n  found: it can't be written"):
        directory.check_writable(folder)
    api.init()
    os.environ["PACELINE_RUN_DIR"] = str(folder)
    try:
        with pytest.raises(CheckpointError, match="it can't be written"):
            Job(make(), Plan(mesh="replicate=1"))
    finally:
        del os.environ["PACELINE_RUN_DIR"]
