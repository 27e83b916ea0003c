"""Megatron's GPT: tensor-parallel blocks in float16, attention by plain operations, stages of a pipeline.

Korthikanti et al. (arXiv 2205.05198, figure 1) tell activation memory of the first stage: by their formula, which is
what is compared. vTrain's (VIA-Research/vTrain) measurements of Megatron-DeepSpeed tell speed: that they ran on
A100-80GB is what can be predicted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.nouns.profile import Recording
from published.stage import default_dtype, depth, stage
from published.zero import FlatOptimizer, Keeping


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a GPT."""

    width: int
    layers: int
    heads: int
    words: int = 51200


@dataclass(frozen=True, slots=True)
class Part:
    """What one GPU has of it.

    Attributes:
        layers: so many.
        is_first, is_last: with the embedding, with the scores.
        tensor: GPUs that share a layer; of what every one of them has whole, with `splits_words` only its words.
        in_flight: micro-batches whose forward pass is done before the first backward pass.
        recomputes: "none", "selective" (attention's inside) or "full".
    """

    layers: int
    is_first: bool
    is_last: bool
    tensor: int = 1
    splits_words: bool = False
    in_flight: int = 1
    recomputes: str = "full"


# Micro-batch, and how often a pipeline's stages come round (interleaved): table 3 of the paper.
SHAPES = {
    "GPT-22B": (Shape(6144, 48, 64), 4, 1),
    "GPT-3-175B": (Shape(12288, 96, 96), 1, 3),
    "MT-NLG-530B": (Shape(20480, 105, 128), 1, 3),
    "GPT-1T": (Shape(25600, 128, 160), 1, 1),
}


