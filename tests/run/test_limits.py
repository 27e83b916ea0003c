"""A disk that is full, a limit on files, Ctrl-C at an odd moment: said in words, and what was reached is kept."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import paceline
from paceline.checkpoint.save import CheckpointWriter
from paceline.cli.main import main
from paceline.launch.local import allow_open_files
from paceline.nouns.errors import CheckpointError, UsageError, how_to_write
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.run.ends import first_of
from paceline.run.failures import UNWRITTEN
from paceline.run.rank.server_process import _event_writer
from paceline.run.rank.worker import failed
from paceline.run.rank_output import OutputLog
from paceline.run.read.standing import ask
from paceline.run.start.outcome import JobEnd
from paceline.run.supervise.elastic import _write_generation
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.supervised_job import finish
from paceline.run.supervise.supervisor import Ending, JobRequest, Supervisor, private_folder
from paceline.train.event_log import Events

from support.jobs import command, leftovers, losses, marked, write_workload

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raising(error):
    def raise_(*_, **__):
        raise error

    return raise_


def test_unwritable_result_is_told_and_the_job_ends_unchanged(tmp_path, monkeypatch):
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
    with pytest.raises(UsageError, match=r"Read-only file system.*\n.*mount that file system"):
        directory.write_start(tmp_path, Plan(), tmp_path / "x.py", [])


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EACCES, "you may write there"),
        (errno.EROFS, "mount that file system"),
        (errno.EIO, "dmesg"),
    ],
)
def test_the_fix_goes_with_the_reason(number, fix):
    assert fix in how_to_write(OSError(number, os.strerror(number)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("name", ["a.json", None])
def test_a_command_that_can_not_write_says_so_in_three_lines(number, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paceline.cli.completion_command.run", raising(OSError(number, os.strerror(number), name)))
    assert main(["completion", "bash"]) == 1
    error = OSError(number, os.strerror(number))
    what = "the file 'a.json'" if name else "a file of this command"
    wanted = f"{what} should be written or read\n  found: {error.strerror}\n  fix: {how_to_write(error, '')}\n"
    assert capsys.readouterr().err == f"paceline completion: error: {wanted}"


def test_a_command_without_a_folder_for_temporary_files_says_so(monkeypatch, capsys):
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/no/such", "/none"])
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("paceline.cli.completion_command.run", lambda _: tempfile.mkdtemp())
    assert main(["completion", "bash"]) == 1
    told = capsys.readouterr().err
    assert "No usable temporary directory found in ['/no/such', '/none']\n  fix: free space in one of these" in told
    assert told.count("\n") == 3


def test_system_error_caused_by_a_command_is_not_reworded(monkeypatch):
    monkeypatch.setattr("paceline.cli.completion_command.run", raising(OSError(errno.EBADF, os.strerror(errno.EBADF))))
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["completion", "bash"])


def test_unwritable_run_directory_has_the_fix_for_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.run.directory.try_writing", raising(OSError(errno.EFBIG, os.strerror(errno.EFBIG))))
    with pytest.raises(UsageError, match=r"File too large.*\n.*ulimit -f"):
        directory.check_writable(tmp_path / "a")


def test_unwritable_private_folder_has_the_fix_for_its_reason(monkeypatch):
    monkeypatch.setattr("paceline.run.supervise.supervisor.make_private", raising(FULL))
    with pytest.raises(UsageError, match="free space there, or name another place with the variable TMPDIR"):
        private_folder()
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr("paceline.run.supervise.supervisor.make_private", raising(read_only))
    with pytest.raises(UsageError, match=r"mount that file system .*, or name another place with the variable TMPDIR"):
        private_folder()


def test_events_that_can_not_be_opened_are_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.train.event_log.regular", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    with pytest.raises(UsageError, match=r"the job should write its events to.*\n.*Too many open files.*\n.*ulimit -n"):
        Events(tmp_path)


def test_unwritable_generation_number_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", raising(FULL))
    with pytest.raises(UsageError, match=r"can't begin generation 3.*\n.*No space left.*\n.*free space"):
        _write_generation(tmp_path, 3)


def test_output_that_can_not_be_kept_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.run.rank_output.regular", raising(FULL))
    log = OutputLog(tmp_path)
    assert [log.add(0, "a"), log.add(0, "b")] == ["No space left on device", None]
    log.close()
    said = io.StringIO()
    supervisor = Supervisor(JobRequest(Path("x"), (), 1, tmp_path), Screen(io.StringIO(), said))
    for text in "ab":
        supervisor.on_output(0, text)
    supervisor.output.close()
    assert said.getvalue().count("can't be kept") == 1
    assert f"{tmp_path}/output.log (No space left on device)" in said.getvalue()


def test_an_asker_who_can_not_write_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", raising(FULL))
    with pytest.raises(OSError, match="No space left"):
        ask(tmp_path, 2, 60.0)
    assert not list(tmp_path.iterdir())


def not_saved(folder):
    error = CheckpointError("the last checkpoint should be written", "two attempts failed", f"it is in {folder}")
    error.saved_to = str(folder)
    return error


def told_by_a_rank(folder, monkeypatch, capsys, error):
    """What a rank prints whose run directory can't be written."""
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", raising(FULL))
        assert failed(error, folder) == 1
    return capsys.readouterr().err


