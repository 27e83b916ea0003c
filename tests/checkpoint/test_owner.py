"""A run directory belongs to one live job: here as two hosts with one disk, whose time the tests set."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import owner as owners
from paceline.checkpoint.manifest import folder_name, list_checkpoints, partial_of
from paceline.checkpoint.owner import (
    DESCRIPTOR,
    LOCK,
    RECORD,
    SILENT_S,
    TOKEN,
    Ownership,
    RunTakenError,
    ThisHost,
    check_free,
    check_owner,
    keep_lock,
    read_owner,
    take,
    wait_until_taken,
)
from paceline.checkpoint.save import CheckpointWriter
from paceline.nouns.errors import UsageError
from paceline.run import directory
from paceline.run.directory import RunChoice
from paceline.train import prepare

HOLD = """
import sys, time
from pathlib import Path
from paceline.checkpoint.owner import take
take(Path(sys.argv[1]), print, "another")
print("has it", flush=True)
time.sleep(60)
"""


class Time:
    """A clock that `sleep` moves on; `each` is called at every sleep."""

    def __init__(self, each=lambda: None):
        self.now = 0.0
        self.each = each

    def now_s(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.each()


def host(name, each=lambda: None, boot=""):
    time = Time(each)
    return ThisHost(name, boot or f"boot of {name}", time, time.sleep)


@pytest.fixture
def local_locks(monkeypatch):
    """Locks that another host does not see: each gets them."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.fixture
def said():
    return []


def touch(folder, ago_s=0.0):
    at = (folder / RECORD).stat().st_mtime - ago_s
    os.utime(folder / RECORD, (at, at))


def test_owned_run_directory_is_refused_with_its_owner_and_a_fix(tmp_path, said):
    folder = tmp_path / "a"
    first = take(folder, said.append, "another --job than a")
    before = (folder / RECORD).read_bytes()
    with pytest.raises(UsageError) as refused:
        take(folder, said.append, "another --job than a")
    error = refused.value
    assert error.asked == f"can't start a job in {folder}"
    assert f"another job has it: process {os.getpid()} on {first.owner.host}, since 20" in error.found
    assert error.fix == f"wait for its end, end it (`kill {os.getpid()}`), or write another --job than a"
    assert error.exit_code == 2
    assert (folder / RECORD).read_bytes() == before
    (folder / "plan.json").touch()
    first.release()
    with take(folder, said.append, "") as second:
        assert second.owner.token != first.owner.token
    assert read_owner(folder).token == ""
    assert not said
    assert {path.name for path in folder.iterdir()} == {RECORD, LOCK, "plan.json"}


