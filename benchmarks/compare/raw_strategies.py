"""Train the benchmarks' BERT on two ranks with each strategy by hand in raw torch, as torch's tutorials do.

raw_shard       `fully_shard` on every layer and on the model (FSDP2)
raw_tensor      `parallelize_module`: attention and feed-forward by columns, then rows (Megatron's plan);
                the tied embedding and head by vocabulary, with `loss_parallel`
raw_gpipe,      `PipelineStage` of one half of the layers each, four micro-batches; the embedding, which
raw_1f1b        both ends need, on both, its gradients added
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn import functional as F

from compare.bert_workload import MICRO_BATCHES, Batch, batches, loss, make_model, make_optimizer

Step = Callable[[], float | None]


def raw_shard(folder: Path, rank: int, ranks: int) -> Step:
    """Return a step under FSDP2; gradients are means over the ranks, whose losses weigh the same."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    model: Any = make_model()
    for layer in model.bert["encoder"]["layer"]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _full_step(model, batches(folder, rank, ranks))


def raw_tensor(folder: Path, rank: int, ranks: int) -> Step:
    """Return a step under tensor parallelism; every rank sees the whole batch."""
    dist.init_process_group("gloo")
    model = make_model()
    _split_by_tensor(model, ranks)
    return _full_step(model, batches(folder), loss_parallel)


def _full_step(model: Any, data: Iterator[Batch], context: Callable[[], Any] = contextlib.nullcontext) -> Step:
    """Return a step of a model that each rank calls as one: the loss, gradients of its mean, the update."""
    optimizer = make_optimizer(model)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with context():
            total, weight = loss(model, next(data))
            mean = total / weight
            mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return mean.item()

    return step


def _split_by_tensor(model: Any, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    plan = {
        # One input for the three projections: their gradients meet before they cross the network, once.
        "attention.self": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "attention.self.query": ColwiseParallel(),
        "attention.self.key": ColwiseParallel(),
        "attention.self.value": ColwiseParallel(),
        "attention.output.dense": RowwiseParallel(),
        "intermediate.dense": ColwiseParallel(),
        "output.dense": RowwiseParallel(),
    }
    for layer in model.bert["encoder"]["layer"]:
        layer.attention["self"].heads //= ranks  # each rank has columns of query, key and value for its share of heads
        parallelize_module(layer, mesh, plan)
    embeddings, head = model.bert["embeddings"], model.cls["predictions"]
    parallelize_module(embeddings, mesh, {"word_embeddings": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(head, mesh, {"decoder": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    # `parallelize_module` replaced the parameters by DTensors, each its own.
    head.decoder.weight = embeddings.word_embeddings.weight  # tied again: both are rows of the vocabulary
    head.bias = head.decoder.bias


class FirstHalf(nn.Module):
    """Embeddings and the first half of the layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        layers = list(model.bert["encoder"]["layer"])
        self.embeddings = model.bert["embeddings"]
        self.layers = nn.ModuleList(layers[: len(layers) // 2])
        self.tied = model.bert["embeddings"].word_embeddings.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return (batch, length, hidden) from (batch, length)."""
        hidden: Tensor = self.embeddings(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class SecondHalf(nn.Module):
    """The other layers and the head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        layers = list(model.bert["encoder"]["layer"])
        self.layers = nn.ModuleList(layers[len(layers) // 2 :])
        self.head = model.cls["predictions"]
        self.tied = model.cls["predictions"].decoder.weight

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Return scores for the hidden tokens, (batch * places, vocabulary), from (batch, length, hidden)."""
        for layer in self.layers:
            hidden = layer(hidden)
        rows = torch.arange(len(places))[:, None]  # (batch, 1), against places of (batch, hidden tokens)
        scores: Tensor = self.head(hidden[rows, places])
        return scores.flatten(0, 1)


def raw_gpipe(folder: Path, rank: int, ranks: int) -> Step:
    """Return a step of a pipeline with all forward passes first, then all backward passes."""
    return _pipeline(folder, rank, ranks, ScheduleGPipe)


def raw_1f1b(folder: Path, rank: int, ranks: int) -> Step:
    """Return a step of a pipeline with forward and backward passes in turn."""
    return _pipeline(folder, rank, ranks, Schedule1F1B)


def _pipeline(folder: Path, rank: int, ranks: int, schedule_type: Any) -> Step:
    dist.init_process_group("gloo")
    model = make_model()  # in full on both ranks, from one seed: so the tied weights start alike
    half: Any = FirstHalf(model) if rank == 0 else SecondHalf(model)
    stage = PipelineStage(half, rank, ranks, torch.device("cpu"))

    def mean_loss(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels.flatten())

    schedule = schedule_type(stage, MICRO_BATCHES, loss_fn=mean_loss)
    optimizer = make_optimizer(half)
    data = batches(folder)

    def run(batch: Batch) -> float | None:
        """Run all micro-batches, and return the mean loss on the rank that has it."""
        if rank == 0:
            schedule.step(batch["input_ids"])
            return None
        losses: list[Tensor] = []
        schedule.step(target=batch["labels"], losses=losses, return_outputs=False, places=batch["places"])
        return statistics.mean(value.item() for value in losses)

    def step() -> float | None:
        optimizer.zero_grad(set_to_none=True)
        mean = run(next(data))
        # Each rank has the gradient of its own use of the tied weight; their sum updates both copies alike.
        dist.all_reduce(half.tied.grad)
        optimizer.step()
        return mean

    return step
