"""A disk that is full, a limit on files, Ctrl-C at an odd moment: said in words, and what was reached is kept."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
from pathlib import Path

import pytest

from paceline.checkpoint.save import CheckpointWriter
from paceline.cli.main import main
from paceline.launch.local import allow_open_files
from paceline.nouns.errors import UsageError, how_to_write
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.run.rank.server_process import _teller
from paceline.run.supervise.job import finish
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervisor import Ending

from support.jobs import command, leftovers, losses, marked, write_workload

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raising(error):
    def raise_(*_, **__):
        raise error

    return raise_


def test_a_result_that_cannot_be_written_is_said_and_the_job_ends_as_it_did(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", raising(FULL))
    said = []
    result = finish(tmp_path, Ending("done", 0), Progress(tmp_path), said.append)
    assert (result["status"], result["exit_code"]) == ("done", 0)
    assert "result.json\n  found: it can't be written (No space left on device)\n  fix: free space there" in said[0]


def test_a_draft_that_cannot_be_written_is_not_left(tmp_path, monkeypatch):
    real = Path.write_text

    def half(self, text, *more):
        real(self, text[:5])
        raise FULL

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        directory.write_json(tmp_path / "a.json", {"a": 1})
    assert not list(tmp_path.iterdir())


def test_a_plan_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Plan, "write", raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(UsageError, match=r"Read-only file system.*\n.*see that you may write there"):
        directory.write_start(tmp_path, Plan(), tmp_path / "x.py", [])


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EACCES, "you may write there"),
    ],
)
def test_the_fix_goes_with_the_reason(number, fix):
    assert fix in how_to_write(OSError(number, os.strerror(number)))


def test_a_checkpoint_larger_than_a_file_may_be_names_that_limit(tmp_path, monkeypatch):
    too_large = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    monkeypatch.setattr("paceline.checkpoint.save._write_rank", raising(too_large))
    writer = CheckpointWriter(0, 1, lambda event: None)
    writer._write(tmp_path / "step-1", {}, {}, {"optimizer": {}}, 0)
    assert "ulimit -f" in str(writer.wait())
    assert "free space" not in str(writer.failure)


def test_a_rank_whose_part_fails_frees_its_space_for_the_note(tmp_path, monkeypatch):
    def half(partial, rank, *_):
        (partial / f"rank-{rank:05d}.safetensors").write_bytes(b"x" * 1000)
        raise FULL

    monkeypatch.setattr("paceline.checkpoint.save._write_rank", half)
    CheckpointWriter(1, 2, lambda event: None)._write(tmp_path / "step-1", {}, {}, {"optimizer": {}}, 0)
    (partial,) = tmp_path.iterdir()
    assert [path.name for path in partial.iterdir()] == ["note-00001.json"]


def test_events_of_servers_that_cannot_be_written_end_nothing(tmp_path, capsys):
    (tmp_path / "servers.jsonl").symlink_to("/dev/full")
    tell = _teller(tmp_path)
    tell({"event": "a"})
    tell({"event": "b"})
    assert capsys.readouterr().err.count("can't be written (No space left on device)") == 1


def test_the_limit_on_open_files_is_raised_where_it_may_be():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        allow_open_files(120)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (120, before[1])
        allow_open_files(50)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 120
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("limit", [16, 24])
def test_too_few_open_files_are_refused_before_anything_starts(tmp_path, limit):
    file = write_workload(tmp_path)
    line = f"ulimit -n {limit}; {' '.join(command('run', '-n', '2', '--job', 'a', file))}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=marked(tmp_path, {}))
    assert done.returncode == 2
    assert f"the limit on open files is {limit}\n  fix: raise it: `ulimit -n 1024`" in done.stderr
    assert done.stderr.count("\n") == 3
    assert not list((tmp_path / "runs").iterdir())
    assert not leftovers(tmp_path)


def test_ctrl_c_while_a_command_is_loaded_is_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("importlib.import_module", raising(KeyboardInterrupt()))
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "paceline: interrupted\n"


@pytest.mark.slow
def test_a_job_under_a_limit_on_file_size_names_it(tmp_path):
    file = write_workload(tmp_path)
    file.write_text(file.read_text().replace("epochs=4", "epochs=2"))  # whose events fit
    line = f"ulimit -f 8; {' '.join(command('run', '-n', '2', '--job', 'a', file))}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=marked(tmp_path, {}))
    assert "File too large" in done.stdout + done.stderr
    assert "raise the limit on the size of a file" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert losses(tmp_path / "runs" / "a")
    assert json.loads((tmp_path / "runs" / "a" / "result.json").read_text())["checkpoint"] is None
