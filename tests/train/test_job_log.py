"""What the loop logs: numbers of all ranks by sum and weight, texts and pictures of rank 0, and mistakes by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline.comm import api
from paceline.nouns.errors import PacelineError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train import log
from paceline.train.job import Job

from support.jobs import LOOP, STEPS, events, write_workload
from support.jobs import paceline as command
from support.ranks import run_ranks

# What each of four ranks has, right and asked: 4 of 9 over all. A mean of the four means is another number.
SCORES = [(3, 4), (1, 2), (0, 0), (0, 3)]


def job_of(plan=None):
    api.init()
    workload = paceline.Workload(
        model=lambda: torch.nn.Linear(5, 1),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=None,
    )
    return Job(workload, Plan.parse(plan or f"replicate={api.size()}"))


def logged(rank, plan=None):
    job = job_of(plan)
    parts = [SCORES[number] for number in range(job.rank, len(SCORES), job.size)]
    right, asked = (sum(column) for column in zip(*parts, strict=True))
    return job.log(
        {"held out/accuracy": (torch.tensor(float(right), requires_grad=True) * 1, torch.tensor([asked]))},
        mean=np.float32(job.rank),
        nothing=(0.0, 0),
        flag=True,
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums_and_weights_are_added_up_over_the_ranks(ranks):
    results = run_ranks(ranks, logged)
    for result in results:
        assert result["held out/accuracy"] == pytest.approx(4 / 9, abs=1e-15)
        assert result["mean"] == (ranks - 1) / 2
        assert result["flag"] == 1.0
        assert math.isnan(result["nothing"])
        assert list(result) == sorted(result)


def logged_by_rank_0(rank):
    job = job_of()
    try:
        if job.rank == 0:
            job.log(loss=1.0)
        job.step(torch.ones(2, 5))
        job.step(torch.ones(2, 5))
    except PacelineError as error:
        return str(error)
    return "went on"


def test_a_rank_that_logs_alone_is_told():
    texts = run_ranks(2, logged_by_rank_0)
    assert any("job.log should be reached by all ranks after the same step" in text for text in texts), texts


def logs_other_names(rank):
    job = job_of()
    with pytest.raises(WorkloadError) as caught:
        job.log({"loss": 1.0} if job.rank == 0 else {"loss": 1.0, "accuracy": 0.5})
    return str(caught.value)


def test_other_names_on_a_rank_are_told_on_every_rank():
    for text in run_ranks(2, logs_other_names):
        assert "rank 0 logs loss, and rank 1 logs accuracy, loss" in text
        assert "with (0, 0) where a rank has nothing to add" in text


# What is logged, and what the error says that was found.
REFUSED = {
    "text": ({"a": "0.5"}, "it is '0.5'"),
    "three numbers": ({"a": (1, 2, 3)}, r"it is \(1, 2, 3\)"),
    "a vector": ({"a": torch.ones(3)}, "it is"),
    "a pair with a vector": ({"a": (torch.ones(2), 2)}, "it is"),
    "none": ({"a": None}, "it is None"),
    "complex": ({"a": 1j}, "it is 1j"),
    "complex tensor": ({"a": torch.tensor(1j)}, "it is"),
    "no name": ({"": 1.0}, "it is ''"),
    "spaces": ({"  ": 1.0}, "it is ' ' of type str"),
    "a number as a name": ({3: 1.0}, "it is 3"),
    "two lines": ({"a\nb": 1.0}, "it is"),
    "a long name": ({"a" * 201: 1.0}, "it is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_number_is_refused(case):
    values, found = REFUSED[case]
    with pytest.raises(UsageError, match=f"found: {found}"):
        job_of().log(values)


PICTURES = {
    "grey": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "colours": torch.rand(3, 4, 3),
    "with alpha": np.random.default_rng(0).random((3, 4, 4)),
    "beyond 0 to 1": torch.tensor([[-1.0, 2.0, math.nan, 0.5]] * 3),
}


@pytest.mark.parametrize("case", PICTURES)
def test_an_array_becomes_a_png_file(case, tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = log.write_picture("../a b/ä", PICTURES[case], 7, tmp_path)
    assert path.parent == tmp_path / "pictures"
    assert re.fullmatch("a-b-[0-9a-f]{8}-00000007.png", path.name)
    assert log.write_picture("a b", PICTURES[case], 7, tmp_path) != path
    with image.open(path) as read:
        assert read.size == (4, 3)
        pixels = np.asarray(read)
    if case == "grey":
        assert pixels.tolist() == PICTURES[case].tolist()
    if case == "beyond 0 to 1":
        assert pixels[0].tolist() == [0, 255, 0, 128]


def test_figures_and_images_become_png_files(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from PIL import Image

    for picture in (Figure(), Image.new("RGB", (3, 2))):
        path = log.write_picture("it", picture, 1, tmp_path)
        assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("picture", "found"),
    [
        (np.zeros((3, 4, 2)), r"its shape is \(3, 4, 2\)"),
        (np.zeros(3), "its shape"),
        ("a.png", "it is 'a.png'"),
        (np.zeros((0, 4)), "its"),
    ],
)
def test_what_is_no_picture_is_refused(picture, found, tmp_path):
    with pytest.raises(UsageError, match=f"can't log 'it' as a picture\n  found: {found}"):
        log.write_picture("it", picture, 1, tmp_path)


def test_what_is_no_text_is_refused():
    job = job_of()
    with pytest.raises(UsageError, match="as text\n  found: it is 3"):
        job.log_text("it", 3)
    with pytest.raises(UsageError, match="found: it has 100,001 characters"):
        job.log_text("it", "a" * 100_001)


LOGS = LOOP.replace(
    "        job.step(batch)\n",
    "        job.step(batch)\n"
    "        job.log(rank=job.rank, step=job.step_number)\n"
    "        job.log_text('said', f'<b>{job.rank}</b>')\n"
    "        if job.step_number == 2:\n"
    "            job.log_picture('weights', next(job.model.parameters()).detach())\n",
)


@pytest.mark.slow
def test_a_run_has_what_was_logged(tmp_path):
    assert LOGS != LOOP
    ended = command(tmp_path, "run", "-n", "2", "--job", "a", write_workload(tmp_path, loop=LOGS))
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "a"
    rows = events(run, "logged")
    assert [(row["step"], row["rank"], row["logged_step"]) for row in rows] == [
        (step, 0.5, step) for step in range(1, STEPS + 1)
    ]
    assert [row["text"] for row in events(run, "text")] == ["<b>0</b>"] * STEPS
    (picture,) = events(run, "picture")
    assert (picture["name"], picture["step"], picture["path"]) == ("weights", 2, "pictures/weights-00000002.png")
    assert (run / picture["path"]).read_bytes()[:4] == b"\x89PNG"


LOOP_OF_ONES_OWN = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

class Keeps:
    def __init__(self, run_dir):
        self.file = open("kept", "a")
    def write(self, event):
        self.file.write(event["event"] + "\\n")
    def close(self):
        self.file.close()

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader, sinks=[Keeps])
for (batch,) in loader:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    job.backward(loss)
    job.log(before=job.step_number)
    optimizer.step()
    job.log(loss=(loss.detach() * len(batch), len(batch)))
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("verify", "-n", "2"), marks=pytest.mark.integration),
        ("plan", "-n", "2", "--explain-memory"),
        ("run", "-n", "2", "--job", "a"),
    ],
)
@pytest.mark.slow
def test_a_loop_of_ones_own_has_sinks_and_logs_at_the_step_that_was_made(tmp_path, words):
    file = tmp_path / "loop.py"
    file.write_text(LOOP_OF_ONES_OWN)
    ended = command(tmp_path, *words, file)
    assert ended.code == 0, ended.out + ended.err
    assert (tmp_path / "kept").exists() == (words[0] == "run")
    if words[0] != "run":
        return
    rows = events(tmp_path / "runs" / "a", "logged")
    assert [(row["step"], "loss" in row) for row in rows] == [
        (0, False),
        (1, True),
        (1, False),
        (2, True),
        (2, False),
        (3, True),
    ]
    steps = events(tmp_path / "runs" / "a", "step")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == pytest.approx([step["loss"] for step in steps], rel=1e-6)
    assert (tmp_path / "kept").read_text().split().count("logged") == 6


@pytest.mark.parametrize(("sinks", "found"), [(3, "it is 3"), ([3], "it is 3"), ([print()], "it is None")])
def test_sinks_of_a_loop_are_checked(sinks, found):
    model = torch.nn.Linear(4, 1)
    with pytest.raises(WorkloadError, match=f"found: {found}"):
        paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), sinks=sinks)


@pytest.mark.slow
def test_under_servers_worker_0s_numbers_are_written(tmp_path):
    file = write_workload(tmp_path, loop=LOGS)
    ended = command(tmp_path, "run", "-n", "2", "--plan", "server=1", "--job", "a", file)
    assert ended.code == 0, ended.err
    assert {row["rank"] for row in events(tmp_path / "runs" / "a", "logged")} == {0.0}


def test_the_event_is_json(tmp_path):
    assert json.loads(json.dumps(log.field_of("step"))) == "logged_step"
    assert log.field_of("loss") == "loss"
    assert Path(tmp_path).is_dir()
