"""Copies of checkpoints in an object store: a copy is whole or no checkpoint, and a run goes on from it elsewhere."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import socket
import threading
import time
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from moto.server import ThreadedMotoServer

import paceline as api
from paceline.checkpoint import copies
from paceline.checkpoint.copies import CopyFolder, SilentStoreError, check_url, fetch_run, find_copy, is_url
from paceline.checkpoint.manifest import MANIFEST, read_manifest
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.nouns.plan import Plan
from paceline.run.directory import RunChoice, check_copies
from paceline.run.failures import silent_death
from paceline.run.start.outcome import JobEnd
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervised_job import result_of
from paceline.run.supervise.supervisor import THE_COMMAND, Ending
from paceline.train.job import Job

from support.jobs import STEPS, events, paceline, wait_for, write_workload
from support.ranks import run_ranks

BUCKET = "runs"


@pytest.fixture(scope="module")
def s3():
    """A local server of S3, with one bucket; whose address is in the variables that its library reads."""
    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server.start()
    address = f"http://127.0.0.1:{port}"
    variables = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test-secret-word",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield boto3.client("s3")
    server.stop()


def keys(s3, prefix=""):
    return sorted(entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", []))


def steps_in(s3, job):
    return sorted({int(key.split("step-")[1][:8]) for key in keys(s3, f"{job}/") if key.endswith(MANIFEST)})


def run(folder, *words, **environment):
    return paceline(folder, "run", "-n", "2", *words, **environment)


KILLED_ONCE_COPIED = """
    import signal
    if job and '"copied"' in open(f"{os.environ['PACELINE_RUN_DIR']}/events.jsonl").read():
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_goes_on_on_another_machine(s3, tmp_path):
    """The job is killed, its disk is lost, and it ends with the same losses as one that nobody disturbed."""
    here, there, whole = (tmp_path / name for name in ("here", "there", "whole"))
    for folder in (here, there, whole):
        folder.mkdir()
    file = write_workload(tmp_path)
    copied = ("--job", "moved", "--checkpoint-every", "4", "--copy-to", f"s3://{BUCKET}/", file)
    broken = write_workload(tmp_path, hook=KILLED_ONCE_COPIED, name="broken.py")
    ended = run(here, *copied[:-1], broken, TEST_PAUSE="0.4")
    assert ended.code == 1
    shutil.rmtree(here / "runs")
    began_at = steps_in(s3, "moved")[-1]
    assert began_at in range(4, STEPS, 4)

    ended = run(there, "--resume", *copied)
    assert ended.code == 0, ended.err
    assert f"step-{began_at:08d} was read from s3://{BUCKET}/moved" in ended.err
    undisturbed = run(whole, "--job", "moved", file)
    assert undisturbed.code == 0
    mine, theirs = (
        {event["step"]: event["loss"] for event in events(folder / "runs" / "moved", "step")}
        for folder in (there, whole)
    )
    assert mine == {step: loss for step, loss in theirs.items() if step > began_at}
    # The last step is copied before the job ends, and no more stay than on the disk.
    kept = steps_in(s3, "moved")
    assert kept[-1] == STEPS
    assert len(kept) <= 3
    folder = find_copy(f"s3://{BUCKET}/moved", print, tmp_path)
    assert (folder / MANIFEST).read_bytes() == (
        there / "runs" / "moved" / "checkpoints" / folder.name / MANIFEST
    ).read_bytes()
    event = events(there / "runs" / "moved", "copied")[-1]
    assert (event["step"], event["url"]) == (STEPS, f"s3://{BUCKET}/moved/checkpoints/{folder.name}")
    log = (there / "runs" / "moved" / "events.jsonl").read_text() + ended.out + ended.err
    assert "test-secret-word" not in log

    # A job of the same name that begins anew would mix its checkpoints with those.
    again = run(whole, "--job", "other", "--copy-to", f"s3://{BUCKET}", file)
    assert again.code == 0, again.err
    shutil.rmtree(whole / "runs")
    again = run(whole, "--job", "other", "--copy-to", f"s3://{BUCKET}", file)
    assert again.code == 2
    assert "checkpoints of such a job are there" in again.err
    assert not (whole / "runs").exists()

    exported = paceline(whole, "export", f"s3://{BUCKET}/other", "--to", "safetensors", "exported")
    assert exported.code == 0, exported.err
    assert (whole / "exported" / "model.safetensors").exists()


