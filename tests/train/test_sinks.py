"""Event sinks: they get what the file gets, in every kind of run, and none can end or hold up the job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from paceline.nouns.errors import UsageError, WorkloadError
from paceline.train import sinks as module
from paceline.train.event_log import Events, open_events
from paceline.train.sinks import close_sinks, open_sinks

from support.jobs import LOOP, STEPS, events, marked, paceline, send, start, wait_for
from support.sinks import received, sink_file

THREE_PARTS = re.compile(r"^.+\n  found: .+\n  fix: .+$", re.DOTALL)


def written(folder, job="a"):
    """All events of a run."""
    return [json.loads(line) for line in (folder / "runs" / job / "events.jsonl").read_text().splitlines()]


def run(folder, *words, **environment):
    ended = paceline(folder, "run", *words, TEST_SINK=str(folder / "sink"), **environment)
    assert ended.code == 0, ended.err
    return ended


class Keeps:
    """Keeps its events; may wait first, and raise afterwards."""

    def __init__(self, before=None, error=None):
        self.before = before
        self.error = error
        self.got = []
        self.closed = 0

    def write(self, event):
        if self.before is not None:
            self.before.wait()
        self.got.append(event)
        if self.error is not None:
            raise self.error

    def close(self):
        self.closed += 1


def numbered(count):
    return [{"event": "step", "step": number} for number in range(1, count + 1)]


def test_a_sink_gets_what_the_file_gets(tmp_path):
    sink = Keeps()
    events = open_events(0, tmp_path, [lambda run_dir: sink])
    for event in [{"event": "start"}, *numbered(3)]:
        events.write(event)
    events.close()
    events.close()
    assert sink.got == [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event.get("step") for event in sink.got] == [None, 1, 2, 3]
    assert sink.closed == 1


def test_no_rank_but_the_first_makes_sinks(tmp_path):
    events = open_events(1, tmp_path, [lambda run_dir: pytest.fail("made")])
    events.write({"event": "start"})
    events.close()
    assert list(tmp_path.iterdir()) == []


def test_a_sink_of_a_file_run_alone_gets_events_without_a_file():
    folders = []
    sink = Keeps()
    events = open_events(0, None, [lambda run_dir: folders.append(run_dir) or sink])
    events.write({"event": "start"})
    events.close()
    assert folders == [None]
    assert [event["event"] for event in sink.got] == ["start"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_sink_that_would_end_its_process_is_left_out(error, capsys):
    bad, good = Keeps(error=error), Keeps()
    events = Events(None, sinks=open_sinks([lambda _: bad, lambda _: good], None))
    for event in numbered(5):
        events.write(event)
    events.close()
    assert [event["step"] for event in bad.got] == [1]
    assert bad.closed == 1, "it may still write what it has"
    assert [event["step"] for event in good.got] == [1, 2, 3, 4, 5]
    why, counted = capsys.readouterr().err.splitlines()
    assert why.startswith(f"paceline: the sink Keeps gets no more events: write('step') raised {type(error).__name__}")
    assert counted == "paceline: the sink Keeps has ended; 5 of 5 events did not arrive"


class IsAway(Keeps):
    """Its server is away for some events."""

    address = "http://me:secret@127.0.0.1:9/api?token=secret"

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def write(self, event):
        if event["step"] in self.steps:
            raise ConnectionError(f"can't reach {self.address}\nnow")
        super().write(event)


def test_a_sink_whose_server_comes_back_gets_the_later_events(capsys):
    away, good = IsAway({2, 3}), Keeps()
    events = Events(None, sinks=open_sinks([lambda _: away, lambda _: good], None))
    for event in numbered(5):
        events.write(event)
    events.close()
    assert [event["step"] for event in away.got] == [1, 4, 5]
    assert [event["step"] for event in good.got] == [1, 2, 3, 4, 5]
    assert away.closed == 1
    why, counted = capsys.readouterr().err.splitlines()
    who = "paceline: the sink IsAway (http://127.0.0.1:9/api)"
    said = "write('step') raised ConnectionError: can't reach http://127.0.0.1:9/api now"
    assert why == f"{who} has lost an event: {said}; training goes on, the next are tried"
    assert counted == f"{who} has ended; 2 of 5 events did not arrive"


def test_a_sink_that_cant_be_closed_is_told(capsys):
    class Unclosed(Keeps):
        def close(self):
            raise OSError("disk full")

    events = Events(None, sinks=open_sinks([lambda _: Unclosed()], None))
    events.close()
    assert "the sink Unclosed could not be closed: close() raised OSError: disk full" in capsys.readouterr().err


@pytest.fixture
def soon(monkeypatch):
    """Limits of a moment, and an event that a test sets where something hangs until then."""
    monkeypatch.setattr(module, "OPEN_S", 0.05)
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    go_on = threading.Event()
    yield go_on
    go_on.set()


def test_a_sink_whose_making_hangs_gets_its_events_later(soon, capsys):
    sink, good = Keeps(), Keeps()
    events = Events(None, sinks=open_sinks([lambda _: soon.wait() and sink, lambda _: good], None))
    for event in numbered(3):
        events.write(event)
    assert wait_for(lambda: len(good.got) == 3)
    assert sink.got == []
    soon.set()
    assert wait_for(lambda: len(sink.got) == 3)
    events.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "the sink <lambda> (sinks[0]) has not been made within 0.05 s; up to 1000 events wait for it" in line


def test_a_sink_that_is_never_made_is_given_up(soon, capsys):
    good = Keeps()
    events = Events(None, sinks=open_sinks([lambda _: soon.wait() and Keeps(), lambda _: good], None))
    for event in numbered(3):
        events.write(event)
    events.close()
    assert good.closed == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "(sinks[0]) did not end within 0.2 s, it waits in making it; 3 of 3 events did not arrive" in last


def test_a_sink_is_made_as_soon_as_its_server_is_there(soon, capsys):
    """It misses nothing that the queue holds."""
    sink, tries = Keeps(), []

    def make(_):
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("away")
        return sink

    events = Events(None, sinks=open_sinks([make], None))
    for event in numbered(3):
        events.write(event)
    assert wait_for(lambda: len(sink.got) == 3)
    events.close()
    assert sink.closed == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the sink make (sinks[0]) could not be made: ConnectionError: away; training goes on without it" in line


def test_a_package_that_takes_long_to_import_is_waited_for(soon, tmp_path, monkeypatch):
    """Whether it is there must be known before the first step."""
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(0.3)\nraise ImportError('not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(_):
        try:
            import slow_to_import  # noqa: F401
        except ImportError:
            raise UsageError("a", "b", "c") from None

    with pytest.raises(UsageError):
        open_sinks([make], None)


class Busy(Keeps):
    """Computes for longer than a sink that waits would have."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.compute()

    def compute(self):
        end_s = time.monotonic() + self.seconds
        while time.monotonic() < end_s:
            sum(range(1000))

    def write(self, event):
        self.compute()
        super().write(event)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux, which says what a thread does")
