"""ZeRO-1 (`shard` with zero=1, or beside a split model): ranks end where one does, each with a part of the state."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.checkpoint.manifest import OPTIMIZER
from paceline.checkpoint.reshard import take
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.parallel.whole_update import share_out
from paceline.train import snapshot
from paceline.train.job import Job

from support import models
from support.rank_comparisons import compare, held_here, train
from support.ranks import run_ranks
from support.whole_optimizers import Lamb

TWO = ("shard=2,zero=1", "shard=2,zero=1,offload=on")
FOUR = ("shard=4,zero=1", "replicate=2,shard=2,zero=1", "shard=2,tensor=2", "shard=2,pipeline=2", "shard=2,context=2")
TOLERANCE = 1e-10


class Odd(nn.Module):
    """Rows that do not divide, one row only, a scalar, a frozen matrix, a tied weight, and what no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(37, 6), nn.Linear(6, 37, bias=False)
        self.inner = nn.Linear(6, 5)
        self.outer = nn.Linear(5, 6)
        self.one = nn.Parameter(torch.full((1, 6), 0.5))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * self.one
        x = x + self.frozen(self.outer(torch.tanh(self.inner(x))))
        return self.head(x) * self.scale


def loss(model, batch):
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), scores[..., 0].numel()


class Reassigns(torch.optim.Optimizer):
    """Keeps state from its constructor on, and gives parameters other memory."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, 0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sum"] += parameter.grad.square()
                    parameter.data = parameter - group["lr"] * parameter.grad / self.state[parameter]["sum"].sqrt()


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1),
    "lamb": lambda model: Lamb([parameter for parameter in model.parameters() if parameter.requires_grad]),
    "reassigns": lambda model: Reassigns([p for p in model.parameters() if p.requires_grad]),
}


def odd(optimizer, **parts):
    random = torch.Generator().manual_seed(0)
    return paceline.Workload(
        **{
            "model": Odd,
            "loss": loss,
            "optimizer": OPTIMIZERS[optimizer],
            "data": list(torch.randint(37, (30, 7), generator=random)),
            "batch_size": 10,
            "micro_batch_size": 2,
            "steps": 3,
            "precision": "float64",
            "clip_norm": 0.5,
            **parts,
        }
    )


def state_of(job):
    """The parts of the optimizer's state that this rank saves."""
    parts, _ = snapshot.optimizer_state(job.model, job.optimizer, job.parallel.local_shards(), job.size)
    return {name: (part.tensor.clone(), part.shard.shard_spec) for name, part in parts.items()}


def train_odd(rank, cells):
    api.init()
    found = {}
    for optimizer, plan in cells:
        job = Job(odd(optimizer), Plan.parse(plan))
        at_start = state_of(job)
        steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
        found[optimizer, plan] = (steps, held_here(job)), state_of(job), at_start
        job.close()
    return found


CELLS = [(optimizer, plan) for optimizer in OPTIMIZERS for plan in (*TWO, *FOUR) if "context" not in plan]


@functools.cache
def results(ranks):
    cells = [(optimizer, "replicate=1") for optimizer in OPTIMIZERS]
    if ranks > 1:
        cells = [cell for cell in CELLS if Plan.parse(cell[1]).world_size == ranks]
    return run_ranks(ranks, train_odd, cells, timeout_s=300)


@pytest.mark.parametrize(("optimizer", "plan"), CELLS)
def test_ranks_end_where_one_does(optimizer, plan):
    """Losses, norms, parameters and gradients; a parameter that no rank uses keeps its value under weight decay."""
    ranks = results(Plan.parse(plan).world_size)
    assert (
        compare(results(1)[0][optimizer, "replicate=1"][0], [found[optimizer, plan][0] for found in ranks]) == "equal"
    )


@pytest.mark.parametrize(("optimizer", "plan"), CELLS)
def test_the_parts_of_the_state_are_those_of_one_rank(optimizer, plan):
    for when in (1, 2):  # at the end, and before the first step
        whole = results(1)[0][optimizer, "replicate=1"][when]
        seen: Counter[str] = Counter()
        for found in results(Plan.parse(plan).world_size):
            for name, (tensor, spec) in found[optimizer, plan][when].items():
                expected = take(whole[name][0], spec)
                torch.testing.assert_close(tensor, expected, rtol=TOLERANCE, atol=TOLERANCE)
                seen[name] += tensor.numel()
        assert all(seen[name] >= tensor.numel() for name, (tensor, _) in whole.items())