def small_workload():
    def loss(model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

    return api.Workload(
        model=lambda: torch.nn.Linear(3, 2),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        data=torch.utils.data.TensorDataset(torch.arange(48.0).view(16, 3) / 10),
        batch_size=4,
        epochs=9,
    )


def small_job():
    api.init()
    return Job(small_workload(), Plan(mesh=f"replicate={api.size()}"))


def take(job, steps):
    batches = job.batches()
    return [job.step(next(batches)) for _ in range(steps)]


def save_and_load(rank, url, variables):
    """Save after three steps; go on; load; go on again."""
    os.environ.update(variables)  # the fork server of ranks may be older than the store
    job = small_job()
    take(job, 3)
    job.save(url)
    first = take(job, 2)
    job.load(url)
    assert job.step_number == 3
    second = take(job, 2)
    job.save(url)  # in place of the other
    weights = [parameter.detach().clone() for parameter in job.model.parameters()]
    take(job, 1)
    job.load(url, weights_only=True)
    same = all(torch.equal(*pair) for pair in zip(weights, job.model.parameters(), strict=True))
    job.close()
    return first, second, same, job.step_number


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_saves_to_and_loads_from_a_store(s3, ranks):
    url = f"s3://{BUCKET}/own/best-{ranks}"
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for first, second, same, step in run_ranks(ranks, save_and_load, url, variables, timeout_s=120):
        assert first == second
        assert same
        assert step == 6
    assert keys(s3, f"own/best-{ranks}") == [
        f"own/best-{ranks}/{name}" for name in (MANIFEST, *(f"rank-{rank:05d}.safetensors" for rank in range(ranks)))
    ]


def saved(folder, steps=3, name="saved"):
    job = small_job()
    take(job, steps)
    job.save(folder / name)
    job.close()
    return folder / name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("one"))


def in_store(checkpoint, url, steps=(4, 8)):
    """Copies of a checkpoint as a run has them."""
    for step in steps:
        (CopyFolder(url) / "checkpoints" / f"step-{step:08d}").put_checkpoint(checkpoint)


def damage(store, how):
    """Damage the newest copy in a folder that stands for a store."""
    newest = store / "checkpoints" / "step-00000008"
    file = newest / "rank-00000.safetensors"
    if how == "torn":
        file.write_bytes(file.read_bytes()[:-7])
    elif how == "altered":
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    elif how == "gone":
        file.unlink()
    elif how == "the manifest altered":
        text = (newest / MANIFEST).read_text()
        (newest / MANIFEST).write_text(text.replace('"step": 3', '"step": 9'))
    else:
        (newest / MANIFEST).unlink()


@pytest.mark.parametrize("how", ["torn", "altered", "gone", "the manifest altered", "no manifest"])
def test_a_copy_that_is_not_whole_is_passed_over(checkpoint, tmp_path, how):
    url = f"file://{tmp_path}/store"
    in_store(checkpoint, url)
    damage(tmp_path / "store", how)
    told = []
    found = fetch_run(url, tmp_path / "run", told.append)
    assert found.name == "step-00000004"
    assert read_manifest(found)["step"] == 3
    passed_over = [text for text in told if "step-00000008 is passed over" in text]
    assert len(passed_over) == (how != "no manifest")  # without it there is no checkpoint
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000004"]


def test_where_no_copy_is_whole_nothing_is_left(checkpoint, tmp_path):
    url = f"file://{tmp_path}/store"
    in_store(checkpoint, url, [8])
    damage(tmp_path / "store", "torn")
    with pytest.raises(CheckpointError, match="none of the 1 there is whole"):
        fetch_run(url, tmp_path / "run", print)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


class Torn:
    """A file system that drops the end of what it is sent."""

    def __init__(self, plain):
        self.plain = plain

    def __getattr__(self, name):
        return getattr(self.plain, name)

    def put_file(self, source, target, size):
        with open(source, "rb") as file:
            self.plain.pipe_file(target, file.read()[:-1])


