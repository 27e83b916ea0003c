"""A loop of the user's own, tried as one rank alone, holds and sends what it does among real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.nouns.errors import WorkloadError
from paceline.nouns.loop_profile import LoopProfile
from paceline.nouns.plan import Plan
from paceline.nouns.profile import (
    ACTIVATIONS,
    BUFFERS,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
)
from paceline.plan.memory import memory_of

from support.loop_steps import predicted, taken
from support.ranks import preload
from support.sample import INTEGRATION, sampled

preload("paceline.profile.profile_loop")
LOOPS = Path(__file__).parents[2] / "examples" / "loops"
OFF = {"ppo": 0.02}  # of the measured peak: what kernels take in a model of 300 parameters
USUAL_OFF = 0.005  # most are equal to the byte
TENSOR_OFF = {"contrastive": 0.1}  # a model of 48 kB, of which one run in three measures 4.6 kB more
USUAL_TENSOR_OFF = 0.08
TRIES = 3  # what another thread frees the profiler does not hear: on a busy machine it may measure too much
KINDS = {"parameters": PARAMETERS, "buckets": COMMUNICATION, "optimizer": OPTIMIZER, "buffers": BUFFERS}


def check_same(name, line, file=None):
    """Each rank's traffic, step by step, what it holds between steps, and its peak."""
    file = file or LOOPS / f"{name}.py"
    ranks = range(Plan.parse(line).world_size)
    profiles = [predicted(file, line, rank) for rank in ranks]
    memories = [memory_of(profile.profile) for profile in profiles]
    is_tensor = "tensor" in line
    off = TENSOR_OFF.get(name, USUAL_TENSOR_OFF) if is_tensor else OFF.get(name, USUAL_OFF)
    for _ in range(TRIES):
        answers = taken(file, line, len(profiles[0].steps))
        if all(answer["peak"] <= own.peak * (1 + off) for own, answer in zip(memories, answers, strict=True)):
            break
    for rank, profile, memory, answer in zip(ranks, profiles, memories, answers, strict=True):
        first = int(is_tensor)  # in the first step real ranks also agree on the pieces, and map memory
        assert [step["traffic"] for step in profile.steps[first:]] == answer["traffic"][first:], rank
        assert {kind: memory.between.get(KINDS[kind], 0) for kind in KINDS} == {kind: answer[kind] for kind in KINDS}
        assert sum(each["state_bytes"] for each in profile.optimizers) == answer["optimizer"]
        assert abs(memory.peak / answer["peak"] - 1) < off, (rank, memory.peak, answer["peak"])
        assert profile.profile.shared_bytes == answer["shared"]
        if len(ranks) == 1:  # several sum them in their buckets
            assert memory.between.get(GRADIENTS, 0) == answer["gradients"]


SLOW = pytest.mark.slow
BEST_KNOWN = ("classifier", "gan", "muon", "distillation", "language_model")
OTHERS = ("ppo", "tokens", "buckets", "contrastive")
FOUR = ("replicate=4", "shard=4,zero=1", "replicate=2,shard=2,zero=1", "replicate=2,shard=2", "replicate=2,tensor=2")
CASES = [
    ("gan", "shard=2,zero=1", []),
    ("distillation", "replicate=2", []),
    ("language_model", "shard=2", []),
    ("classifier", "tensor=2", []),
    ("muon", "shard=2,zero=2", SLOW),
    *((name, line, SLOW) for name in BEST_KNOWN for line in ("replicate=1", "replicate=2", "shard=2,zero=1")),
    *(
        (name, line, sampled(row, column, of=5))
        for row, name in enumerate(BEST_KNOWN)
        for column, line in enumerate(FOUR)
    ),
    *(
        (name, line, sampled(row, column, of=4))
        for row, name in enumerate(OTHERS)
        for column, line in enumerate(("replicate=2", "shard=4,zero=1", "shard=2", "tensor=2"))
    ),
    *(("gan", f"replicate=2,{option}", INTEGRATION) for option in ("compression=bf16", "bucket_bytes=100")),
]
CASES = {(name, line): marks for name, line, marks in reversed(CASES)}  # of two alike the first


@pytest.mark.parametrize(
    ("name", "line"), [pytest.param(*case, marks=marks, id="-".join(case)) for case, marks in CASES.items()]
)
def test_a_loop_holds_and_sends_what_was_predicted(name, line):
    check_same(name, line)


LOOP = """
import torch
from torch.utils.data import DataLoader
import paceline
model, other = torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)
first, second = torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
loader = DataLoader(torch.ones(64, 64), batch_size=16)
job, model, other, first, second, loader = paceline.prepare(model, other, first, second, loader)
for _ in job.epochs(EPOCHS):
    for number, batch in enumerate(loader):
        loss = other(model(batch).relu()).square().mean()
        first.zero_grad(), second.zero_grad()
        job.backward(loss)
        BODY
"""