class Block(nn.Module):
    """Attention of this GPU's heads, and its part of the feed-forward."""

    def __init__(self, shape: Shape, part: Part) -> None:
        super().__init__()
        width, own = shape.width, shape.width // part.tensor
        self.heads, self.head = shape.heads // part.tensor, width // shape.heads
        self.tensor = part.tensor if part.splits_words else 1
        self.is_selective = part.recomputes == "selective"
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.proj = nn.Linear(width, 3 * own), nn.Linear(own, width)
        self.up, self.down = nn.Linear(width, 4 * own), nn.Linear(4 * own, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of `x` (words, samples, width)."""
        x = x + F.dropout(self._summed(self.proj(self._attend(self._product(self.qkv, self.norms[0](x))))), 0.1)
        inner = F.gelu(self._product(self.up, self.norms[1](x)))
        return x + F.dropout(self._summed(self.down(inner)), 0.1)

    def _product(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if self.tensor == 1:
            return layer(x)  # type: ignore[no-any-return]
        return GatheredLinear.apply(x, layer.weight, layer.bias, self.tensor)  # type: ignore[no-any-return]

    def _summed(self, x: Tensor) -> Tensor:
        return Scattered.apply(x, self.tensor) if self.tensor > 1 else x  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor) -> Tensor:
        length, batch, _ = qkv.shape
        query, key, value = qkv.view(length, batch * self.heads, 3 * self.head).chunk(3, -1)
        parts = [one.transpose(0, 1) for one in (query, key, value)]
        mix = partial(checkpoint, _mixed, use_reentrant=False) if self.is_selective else _mixed
        mixed: Tensor = mix(*parts)  # type: ignore[operator]
        return mixed.transpose(0, 1).reshape(length, batch, -1)


def _mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    shares = F.softmax(query @ key.transpose(1, 2), -1)
    return F.dropout(shares, 0.1) @ value


class GatheredLinear(torch.autograd.Function):
    """A product with words that come from every GPU; kept are only this GPU's, the rest comes again for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, count: int) -> Tensor:
        """Of all words."""
        ctx.save_for_backward(x, weight)
        ctx.count = count
        return F.linear(x.new_empty(x.shape[0] * count, *x.shape[1:]), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        """Of this GPU's words, and of the weight and the bias."""
        x, weight = ctx.saved_tensors
        whole = x.new_empty(x.shape[0] * ctx.count, *x.shape[1:])
        came = gradient @ weight
        flat = gradient.flatten(0, 1)
        return came[: x.shape[0]].clone(), flat.t() @ whole.flatten(0, 1), flat.sum(0), None


class Scattered(torch.autograd.Function):
    """The sum over GPUs, of which each keeps its part of the words."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, count: int) -> Tensor:
        """This GPU's part."""
        ctx.count = count  # type: ignore[attr-defined]
        return x.new_empty(x.shape[0] // count, *x.shape[1:])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """All words."""
        return gradient.new_empty(gradient.shape[0] * ctx.count, *gradient.shape[1:]), None  # type: ignore[attr-defined]


class Model(nn.Module):
    """A stage, or all of it."""

    def __init__(self, shape: Shape, part: Part) -> None:
        super().__init__()
        self.part = part
        own = shape.words // part.tensor
        self.words = nn.Embedding(own, shape.width) if part.is_first or part.is_last else None
        self.blocks = nn.ModuleList(Block(shape, part) for _ in range(depth(part.layers)))
        self.norm = nn.LayerNorm(shape.width) if part.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """The loss, or what the next stage gets."""
        if self.part.is_first:
            assert self.words is not None
            x = F.dropout(self.words(x), 0.1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.part.recomputes == "full" else block(x)
        if self.norm is None:
            return x
        assert self.words is not None
        scores = self.norm(x) @ self.words.weight.t()
        return F.cross_entropy(
            scores.float().flatten(0, 1), torch.zeros(scores.shape[0] * scores.shape[1], dtype=torch.int64)
        )


def why_not(row: dict[str, str]) -> str | None:
    """Why a row is not predicted."""
    if row["model"] in SHAPES and row["metric"] != "activation_memory":
        return "how much of its optimizer's state a GPU keeps is not said"
    return None


def predicted(row: dict[str, str]) -> list[Recording]:
    """A row's steps, of the first stage and of the last."""
    told = {name: int(value) for name, value in re.findall(r"(tp|pp|dp)(\d+)", row["strategy"])}
    tensor, stages, length = told["tp"], told["pp"], int(row["seq_len"])
    if row["model"] in SHAPES:
        shape, batch, rounds = SHAPES[row["model"]]
        layers = round(shape.layers * (1 + (stages - 1) / (stages * rounds) if rounds > 1 else 1))
        how = "none" if row["act_ckpt"] == "none" else "selective"
        part = Part(layers, False, False, tensor, how == "selective", recomputes=how)
        return [forward_only(shape, part, (length, batch))]
    numbers = [int(value) for value in re.findall(r"=(\d+)", row["model"])]
    shape, batch = Shape(*numbers), int(row["micro_batch"])
    count = -(-shape.layers // stages)
    micro_batches = max(int(row["global_batch"]) // (told["dp"] * batch), 1)
    parts = [
        Part(count, number == 0, number == stages - 1, tensor, in_flight=min(stages - number, micro_batches))
        for number in sorted({0, stages - 1})
    ]
    return [recorded(shape, part, (length, batch)) for part in parts]


def forward_only(shape: Shape, part: Part, sizes: tuple[int, int]) -> Recording:
    """A forward pass of all that is in flight, and its backward pass: its activations are the most."""
    with stage() as made:
        with default_dtype(torch.float16):
            model = Model(shape, part)
        length = sizes[0] // (part.tensor if part.splits_words else 1)
        came = torch.zeros(length, sizes[1], shape.width, dtype=torch.float16)

        def step() -> None:
            out = model(came.detach().requires_grad_())
            made.recorder.phase = "backward"
            out.sum().backward()
            model.zero_grad()

        return made.run(model, step, steps=1)


def recorded(shape: Shape, part: Part, sizes: tuple[int, int]) -> Recording:
    """Steps of one GPU.

    Args:
        shape: of the model.
        part: what this GPU has of it.
        sizes: words, and samples of a micro-batch.
    """
    with stage() as made:
        with default_dtype(torch.float16):
            model = Model(shape, part)
        optimizer = FlatOptimizer(model, Keeping(flattens=False, keeps_wide=True), made)

        def forward() -> Tensor:
            if part.is_first:
                return model(torch.zeros(sizes, dtype=torch.int64))  # type: ignore[no-any-return]
            return model(torch.zeros(*sizes, shape.width, dtype=torch.float16, requires_grad=True))  # type: ignore[no-any-return]

        def step() -> None:
            waiting = []
            for _ in range(part.in_flight + 1):
                made.recorder.phase = "forward"
                waiting.append(forward())
                if len(waiting) >= part.in_flight:
                    out = waiting.pop(0)
                    out.backward(torch.empty_like(out))
            while waiting:
                out = waiting.pop(0)
                out.backward(torch.empty_like(out))
            made.recorder.phase = "update"
            optimizer.step()

        return made.run(model, step, steps=1)
