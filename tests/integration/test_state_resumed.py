"""A killed job goes on with the state that its loop keeps: the same end as undisturbed, bit for bit."""

from __future__ import annotations

import re

import pytest

from support.jobs import paceline
from support.sample import sampled

COMMON = """
import collections, os, random, signal

import torch

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 4, dtype=torch.float64)
targets = inputs.sum(1, keepdim=True)


def net(inputs, width):
    return torch.nn.Sequential(torch.nn.Linear(inputs, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)).double()


class Replay:
    def __init__(self):
        self.rows = collections.deque(maxlen=5)

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


def keep(job):
    dial = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    plateau = job.keep("plateau", torch.optim.lr_scheduler.ReduceLROnPlateau(dial, patience=1))
    stopper = job.keep("stopper", {"best": float("inf"), "bad": 0})
    replay = job.keep("replay", Replay(), per_rank=True)
    draws = job.keep("draws", random.Random(job.rank), per_rank=True)
    return plateau, stopper, replay, draws


def after_step(job, ema, kept, mean):
    plateau, stopper, replay, draws = kept
    ema.update()
    plateau.step(mean)
    stopper["bad"] = 0 if mean < stopper["best"] else stopper["bad"] + 1
    stopper["best"] = min(mean, stopper["best"])
    replay.rows.append(torch.full((2,), job.rank + draws.random()))
    if job.step_number == int(os.environ.get("KILL_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)


def tell(job, ema, kept, score):
    plateau, stopper, replay, draws = kept
    with ema.applied():
        averaged = job.evaluate(torch.utils.data.TensorDataset(inputs, targets), score)["loss"]
    rows = [row.tolist() for row in replay.rows]
    best = [found[0] for found in job.kept_objects.best().states.values()]
    counts = plateau.state_dict(), stopper, rows, draws.random(), best
    print("ends at", job.rank, job.step_number, repr(averaged), counts)
"""
DECLARED = """
from common import *


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[1])


data = torch.utils.data.TensorDataset(inputs, targets)
workload = paceline.Workload(
    model=lambda: net(4, 512),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data=data,
    batch_size=16,
    epochs=2,
)
job = paceline.distribute(workload)
ema, kept = job.ema(0.9), keep(job)
for batch in job.batches():
    mean = job.step(batch)
    if job.step_number % 4 == 0:
        job.save_best(job.evaluate(data)["loss"])
    after_step(job, ema, kept, mean)
tell(job, ema, kept, loss_score := lambda model, batch: {"loss": loss(model, batch)})
"""
# A GAN whose generator is told the target too, so that its loss falls.
GAN = """
from common import *

generator, critic = net(4, 512), net(1, 256)
optimizer, critics = torch.optim.AdamW(generator.parameters(), lr=1e-2), torch.optim.Adam(critic.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=16, shuffle=True)
job, generator, critic, optimizer, critics, loader = paceline.prepare(generator, critic, optimizer, critics, loader)
ema, kept = job.ema(0.9), keep(job)
for _ in job.epochs(2):
    for batch, wanted in loader:
        optimizer.zero_grad()
        critics.zero_grad()
        made = generator(batch)
        job.backward(critic(made.detach()).mean() - critic(wanted).mean())
        critics.step()
        error = (made - wanted).square().mean()
        job.backward(error - 0.1 * critic(made).mean())
        optimizer.step()
        mean = float(job.all_reduce(error.detach(), "mean"))
        job.save_best(mean)
        after_step(job, ema, kept, mean)


def score(model, batch):
    return {"loss": ((model[0](batch[0]) - batch[1]).square().sum(), len(batch[1]))}


tell(job, ema, kept, score)
"""
FILES = {"declared": DECLARED, "gan": GAN}
CELLS = [
    pytest.param(name, plan, marks=sampled(row, column))
    for row, name in enumerate(FILES)
    for column, plan in enumerate(("replicate=2", "shard=2", "tensor=2"))
]
ONLY = [
    pytest.param("declared", "pipeline=2", marks=pytest.mark.integration),
    pytest.param("gan", "shard=2,zero=1", marks=pytest.mark.complete),
]


@pytest.mark.parametrize(("name", "plan"), [*CELLS, *ONLY])
def test_a_killed_job_ends_as_if_it_had_not_been(name, plan, tmp_path):
    (tmp_path / "common.py").write_text(COMMON)
    file = tmp_path / "train.py"
    file.write_text(FILES[name])
    options = ("run", "-n", "2", "--plan", plan, "--checkpoint-every", "3")
    whole = paceline(tmp_path, *options, "--job", "a", file)
    assert whole.code == 0, whole.err
    killed = paceline(tmp_path, *options, "--job", "b", file, KILL_AT="11")
    assert killed.code == 1
    again = paceline(tmp_path, *options, "--job", "b", "--resume", file)
    assert again.code == 0, again.err
    expected = sorted(re.findall(r"ends at (.*)", whole.out))
    assert len(expected) == 2
    assert sorted(re.findall(r"ends at (.*)", again.out)) == expected
    assert (tmp_path / "runs" / "b" / "best" / "manifest.json").exists()