def written(folder, body="first.step(), second.step()", epochs=3, **changes):
    text = LOOP.replace("BODY", body).replace("EPOCHS", str(epochs))
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / "loop.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("body", "steps", "first"),
    [
        ("first.step(), second.step()", 2, 1),
        ("first.step(), number % 3 == 2 and second.step()", 6, 3),  # the second has its state from the third step on
        ("number % 2 and [first.step(), second.step()]", 2, 1),  # steps of two batches
    ],
)
def test_profile_loop_doubles_the_steps_until_all_state_exists(tmp_path, body, steps, first):
    profile = predicted(written(tmp_path, body), "replicate=2")
    assert (len(profile.steps), profile.from_step) == (steps, first)
    assert memory_of(profile.profile).between[OPTIMIZER] == 2 * 4 * (65 * 256 + 1) + 4 * 257
    assert len(profile.profile.notices) == 1


def test_an_optimizer_that_makes_no_update_is_told(tmp_path):
    profile = predicted(written(tmp_path, "first.step()", epochs=30), "replicate=2")
    assert len(profile.steps) == 20
    assert "SGD made no update there" in profile.profile.notices[1]


def test_a_loop_of_one_step_is_told(tmp_path):
    profile = predicted(written(tmp_path, "number == 3 and [first.step(), second.step()]", epochs=1), "replicate=1")
    assert len(profile.steps) == 1
    assert profile.steps[0]["backwards"] == 4
    assert "later steps are not in this" in profile.profile.notices[1]


