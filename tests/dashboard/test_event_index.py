"""Reading events into columns: what counts, what is torn, and files that change while they are read."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import numpy as np
import pytest

from paceline.dashboard.charts import curves_of, decimated
from paceline.nouns.step_record import StepRecord
from paceline.run.read.event_columns import EventIndex
from paceline.run.read.runs import read_details

from support.dashboards import start_event, step_event, write_events


def read(path) -> EventIndex:
    index = EventIndex(path)
    while True:
        index.read_on(1.0)
        if index.is_complete:
            return index


def test_event_index_counts_repeated_steps_once_by_last_value(tmp_path):
    path = tmp_path / "events.jsonl"
    again = [{"event": "resumed", "at": 1.0, "step": 2, "position": 64, "path": "x"}]
    again += [step_event(number, loss=10.0 * number) for number in (3, 4)]
    write_events(path, [start_event(5), *(step_event(number, loss=float(number)) for number in range(1, 6)), *again])
    curve = curves_of(read(path), 100)["loss"]
    # The fifth step is from before the job went back: it has not been taken again.
    assert curve.step.tolist() == [1, 2, 3, 4]
    assert curve.mean.tolist() == [1, 2, 30, 40]


def test_a_point_has_the_mean_and_the_bounds_of_its_steps(tmp_path):
    steps = np.arange(1.0, 1001.0)
    values = np.sin(steps)
    values[500] = 77.0
    curve = decimated(steps, values, 10)
    assert len(curve.step) == 10
    assert curve.high.max() == 77.0, "a spike of one step must not be lost"
    assert curve.low.min() == values.min()
    first = values[: int(np.searchsorted(steps, curve.step[0])) + 1]
    assert curve.mean[0] == pytest.approx(first.mean())
    assert curve.step[-1] == 1000


def test_losses_that_are_not_finite_are_counted_and_are_gaps(tmp_path):
    path = tmp_path / "events.jsonl"
    losses = [1.0, math.nan, math.inf, 2.0]
    write_events(path, [start_event(4), *(step_event(number, loss=loss) for number, loss in enumerate(losses, 1))])
    curve = curves_of(read(path), 10)["loss"]
    assert curve.not_finite == 2
    assert np.isnan(curve.mean).tolist() == [False, True, True, False]


def test_few_points_of_many_losses_that_are_not_finite(tmp_path):
    values = np.full(1000, np.nan)
    values[:10] = 3.0
    curve = decimated(np.arange(1.0, 1001.0), values, 10)
    assert curve.not_finite == 990
    assert curve.mean[0] == 3.0
    assert np.isnan(curve.mean[1:]).all()
    assert np.isnan(curve.high[1:]).all()


def test_a_torn_last_line_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    whole = json.dumps(step_event(2, loss=5.0)) + "\n"
    write_events(path, [start_event(2), step_event(1), whole[:30]])
    index = read(path)
    assert index.count("step") == 1
    with path.open("a") as file:
        file.write(whole[30:])
    index.read_on(1.0)
    assert curves_of(index, 10)["loss"].mean.tolist() == [3.0, 5.0]


@pytest.mark.parametrize(
    "line",
    [
        "{torn\n", "[1, 2]\n", "null\n", '{"event": 3}\n', '{"no": "event"}\n', '{"event": "step"}\n', "\xff\xfe\n",
        '{"event": "step", "step": "seven", "at": 1.0}\n', '{"event": "step", "step": -1, "loss": 1}\n',
        "[" * 500 + "\n",
        '{"event": "logged", "step": "x", "lr": 1.0}\n', '{"event": "logged", "lr": 1.0}\n', "\n", "\r\n",
    ],
)  # fmt: skip
def test_lines_that_are_no_events_are_passed_over(tmp_path, line):
    path = tmp_path / "events.jsonl"
    write_events(path, [start_event(3), step_event(1), line, step_event(2), step_event(3)])
    found = curves_of(read(path), 10)
    assert found["loss"].step.tolist()[-3:] == [1, 2, 3]
    assert "lr" not in found


def test_the_loops_own_numbers_and_evaluations_have_curves(tmp_path):
    path = tmp_path / "events.jsonl"
    more = [
        {"event": "logged", "at": 1.0, "step": 2, "lr": 0.1, "logged_step": 7.0, "is_on": True, "name": "x"},
        {"event": "evaluation", "at": 1.0, "step": 2, "loss": 0.5},
        {"event": "logged", "at": 1.0, "step": 3, "lr": 0.2},
    ]
    write_events(path, [start_event(3), *(step_event(number) for number in (1, 2, 3)), *more])
    found = curves_of(read(path), 10)
    assert found["lr"].mean.tolist() == [0.1, 0.2]
    assert found["step"].mean.tolist() == [7.0]
    assert found["evaluation loss"].mean.tolist() == [0.5]
    assert not {"is_on", "name", "at"} & set(found)


def test_rates_are_left_out_where_they_say_nothing(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, [start_event(2), step_event(1), step_event(2)])
    found = curves_of(read(path), 10)
    assert found["samples per second"].mean.tolist() == [640.0, 640.0]
    assert "weight per second" not in found, "it is the number of samples"
    assert "gradient norm" not in found
    tokens = {"samples": 0, "weight": 4096.0}
    write_events(
        path, [start_event(2), step_event(1, **tokens), step_event(2, **tokens), *[step_event(3, **tokens)] * 3]
    )
    found = curves_of(read(path), 10)
    assert "samples per second" not in found
    assert found["weight per second"].mean[0] == 4096 / 0.05


def test_events_come_the_newest_first_by_kind(tmp_path):
    path = tmp_path / "events.jsonl"
    saved = [{"event": "checkpoint", "at": 1.0, "path": f"c{number}", "step": number} for number in range(5)]
    write_events(path, [start_event(2), step_event(1), *saved, step_event(2)])
    index = read(path)
    assert [event["step"] for event in index.events("checkpoint", 0, 2)] == [4, 3]
    assert [event["step"] for event in index.events("checkpoint", 3, 9)] == [1, 0]
    assert [event["event"] for event in index.events(None, 0, 99)] == ["checkpoint"] * 5 + ["start"]
    assert index.count(None) == 6
    assert index.events("unknown", 0, 9) == []


def test_another_run_under_the_same_name_is_read_anew(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, [start_event(9), *(step_event(number) for number in range(1, 10))])
    index = read(path)
    path.unlink()
    index.read_on(1.0)
    assert index.count("step") == 0
    write_events(path, [start_event(1), step_event(1, loss=8.0)])
    index.read_on(1.0)
    assert curves_of(index, 10)["loss"].mean.tolist() == [8.0]


def test_before_all_is_read_some_of_the_rest_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.nouns.reading._READ_BYTES", 4096)
    path = tmp_path / "events.jsonl"
    write_events(path, [start_event(5000), *(step_event(number) for number in range(1, 5001))])
    index = EventIndex(path)
    index.read_on(0.0)
    assert index.share == 0.0
    index.read_on(1e-9)
    curve = curves_of(index, 100)["loss"]
    assert curve.step[-1] > 4900, "the end of the job is seen at once"
    assert 50 < len(curve.step) <= 100
    index.read_on(60.0)
    assert index.is_complete
    assert curves_of(index, 10_000)["loss"].step.tolist() == list(range(1, 5001))


def test_the_steps_that_are_asked_for(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, [start_event(50), *(step_event(number) for number in range(1, 51))])
    assert curves_of(read(path), 100, 10, 12)["loss"].step.tolist() == [10, 11, 12]


def test_event_index_keeps_logged_loss_apart_from_step_losses(tmp_path):
    path = tmp_path / "events.jsonl"
    own = [{"event": "logged", "at": 1.0, "step": 2, "loss": 100.0, "evaluation loss": 5.0}]
    write_events(path, [start_event(2), step_event(1), step_event(2), *own])
    found = curves_of(read(path), 10)
    assert found["loss"].mean.tolist() == [3.0, 1.5]
    assert found["logged loss"].mean.tolist() == [100.0]
    assert found["logged evaluation loss"].mean.tolist() == [5.0]


def test_event_index_pace_is_of_newest_attempt_after_first_step(tmp_path):
    path = tmp_path / "events.jsonl"
    first = [start_event(9), *(step_event(number, seconds=9.0) for number in (1, 2, 3))]
    second = [start_event(9), *(step_event(number, seconds=number / 10) for number in (3, 4, 5, 9))]
    write_events(path, [*first, *second])
    for details in (read_details(tmp_path), read_details(tmp_path, read(path))):
        assert details.seconds_per_step == pytest.approx(0.5)
        assert details.samples_per_s == pytest.approx(32 * 3 / 1.8)


def test_event_index_counts_infinite_norms_but_not_missing_ones(tmp_path):
    path = tmp_path / "events.jsonl"
    norms = [1.0, None, math.inf, 2.0]
    write_events(
        path, [start_event(4), *(step_event(number, gradient_norm=norm) for number, norm in enumerate(norms, 1))]
    )
    assert curves_of(read(path), 10)["gradient norm"].not_finite == 1


def test_a_file_that_another_was_copied_over_is_read_anew(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, [start_event(9), *(step_event(number, loss=9.0) for number in range(1, 5))])
    index = read(path)
    write_events(path, [start_event(9, at=7.0), *(step_event(number, loss=1.0) for number in range(1, 10))])
    index.read_on(1.0)
    assert curves_of(index, 99)["loss"].mean.tolist() == [1.0] * 9


def test_more_names_than_have_a_curve_are_told(tmp_path):
    path = tmp_path / "events.jsonl"
    many = {f"n{number}": 1.0 for number in range(250)}
    write_events(path, [start_event(1), step_event(1), {"event": "logged", "at": 1.0, "step": 1, **many}])
    index = read(path)
    assert index.is_cut
    assert len(curves_of(index, 9)) < 250


def test_a_record_is_read_with_all_its_fields(tmp_path):
    values = {}
    for number, field in enumerate(fields(StepRecord), 1):
        values[field.name] = number % 2 == 0 if field.type == "bool" else number
    write_events(tmp_path / "events.jsonl", [{**StepRecord(**values).to_json(), "at": 7.0}])
    columns = read(tmp_path / "events.jsonl").columns
    assert {name: column.tolist() for name, column in columns.items()} == {
        name: [float(value)] for name, value in {**values, "at": 7.0}.items()
    }
