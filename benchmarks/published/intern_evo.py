"""InternEvo (InternLM/InternEvo, doc/en/train_performance.md, "GPU Memory Usage Test"): InternLM on 3 to 16 A800-80GB.

One sample of 2048 words in a micro-batch, four in a step, bfloat16, every block computed again. How memory was
measured is not said; taken is what a process has, in units of 1e9 bytes. With a pipeline no state is shared: each stage
has all of its own in float32, flat, and widens its gradients to update.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.nouns.profile import OPTIMIZER, Recording
from published.pieces import FusedLoss, RmsNorm, adamw_of_2_0
from published.stage import Stage, default_dtype, depth, stage, steps_for
from published.zero import FlatOptimizer, Keeping

MICRO_BATCHES = 4
BRIEF = 2  # to try out, where no more are in flight
WORDS = 103168
BUCKET = 512 * 2**20  # gradients that are summed at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model: configs/."""

    width: int
    layers: int
    heads: int
    inner: int


SHAPES = {"InternLM-7B": Shape(4096, 32, 32, 11008), "InternLM-20B": Shape(5120, 60, 40, 13824)}


@dataclass(frozen=True, slots=True)
class Part:
    """Of the model, what one GPU has.

    Attributes:
        layers: so many of them.
        is_first, is_last: with the embedding, with the head.
        tensor: GPUs that share a layer.
        shards: GPUs that share parameters (FSDP); 1 for none.
        in_flight: micro-batches whose forward pass is done before the first backward pass.
        zero: GPUs that share the optimizer's state.
        recomputes: every block in the backward pass.
    """

    layers: int
    is_first: bool = True
    is_last: bool = True
    tensor: int = 1
    shards: int = 1
    in_flight: int = 1
    zero: int = 1
    recomputes: bool = True