def test_profile_loop_without_loader_ends_its_last_step_at_exit(tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(SPARSE.replace("sparse=True", "sparse=False").replace("range(2)", "range(1)"))
    assert len(predicted(file, "replicate=2").steps) == 1


def test_profile_loop_evaluate_and_save_need_no_files_or_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    score = "lambda models, batch: {'mean': (batch.sum(), len(batch))}"
    body = f"first.step(), second.step(), job.save('out'), job.evaluate(torch.ones(8, 64), {score})"
    profile = predicted(written(tmp_path, body), "replicate=4")
    assert {path.name for path in tmp_path.iterdir()} == {"loop.py"}
    # The evaluation's sums are the loop's: they are in each step's traffic.
    assert len(profile.steps) == 2


def test_what_each_model_and_optimizer_takes(tmp_path):
    profile = predicted(written(tmp_path), "shard=2,zero=1")
    assert [model["name"] for model in profile.models] == ["Linear", "Linear"]
    assert [model["parameters"] for model in profile.models] == [65 * 256, 257]
    adamw, sgd = profile.optimizers
    assert (adamw["name"], adamw["parameters"], adamw["state_bytes"]) == ("AdamW", 65 * 256, 8 * 64 * 256 + 4)
    assert (sgd["name"], sgd["parameters"], sgd["state_bytes"]) == ("SGD", 257, 0)  # the other rank's
    assert profile.owned == [64 * 256, 256 + 257]
    assert (profile.batch_size, profile.profile.micro_batch) == (16, 8)
    other = predicted(written(tmp_path), "shard=2,zero=1", rank=1)
    assert [each["state_bytes"] for each in other.optimizers] == [8 * 256 + 4, 4 * 257]


def test_for_a_gpu_its_allocator_is_played(tmp_path):
    profile = predicted(written(tmp_path), "replicate=2", device="cuda")
    memory = memory_of(profile.profile)
    on_cpu = memory_of(predicted(written(tmp_path), "replicate=2").profile)
    assert memory.at_peak[INPUTS] == 2 * on_cpu.at_peak[INPUTS]  # the next batch too
    assert memory.reserved >= memory.peak
    assert "attention is the CPU's" in profile.profile.notices[1]
    assert profile.profile.shared_bytes == 0
    assert any("_foreach" in name for name in profile.profile.operations)


def test_whose_memory_it_is(tmp_path):
    big = written(tmp_path, **{"torch.ones(64, 64), batch_size=16": "torch.ones(4096, 64), batch_size=2048"})
    memory = memory_of(predicted(big, "replicate=1").profile)
    assert memory.phase == "backward"
    assert memory.at_peak[ACTIVATIONS] >= 2048 * 256 * 4
    names = {holder.name for holder in memory.holders}
    assert {"0.weight", "batch"} <= names, names


def test_blocks_of_a_frozen_model_are_gathered_parameters():
    memory = memory_of(predicted(LOOPS / "distillation.py", "replicate=4").profile)
    assert memory.at_peak[GATHERED] >= 4 * (21 * 64 + 65 * 5)  # its only block is all of it
    assert ("0.0.weight", GATHERED) in {(holder.name, holder.kind) for holder in memory.holders}


VALUES = """
import torch, paceline
model = torch.nn.Linear(4, 4)
model.register_buffer("seen", torch.zeros(()))
job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
while not job.step_number:
    model.seen += 0.5
    job.backward(model(torch.ones(8, 4)).exp().mean(), 8)
    norm = job.clip(9.0)
    optimizer.step()
job.end_step()
raise ValueError(f"norm {norm:.5f}, seen {float(model.seen)}")
"""


def test_profile_loop_values_are_of_ranks_with_equal_samples(tmp_path):
    """The loop may look at them: the gradients, and the buffers at the end of a step."""
    file = tmp_path / "loop.py"
    file.write_text(VALUES)
    seen = []
    for line in ("replicate=1", "replicate=4", "shard=4,zero=1"):
        with pytest.raises(AssertionError) as raised:
            predicted(file, line)
        seen += re.findall(r"ValueError in line 12: (norm .*)", str(raised.value))
    assert len(seen) == 3
    assert len(set(seen)) == 1, seen
    assert seen[0].endswith("seen 0.5")


def test_a_compiled_model_is_told(tmp_path):
    file = written(tmp_path, **{"job, model": "model = torch.compile(model)\njob, model"})
    assert "torch.compile had no effect" in predicted(file, "replicate=1").profile.notices[1]


def test_data_that_was_there_before_is_not_the_steps(tmp_path):
    """Rows of it are views of all of it."""
    file = written(tmp_path, **{"loader)\nfor": "loader)\ndata = torch.ones(10**6)\nfor"})
    text = file.read_text().replace("import paceline\n", "import paceline\nearlier = torch.ones(10**6)\n")
    before = memory_of(predicted(file, "replicate=1").profile).peak
    file.write_text(
        text.replace("data = torch.ones(10**6)\n", "").replace(
            "job.backward(", "row = earlier[3:5]\n        job.backward("
        )
    )
    after = memory_of(predicted(file, "replicate=1").profile).peak
    assert before > 4 * 10**6 > after


BROKEN = [
    ({"job.backward(loss)": "raise ValueError('no\\nsuch')"}, "replicate=1", "it raised ValueError in line 13: no\n"),
    ({"job.epochs(EPOCHS)": "[]"}, "replicate=2", "it ended before one"),
    ({"import paceline\n": "import paceline, sys\nsys.exit()\n"}, "replicate=2", "it ended before one"),
    ({"BODY": "pass"}, "replicate=2", "no optimizer stepped"),
    ({"BODY": "paceline.prepare(model, first)"}, "replicate=2", "a second time"),
    ({"(loss)": "(loss * float('nan'))"}, "replicate=2", "NaN or infinite"),
    ({"loader)\nfor": "loader)\nmodel.cuda()\nfor"}, "replicate=2", "in line 9: "),
    ({}, "replicate=2,compression=topk", "compression=topk"),
    ({}, "pipeline=2", "pipeline needs the loss as a function"),
    ({}, "shard=2,tensor=2", "tensor gives each rank pieces"),
]


@pytest.mark.parametrize(("changes", "line", "found"), BROKEN, ids=[found for _, _, found in BROKEN])
def test_what_can_not_be_tried(tmp_path, changes, line, found):
    text = LOOP
    for old, new in {**changes, "BODY": "first.step(), second.step()", "EPOCHS": "3"}.items():
        text = text.replace(old, changes.get(old, new))
    assert changes == {} or text != LOOP
    (tmp_path / "loop.py").write_text(text)
    with pytest.raises(AssertionError) as raised:
        predicted(tmp_path / "loop.py", line)
    assert found in str(raised.value)
    assert "  fix: " in str(raised.value)


SPARSE = """
import torch
import paceline
model = torch.nn.Embedding(9, 2, sparse=True)
job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(2):
    optimizer.zero_grad()
    job.backward(model(torch.ones(3, dtype=torch.int64)).sum(), 3)
    optimizer.step()
"""


def test_rows_that_ranks_would_exchange_depend_on_the_data(tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(SPARSE)
    assert memory_of(predicted(file, "replicate=1").profile).between[PARAMETERS] == 4 * 18
    with pytest.raises(AssertionError, match="how many depends on the data"):
        predicted(file, "replicate=2")


def test_a_profile_is_a_file(tmp_path):
    profile = predicted(written(tmp_path), "shard=2,zero=1")
    profile.write(tmp_path / "profile.json")
    again = LoopProfile.read(tmp_path / "profile.json")
    assert again.steps == profile.steps
    assert memory_of(again.profile) == memory_of(profile.profile)
    text = (tmp_path / "profile.json").read_text()
    for bad in ("", "[]", text.replace('"from_step": 1', '"from_step": 9'), text.replace('"owned"', '"own"')):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(WorkloadError, match="can't be read"):
            LoopProfile.read(tmp_path / "bad.json")