def test_a_folder_with_nothing_in_it_goes(tmp_path, said):
    take(tmp_path / "runs" / "a", said.append, "").release()
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize("has_ended", [True, False], ids=["of a job", "new"])
def test_a_start_that_does_not_begin_leaves_the_folder_as_it_was(tmp_path, has_ended):
    (tmp_path / "plan.json").touch()
    if has_ended:
        take(tmp_path, print, "").release()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    take(tmp_path, print, "").release(has_begun=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_simultaneous_starts_never_share_a_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "new_name", lambda script: "train-20260101-000000")
    had, refused = [], []
    together = threading.Barrier(6)

    def start(job):
        together.wait()
        try:
            had.append(directory.new_run(RunChoice(runs=tmp_path, job=job), Path("train.py"), print))
        except UsageError as error:
            refused.append(error.found)

    threads = [threading.Thread(target=start, args=(job,)) for job in ("a", "a", "a", None, None, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = sorted(owned.folder.name for owned in had)
    assert names == ["a", "train-20260101-000000", "train-20260101-000000-2", "train-20260101-000000-3"]
    assert len(refused) == 2
    assert all("another" in found for found in refused)
    for owned in had:
        owned.release()


def started(folder):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "has it\n"
    return holder


def test_what_a_killed_process_had_is_free_at_once(tmp_path, said):
    holder = started(tmp_path)
    with pytest.raises(UsageError, match=f"process {holder.pid} on "):
        take(tmp_path, said.append, "")
    with pytest.raises(UsageError, match="rm a\n"):
        check_free(tmp_path, "rm a")
    holder.kill()
    holder.communicate()
    check_free(tmp_path, "rm a")
    take(tmp_path, said.append, "").release()
    assert not said


def test_owner_waits_for_and_names_processes_of_a_killed_command(tmp_path, said, monkeypatch):
    monkeypatch.setattr(owners, "_POLL_S", 0.5)
    holder = started(tmp_path)
    holder.kill()
    holder.communicate()
    lock = os.open(tmp_path / LOCK, os.O_RDWR)
    try:
        owners.fcntl.flock(lock, owners.fcntl.LOCK_EX)
        here = ThisHost(clock=(time := Time()), sleep=time.sleep)
        with pytest.raises(UsageError) as refused:
            take(tmp_path, said.append, "", this_host=here)
        assert "that process has ended, and others of its job have not" in refused.value.found
        assert f"`kill {os.getpid()}`" in refused.value.fix
        assert 29 < time.now < 32
        assert said == [f"waiting for the last processes of the job that had {tmp_path.name}: its command has ended"]
        time.now, time.each = 0.0, lambda: time.now > 5 and owners.fcntl.flock(lock, owners.fcntl.LOCK_UN)
        take(tmp_path, said.append, "", this_host=here).release()
        assert 5 < time.now < 7
    finally:
        os.close(lock)


def test_owner_release_frees_a_lock_inherited_by_another_process(tmp_path, said):
    (tmp_path / "plan.json").touch()
    first = take(tmp_path, said.append, "")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[first.lock])
    try:
        first.release()
        take(tmp_path, said.append, "").release()
    finally:
        other.communicate(b"\n")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_rank_forks_does_not_hold_the_lock(tmp_path, said):
    code = """if True:
        import os, sys
        from pathlib import Path
        from paceline.checkpoint.owner import DESCRIPTOR, keep_lock, take
        owned = take(Path(sys.argv[1]), print, "")
        os.environ.update(owned.variables)
        keep_lock(os.environ)
        assert DESCRIPTOR not in os.environ
        if os.fork() == 0:
            try:
                os.fstat(owned.lock)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.wait()[1] == 0
        os.fstat(owned.lock)
    """
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
    keep_lock({})
    keep_lock({DESCRIPTOR: "999999"})


def test_owner_lock_on_a_removed_file_is_taken_on_the_new_file(tmp_path, said, monkeypatch):
    real = owners.fcntl.flock
    removed = []

    def remove_once(descriptor, operation):
        if not removed:
            (tmp_path / LOCK).unlink()
            removed.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", remove_once)
    owned = take(tmp_path, said.append, "")
    with pytest.raises(UsageError):
        take(tmp_path, said.append, "")
    owned.release()


@pytest.mark.usefixtures("local_locks")
def test_an_owner_on_another_host_that_shows_life_is_refused(tmp_path, said):
    take(tmp_path, said.append, "", this_host=host("h1"))
    second = host("h2", each=lambda: second.clock.now > 9 and touch(tmp_path, 1.0))
    with pytest.raises(UsageError) as refused:
        take(tmp_path, said.append, "another --job than a", this_host=second)
    assert f"process {os.getpid()} on h1, since" in refused.value.found
    assert f"`kill {os.getpid()}` on h1" in refused.value.fix
    assert second.clock.now < 12
    assert len(said) == 1
    assert "60 s without a sign of life" in said[0]


@pytest.mark.usefixtures("local_locks")
def test_owner_silent_on_another_host_is_replaced_and_informed(tmp_path, said):
    first = take(tmp_path, said.append, "", this_host=host("h1"))
    second = host("h2")
    owned = take(tmp_path, said.append, "", this_host=second)
    assert SILENT_S <= second.clock.now < SILENT_S + 5
    assert "is taken over: no sign of life of process" in said[1]
    assert first.is_taken()
    with pytest.raises(RunTakenError, match=f"another start has taken it: process {os.getpid()} on h2"):
        first.check()
    with pytest.raises(RunTakenError):
        first.renew()
    first.release()
    owned.check()
    assert read_owner(tmp_path).token == owned.owner.token


@pytest.mark.usefixtures("local_locks")
def test_owner_that_ends_on_another_host_is_replaced_at_once(tmp_path, said):
    (tmp_path / "plan.json").touch()
    first = take(tmp_path, said.append, "", this_host=host("h1"))
    second = host("h2", each=lambda: second.clock.now == 3 and first.release())
    take(tmp_path, said.append, "", this_host=second)
    assert second.clock.now == 3


@pytest.mark.usefixtures("local_locks")
@pytest.mark.parametrize(
    ("second", "ago_s"), [(host("h2"), 3600.0), (host("h1", boot="another"), 0.0)], ids=["long ago", "rebooted"]
)
def test_nothing_is_waited_for_where_the_owner_can_not_live(tmp_path, said, second, ago_s):
    take(tmp_path, said.append, "", this_host=host("h1"))
    touch(tmp_path, ago_s)
    take(tmp_path, said.append, "", this_host=second).check()
    assert second.clock.now == 0


@pytest.mark.usefixtures("no_locks")
def test_on_a_disk_without_locks_the_living_process_counts(tmp_path, said):
    take(tmp_path, said.append, "")
    with pytest.raises(UsageError, match=f"process {os.getpid()} on "):
        take(tmp_path, said.append, "")
    dead = subprocess.run([sys.executable, "-c", HOLD.replace("time.sleep(60)", ""), str(tmp_path / "b")])
    assert dead.returncode == 0
    assert read_owner(tmp_path / "b").token
    take(tmp_path / "b", said.append, "").check()
    assert not said


def test_an_owner_whose_number_another_process_has_now_is_dead(tmp_path):
    here = ThisHost()
    owned = take(tmp_path, print, "")
    assert not here.knows_dead(owned.owner)
    before = owners.dataclasses.replace(owned.owner, started="1")
    assert here.knows_dead(before)
    owned.release()


DAMAGED = [b"", b"{", b"[1]", b"\xff", b'{"token": 3}', b"x" * 2**15]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_record_stops_nobody(tmp_path, said, content):
    (tmp_path / RECORD).write_bytes(content)
    check_owner(tmp_path, "mine")
    owned = take(tmp_path, said.append, "")
    assert read_owner(tmp_path) == owned.owner
    owned.release()


@pytest.mark.parametrize(("name", "value"), [("since", 2**62), ("pid", -1), ("pid", 2**40), ("host", None)])
def test_a_record_of_impossible_values_is_none(tmp_path, name, value):
    take(tmp_path, print, "")
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps({**record, name: value}))
    assert read_owner(tmp_path) is None


