"""`paceline logs`: what ranks printed, of one rank, the last lines, what comes; and what is refused."""

from __future__ import annotations

import json
import subprocess
import threading
import time

import pytest

from paceline.cli.main import main
from paceline.run import rank_output as output
from paceline.run.rank_output import FILE, OutputLog, read_lines

from support.jobs import command, marked, paceline, start, wait_for, write_workload

LOOP = """
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        print(f"line {job.step_number} of {job.rank}", flush=True)
        time.sleep(float(os.environ.get("TEST_PAUSE", "0")))
    print("\\ta tab, [brackets] and ümlaut")
    print("an error", file=sys.stderr)
"""


def write(tmp_path):
    file = write_workload(tmp_path, loop=LOOP)
    file.write_text("import os, sys, time\n" + file.read_text())
    return file


@pytest.mark.slow
def test_every_line_of_every_rank_is_kept(tmp_path, capsys):
    done = paceline(tmp_path, "run", "-n", "2", "--job", "a", write(tmp_path))
    assert done.code == 0, done.err
    assert main(["logs", "a", "--runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(line for line in done.out.splitlines() if line.startswith("["))
    assert "[1] \ta tab, [brackets] and ümlaut" in lines
    assert "[0] an error" in lines
    assert [line for line in lines if line.startswith("[1] line")] == [f"[1] line {n} of 1" for n in range(1, 21)]
    assert main(["logs", "a", "--runs", str(tmp_path / "runs"), "--rank", "1", "--last", "2", "--json"]) == 0
    last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["rank"] for each in last] == ["1", "1"]
    assert last[0]["at"] <= last[1]["at"]
    assert {each["text"] for each in last} == {"\ta tab, [brackets] and ümlaut", "an error"}


@pytest.mark.slow
def test_it_follows_a_job_to_its_end(tmp_path):
    job = start(tmp_path, "run", "-n", "2", "--job", "a", write(tmp_path), TEST_PAUSE="0.1")
    assert wait_for(lambda: (tmp_path / "runs/a" / FILE).exists(), 30)
    followed = subprocess.run(
        command("logs", "a", "--follow", "--rank", "0"),
        cwd=tmp_path, capture_output=True, text=True, timeout=60, env=marked(tmp_path, {}),
    )  # fmt: skip
    job.communicate()
    assert followed.returncode == 0, followed.stderr
    lines = [line for line in followed.stdout.splitlines() if line.startswith("[0] line")]
    assert lines == [f"[0] line {n} of 0" for n in range(1, 21)]


def make_run(tmp_path, *lines):
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"version": 1, "script": "a.py", "ranks": 2}))
    if lines:
        (folder / FILE).write_bytes(b"".join(lines))
    return folder


def test_torn_lines_are_passed_over_and_times_are_shown(tmp_path, capsys):
    make_run(tmp_path, b"10.5 0\tone\n", b"x 1\ttwo\n", b"no tab\n", b"11.5 server 1\tthree \xff\n", b"12.")
    assert main(["logs", "a", "--runs", str(tmp_path / "runs"), "--time"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[9:] for line in lines] == ["[0] one", "[server 1] three \ufffd"]
    assert lines[0][:8] == time.strftime("%H:%M:%S", time.localtime(10.5))


def test_commands_to_a_terminal_are_not_handed_on(tmp_path, capsys, monkeypatch):
    make_run(tmp_path, b"10.5 0\t\x1b[31mred\x1b[0m\ta\x1b]0;title\x07\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["logs", "a", "--runs", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out == "[0] \x1b[31mred\x1b[0m\ta\ufffd]0;title\ufffd\n"


def test_a_line_with_a_carriage_return_is_one(tmp_path, capsys):
    folder = make_run(tmp_path, b"10.5 0\t90%\r100%\n")
    (folder / "result.json").write_text('{"status": "done"}')
    for words in ([], ["--follow"]):
        assert main(["logs", "a", "--runs", str(tmp_path / "runs"), *words]) == 0
        assert capsys.readouterr().out == "[0] 90%\r100%\n"


# Words, and what the error says.
REFUSED = {
    "no such rank": (["--rank", "2"], "it has the ranks 0 to 1, server 1"),
    "no rank": (["--rank", "x"], "it has the ranks 0 to 1, server 1"),
    "a rank of 5,000 digits": (["--rank", "9" * 5000], "it has the ranks 0 to 1, server 1"),
    "no lines": (["--last", "0"], "it is no number of lines"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_error(case, tmp_path, capsys):
    words, found = REFUSED[case]
    make_run(tmp_path, b"10.5 0\tone\n", b"11.5 server 1\tthree\n")
    assert main(["logs", "a", "--runs", str(tmp_path / "runs"), *words]) == 2
    assert found in capsys.readouterr().err


def test_a_job_without_output_says_where_it_may_be(tmp_path, capsys):
    make_run(tmp_path)
    assert main(["logs", "a", "--runs", str(tmp_path / "runs")]) == 2
    assert "there is no output.log in it" in capsys.readouterr().err


def test_a_file_that_is_full_or_cant_be_written_ends_no_job(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_MOST_BYTES", 100)
    log = OutputLog(tmp_path)
    for number in range(20):
        log.add(0, f"line {number}")
    log.close()
    lines = [line.text for line in read_lines(tmp_path / FILE)]
    assert lines[0] == "line 0"
    assert lines[-1].startswith("paceline: the file is full")
    assert len(lines) < 10
    nowhere = OutputLog(tmp_path / "nowhere")
    nowhere.add(0, "x")
    assert nowhere.is_over


def test_two_supervisors_write_whole_lines(tmp_path):
    def write_many(source):
        log = OutputLog(tmp_path)
        for number in range(500):
            log.add(source, f"{number} " + "x" * 300)
        log.close()

    threads = [threading.Thread(target=write_many, args=(source,)) for source in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for source in ("0", "1"):
        lines = list(read_lines(tmp_path / FILE, source))
        assert [line.text for line in lines] == [f"{number} " + "x" * 300 for number in range(500)]
