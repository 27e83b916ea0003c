"""A job goes on to its last step with other batches, and one that takes no step says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paceline
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.run.start.outcome import JobEnd


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.ones(100, 4))


def workload(data=None, **settings):
    return paceline.Workload(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=torch.ones(100, 4) if data is None else data,
        **settings,
    )


def train(job):
    return [batch.positions for batch in job.batches() if job.step(batch) is not None]


@pytest.mark.parametrize(
    ("before", "after", "steps", "position"),
    [
        ({"batch_size": 16, "steps": 10}, {"batch_size": 8, "steps": 24}, 24, 256),
        ({"batch_size": 8, "steps": 10}, {"batch_size": 16, "steps": 24}, 24, 280),
        ({"batch_size": 8, "steps": 10}, {"batch_size": 8, "steps": 24}, 24, 188),
        ({"batch_size": 8, "steps": 10}, {"batch_size": 16, "steps": 10}, 10, 80),
        ({"batch_size": 16, "epochs": 1}, {"batch_size": 8, "epochs": 2}, 20, 200),
        ({"batch_size": 16, "steps": 3}, {"batch_size": 8, "epochs": 1}, 10, 100),
    ],
)
def test_a_job_goes_on_to_its_last_step_with_other_batches(tmp_path, capsys, before, after, steps, position):
    job = paceline.distribute(workload(**before))
    taken = train(job)
    job.save(tmp_path / "saved")
    job = paceline.distribute(workload(**after))
    job.load(tmp_path / "saved")
    taken += train(job)
    assert (job.step_number, job.position, job.total_steps) == (steps, position, steps)
    assert [number for positions in taken for number in positions] == list(range(position))  # none left out or twice
    assert ("was saved with batch_size" in capsys.readouterr().out) == (before["batch_size"] != after["batch_size"])


def test_a_stream_goes_on_with_batches_of_one_size_in_an_epoch(tmp_path):
    job = paceline.distribute(workload(Stream, batch_size=10, steps=15))
    train(job)
    job.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="after 5 batches of 10 in an epoch") as caught:
        paceline.distribute(workload(Stream, batch_size=20, steps=20)).load(tmp_path / "saved")
    assert "batch_size=10" in caught.value.fix
    job = paceline.distribute(workload(Stream, batch_size=10, steps=20))
    job.load(tmp_path / "saved")
    assert len(train(job)) == 5


def batches_alone(job):
    list(job.batches())


def gradients_alone(job):
    model = job.model
    for batch in job.loops[0]:
        job.backward(model(batch).mean())


def nothing(job):
    return None


def loop_job():
    model = nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
    job, _, _, loader = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    job.loops = [loader]
    return job


def declared():
    return paceline.distribute(workload(batch_size=10, steps=3))


@pytest.mark.parametrize(
    ("make", "use", "found"),
    [
        (declared, batches_alone, "trained on none"),
        (declared, nothing, "was not entered"),
        (loop_job, gradients_alone, "no optimizer stepped"),
        (loop_job, lambda job: list(job.loops[0]), "trained on none"),
        (loop_job, nothing, "was not entered"),
    ],
)
def test_a_run_without_a_step_is_refused(tmp_path, monkeypatch, make, use, found):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PACELINE_PLAN", "{}")
    job = make()
    use(job)
    with pytest.raises(UsageError, match="0 steps were taken") as caught:
        job.close()
    assert found in caught.value.found
    job.close(save=False)


@pytest.mark.parametrize("use", [train, lambda job: job.evaluate(torch.ones(5, 4)), lambda job: job.log(a=1.0)])
def test_a_run_that_does_something_ends(tmp_path, monkeypatch, use):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PACELINE_PLAN", "{}")
    job = declared()
    use(job)
    job.close()
    assert job.closed_step in (0, 3)


@pytest.mark.parametrize(
    ("last", "loaded", "text"),
    [
        ({"step": 3}, {}, "done; runs/a"),
        ({"step": 3}, {2: 8}, "done; runs/a"),
        (None, {}, "done, 0 steps were taken; runs/a"),
        (
            None,
            {3: 12},
            "done before: no step was left after step 3 (to train on, raise the file's epochs or steps); runs/a",
        ),
    ],
)
def test_the_last_line_says_how_many_steps_were_taken(last, loaded, text):
    progress = SimpleNamespace(last=last, loaded=loaded, started={"total_steps": 3})
    assert JobEnd("runs/a", SimpleNamespace(status="done"), progress).text() == text
