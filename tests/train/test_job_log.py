"""What the loop logs: numbers of all ranks by sum and weight, texts and pictures of rank 0, and mistakes by name."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline.comm import api
from paceline.nouns.errors import PacelineError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.sinks.numbers import numbers_of
from paceline.train import log
from paceline.train.job import Job
from paceline.train.log import Pictures
from paceline.train.sinks import open_sinks

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
    "flipped": np.arange(12, dtype=np.uint8).reshape(3, 4)[::-1],
    "black and white": np.eye(3, 4, dtype=bool),
    "zeros and ones": np.eye(3, 4, dtype=np.int64),
}
READ_ONLY = np.zeros((3, 4), np.uint8)
READ_ONLY.flags.writeable = False
PICTURES["read only"] = READ_ONLY


@pytest.mark.parametrize("case", PICTURES)
def test_an_array_becomes_a_png_file(case, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pictures = Pictures(tmp_path)
    written = pictures.write("../a b/ä", PICTURES[case], 7)
    assert re.fullmatch("pictures/a-b-[0-9a-f]{8}-00000007.png", written)
    assert pictures.write("a b", PICTURES[case], 7) != written
    path = tmp_path / written
    with image.open(path) as read:
        assert read.size == (4, 3)
        pixels = np.asarray(read)
    if case in ("black and white", "zeros and ones"):
        assert pixels.tolist() == (np.eye(3, 4) * 255).tolist()
    if case in ("grey", "flipped", "read only"):
        assert pixels.tolist() == PICTURES[case].tolist()
    if case == "beyond 0 to 1":
        assert pixels[0].tolist() == [0, 255, 0, 128]


def test_figures_and_images_become_png_files(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from PIL import Image

    images = [
        Image.new(mode, (3, 2)) for mode in ("RGB", "CMYK", "F", "L", "1", "YCbCr", "HSV", "LAB", "RGBA", "P", "I")
    ]
    for picture in (Figure(), *images):
        written = Pictures(tmp_path).write("it", picture, 1)
        assert (tmp_path / written).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("picture", "found"),
    [
        (np.zeros((3, 4, 2)), r"its shape is \(3, 4, 2\)"),
        (np.zeros(3), "its shape"),
        ("a.png", "it is 'a.png'"),
        (np.zeros((0, 4)), "its"),
        (np.full((3, 4), 128), "it has whole numbers of torch.int64 from 128 to 128"),
        (torch.zeros(3, 4, dtype=torch.complex64), "its numbers are complex"),
        (np.zeros((3, 4), complex), "it is"),
        (np.full((3, 4), None), "it is"),
    ],
)
def test_what_is_no_picture_is_refused(picture, found, tmp_path):
    with pytest.raises(UsageError, match=f"can't log 'it' as a picture\n  found: {found}"):
        Pictures(tmp_path).write("it", picture, 1)


def test_a_full_disk_leaves_a_picture_out_and_ends_nothing(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    job = job_of()
    ignoring = type("Ignoring", (), {"write": lambda self, event: None, "close": lambda self: None})
    job.events.sinks = open_sinks([lambda run_dir: ignoring()], None)
    monkeypatch.setattr("os.replace", full)
    job.log_picture("it", torch.rand(3, 4))
    assert "the picture 'it' of step 0 can't be written (No space left on device)" in capsys.readouterr().out
    monkeypatch.undo()
    assert [path.suffix for path in Path(job.logged.pictures.temporary.name).iterdir()] == []
    job.log_picture("it", torch.rand(3, 4))
    folder = Path(job.logged.pictures.temporary.name)
    assert [path.name for path in folder.iterdir()] == ["it-00000000.png"]
    job.close()
    assert not folder.exists(), "without a run directory nothing is left"


def test_after_close_nothing_can_be_logged():
    job = job_of()
    job.close()
    for call in (lambda: job.log(a=1), lambda: job.log_text("a", "b"), lambda: job.log_picture("a", torch.rand(2, 2))):
        with pytest.raises(UsageError, match=r"they have ended: .*\n  fix: call job.log\w* before job.close"):
            call()


@pytest.mark.parametrize(
    ("value", "number"),
    [(np.array([1.5]), 1.5), (np.array(2), 2.0), (np.float16(0.5), 0.5), (torch.tensor([[3]]), 3.0), (True, 1.0)],
)
def test_numbers_of_every_kind(value, number):
    assert job_of().log(a=value, b=(value, 2)) == {"a": number, "b": number / 2}


@pytest.mark.parametrize("value", [10**400, torch.empty(1, device="meta"), np.ones(2), np.array(["a"])])
def test_what_can_not_be_a_number_is_refused(value):
    with pytest.raises(UsageError, match="can't log 'a'"):
        job_of().log(a=value)


def test_half_a_character_is_replaced():
    assert log.checked_text("a", b"\xff!".decode("utf-8", "surrogateescape")) == "?!"


def log_a_parameter(rank, zero):
    """What each rank gets for a parameter of one element, of which only one rank has it."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(f"shard=2,zero={zero}")))
    model = torch.nn.Linear(4, 1)
    torch.nn.init.constant_(model.bias, 2.5)
    job, model, _ = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return job.log(bias=model.bias)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_parameter_in_parts_is_logged_as_it_is(zero):
    assert run_ranks(2, log_a_parameter, zero) == [{"bias": 2.5}] * 2


def loop_in_which_rank_0_logs_alone(rank, where):
    model = torch.nn.Linear(4, 1)
    job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for number in range(3):
            job.backward(model(torch.ones(8, 4)).mean(), weight=8)
            if where == "before the update" and rank == 0:
                job.log(a=1)
            optimizer.step()
            if where == "after the update" and rank == 0:
                job.log(a=1)
            if where == "after the last update" and rank == 0 and number == 2:
                job.log(a=1)
        job.close()
    except PacelineError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("where", ["before the update", "after the update", "after the last update"])
def test_in_a_loop_of_ones_own_a_rank_that_logs_alone_is_told(where):
    texts = run_ranks(2, loop_in_which_rank_0_logs_alone, where, timeout_s=40)
    assert any("job.log should be reached by all ranks after the same step" in text for text in texts), texts


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
        pytest.param(("verify", "-n", "2"), marks=pytest.mark.complete),  # tests/train/test_sinks.py verifies
        ("plan", "-n", "2", "--explain-memory"),
        ("run", "-n", "2", "--job", "a"),
    ],
)
@pytest.mark.slow
def test_job_log_of_an_own_loop_has_sinks_and_the_step_made(tmp_path, words):
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


def test_names_come_back_from_the_event():
    names = ("step", "logged_step", "logged_in", "loss", "at")
    fields = {log.field_of(name): number for number, name in enumerate(names)}
    assert len(fields) == len(names)
    event = json.loads(json.dumps({"event": "logged", "step": 3, "at": 1.5, **fields}))
    assert numbers_of(event) == {name: number for number, name in enumerate(names)}