def test_a_torn_upload_becomes_no_checkpoint(checkpoint, tmp_path):
    folder = CopyFolder(f"file://{tmp_path}/store/step-00000008")
    folder.files = Torn(folder.files)
    with pytest.raises(CheckpointError, match=r"of rank-00000.safetensors \d+ of \d+ bytes have arrived"):
        folder.put_checkpoint(checkpoint)
    assert CopyFolder(f"file://{tmp_path}/store").steps() == []


def test_a_copy_that_is_there_is_not_sent_again(checkpoint, tmp_path):
    folder = CopyFolder(f"file://{tmp_path}/store/step-00000008")
    folder.put_checkpoint(checkpoint)
    folder.files = None_is_sent = Counting(folder.files)
    folder.put_checkpoint(checkpoint)
    assert None_is_sent.sent == 0


class Counting(Torn):
    """Counts what it is sent."""

    sent = 0

    def put_file(self, source, target, size):
        self.sent += 1


def test_a_run_that_is_newer_on_the_disk_reads_nothing(checkpoint, tmp_path):
    url = f"file://{tmp_path}/store"
    in_store(checkpoint, url)
    shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / "step-00000008")
    assert fetch_run(url, tmp_path / "run", print) is None


def test_processes_that_read_at_once_read_one_copy(checkpoint, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store"
    in_store(checkpoint, url)
    found = []
    plain = CopyFolder.fetch_checkpoint
    monkeypatch.setattr(CopyFolder, "fetch_checkpoint", lambda *words: found.append(1) or plain(*words))
    threads = [threading.Thread(target=fetch_run, args=(url, tmp_path / "run", print)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]


def test_stale_and_old_copies_go(checkpoint, tmp_path):
    url = f"file://{tmp_path}/store/checkpoints"
    in_store(checkpoint, f"file://{tmp_path}/store", [1, 2, 3, 9])
    CopyFolder(url).remove_others(3, 2)
    assert CopyFolder(url).steps() == [3, 2]


def copying_job(folder, monkeypatch, url):
    (folder / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setenv("PACELINE_RUN_DIR", str(folder / "run"))
    monkeypatch.setenv("PACELINE_PLAN", json.dumps({"checkpoint_every": 2, "copy_to": url}))


def plain_loop():
    job = api.distribute(small_workload())
    for batch in job.batches():
        job.step(batch)
        if job.step_number == 6:
            break
    return job


def test_copy_store_failure_stops_no_step_but_fails_job_at_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paceline.train.checkpoint_copies._RETRY_AFTER_S", 0.0)
    (tmp_path / "store").write_text("a file where the folder should be")
    copying_job(tmp_path, monkeypatch, f"file://{tmp_path}/store")
    job = plain_loop()
    with pytest.raises(CheckpointError, match="last checkpoint should be copied") as caught:
        job.close()
    assert job.step_number == 6
    assert "--resume" in caught.value.fix
    assert (tmp_path / "run" / "checkpoints" / "step-00000006" / MANIFEST).exists()
    assert "could not be copied" in capsys.readouterr().out
    assert events(tmp_path / "run", "copy_failed")


def test_the_next_process_copies_what_one_before_could_not(tmp_path, monkeypatch):
    copying_job(tmp_path, monkeypatch, f"file://{tmp_path}/store")
    monkeypatch.setattr(CopyFolder, "put_checkpoint", fail)
    monkeypatch.setattr("paceline.train.checkpoint_copies._RETRY_AFTER_S", 0.0)
    with pytest.raises(CheckpointError):
        plain_loop().close()
    monkeypatch.undo()
    copying_job_again(tmp_path, monkeypatch)
    job = api.distribute(small_workload())
    assert job.step_number == 6
    wait_for(lambda: CopyFolder(f"file://{tmp_path}/store/run/checkpoints").steps() == [6], 30)
    assert CopyFolder(f"file://{tmp_path}/store/run/checkpoints").steps() == [6]  # not only at its end
    job.close()


@pytest.fixture
def silent(monkeypatch):
    """A store that takes every call of some functions, and answers none until the test ends; the calls."""
    monkeypatch.setattr(copies, "SILENT_S", 0.2)
    answer = threading.Event()
    calls = []

    def become_silent(*names):
        for name in names:
            wait = functools.partial(_wait, name, calls, answer)
            monkeypatch.setattr(AbstractFileSystem if name.endswith("_file") else LocalFileSystem, name, wait)
        return calls

    yield become_silent
    answer.set()


def _wait(name, calls, answer, *_, **__):
    calls.append(name)
    answer.wait()


@pytest.mark.parametrize("name", ["info", "put_file", "pipe_file", "makedirs"])
def test_a_store_that_does_not_answer_holds_no_copy(checkpoint, tmp_path, silent, name):
    folder = CopyFolder(f"file://{tmp_path}/store/step-00000008")
    silent(name)
    with pytest.raises(SilentStoreError) as caught:
        folder.put_checkpoint(checkpoint)
    assert f"file://{tmp_path}/store/step-00000008" in caught.value.asked
    assert "the store has not answered for" in caught.value.found


@pytest.mark.parametrize("name", ["ls", "exists", "get_file"])
def test_a_store_that_does_not_answer_holds_no_resume(checkpoint, tmp_path, silent, name):
    """And what is silent is not taken for damaged, for which an older copy would do."""
    url = f"file://{tmp_path}/store"
    in_store(checkpoint, url)
    shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / "step-00000002")
    calls = silent(name)
    told = []
    with pytest.raises(SilentStoreError, match=f"file://{tmp_path}/store"):
        fetch_run(url, tmp_path / "run", told.append)
    assert calls == [name]
    assert told == []
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_slow_store_is_waited_for_while_bytes_arrive(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "SILENT_S", 0.3)

    def put_slowly(callback):
        began_s = time.monotonic()
        while time.monotonic() < began_s + 2 * copies.SILENT_S:
            time.sleep(0.01)
            callback.relative_update(1)
        return "sent"

    assert copies._answer_of(put_slowly, size=9) == "sent"
    with pytest.raises(copies._SilentError):
        copies._answer_of(lambda callback: time.sleep(2 * copies.SILENT_S), size=9)


def test_a_store_that_does_not_answer_holds_no_end(tmp_path, monkeypatch, silent, capsys):
    monkeypatch.setattr("paceline.train.checkpoint_copies._REPORT_S", 0.05)
    copying_job(tmp_path, monkeypatch, f"file://{tmp_path}/store")
    calls = silent("put_file")
    job = plain_loop()
    with pytest.raises(CheckpointError, match="last checkpoint should be copied") as caught:
        job.close()
    assert "the store has not answered for" in caught.value.found
    assert f"it is in {tmp_path / 'run'}" in caught.value.fix
    assert f"--resume --job run --copy-to file://{tmp_path}/store copies it" in caught.value.fix
    assert (tmp_path / "run" / "checkpoints" / "step-00000006" / MANIFEST).exists()
    said = capsys.readouterr().out
    assert f"the job's end waits for a copy to file://{tmp_path}/store/run" in said
    # One more than while it trained at most: a second try would wait as long again.
    assert len(calls) <= len(events(tmp_path / "run", "checkpoint"))


def test_an_end_names_what_is_not_copied(tmp_path):
    """Also where the ranks were killed while they waited for the store."""
    run_dir = tmp_path / "a"
    saved = run_dir / "checkpoints" / "step-00000006"
    saved.mkdir(parents=True)
    (saved / MANIFEST).write_text("{}")
    url = "s3://bucket/runs"
    (run_dir / "plan.json").write_text(json.dumps({"mesh": "replicate=1", "copy_to": url}))
    progress = Progress(run_dir)
    step = {"step": 6, "position": 9, "samples": 1, "loss": 0.5, "at": 1.5, "memory_bytes": 9}
    rows = [{"event": "step", **step}, {"event": "checkpoint", "path": str(saved), "step": 6}]
    copied = {"event": "copied", "path": str(saved), "url": f"{url}/a/checkpoints/step-00000006"}
    go_on = "go on with --resume --job a"
    for written, not_copied, go_on_there, copy in (
        (rows, f", which is not copied to {url}", f"{go_on} --copy-to {url}, which copies it", None),
        ([copied], "", go_on, copied["url"]),
    ):
        with (run_dir / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in written)
        progress.read()
        stopped = Ending("stopped", 143, stop_sent_to=THE_COMMAND)
        assert JobEnd(run_dir, stopped, progress).text() == f"stopped; saved as {saved}{not_copied}; {go_on_there}"
        cause = silent_death(0, -9, 2.5)
        failed = JobEnd(run_dir, Ending("failed", 1, cause), progress).text()
        assert failed.endswith(f"\n  Last checkpoint: {saved}{not_copied}; {go_on_there}")
        result = result_of(run_dir, stopped, progress)
        assert (result["checkpoint"], result["copy"]) == (str(saved), copy)


def copying_job_again(folder, monkeypatch):
    monkeypatch.setattr("paceline.train.open_jobs._run_jobs", [])  # as in another process
    monkeypatch.setenv("PACELINE_RUN_DIR", str(folder / "run"))
    monkeypatch.setenv("PACELINE_RESUME", str(folder / "run" / "checkpoints"))
    monkeypatch.setenv("PACELINE_PLAN", json.dumps({"copy_to": f"file://{folder}/store"}))


def fail(*words):
    raise CheckpointError("can't write", "the store is away", "wait")


URLS = {
    "a path": ("/runs", "it is '/runs'"),
    "a password": ("s3://me:secret@host/runs", "a user or a password"),
    "a chain": ("simplecache::s3://runs", "it is 'simplecache"),
    "a query": ("https://host/runs?token=1", "SCHEME://PLACE"),
    "memory": ("memory://runs", "this process's own memory"),
    "memory in capitals": ("MEMORY:///runs", "this process's own memory"),
    "a relative folder": ("file://runs", "file:///FOLDER"),
    "a folder of the home": ("local://~/runs", "local:///FOLDER"),
}


@pytest.mark.parametrize("name", URLS)
def test_what_is_no_url_of_a_folder_is_refused(name):
    url, said = URLS[name]
    with pytest.raises(UsageError) as caught:
        check_url(url, "--copy-to")
    assert said in f"{caught.value.found} {caught.value.fix}"
    assert "secret" not in str(caught.value)


PLACES = {
    "no such scheme": ("nowhere://bucket/runs", "Protocol not known", "s3://BUCKET"),
    "a store that is away": ("s3://no-such-bucket/runs", "bucket", "see that the store"),
    "a library that is not there": ("gs://bucket/runs", "gcsfs is not installed", "pip install gcsfs"),
}


def test_what_can_only_be_read_is_refused_before_the_job(tmp_path, monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)  # it refuses POST
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/tests"
    with pytest.raises(CheckpointError) as caught:
        check_copies(RunChoice(runs=tmp_path / "runs"), url)
    server.shutdown()
    server.server_close()
    assert caught.value.exit_code == 2
    assert caught.value.asked == f"can't write {url}"
    assert "501" in caught.value.found
    monkeypatch.setattr(LocalFileSystem, "open", lambda *_, **__: _fail(NotImplementedError))
    with pytest.raises(CheckpointError, match="fsspec has no such function for file://"):
        check_copies(RunChoice(runs=tmp_path / "runs"), f"file://{tmp_path}/store")


def _fail(error):
    raise error


@pytest.mark.parametrize("name", PLACES)
def test_copy_to_an_unwritable_place_is_refused_before_the_job(s3, tmp_path, name):
    url, found, fix = PLACES[name]
    ended = run(tmp_path, "--copy-to", url, write_workload(tmp_path))
    assert ended.code == 2
    assert found in ended.err
    assert fix in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_windows_path_or_a_plain_one_is_no_url():
    assert not is_url("C:/runs")
    assert not is_url(os.fspath("runs/a"))
    assert not is_url(copies)
    assert is_url("s3://a/b")


def test_a_folder_with_something_else_is_not_written_over(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("years of work")
    job = small_job()
    with pytest.raises(CheckpointError, match="something else"):
        job.save(f"file://{tmp_path}/store")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.txt"]
    job.close()