class Attention(nn.Module):
    """Attention of this GPU's heads."""

    def __init__(self, shape: Shape, tensor: int) -> None:
        super().__init__()
        self.heads, self.head = shape.heads // tensor, shape.width // shape.heads
        own = shape.width // tensor
        self.qkv, self.proj = nn.Linear(shape.width, 3 * own), nn.Linear(own, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Of `x` (samples, words, width); positions are turned in place."""
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, self.head).unbind(2)
        query, key, value = (one.transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return self.proj(mixed.reshape(batch, length, -1))


class FeedForward(nn.Module):
    """A gate, and what goes through."""

    def __init__(self, shape: Shape, tensor: int) -> None:
        super().__init__()
        inner = shape.inner // tensor
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((shape.width, inner), (shape.width, inner), (inner, shape.width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, shape: Shape, tensor: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RmsNorm(shape.width), RmsNorm(shape.width)])
        self.attention, self.feed_forward = Attention(shape, tensor), FeedForward(shape, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`; norms take it in float32."""
        x = self.attention(self.norms[0](x.float()).to(x.dtype)) + x
        return self.feed_forward(self.norms[1](x.float()).to(x.dtype)) + x


class Model(nn.Module):
    """A stage of the model, or all of it."""

    def __init__(self, shape: Shape, part: Part) -> None:
        super().__init__()
        self.part, width = part, shape.width
        self.words = nn.Embedding(WORDS, width // part.tensor) if part.is_first else None
        self.widen = part.tensor
        self.blocks = nn.ModuleList(Block(shape, part.tensor) for _ in range(depth(part.layers)))
        self.norm = RmsNorm(width) if part.is_last else None
        self.scores = nn.Linear(width, WORDS // part.tensor, bias=False) if part.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Scores, or what the next stage gets."""
        if self.words is not None:
            x = self.words(x)
            if self.widen > 1:
                x = torch.cat([x] * self.widen, -1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.part.recomputes else block(x)
        return x if self.norm is None or self.scores is None else self.scores(self.norm(x.float()).to(x.dtype))


def why_not(row: dict[str, str]) -> str | None:
    """Why a row is not predicted: all are."""
    return None


def predicted(row: dict[str, str]) -> list[Recording]:
    """A row's steps, of the GPUs that may have most."""
    shape, length = SHAPES[row["model"]], int(row["seq_len"])
    told = dict(re.findall(r"(\w+)=(\S+)", row["strategy"])) | dict(re.findall(r"(tp|pp|zero1=)(\d+)", row["strategy"]))
    gpus, batch = int(row["gpus"]), int(row["micro_batch"])
    tensor, stages = int(told.get("tp", 1)), int(told.get("pp", 1))
    recomputes = row["act_ckpt"] == "full"
    shards = gpus // tensor if told.get("fsdp") == "True" else 1
    zero = told.get("zero1", "1")
    parts = gpus // tensor if zero == "all" else max(int(zero), 1)
    if stages == 1:
        part = Part(shape.layers, True, True, tensor, shards, 1, parts, recomputes)
        return [recorded(shape, part, (batch, length), steps_for(row))]
    least, more = divmod(shape.layers, stages)
    recordings = []
    for number in sorted({0, stages - more if more else 1, stages - 1}):
        layers = least + (number >= stages - more)
        flight = min(stages - number, MICRO_BATCHES)
        part = Part(layers, number == 0, number == stages - 1, tensor, 1, flight, 1, recomputes)
        recordings.append(recorded(shape, part, (batch, length), steps_for(row)))
    return recordings


def recorded(shape: Shape, part: Part, sizes: tuple[int, int], steps: int) -> Recording:
    """Steps of one GPU.

    Args:
        shape: of the model.
        part: what this GPU has of it.
        sizes: samples of so many words in a micro-batch.
        steps: to try out.
    """
    with stage(part.shards, sees_making=part.shards > 1) as made:
        with default_dtype(torch.bfloat16):
            model = Model(shape, part)
        update = _optimizer(model, part, made)
        shape_in = sizes if part.is_first else (*sizes, shape.width)

        def forward() -> Tensor:
            dtype = torch.int64 if part.is_first else torch.bfloat16
            came = torch.zeros(shape_in, dtype=dtype)
            out = model(came if part.is_first else came.requires_grad_())
            return FusedLoss.apply(out.flatten(0, 1), True).sum() if part.is_last else out  # type: ignore[no-any-return]

        def step() -> None:
            waiting = []
            count = max(part.in_flight, BRIEF)
            for number in range(count):
                made.recorder.phase = "forward"
                waiting.append(forward())
                if len(waiting) == part.in_flight or number == count - 1:
                    _backward(waiting.pop(0))
            while waiting:
                _backward(waiting.pop(0))
            made.recorder.phase = "update"
            update()

        return made.run(model, step, steps)


def _backward(out: Tensor) -> None:
    out.backward(torch.empty_like(out))


def _optimizer(model: Model, part: Part, made: Stage) -> Callable[[], None]:
    if made.mesh is None:
        keeping = Keeping(part.zero, buckets=1, bucket=BUCKET, widens_for_norm=True, plain_update=True)
        if part.zero == 1:
            keeping = Keeping(widens_for_norm=True, plain_update=True)
        return FlatOptimizer(model, keeping, made).step
    for block in model.blocks:
        for unit in (block.attention, block.feed_forward):
            fully_shard(unit, mesh=made.mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=made.mesh)
    local: list[Tensor] = [one.to_local() for one in model.parameters()]  # type: ignore[attr-defined]
    states = [torch.empty_like(one, dtype=torch.float32) for one in local for _ in range(3)]
    made.note(states, OPTIMIZER)

    def update() -> None:
        normed = [torch.empty_like(one, dtype=torch.float32) for one in local]
        del normed
        wide = [torch.empty_like(one, dtype=torch.float32) for one in local]
        adamw_of_2_0(wide)
        del wide
        model.zero_grad()
        assert states

    return update
