"""`paceline verify` as a person calls it: the table, the JSON, exit codes, what is refused, and nothing left behind."""

from __future__ import annotations

import json
import os
import re

import pytest

from support.jobs import paceline

pytestmark = pytest.mark.slow

MODEL = """
import paceline
import torch
from torch import nn
from torch.nn import functional as F

def model():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 3))

def loss(model, batch):
    scores = model(batch[0])
    return F.cross_entropy(scores, batch[1], reduction="sum"), len(batch[1])

random = torch.Generator().manual_seed(1)
workload = paceline.Workload(
    model=model,
    loss=loss,
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    data=[(torch.randn(6, generator=random), torch.tensor(i % 3)) for i in range(40)],
    batch_size=8,
    clip_norm=0.5,
)
"""
SCORES = "    scores = model(batch[0])\n"
WORKLOAD = "workload = paceline.Workload("


def write(folder, old="", new=""):
    assert old in MODEL
    path = folder / "model_file.py"
    path.write_text(MODEL.replace(old, new, 1) if old else MODEL)
    return str(path)


def test_what_is_right(tmp_path):
    ended = paceline(tmp_path, "verify", write(tmp_path), "--plan", "replicate=2,tensor=2", "--what", "all", "--json")
    assert ended.code == 0, ended.err
    verdict = json.loads(ended.out)
    assert verdict["verdict"] in ("equal", "rounding")
    assert verdict["plan"] == "replicate=2,tensor=2"
    assert verdict["precision"] == "float32"
    assert verdict["largest_relative_difference"] < 1e-5
    names = [check["check"] for check in verdict["checks"]]
    steps = ["order", "step float64", "step float32", "dropout", "traffic"]
    assert names == [*steps, "resume", "reshard replicate=1", "reshard replicate=4"]
    assert verdict["culprit"] is None


def test_a_bug_is_named_in_the_table(tmp_path):
    """A bug of the product, put there from outside; the reference's process does not see it."""
    bug = """
import os
if "PACELINE_RANK" in os.environ:
    from paceline.parallel import graph_model
    plain = graph_model.take_piece
    graph_model.take_piece = lambda full, *rest: plain(full.flip(0) if full.dim() == 1 else full, *rest)
"""
    path = write(tmp_path, WORKLOAD, f"{bug}\n{WORKLOAD}")
    ended = paceline(tmp_path, "verify", "--plan", "tensor=2", path)
    assert ended.code == 1, ended.err
    assert re.search(r"step float64 +BUG", ended.out)
    assert "module:      0" in ended.out
    assert ended.out.rstrip().endswith("bug (the distributed step is not the single-process step)")


def test_a_wrong_prediction_is_no_wrong_step(tmp_path):
    bug = """
import os
if "PACELINE_RANK" in os.environ:
    from paceline.parallel.engine.declared import DeclaredEngine
    plain = DeclaredEngine.reduce_gradients
    def reduce(self):
        self.comms.axes["replicate"].all_reduce(torch.zeros(3))
        return plain(self)
    DeclaredEngine.reduce_gradients = reduce
"""
    path = write(tmp_path, WORKLOAD, f"{bug}\n{WORKLOAD}")
    what = "order,step,traffic,resume"
    ended = paceline(tmp_path, "verify", "--plan", "replicate=2", path, "--what", what)
    assert ended.code == 1, ended.err
    assert re.search(r"traffic +BUG  rank 0: all_reduce on replicate: 3 calls", ended.out)
    assert re.search(r"resume +ok", ended.out)
    said = (
        "bug (the distributed step is the single-process step, but ranks send something else than what was predicted)"
    )
    assert ended.out.rstrip().endswith(said)


HANG = """
paceline.init()
calls = []

def loss(model, batch):
    calls.append(1)
    if len(calls) != 5 or paceline.rank() != 1:
        paceline.all_reduce(torch.ones(3))
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
"""