def test_owner_record_is_shown_without_terminal_control_codes(tmp_path):
    owned = take(tmp_path, print, "")
    text = str(owners.dataclasses.replace(owned.owner, host="\x1b[2Jh", command="a\nb" * 100))
    assert text.isprintable()
    assert len(text) < 300
    owned.release()


def test_owner_token_is_for_one_start_and_missing_record_passes(tmp_path):
    owned = take(tmp_path, print, "")
    token = owned.owner.token
    check_owner(tmp_path, token)
    owned.renew()
    owned.check()
    with pytest.raises(RunTakenError):
        check_owner(tmp_path, token)
    (tmp_path / "plan.json").touch()
    owned.release()
    with pytest.raises(RunTakenError, match="its job has ended"):
        check_owner(tmp_path, owned.owner.token)
    (tmp_path / RECORD).unlink()
    check_owner(tmp_path, token)
    check_owner(tmp_path, "")


def test_the_owner_shows_life_until_it_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "HEARTBEAT_S", 0.01)
    owned = take(tmp_path, print, "")
    touch(tmp_path, 1000.0)
    owned.start_beating()
    deadline = owners.time.monotonic() + 10
    while owners._age_s(tmp_path) > 500:
        assert owners.time.monotonic() < deadline
        owners.time.sleep(0.01)
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps({**record, "token": "other"}))
    owned._thread.join(10)
    assert owned.taken is not None
    owned.release()
    assert read_owner(tmp_path).token == "other"


