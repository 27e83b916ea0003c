"""What the plan promises, the ledger counts, exactly."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.nouns.buckets import group_parameters
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.plan.step_traffic import step_traffic
from paceline.plan.traffic import TensorFacts, replicate
from paceline.profile.describe import describe
from paceline.train.job import Job

from support import models
from support.ranks import run_ranks

SLOW = pytest.mark.slow


def workload():
    return paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4)),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.randn(32, 8)),
        batch_size=8,
    )


def replicated_traffic(rank, plan):
    api.init()
    job = Job(workload(), plan)
    ledger = job.ledger
    before = dict(ledger.calls), dict(ledger.payload_bytes)
    for batch in job.batches():
        job.step(batch)
    key = ("all_reduce", "replicate")
    steps = job.step_number
    return (ledger.calls[key] - before[0].get(key, 0)) / steps, (
        ledger.payload_bytes[key] - before[1].get(key, 0)
    ) / steps


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"transport": "gloo"}, {"bucket_bytes": 300}, {"compression": "bf16"}], ids=str
)
def test_the_ledger_counts_what_the_plan_predicts(ranks, options):
    plan = Plan(mesh=f"replicate={ranks}", **options)
    model = describe(workload())
    trained = [TensorFacts(**{**sizes, "shape": tuple(sizes["shape"])}) for sizes in model["parameters"]]
    (predicted,) = replicate(plan, trained, len(model["buffers"]))
    for calls, sent in run_ranks(ranks, replicated_traffic, plan):
        assert (calls, sent) == (predicted.calls, predicted.payload_bytes)


ANY_MESH = (
    "shard=2,zero=3", "tensor=2,sequence=on", "pipeline=2,schedule=1f1b", "pipeline=2,schedule=interleaved",
    "replicate=2,shard=2", "pipeline=2,tensor=2", "pipeline=2,shard=2", "shard=2,tensor=2", "replicate=2,pipeline=2",
    "replicate=2,tensor=2",
)  # fmt: skip


def encoder():
    """Two of the encoder's layers: as many as the shortest pipeline of these plans has stages, or more."""
    declared = models.workload("encoder", clip_norm=0.5, precision="fp16")
    return dataclasses.replace(declared, model=lambda: models.Encoder(layers=2))


def rows_of_first_steps(rank, cells, make):
    """What the first step of each job sends, one job after another in the same processes."""
    api.init()
    found = []
    for parts, text in cells:
        job = Job(make(**parts), Plan.parse(text))
        batch = next(iter(job.batches()))
        job.ledger.calls.clear()
        job.ledger.payload_bytes.clear()
        job.step(batch)
        found.append({(row["collective"], row["axis"]): (row["calls"], row["bytes"]) for row in job.ledger.rows()})
        job.close(save=False)
    return found


@functools.cache
def found_on(ranks):
    """What every rank sends under each of the plans for so many ranks."""
    plans = [text for text in ANY_MESH if Plan.parse(text).world_size == ranks]
    found = run_ranks(ranks, rows_of_first_steps, [({}, text) for text in plans], encoder)
    return {text: [rows[number] for rows in found] for number, text in enumerate(plans)}


@pytest.mark.parametrize("text", [pytest.param(t, marks=() if t.startswith("tensor") else SLOW) for t in ANY_MESH])
def test_every_axis_sends_what_was_predicted(text):
    """Embedding, attention, norms and a head under each axis and their mixes, clipped: call by call, byte by byte."""
    plan = Plan.parse(text)
    predicted = step_traffic(plan, describe(encoder(), plan))
    for rank, found in enumerate(found_on(plan.world_size)[text]):
        rows = predicted[Mesh.parse(plan.mesh).coordinate(rank)["pipeline"] if len(predicted) > 1 else 0]
        assert found == {(row.collective, row.axis): (row.calls, row.payload_bytes) for row in rows}