def test_each_rank_has_its_share_of_the_state():
    total = sum(tensor.numel() for tensor, _ in results(1)[0]["adamw", "replicate=1"][1].values())
    for found in results(4):
        here = sum(tensor.numel() for tensor, _ in found["adamw", "shard=4,zero=1"][1].values())
        assert here <= total / 4 + 2 * sum((6, 6, 6, 5, 5, 1, 3, 1)) + 12  # a row of each moment more, and counts


def test_what_is_updated_whole_differs_by_one_parameter_at_most():
    sizes = dict(zip("abcdefghijk", (80, 60, 60, 40, 20, 20, 14, 10, 6, 2, 2), strict=True))
    owners = share_out(sizes, 4)
    shares = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(4)]
    assert max(shares) - min(shares) <= 10
    # Whichever rank computes it, and in whatever order it has them.
    assert share_out(dict(reversed(sizes.items())), 4) == owners


def test_a_tied_parameter_has_one_owner_for_all_its_stages():
    """Each stage's ranks assign all parameters, so that what two of them hold goes to the same places."""
    stages = {"first": [0], "tied": [0, 1], "last": [1]}
    assert share_out({"first": 128, "tied": 64, "last": 32}, 2, stages) == {"first": 0, "tied": 1, "last": 0}


def test_parameters_that_come_later_go_to_the_rank_with_least():
    loads = Counter()
    assert share_out({"a": 8, "b": 4}, 2, loads=loads) == {"a": 0, "b": 1}
    assert share_out({"c": 2}, 2, loads=loads) == {"c": 1}


def train_models(rank, cells):
    api.init()
    return {cell: train(models.workload(cell[0], clip_norm=0.5), cell[1]) for cell in cells}


@functools.cache
def of_models(ranks):
    plans = {1: ("replicate=1",), 2: TWO[:1], 4: FOUR}[ranks]
    return run_ranks(ranks, train_models, [(n, p) for n in ("mlp", "encoder") for p in plans], timeout_s=300)


@pytest.mark.parametrize(
    ("name", "plan"),
    [(n, p) for n in ("mlp", "encoder") for p in (*TWO[:1], *FOUR) if "context" not in p or n == "encoder"],
)
def test_models_end_where_one_rank_does(name, plan):
    ranks = [found[name, plan] for found in of_models(Plan.parse(plan).world_size)]
    assert compare(of_models(1)[0][name, "replicate=1"], ranks) == "equal"


def held_by(rank, optimizer, plan):
    """For each parameter the ranks that have the same part of its state as this one."""
    api.init()
    job = Job(odd(optimizer), Plan.parse(plan))
    held = job.parallel.local_shards()
    return {name: shard.holders for name, shard in held.items() if name.startswith(OPTIMIZER)}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_replicas_hold_the_same_part(optimizer):
    found = run_ranks(4, held_by, optimizer, "replicate=2,shard=2,zero=1")
    for rank, holders in enumerate(found):
        assert set(holders.values()) <= {(rank % 2, rank % 2 + 2), ()}
        assert (rank % 2, rank % 2 + 2) in holders.values()
        assert (() in holders.values()) == (optimizer == "lamb" or rank % 2 == 1)  # a scalar has one owner


def save_and_go_on(rank, folder, optimizer):
    """Saved after a step; what comes of the others, here and from the checkpoint, and under other plans."""
    api.init()
    job = Job(odd(optimizer), Plan.parse("shard=2,zero=1"))
    batches = job.batches()
    job.step(next(batches))
    job.save(folder)
    losses = [job.step(batch) for batch in batches]
    found = {"kept on": (losses, state_of(job), held_here(job))}
    job.close()
    for plan in ("shard=2,zero=1", "shard=2", "replicate=2"):
        again = Job(odd(optimizer), Plan.parse(plan))
        again.load(folder)
        losses = [again.step(batch) for batch in again.batches()]
        found[plan] = losses, state_of(again), held_here(again)
        again.close()
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_checkpoint_goes_on_bit_for_bit_and_under_other_plans(tmp_path, optimizer):
    for found in run_ranks(2, save_and_go_on, str(tmp_path / "saved"), optimizer):
        losses, state, values = found["kept on"]
        again, same_state, same_values = found["shard=2,zero=1"]
        assert losses == again
        assert state.keys() == same_state.keys()
        assert all(torch.equal(tensor, same_state[name][0]) for name, (tensor, _) in state.items())
        assert all(torch.equal(one[0], same_values[name][0]) for name, one in values.items())
        for plan in ("shard=2", "replicate=2"):
            assert found[plan][0] == pytest.approx(losses, rel=TOLERANCE)