def test_a_hang_is_told_with_rank_line_and_last_collective(tmp_path):
    path = write(tmp_path, WORKLOAD, f"{HANG}\n{WORKLOAD}")
    ended = paceline(tmp_path, "verify", "--plan", "replicate=2", path)
    assert ended.code == 1, ended.err
    lines = (tmp_path / "model_file.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "ones(3)" in text)
    assert "the ranks hang (rank 0 at" in ended.out
    assert f"model_file.py:{line}" in ended.out
    assert "rank 1 began nothing more on world where rank 0 began all_reduce on world (12 bytes)" in ended.out
    assert "the last they had in common was all_reduce on world (12 bytes)" in ended.out
    assert ended.seconds < 150  # ten from the hang on; a collective of its own accord waits half an hour


LOOP_THAT_HANGS = """
import torch, paceline
model = torch.nn.Linear(2, 1)
job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    optimizer.zero_grad()
    if step == 1 and paceline.rank() == 0 and paceline.size() > 1:
        paceline.all_reduce(torch.ones(3))
    job.backward(model(torch.ones(8, 2)).mean(), weight=8)
    optimizer.step()
"""


@pytest.mark.complete  # a declared job, above; its lines: test_hang.py
def test_a_hang_of_a_loop_is_told_too(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP_THAT_HANGS)
    ended = paceline(tmp_path, "verify", "-n", "2", str(path))
    assert ended.code == 1, ended.err
    assert "the ranks hang (rank 0 at" in ended.out
    assert "rank 1 began nothing more on world where rank 0 began all_reduce on world (24 bytes)" in ended.out


# A change of the good file, the plan, and what the error must say.
REFUSED = {
    "a branch by rank with a collective": (
        (SCORES, SCORES + "    if paceline.rank() == 1:\n        paceline.all_reduce(torch.ones(1))\n"),
        "replicate=2", "before running: rank 0 began nothing more on world where rank 1 began all_reduce",
    ),
    "a loss that looks at its rank": (
        (SCORES, SCORES + "    scores = scores * (1 + paceline.rank())\n"), "replicate=2", "on rank 0 and",
    ),
    "random numbers": (
        (SCORES, SCORES + "    scores = scores + torch.randperm(9)[0]\n"), "replicate=2", "neither dropout nor",
    ),
    "a memory": (
        (SCORES, SCORES + "    seen.append(1)\n    scores = scores * len(seen)\n"), "replicate=2", "when it is computed again",
    ),
    "a branch by the data": (
        (SCORES, SCORES + "    if batch[0].square().sum() > 30:\n        scores = scores * 2\n"), "replicate=2", "for the whole batch and",
    ),
    "a branch by the data, in a graph": (
        (SCORES, SCORES + "    if batch[0].sum() > 0:\n        scores = scores * 2\n"), "tensor=2", "it looks at values: ",
    ),
    "CUDA": ((SCORES, "    scores = model(batch[0].cuda())\n"), "replicate=2", "runs on CPU processes"),
    "too large": (("nn.Linear(6, 16)", "nn.Linear(6, 16), *[nn.Linear(40000, 40000)] * 30"), "shard=2", "num_hidden_layers=2"),
    "statistics of micro-batches": (
        ("nn.GELU()", "nn.BatchNorm1d(16)"), "replicate=2", "leave micro_batch_size out",
    ),
    "compression": ((), "replicate=2,compression=bf16", "compression=none"),
    "one step": ((), "replicate=2 --steps 1", "write --steps 2"),
    "an unknown check": ((), "replicate=2 --what steps", "the choices are order, step"),
    "no workload": ((WORKLOAD, "another = paceline.Workload("), "replicate=2", "no variable `workload`"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_verified_says_why(case, tmp_path):
    change, plan, says = REFUSED[case]
    path = write(tmp_path, *change)
    text = (tmp_path / "model_file.py").read_text().replace(WORKLOAD, f"paceline.init()\nseen = []\n{WORKLOAD}")
    if "micro" in case:
        text = text.replace("batch_size=8,", "batch_size=8,\n    micro_batch_size=2,")
    (tmp_path / "model_file.py").write_text(text)
    ended = paceline(tmp_path, "verify", path, "--plan", *plan.split())
    assert ended.code == (1 if "before running" in says else 2), ended.out + ended.err
    said = ended.out if ended.code == 1 else ended.err
    assert says in said
    assert ended.code == 1 or "\n  fix: " in said


COUNTED = """
import os, sys

class Count:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open(os.environ["COUNT_FILE"], "a") as file:
                file.write(f"{os.getpid()}\\n")

sys.meta_path.insert(0, Count())
"""

SHORT_LOOP = """
import torch, paceline
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Dropout(), torch.nn.Linear(32, 1))
job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    job.backward(model(torch.ones(8, 2)).mean(), weight=8)
    optimizer.step()
"""


@pytest.mark.parametrize("kind", ["a workload", "a loop"])
def test_torch_is_imported_by_one_process(tmp_path, kind):
    (tmp_path / "sitecustomize.py").write_text(COUNTED)
    path = write(tmp_path)
    if kind == "a loop":
        (tmp_path / "model_file.py").write_text(SHORT_LOOP)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    count = tmp_path / "count.txt"
    ended = paceline(tmp_path, "verify", "-n", "2", path, PYTHONPATH=paths, COUNT_FILE=str(count))
    assert ended.code == 0, ended.out + ended.err
    assert "dropout" in ended.out
    assert len(set(count.read_text().split())) == 1