def test_what_runs_after_exec_has_what_was_taken(tmp_path):
    owned = take(tmp_path, print, "", "launch 1")
    inherited = Ownership.inherited(tmp_path, owned.variables)
    assert (inherited.owner, inherited.lock) == (owned.owner, owned.lock)
    assert Ownership.inherited(tmp_path, {TOKEN: "other"}) is None
    assert Ownership.inherited(tmp_path, {}) is None
    owned.release()


def test_owner_ranks_wait_until_rank_0_has_the_run_directory(tmp_path, said):
    wait_until_taken(tmp_path, "", "rank 1", said.append)  # nothing is known of the launch
    early = host("h1", each=lambda: early.clock.now > 5 and take(tmp_path, print, "", "job 7", host("h0")))
    wait_until_taken(tmp_path, "job 7", "rank 1", said.append, early)
    assert early.clock.now < 8
    assert not said
    with pytest.raises(UsageError) as refused:
        wait_until_taken(tmp_path, "job 8", "rank 1", said.append, host("h1"))
    assert said == [f"rank 1 waits until rank 0 has the run directory {tmp_path}"]
    assert "rank 1 should write to the run directory" in refused.value.asked
    assert f"another job has it: process {os.getpid()} on h0" in refused.value.found
    with pytest.raises(UsageError, match="it does not find after 600 s that rank 0 has it"):
        wait_until_taken(tmp_path / "none", "job 8", "rank 1", said.append, host("h1"))


def test_a_rank_of_a_job_that_lost_the_folder_may_not_save(tmp_path):
    owned = take(tmp_path, print, "")
    environment = {"PACELINE_RUN_DIR": str(tmp_path), TOKEN: owned.owner.token}
    prepare.learn_owner(environment)
    prepare.check_owner(environment)
    told_nothing = {"PACELINE_RUN_DIR": str(tmp_path)}
    prepare.learn_owner(told_nothing)  # as a rank of mpirun's on another host
    prepare.check_owner(told_nothing)
    owned.renew()  # as for a generation of an elastic job, or a restart
    for of_rank in (environment, told_nothing):
        with pytest.raises(RunTakenError):
            prepare.check_owner(of_rank)
    prepare.check_owner({})
    owned.release()


def test_save_in_progress_changes_nothing_after_owner_changes(tmp_path, monkeypatch):
    old = tmp_path / folder_name(1)
    old.mkdir()
    told = []
    owned = take(tmp_path, print, "")
    writer = CheckpointWriter(0, 1, told.append, check_owner=owned.check)
    monkeypatch.setattr("paceline.checkpoint.save.merged_tensors", lambda notes: owned.renew() or {})
    token = owned.owner.token
    writer.check_owner = lambda: check_owner(tmp_path, token)
    manifest = {"optimizer": {"class": "SGD", "groups": [], "numbers": {}}, "step": 2}
    writer._write(tmp_path / folder_name(2), {"own/x": torch.ones(1)}, {}, manifest, 1)
    assert "another start has taken it" in str(writer.wait())
    assert list_checkpoints(tmp_path) == [old]
    assert partial_of(tmp_path / folder_name(2)).is_dir(), "it may be another job's"
    assert not told
    owned.release()


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_signals_are_left_to_the_main_thread(tmp_path, monkeypatch):
    blocked = []
    real = signal.pthread_sigmask
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *words: blocked.append(words) or real(*words))
    owned = take(tmp_path, print, "")
    owned.start_beating()
    owned.release()
    assert signal.SIGINT in blocked[0][1]