class Words(nn.Module):
    """An odd vocabulary, so that scores are split unevenly where the weights are whole; or frozen parameters."""

    def __init__(self, is_frozen):
        super().__init__()
        self.words, self.head = nn.Embedding(97, 16), nn.Linear(16, 97, bias=False)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(()))
        self.head.weight = self.words.weight
        if is_frozen:
            for parameter in (self.words.weight, self.layers[1].weight, self.layers[1].bias, self.scale):
                parameter.requires_grad_(False)

    def forward(self, ids):
        x = self.words(ids) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def word_loss(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def words_workload(precision="float32", is_frozen=False):
    random = torch.Generator().manual_seed(1)
    return paceline.Workload(
        model=lambda: Words(is_frozen),
        loss=word_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.randint(0, 97, (32, 8), generator=random)),
        batch_size=8,
        clip_norm=0.5,
        precision=precision,
    )


UNEVEN = [
    ({}, "tensor=2"),
    ({}, "tensor=2,sequence=on"),
    ({"precision": "bf16"}, "tensor=2"),
    ({"precision": "bf16"}, "tensor=2,sequence=on,checkpointing=full"),
    ({"precision": "bf16"}, "pipeline=2"),
    ({"precision": "bf16"}, "pipeline=2,schedule=interleaved"),
    ({"is_frozen": True}, "pipeline=2"),
    ({"is_frozen": True}, "tensor=2"),
    ({"is_frozen": True}, "shard=2"),
    ({"is_frozen": True}, "replicate=2"),
]  # fmt: skip
UNEVEN_ON_FOUR = [
    ({"is_frozen": True}, "pipeline=2,shard=2"),
    ({"is_frozen": True}, "tensor=2,shard=2"),
    ({"precision": "bf16"}, "pipeline=2,tensor=2"),
    ({"precision": "bf16", "is_frozen": True}, "pipeline=2,shard=2"),
]  # fmt: skip


@SLOW
@pytest.mark.parametrize(("ranks", "cells"), [(2, UNEVEN), (4, UNEVEN_ON_FOUR)])
def test_uneven_pieces_narrow_numbers_and_frozen_parameters(ranks, cells):
    found = run_ranks(ranks, rows_of_first_steps, cells, words_workload)
    for number, (parts, text) in enumerate(cells):
        plan = Plan.parse(text)
        for rank in range(ranks):
            at = Mesh.parse(plan.mesh).coordinate(rank)
            facts = describe(words_workload(**parts), plan, at["tensor"], Mesh.parse(plan.mesh).data_part(rank))
            predicted = step_traffic(plan, facts, at["shard"])
            rows = predicted[at["pipeline"] if len(predicted) > 1 else 0]
            promised = {(row.collective, row.axis): (row.calls, row.payload_bytes) for row in rows}
            assert found[rank][number] == promised, (parts, text, rank)


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 1}
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=32))


def next_word_loss(model, batch):
    scores = model(input_ids=batch, use_cache=False).logits[:, :-1]
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[:, 1:].numel()


@SLOW
def test_ranks_differ_where_activations_are_uneven_and_weights_are_not():
    workload = dataclasses.replace(words_workload(), model=opt, loss=next_word_loss)
    first, second = (describe(workload, Plan.parse("tensor=2"), rank)["split"] for rank in (0, 1))
    shapes = [[one["shape"] for one in split["ranks"][0]["parameters"]] for split in (first, second)]
    assert shapes[0] == shapes[1]
    assert first["ranks"][0]["graph"] != second["ranks"][0]["graph"], "both send the same: the test is void"
    assert not first["is_even"]


def test_every_rank_sends_the_same_where_all_is_even():
    workload = models.workload("encoder", clip_norm=0.5)
    first, second = (describe(workload, Plan.parse("tensor=2"), rank)["split"] for rank in (0, 1))
    assert first["is_even"]
    assert first["ranks"] == second["ranks"]


def test_one_rank_sends_nothing():
    assert replicate(Plan(), [], 0) == []


def test_buckets_are_filled_last_first_and_hold_one_kind():
    sizes = [(10, "a"), (10, "a"), (90, "b"), (10, "b"), (200, "b")]
    assert group_parameters(sizes, 100) == [[4], [3, 2], [1, 0]]
    assert group_parameters([], 100) == []
