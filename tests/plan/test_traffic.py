"""What the plan promises, the ledger counts, exactly."""

from __future__ import annotations

import dataclasses
import functools

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.parallel.replicate.bucket import group_parameters
from paceline.parallel.shard.blocks import find_blocks
from paceline.profile.simulate import step_traffic
from paceline.train.job import Job

from support import models
from support.closed_traffic import ShardTraffic, by_operation, replicate, shard_traffic, sums_bytes, tensor
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
    predicted = by_operation(step_traffic(workload(), plan))
    assert predicted == replicate(plan, workload().model())
    for found in run_ranks(ranks, replicated_traffic, plan):
        assert found == predicted["all_reduce", "replicate"]


ANY_MESH = (
    "shard=2,zero=3", "shard=2,zero=1", "tensor=2,sequence=on", "pipeline=2,schedule=1f1b",
    "pipeline=2,schedule=interleaved", "replicate=2,shard=2", "replicate=2,shard=2,zero=1", "pipeline=2,tensor=2",
    "pipeline=2,shard=2", "shard=2,tensor=2", "replicate=2,pipeline=2", "replicate=2,tensor=2",
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
        found.append(by_operation(job.ledger.rows()))
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
    for rank, found in enumerate(found_on(plan.world_size)[text]):
        assert found == by_operation(step_traffic(encoder(), plan, rank))


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
            promised = by_operation(step_traffic(words_workload(**parts), plan, rank))
            assert found[rank][number] == promised, (parts, text, rank)


class Pair(nn.Module):
    """Two layers with a function of each number between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_pairs_of_layers_send_under_tensor_what_is_known_of_them(pairs, clip_norm):
    declared = dataclasses.replace(
        words_workload(),
        model=lambda: nn.Sequential(nn.Embedding(97, 16), *(Pair() for _ in range(pairs))),
        loss=lambda model, batch: (model(batch).square().sum(), batch.numel()),
        clip_norm=clip_norm,
    )
    rows = by_operation(step_traffic(declared, Plan.parse("tensor=2")))
    assert rows == tensor(2, pairs, activation_bytes=8 * 8 * 16 * 4, clips=clip_norm is not None)


@pytest.mark.parametrize(("zero", "micro_batches"), [(2, 2), (3, 2)])
def test_a_sharded_model_sends_what_is_known_of_it(zero, micro_batches):
    model = encoder().model()
    blocks = find_blocks(model)
    parts = []
    for name, parameter in model.named_parameters():
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        parts.append(ShardTraffic(tuple(parameter.shape), 4, "float32", block))
    declared = dataclasses.replace(
        encoder(), precision="float32", clip_norm=None, micro_batch_size=models.BATCH // 2 // micro_batches
    )
    plan = Plan.parse(f"shard=2,zero={zero}")
    expected = shard_traffic(plan, 2, parts, micro_batches)
    calls, sent = expected["all_reduce", "shard"]
    expected["all_reduce", "shard"] = (calls + 1, sent + sums_bytes(2))
    assert by_operation(step_traffic(declared, plan)) == expected


def reads_a_value(model, batch):
    scores = model(batch)
    kept = scores[scores > 0]  # as many as there are, which a tensor without values can't tell
    return kept.square().sum(), max(len(kept), 1)


def workload_that_reads():
    return dataclasses.replace(workload(), loss=reads_a_value)


def test_traffic_is_simulated_with_values_if_the_loss_reads_them():
    plan = Plan(mesh="replicate=2")
    expected = replicate(plan, workload().model())
    assert by_operation(step_traffic(workload_that_reads(), plan)) == expected
    for (found,) in run_ranks(2, rows_of_first_steps, [({}, "replicate=2")], workload_that_reads):
        assert found == expected


def test_a_model_that_is_too_large_is_not_simulated_with_values(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(WorkloadError, match="with values it takes about"):
        step_traffic(workload_that_reads(), Plan(mesh="replicate=2"))


def test_one_rank_sends_nothing():
    assert step_traffic(workload(), Plan()) == []
    assert replicate(Plan(), workload().model()) == {}


def test_buckets_are_filled_last_first_and_hold_one_kind():
    sizes = [(10, "a"), (10, "a"), (90, "b"), (10, "b"), (200, "b")]
    assert group_parameters(sizes, 100) == [[4], [3, 2], [1, 0]]
    assert group_parameters([], 100) == []


def test_traffic_of_zero_1_is_that_of_replicate_and_updated_rows():
    """With zero=1 gradients are summed as under `replicate`; then each of two ranks sends half of the parameters."""
    declared = dataclasses.replace(encoder(), precision="float32", clip_norm=None)
    summed = by_operation(step_traffic(declared, Plan.parse("replicate=2")))
    expected = {(collective, "shard"): sent for (collective, _), sent in summed.items()}
    numel = sum(parameter.numel() for parameter in declared.model().parameters())
    expected["all_gather", "shard"] = (1, 4 * numel // 2)
    assert by_operation(step_traffic(declared, Plan.parse("shard=2,zero=1"))) == expected