def test_a_sink_that_computes_has_more_time_than_one_that_waits(soon, capsys):
    """So on a busy machine a healthy one loses nothing."""
    events = Events(None, sinks=open_sinks([lambda _: Busy(0.3), lambda _: soon.wait() and Keeps()], None))
    assert [type(each.sink) for each in events.sinks] == [Busy, type(None)]
    events.write({"event": "start"})
    events.close()
    said = capsys.readouterr().err
    assert "the sink Busy" not in said
    assert said.count("(sinks[1])") == 2, said


def test_settings_that_are_refused_late_leave_the_sink_out(soon, capsys):
    def refuse(_):
        soon.wait()
        raise UsageError("can't write there", "there is no key", "c")

    events = Events(None, sinks=open_sinks([refuse], None))
    soon.set()
    assert wait_for(lambda: events.sinks[0].is_left_out)
    events.write({"event": "start"})
    events.close()
    _, why, counted = capsys.readouterr().err.splitlines()
    assert why.endswith("(sinks[0]) is left out: can't write there: there is no key; training goes on")
    assert counted == "paceline: the sink refuse (sinks[0]) has ended; 1 of 1 events did not arrive"


def test_sink_call_that_does_not_return_is_told_during_the_job(soon, monkeypatch, capsys):
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    stuck = Keeps(before=soon)
    events = Events(None, sinks=open_sinks([lambda _: stuck], None))
    events.write({"event": "start"})
    assert wait_for(lambda: events.sinks[0].events.empty())
    for event in numbered(3):
        events.write(event)
    assert "the sink Keeps has not come back from write('start') for 0 s" in capsys.readouterr().err
    soon.set()
    events.close()


