"""What Kubeflow Trainer and Slurm are told of a job: by a server and a program that take it."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time

import pytest

from paceline.nouns.errors import UsageError
from paceline.train import scheduler_progress
from paceline.train.scheduler_progress import Progress, SlurmComment, TrainJobStatus, scheduler_sinks
from paceline.train.sinks import close_sinks, open_sinks

from support.jobs import paceline, write_workload

START = {"event": "start", "total_steps": 200, "at": 0.0}


def step(number, at, loss=0.25):
    return {"event": "step", "step": number, "loss": loss, "at": at}


def progress(*events):
    found = Progress()
    for event in events:
        found.take(event)
    return found


# Events; percentage, seconds that are left.
CASES = {
    "begun": ([START], 0, None),
    "half": ([START, step(1, 10.0), step(101, 60.0)], 50, 50),
    "resumed": ([START, step(101, 10.0), step(151, 20.0)], 75, 10),
    "too new to say": ([START, step(1, 10.0), step(2, 10.1)], 1, None),
    "all steps, not the end": ([START, step(1, 10.0), step(200, 60.0)], 99, 0),
    "the end": ([START, step(1, 10.0), step(200, 60.0), {"event": "end", "at": 61.0}], 100, 0),
    "a clock that is set meanwhile": (
        [START, step(1, 10.0), {**step(101, 3660.0), "times": {"forward": 20.0, "data": 30.0}}],
        50,
        50,
    ),
    "stopped": (
        [START, step(1, 0.0), step(100, 9.9), {"event": "stopped", "at": 9.9}, {"event": "end", "at": 9.9}],
        50,
        10,
    ),
    "of unknown length": ([{**START, "total_steps": 0}, step(1, 0.0), step(9, 9.0)], None, None),
    "its length is told later": (
        [{**START, "total_steps": 0}, {"event": "own_batches", "total_steps": 20}, step(5, 1.0)],
        25,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_how_far_a_job_is(case):
    events, percentage, remaining_s = CASES[case]
    found = progress(*events)
    assert (found.percentage, found.remaining_s) == (percentage, remaining_s)


@pytest.fixture
def server():
    """A controller on loopback: what it got, and the status with which it answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.headers["Authorization"], json.loads(body)))
            self.server.paths.append(self.path)
            self.send_response(self.server.status)
            self.send_header("Location", self.server.location)
            self.end_headers()

        def do_GET(self):
            self.server.paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.got, served.paths, served.status, served.location = [], [], 200, "/"
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def environment_of(server, tmp_path):
    (tmp_path / "token").write_text("first\n")
    url = f"http://127.0.0.1:{server.server_address[1]}/status"
    return {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token")}


@pytest.mark.slow
def test_a_trainjob_is_told_by_rank_0_alone(server, tmp_path):
    file = write_workload(tmp_path)
    done = paceline(tmp_path, "run", "-n", "2", "--job", "a", file, **environment_of(server, tmp_path))
    assert done.code == 0, done.err
    tokens, bodies = zip(*server.got, strict=True)
    assert set(tokens) == {"Bearer first"}
    assert 2 <= len(bodies) < 10  # not for each of the 20 steps
    last = bodies[-1]["trainerStatus"]
    assert last["progressPercentage"] == 100
    assert last["metrics"][0]["name"] == "loss"
    assert float(last["metrics"][0]["value"]) > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", last["lastUpdatedTime"])
    assert bodies[0]["trainerStatus"]["progressPercentage"] < 100


def test_a_token_that_rotates_and_numbers_of_all_kinds(server, tmp_path, monkeypatch):
    sink = TrainJobStatus(environment_of(server, tmp_path), tmp_path)
    for event in (START, step(1, 0.0), {"event": "evaluation", "step": 1, "accuracy": 0.5, "at": 1.0}):
        sink.write(event)
    (tmp_path / "token").write_text("second")
    sink.write({"event": "logged", "step": 1, "lr": 0.125, "at": 1.0})
    sink.close()
    assert [token for token, _ in server.got] == ["Bearer first", "Bearer second"]
    metrics = {each["name"]: each["value"] for each in server.got[-1][1]["trainerStatus"]["metrics"]}
    assert metrics == {"loss": "0.25", "evaluation/accuracy": "0.5", "lr": "0.125"}


@pytest.mark.parametrize("status", [401, 429, 500])
def test_a_controller_that_refuses_ends_nothing(status, server, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_progress, "_TRAINER_EVERY_S", 0.0)
    server.status = status
    sink = TrainJobStatus(environment_of(server, tmp_path), None)
    sink.write(step(1, 0.0))
    (tmp_path / "token").unlink()
    sink.write(step(2, 0.0))
    server.status = 200
    (tmp_path / "token").write_text("third")
    sink.close()
    assert len(server.got) == 2


def test_a_token_follows_no_redirect(server, tmp_path):
    environment = environment_of(server, tmp_path)
    server.status, server.location = 302, environment["KUBEFLOW_TRAINER_SERVER_URL"] + "/elsewhere"
    sink = TrainJobStatus(environment, None)
    sink.write(step(1, 0.0))
    assert [path for path in server.paths if path != "/status"] == []
    assert len(server.got) == 1


# Variables, and what is refused.
REFUSED = {
    "no token": ({"KUBEFLOW_TRAINER_SERVER_URL": "https://a/status"}, "KUBEFLOW_TRAINER_SERVER_TOKEN is not set"),
    "no encryption": (
        {"KUBEFLOW_TRAINER_SERVER_URL": "http://controller/status", "KUBEFLOW_TRAINER_SERVER_TOKEN": "t"},
        "without encryption",
    ),
    "no address": (
        {"KUBEFLOW_TRAINER_SERVER_URL": "file:///etc/passwd", "KUBEFLOW_TRAINER_SERVER_TOKEN": "t"},
        "without encryption",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_leak_the_token_is_refused(case):
    environment, found = REFUSED[case]
    with pytest.raises(UsageError, match=found):
        TrainJobStatus(environment, None)


@pytest.mark.parametrize("case", REFUSED)
def test_a_controller_without_what_it_needs_ends_no_job(case, capfd):
    environment, found = REFUSED[case]
    sinks = open_sinks(scheduler_sinks(environment), None)
    assert [each.sink for each in sinks] == [None]
    close_sinks(sinks)
    assert found in capfd.readouterr().err


SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then
    if [ {status} = 2 ]; then exit 1; fi
    printf '%s\n' 'JobId=77 JobName=a AdminComment=x {comment} StdErr=/tmp/a'
    exit 0
fi
printf '%s|' "$@" >> {log}
echo >> {log}
exit {status}
"""


def scontrol(folder, status=0, comment="Comment=(null)"):
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(SCONTROL.format(log=folder / "log", status=status, comment=comment))
    program.chmod(0o755)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 1])
def test_slurms_comment_has_the_step(status, tmp_path):
    program = scontrol(tmp_path / "bin", status)
    path = f"{program.parent}:/usr/bin:/bin"
    done = paceline(tmp_path, "run", "--job", "a-b", write_workload(tmp_path), SLURM_JOB_ID="77", PATH=path)
    assert done.code == 0, done.err
    lines = (program.parent / "log").read_text().splitlines()
    assert len(lines) == 2  # the first step, and the end
    assert re.fullmatch(r"update\|JobId=77\|Comment=paceline a-b: step 1/20, loss [\d.]+\|", lines[0])
    assert re.fullmatch(r"update\|JobId=77\|Comment=paceline a-b: step 20/20, loss [\d.]+, done\|", lines[1])


# What `scontrol show job` says, and how often the comment is changed.
COMMENTS = {
    "Comment=paceline project": 0,
    "": 2,
    "Comment=": 2,
    "Comment=paceline b: step 3/9, loss 1": 2,
    "Comment=project 12": 0,
}


@pytest.mark.parametrize("comment", COMMENTS)
def test_a_comment_of_somebody_else_stays(comment, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_progress, "_SLURM_EVERY_S", 0.0)
    program = scontrol(tmp_path / "bin", comment=comment)
    sink = SlurmComment("77", str(program), None)
    sink.write(step(1, 0.0))
    sink.write(step(2, 0.0))
    log = program.parent / "log"
    assert (log.read_text().count("update") if log.exists() else 0) == COMMENTS[comment]


def test_where_slurm_does_not_answer_no_comment_is_changed(tmp_path):
    program = scontrol(tmp_path / "bin", status=2, comment="Comment=project 12")
    sink = SlurmComment("77", str(program), None)
    sink.write(step(1, 0.0))
    assert not (program.parent / "log").exists()
    assert sink.is_free is None  # it is asked again


def test_scontrol_that_hangs_is_given_up(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(scheduler_progress, "_LIMIT_S", 0.2)
    sink = SlurmComment("7", str(program), None)
    began_s = time.monotonic()
    sink.write(step(1, 0.0))
    assert time.monotonic() - began_s < 50, "it was waited for"


def test_without_a_scheduler_there_is_no_sink(tmp_path):
    program = scontrol(tmp_path / "bin")
    assert scheduler_sinks({"PATH": str(program.parent)}) == []
    assert scheduler_sinks({"PATH": "/nowhere", "SLURM_JOB_ID": "7"}) == []
    assert scheduler_sinks({"PATH": str(program.parent), "SLURM_JOB_ID": "7; rm"}) == []
    assert [made.__name__ for made in scheduler_sinks({"PATH": str(program.parent), "SLURM_JOB_ID": "7"})] == [
        "SlurmComment"
    ]