def test_unwritable_failure_of_a_rank_reaches_its_supervisor(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_SUPERVISED", "1")
    monkeypatch.setenv("PACELINE_RANK", "1")
    lines = told_by_a_rank(tmp_path, monkeypatch, capsys, not_saved("/tmp/else")).splitlines()
    shown = io.StringIO()
    supervisor = Supervisor(JobRequest(Path("x"), (), 2, tmp_path), Screen(shown, shown))
    for line in lines:
        supervisor.on_output(1, line)
    supervisor.on_ended(1, 1)
    ending = supervisor._ending(Progress(tmp_path), {})
    assert (ending.cause["rank"], ending.cause["message"]) == (1, str(not_saved("/tmp/else")))
    assert "os._exit" not in shown.getvalue()
    assert UNWRITTEN not in shown.getvalue()
    # The last step is not in the newest checkpoint of the run: the words must not send anybody there.
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    text = JobEnd(tmp_path, ending, Progress(tmp_path)).text()
    assert "fix: it is in /tmp/else" in text
    assert "step-00000010" not in text


@pytest.mark.parametrize("line", ["", "{", "[]", '{"rank": 0}'])
def test_a_line_that_only_begins_like_a_failure_is_output(line, tmp_path):
    shown = io.StringIO()
    supervisor = Supervisor(JobRequest(Path("x"), (), 2, tmp_path), Screen(shown, shown))
    supervisor.on_output(1, UNWRITTEN + line)
    supervisor.output.close()
    assert f"[1] {UNWRITTEN}{line}\n" in shown.getvalue()
    assert not supervisor.unwritten


def test_unwritable_failure_is_shown_if_there_is_no_supervisor(tmp_path, monkeypatch, capsys):
    told = told_by_a_rank(tmp_path, monkeypatch, capsys, not_saved("/tmp/else"))
    assert told.startswith(f"{not_saved('/tmp/else')}\npaceline: this could not be written to {tmp_path}/failures")


def test_unwritable_failure_is_not_reported_as_no_error(tmp_path, monkeypatch):
    assert "without an error" in first_of(tmp_path, {0: 1}, 1, None)["message"]
    monkeypatch.setattr("paceline.run.failures.try_writing", raising(FULL))
    found = first_of(tmp_path, {0: 1}, 1, None)["message"]
    where = f"{tmp_path}/failures (No space left on device)"
    assert (
        found
        == f"rank 0's process ended with exit code 1, and could not write down why in {where}: its last lines say it"
    )


LOAD = """
import runpy, sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv = ["paceline", {verb!r}]
runpy.run_module("paceline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("verb", ["run", "plan", "runs"])
@pytest.mark.parametrize("name", ["paceline.cli.main", "argparse", "paceline.nouns.errors", "paceline.cli.VERB"])
def test_ctrl_c_at_any_import_of_a_command_is_one_line(name, verb):
    code = LOAD.format(name=name.replace("VERB", f"{verb}_command"), verb=verb)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "paceline: interrupted\n")


def test_little_is_imported_before_a_command_can_catch_ctrl_c():
    folder = str(Path(paceline.__file__).parents[1])
    slow = "{'typing', 're', 'enum', 'argparse', 'dataclasses'} & set(sys.modules)"
    code = f"import sys; sys.path.insert(0, {folder!r}); import paceline.__main__; print(sorted({slow}))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


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


def test_events_of_servers_that_cannot_be_written_end_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paceline.run.rank.server_process.regular", raising(FULL))
    tell = _event_writer(tmp_path)
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
    assert "fix: raise the limit on the size of a file" in done.stderr.rpartition("two attempts failed")[2]
    assert "Traceback" not in done.stdout + done.stderr
    assert losses(tmp_path / "runs" / "a")
    assert json.loads((tmp_path / "runs" / "a" / "result.json").read_text())["checkpoint"] is None