def test_a_sink_that_waits_holds_up_nothing(monkeypatch, capsys):
    """While it waits, events beyond the queue are dropped; what comes after it caught up is not."""
    monkeypatch.setattr(module, "QUEUE_EVENTS", 10)
    go_on = threading.Event()
    sink = Keeps(before=go_on)
    events = Events(None, sinks=open_sinks([lambda _: sink], None))
    began = time.monotonic()
    for event in numbered(1000):
        events.write(event)
    assert time.monotonic() - began < 20, "the sink waits without end"
    go_on.set()
    assert wait_for(lambda: len(sink.got) >= 10 and events.sinks[0].events.empty())
    events.write({"event": "end"})
    events.close()
    steps = [event["step"] for event in sink.got[:-1]]
    assert steps[:10] == list(range(1, 11))
    assert len(steps) <= 11, "those in the queue, and the one that it had taken"
    assert sink.got[-1]["event"] == "end"
    assert capsys.readouterr().err.count("the sink Keeps lags 10 events behind") == 1


def test_a_sink_that_never_ends_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    stuck, good = Keeps(before=threading.Event()), Keeps()
    events = Events(None, sinks=open_sinks([lambda _: stuck, lambda _: good], None))
    events.write({"event": "start"})
    began = time.monotonic()
    events.close()
    assert 0.2 <= time.monotonic() - began < 4.5, "one that computes has five"
    assert good.closed == 1
    said = capsys.readouterr().err
    assert "the sink Keeps did not end within 0.2 s, it waits in write('start'); 1 of 1 events did not arrive" in said
    stuck.before.set()


def test_a_sink_that_cant_be_made_holds_up_no_other(soon, capsys):
    good = Keeps()

    def divide(_):
        return 1 / 0

    sinks = open_sinks([lambda _: good, divide], None)
    assert [each.sink for each in sinks] == [good, None]
    close_sinks(sinks)
    said = capsys.readouterr().err
    assert "the sink divide (sinks[1]) could not be made: ZeroDivisionError" in said, "it says which"


def test_sink_that_refuses_its_settings_ends_the_job_at_start():
    def refuse(_):
        raise UsageError("a", "b", "c")

    with pytest.raises(UsageError):
        open_sinks([refuse], None)


class OnlyWrites:
    def write(self, event):
        """Has no close."""


@pytest.mark.parametrize(("value", "lacks"), [(None, "write"), (open, "write"), (OnlyWrites(), "close")])
def test_what_is_no_sink_is_refused(value, lacks):
    def unfit(_):
        return value

    with pytest.raises(WorkloadError, match=rf"unfit \(sinks\[1\]\) returned .*, which has no {lacks}") as caught:
        open_sinks([Keeps, unfit], None)
    assert THREE_PARTS.match(str(caught.value))


