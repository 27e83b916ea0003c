"""Loops of one's own under `context` and `expert`: positions and samples of a rank train as whole batches do."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.nouns.errors import PacelineError, PlanError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.plan import Plan
from paceline.train.precision import grouped_products_in_float64

from support.expert_models import Mixture
from support.ranks import preload, run_ranks

preload("paceline.train.loop_job", "paceline.parallel.split_forward")
STEPS, BATCH, LENGTH, WIDTH, WORDS = 3, 5, 8, 16, 20
TOKENS = torch.randint(WORDS, (STEPS, BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
PARTS = {1: [slice(0, BATCH)], 2: [slice(0, 2), slice(2, BATCH)]}


class Attention(nn.Module):
    """Causal attention and a layer of its own; one parameter is used in the last step alone."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """Words to scores of the next ones; `late` gets no gradient before the loop asks for it."""

    def __init__(self, mixes):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = Attention() if mixes == "attention" else Mixture()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.late = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens, asks=False, extra=None):
        x = self.words(tokens) if extra is None else self.words(tokens) + extra
        x = self.mix(x)
        hidden = self.norm(x * self.late if asks else x)
        return {"scores": self.head(hidden), "hidden": hidden}


def loss_of(out, tokens):
    return F.cross_entropy(out["scores"][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(rank, mixes, mesh):
    """Two calls in a step, inputs that want gradients, clipping by the norm of the whole, an evaluation."""
    with grouped_products_in_float64():
        return trained(mixes, mesh)


def trained(mixes, mesh):
    if mesh:
        os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh=mesh)))
        paceline.init()
    torch.manual_seed(0)
    model = Reader(mixes).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    job = None
    if mesh:
        job, model, optimizer = paceline.prepare(model, optimizer)
    part = PARTS[job.data_size][job.data_rank] if job else slice(0, BATCH)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = TOKENS[step][part]
        extra = torch.full((len(tokens), LENGTH, WIDTH), 0.1, dtype=torch.float64, requires_grad=True)
        out = model(tokens, extra=extra, asks=step == STEPS - 1)
        (slope,) = torch.autograd.grad(out["hidden"].square().sum(), extra, retain_graph=True)
        loss = loss_of(out, tokens) + model(tokens.flip(1))["hidden"].abs().mean()
        if job:
            job.backward(loss, weight=len(tokens))
            norm = job.clip(0.1)
        else:
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        found.append(torch.tensor(norm, dtype=torch.float64))
        slopes = job.all_gather(slope) if job else slope
        found.append(slopes)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found.append(model(TOKENS[0])["scores"])
    for name, tensor in model.named_parameters():
        is_cut = bool(job) and name in model.forward.placements
        found.append((model.forward.full_tensor(name, tensor) if is_cut else tensor).detach().clone())
    cut = sorted(model.forward.placements) if job else []
    return cut, found


MESHES = [
    ("attention", "context=2", 2),
    ("attention", "context=3", 3),
    ("attention", "replicate=2,context=2", 4),
    ("mixture", "context=2", 2),
    ("mixture", "replicate=2,expert=2", 4),
]


@pytest.mark.parametrize(("mixes", "mesh", "ranks"), MESHES)
def test_split_sequences_and_samples_train_as_one_rank_does(mixes, mesh, ranks):
    _, expected = train(0, mixes, "")
    for cut, found in run_ranks(ranks, train, mixes, mesh):
        assert cut == (["mix.down", "mix.gate", "mix.up"] if "expert" in mesh else [])
        assert len(found) == len(expected)
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-9)


def refuse(rank, mesh, case):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh=mesh)))
    paceline.init()
    model = (nn.Linear(WIDTH, WIDTH) if case == "plain" else Reader("attention")).double()
    job, model, _ = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        if case == "plain":
            model(torch.ones(BATCH, WIDTH, dtype=torch.float64))
        out = model(TOKENS[0], extra=torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True))
        (slope,) = torch.autograd.grad(out["scores"].sum(), model.head.weight, create_graph=True)
        job.backward(slope.norm())
    except PacelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mesh", "case", "says"),
    [
        ("context=2", "penalty", "can't take the gradient of a gradient"),
        ("context=2", "plain", "no operation of the model runs on pieces of a sequence"),
        ("expert=2", "plain", "the model has no grouped matrix products"),
    ],
)
def test_what_is_refused_is_said_on_every_rank(mesh, case, says):
    for text in run_ranks(2, refuse, mesh, case):
        assert says in text


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("context=2,tensor=2", "one axis at a time splits what a loop calls, and these are context and tensor"),
        ("shard=2,context=2", "context gives each rank positions of every sequence"),
        ("shard=2,expert=2", "expert gives each rank pieces of parameters"),
        ("pipeline=2,context=2", "pipeline needs the loss as a function"),
    ],
)
def test_plans_that_split_in_two_ways_are_refused(mesh, says):
    with pytest.raises(PlanError, match=says):
        check_plan_of_loop(Plan(mesh=mesh))
