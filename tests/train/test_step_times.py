"""Where a step's time goes: each moment counts once, for the right kind of work, on every axis."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest
import torch

import paceline
from paceline.comm.step_times import COMMUNICATION, FORWARD, OTHER, TIMES, StepTimes, Timed, timed_data
from paceline.run.read.times import files_of, read_steps
from paceline.train.times_file import TimesFile

from support.jobs import events, write_workload
from support.jobs import paceline as command

PAUSE_S = 0.004
SLEEPS = f"    time.sleep({PAUSE_S})\n"  # in each forward pass
# Sleeps in its own code after each step, and evaluates and saves once.
LOOP = f"""
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        time.sleep({PAUSE_S})
        if job.step_number == 10:
            job.evaluate(Numbers())
            job.save("saved")
"""
# Flags, the kinds that steps must have, and those that they can't.
AXES = {
    "replicate": (["--plan", "replicate=2"], {"communication replicate"}, {"bubble"}),
    "gloo": (["--plan", "replicate=2,transport=gloo"], {"communication replicate"}, {"bubble"}),
    "shard": (["--plan", "shard=2"], {"communication shard"}, {"bubble"}),
    "tensor": (["--plan", "tensor=2"], {"communication tensor"}, {"bubble"}),
    "pipeline": (["--plan", "pipeline=2"], {"communication pipeline", "bubble"}, set()),
    "servers": (["--plan", "server=1,replicate=2"], {"communication server"}, {"bubble"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_the_kinds_add_up_to_the_time_that_passes(axis, tmp_path):
    flags, expected, excluded = AXES[axis]
    file = write_workload(tmp_path, loop=LOOP, hook="" if axis in ("tensor", "pipeline") else SLEEPS)
    if axis == "tensor":  # which splits no small layers
        text = file.read_text()
        file.write_text(text.replace("Linear(4, 8)", "Linear(4, 4096)").replace("Linear(8, 1)", "Linear(4096, 1)"))
    done = command(tmp_path, "run", "--job", "a", "--checkpoint-every", "10", *flags, file)
    assert done.code == 0, done.err
    run_dir = tmp_path / "runs/a"
    assert list(files_of(run_dir)) == [0, 1]
    for path in files_of(run_dir).values():
        steps = [step for step in read_steps(path) if step.step is not None]
        assert [step.step for step in steps] == list(range(1, 21))
        for before, after in itertools.pairwise(steps):
            assert after.begin_ns == before.begin_ns + before.ns  # without a gap, and without an overlap
        total: dict[str, int] = {}
        for step in steps[1:]:
            for kind, ns in step.by_kind.items():
                total[kind] = total.get(kind, 0) + ns
        assert expected <= total.keys()
        assert not excluded & total.keys()
        assert {
            "data",
            "forward",
            "backward",
            "optimizer",
            "checkpoint",
            "evaluation",
            "other",
        } <= total.keys() | excluded
        assert total["other"] / 1e9 > 0.9 * 19 * PAUSE_S
        if axis not in ("tensor", "pipeline"):
            assert total["forward"] / 1e9 > 0.9 * 19 * PAUSE_S
            assert total["backward"] / 1e9 < 19 * PAUSE_S
    # By another clock: events have the wall clock of rank 0.
    written = events(run_dir, "step")
    passed_s = written[-1]["at"] - written[0]["at"]
    split_s = sum(sum(event["times"].values()) for event in written[1:])
    assert split_s == pytest.approx(passed_s, rel=0.02, abs=0.003)


def test_a_loop_of_its_own_has_the_same_kinds(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            time.sleep(0.001)
            return torch.full((4,), float(index))

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=8)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    job.times_file = TimesFile(tmp_path, 0)
    for _ in job.epochs(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            time.sleep(0.005)
            job.backward(loss)
            optimizer.step()
            time.sleep(0.003)
    job.close()
    steps = [step for step in read_steps(tmp_path / "times/0.jsonl") if step.step is not None]
    assert len(steps) == 8
    # A step ends when the loop has its next batch, and a pass ends without one.
    counted = (*steps[1:3], *steps[4:7])
    for step in counted:
        assert step.by_kind["forward"] > 5e6
        assert step.by_kind["data"] > 8e6
        assert step.by_kind["other"] > 3e6
    # A busy machine lengthens one step. A sleep that is counted for the wrong kind lengthens each.
    for kind in ("backward", "optimizer"):
        assert 0 < min(step.by_kind[kind] for step in counted) < 3e6


@pytest.fixture
def times():
    before, spans = TIMES.kind, TIMES.spans
    TIMES.restart()
    yield TIMES
    TIMES.restart(before)
    TIMES.spans = spans


def test_what_is_waited_for_inside_is_taken_off(times):
    times.spans = []
    with Timed(FORWARD):
        time.sleep(0.002)
        with Timed(f"{COMMUNICATION} shard", "all_gather"):
            time.sleep(0.01)
    found = times.take()
    assert found[FORWARD] >= 0.002e9
    assert found[f"{COMMUNICATION} shard"] >= 0.01e9
    inner, outer = times.spans
    assert found[FORWARD] == pytest.approx(outer.end_ns - outer.begin_ns - (inner.end_ns - inner.begin_ns), abs=1e6)
    assert (inner.kind, inner.name) == (f"{COMMUNICATION} shard", "all_gather")
    assert outer.begin_ns < inner.begin_ns < inner.end_ns < outer.end_ns
    assert times.take().keys() == {OTHER}


def test_an_evaluation_has_its_collectives(times):
    with Timed("evaluation"), Timed(FORWARD), Timed(f"{COMMUNICATION} data", "all_reduce"):
        time.sleep(0.002)
    assert times.take().keys() == {OTHER, "evaluation"}


def test_an_error_ends_the_kind(times):
    with pytest.raises(ValueError, match="x"), Timed(FORWARD):
        raise ValueError("x")
    assert times.kind == OTHER


def test_other_threads_do_not_count(times):
    thread = threading.Thread(target=lambda: Timed(FORWARD).__enter__())
    thread.start()
    thread.join()
    times.switch("data")
    assert times.kind == "data"
    assert FORWARD not in times.take()


def test_the_time_of_a_batch_is_data(times):
    def batches():
        for number in range(3):
            time.sleep(0.002)
            yield number

    assert list(timed_data(batches())) == [0, 1, 2]
    assert times.take()["data"] >= 0.006e9


def test_switched_off_it_measures_nothing():
    times = StepTimes()
    times.is_on = False
    assert times.enter(FORWARD) is None


def test_step_times_file_continues_after_a_truncated_line(tmp_path):
    (tmp_path / "times").mkdir()
    (tmp_path / "times/3.jsonl").write_text(
        '{"version":1,"rank":3}\n{"step":1,"begin_ns":0,"ns":{"data":5}}\n{"step":2,"beg'
    )
    file = TimesFile(tmp_path, 3)
    file.end_step(2)
    file.close()
    steps = list(read_steps(tmp_path / "times/3.jsonl"))
    assert [step.step for step in steps] == [1, 2, None]
    assert steps[1].process.pid != steps[0].process.pid


def test_a_full_disk_ends_no_training(tmp_path, monkeypatch):
    file = TimesFile(tmp_path, 0)
    before = (tmp_path / "times/0.jsonl").stat().st_size

    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

        def tell(self):
            return before

        def close(self):
            file.closed = True

    file.file.close()
    file.file = Full()
    assert file.end_step(1).keys() >= {OTHER}
    file.close()
    assert file.closed
    assert (tmp_path / "times/0.jsonl").stat().st_size == before


def test_step_times_spans_stop_at_a_count_and_at_a_file_size(times, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.comm.step_times.MOST_SPANS", 3)
    monkeypatch.setattr("paceline.train.times_file._MOST_BYTES", 400)
    file = TimesFile(tmp_path, 0)
    for number in range(1, 6):
        for _ in range(10):
            with Timed(FORWARD):
                pass
        file.end_step(number)
        file.flush()
    file.close()
    steps = [step for step in read_steps(tmp_path / "times/0.jsonl") if step.step is not None]
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert len(steps[0].spans) == 3
    assert len(steps[-1].spans) == 0


def test_lines_wait_half_a_second_at_most(tmp_path, monkeypatch):
    file = TimesFile(tmp_path, 0)
    path = tmp_path / "times/0.jsonl"
    monkeypatch.setattr("paceline.train.times_file._FLUSH_NS", 10**12)
    file.end_step(1)
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None]
    monkeypatch.setattr("paceline.train.times_file._FLUSH_NS", 0)
    file.end_step(2)
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None, 1, 2]
    file.close()
