"""Jobs whose activations wait in the host's memory end with the parameters that they end with without, under each axis.

Under `tensor` the graph is cut into pieces, by which gradients may be added up in another order: there they are those
of `checkpointing=full`, which cuts it as well. The device is the CPU, with streams whose copies are late: see
`support/delayed_copies.py`.
"""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.comm import api
from paceline.comm.dtensor_parts import local
from paceline.nouns.patching import patched
from paceline.nouns.plan import Plan
from paceline.parallel import offload_activations
from paceline.train import parallelize
from paceline.train.job import Job

from support import attention_models, expert_models
from support.delayed_copies import DelayedCopies
from support.ranks import preload, run_ranks

preload("paceline.train.job", "transformers.models.bert.modeling_bert")
LINES = [
    *("replicate=2", "shard=2", "shard=2,zero=2", "tensor=2", "tensor=2,sequence=on", "context=2"),
    *("pipeline=2,micro_batches=2", "pipeline=2,micro_batches=4,schedule=zero_bubble", "shard=2,zero=1"),
    *("pipeline=2,micro_batches=2,schedule=interleaved",),
]


def ended(make, line, streams=None):
    """The losses and parameters of a job."""
    job = Job(make(), Plan.parse(line))
    placed = job.parallel.placed
    if streams is not None:
        offloaded = placed.split.offloaded if hasattr(placed, "split") else placed.offloaded
        offloaded.streams = streams
    losses = [job.step(batch) for batch in job.batches()]
    return losses, [local(value).detach().clone() for value in placed.updated().values()]


def train(rank, cells):
    """Of each cell, whether losses and parameters are the same bits, and how much was copied."""
    api.init()
    torch.set_num_threads(1)
    found = []
    for make, line in cells:
        losses, values = ended(make, f"{line},checkpointing=full" if "tensor" in line else line)
        with (
            DelayedCopies() as streams,
            patched(offload_activations, LEAST_BYTES=64),
            patched(parallelize, check_can_offload=lambda kind: None),
        ):
            again, others = ended(make, f"{line},checkpointing=offload", streams)
        is_same = losses == again and all(torch.equal(one, other) for one, other in zip(values, others, strict=True))
        found.append((is_same, streams.seen["copies"]))
    return found


def attention():
    return attention_models.workload("absolute")


def experts():
    model, _ = expert_models.MODELS["mixtral"]
    return expert_models.workload("mixtral", model=functools.partial(model, num_hidden_layers=3), precision="float32")


@pytest.mark.integration
def test_two_ranks():
    cells = [(attention, line) for line in LINES] + [(experts, "expert=2")]
    first, second = run_ranks(2, train, cells)
    for (_, line), (is_same, copies), (is_same_there, copies_there) in zip(cells, first, second, strict=True):
        # Of a pipeline's last stage each backward pass follows its forward pass: nothing leaves.
        assert (line, is_same, is_same_there, copies + copies_there > 4) == (line, True, True, True)