def test_a_file_run_alone_has_sinks(tmp_path):
    file = sink_file(tmp_path)
    environment = {**marked(tmp_path, {}), "TEST_SINK": str(tmp_path / "sink")}
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((made, *got, closed),) = received(tmp_path)
    assert made["made"] is None
    assert closed == {"closed": True}, "the loop closes no job: its sinks are closed at the end all the same"
    assert [event["event"] for event in got] == ["start", *["step"] * STEPS]
    assert done.stderr == ""


def test_sinks_are_closed_if_the_event_file_cannot_be_opened(tmp_path):
    sink = "type('Sink', (), {'write': print, 'close': lambda self: print('closed')})"
    code = "from paceline.train.event_log import Events, open_sinks; Events(__import__('pathlib').Path('none'), "
    code += f"sinks=open_sinks([lambda run_dir: {sink}()], None))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "closed\n"
    assert "the job should write its events to none/events.jsonl" in done.stderr


@pytest.mark.slow
def test_sinks_get_the_events_of_the_file_over_stops_and_resumes(tmp_path):
    file = sink_file(tmp_path)
    where = {"TEST_SINK": str(tmp_path / "sink"), "TEST_PAUSE": "0.2"}
    process = start(tmp_path, "run", "-n", "2", "--job", "a", "--checkpoint-every", "3", file, **where)
    assert wait_for(lambda: len(events(tmp_path / "runs" / "a", "step")) >= 4, 60)
    send(process, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    run(tmp_path, "-n", "2", "--job", "a", "--resume", file)
    first, second = received(tmp_path)
    for made, *got, closed in (first, second):
        assert (made["made"], made["rank"]) == ("a", "0")
        assert closed == {"closed": True}
        assert got[0]["event"] == "start"
        assert got[-1]["event"] == "end"
    assert first[1:-1] + second[1:-1] == written(tmp_path)
    assert {"stopped", "checkpoint", "resumed"} <= {event.get("event") for event in first + second}


@pytest.mark.slow
def test_a_failing_sink_ends_no_job(tmp_path):
    file = sink_file(tmp_path, "Fails, Record, lambda run_dir: 1 / 0")
    ended = run(tmp_path, "-n", "2", "--job", "a", file)
    assert len(events(tmp_path / "runs" / "a", "step")) == STEPS
    assert (ended.out + ended.err).count("the sink Fails has lost an event") == 1
    assert "write('step') raised ConnectionError: the server is away" in ended.out + ended.err
    assert f"the sink Fails has ended; 1 of {len(written(tmp_path))} events did not arrive" in ended.out + ended.err
    assert "the sink <lambda> (sinks[2]) could not be made: ZeroDivisionError" in ended.out + ended.err
    kinds = [event["event"] for event in written(tmp_path)]
    assert (tmp_path / "sink-fails").read_text().split() == [*kinds, "closed"], "it may come back"
    assert received(tmp_path)[0][1:-1] == written(tmp_path)


@pytest.mark.slow
def test_sinks_of_a_job_that_fails_are_closed(tmp_path):
    hook = "    if job is not None and job.step_number == 4: raise ValueError('the cause')"
    file = sink_file(tmp_path)
    file.write_text(file.read_text().replace('    """Faults go here."""', hook))
    ended = paceline(tmp_path, "run", "--job", "a", file, TEST_SINK=str(tmp_path / "sink"))
    assert ended.code == 1
    assert "the cause" in ended.err
    ((_, *got, closed),) = received(tmp_path)
    assert closed == {"closed": True}
    assert got == written(tmp_path)


@pytest.mark.slow
def test_sinks_of_servers_when_worker_0_is_replaced(tmp_path):
    """The new process makes its own; the events at its start are marked, and no step is sent twice."""
    file = sink_file(tmp_path)
    where = {"TEST_SINK": str(tmp_path / "sink"), "TEST_PAUSE": "0.3"}
    process = start(tmp_path, "run", "-n", "2", "--plan", "server=1", "--job", "a", file, **where)
    assert wait_for(lambda: (tmp_path / "sink").exists() and len([*received(tmp_path), []][0]) >= 6, 60)
    os.kill(received(tmp_path)[0][0]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    first, second = received(tmp_path)
    assert {"closed": True} not in first
    assert second[-1] == {"closed": True}
    assert second[1]["event"] == "start"
    assert second[1]["takes_over"] is True
    assert [row for row in first + second if "event" in row] == written(tmp_path)
    steps = [row["step"] for row in first + second if row.get("event") == "step"]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_tensorboard_shows_the_losses_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    file = sink_file(tmp_path, "Record, paceline.TensorBoard")
    where = {"TEST_SINK": str(tmp_path / "sink")}
    words = ("--job", "a", "--checkpoint-every", "3")
    # It fails after step 8, so steps are taken again from a checkpoint before that.
    fail = "        if job.step_number == 8:\n            time.sleep(1)\n            raise BaseException('the cause')\n"
    loop = LOOP.replace("        time.sleep", f"{fail}        time.sleep")
    file.write_text(file.read_text().replace(LOOP, loop))
    broken = paceline(tmp_path, "run", *words, file, **where)
    assert broken.code == 1
    file.write_text(file.read_text().replace(loop, LOOP))
    run(tmp_path, *words, "--resume", file)
    curves = read_curves(tmp_path / "runs" / "a" / "tensorboard")
    lines = {event["step"]: event for event in events(tmp_path / "runs" / "a", "step")}
    assert len(events(tmp_path / "runs" / "a", "step")) > STEPS
    steps = [step for step, _ in curves["train/loss"]]
    assert steps == list(range(1, STEPS + 1)), "steps that were taken again replace the old ones"
    for name in ("loss", "gradient_norm", "seconds", "sent_bytes", "memory_bytes"):
        for step, value in curves[f"train/{name}"]:
            assert value == pytest.approx(lines[step][name], rel=1e-6)


def read_curves(folder):
    """The scalars in a folder as TensorBoard reads them, in a process of their own for its many warnings."""
    code = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "read = EventAccumulator(sys.argv[1]).Reload()\n"
        "tags = read.Tags()['scalars']\n"
        "print(json.dumps({tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in tags}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_tensorboard_draws_evaluations(tmp_path):
    pytest.importorskip("tensorboard")
    loop = LOOP + "    job.evaluate(Numbers())\n"
    run(tmp_path, "--job", "a", sink_file(tmp_path, "paceline.TensorBoard", loop))
    (evaluation,) = events(tmp_path / "runs" / "a", "evaluation")
    ((step, value),) = read_curves(tmp_path / "runs" / "a" / "tensorboard")["evaluation/loss"]
    assert step == evaluation["step"] == STEPS
    assert value == pytest.approx(evaluation["loss"])


@pytest.mark.slow
def test_without_the_package_tensorboard_nothing_starts(tmp_path):
    (tmp_path / "hidden" / "tensorboard").mkdir(parents=True)
    (tmp_path / "hidden" / "tensorboard" / "__init__.py").write_text("raise ImportError('not there')\n")
    file = sink_file(tmp_path, "paceline.TensorBoard")
    ended = paceline(tmp_path, "run", "-n", "2", file, PYTHONPATH=str(tmp_path / "hidden"))
    assert ended.code == 2
    assert "the package tensorboard is not installed" in ended.err
    assert "fix: pip install 'paceline[tensorboard]'" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("plan", "--explain-memory"), marks=pytest.mark.complete),  # tests/train/test_job_log.py plans
        ("verify", "--plan", "replicate=2"),
    ],
)
def test_commands_that_train_nothing_make_no_sinks(tmp_path, words):
    file = sink_file(tmp_path)
    ended = paceline(tmp_path, *words, file, TEST_SINK=str(tmp_path / "sink"))
    assert ended.code == 0, ended.out + ended.err
    assert not (tmp_path / "sink").exists()
