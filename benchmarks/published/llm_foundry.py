"""MosaicML's MPT (mosaicml/llm-foundry, scripts/train/benchmarking): Composer with FSDP, flash attention, bfloat16.

Parameters and AdamW's states are float32 parts, gathered and summed in bfloat16; the cross-entropy is fused; blocks
are computed again where a row says so. Rows tell speed: that they ran is what can be predicted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from paceline.nouns.profile import OPTIMIZER, Recording
from published.pieces import FusedLoss
from published.stage import Stage, depth, stage

WORDS = 50368
SHAPES = {  # width, heads, layers: scripts/train/yamls/pretrain
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 16, 24),
    "MPT-760m": (1536, 12, 24),
    "MPT-1b": (2048, 16, 24),
    "MPT-3b": (2560, 20, 32),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 56, 48),
    "MPT-70b": (8192, 64, 80),
}


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of `x` (samples, words, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, 2)
        query, key, value = (one.view(batch, length, self.heads, -1).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        x = x + self.proj(mixed.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, sizes: tuple[int, int, int], length: int) -> None:
        super().__init__()
        width, heads, layers = sizes
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """Scores."""
        x = self.words(words) + self.places(torch.zeros_like(words))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.words.weight.t()


def why_not(row: dict[str, str]) -> str | None:
    """Why a row is not predicted."""
    return "float8 products" if "fp8" in row["precision"] else None


def predicted(row: dict[str, str]) -> list[Recording]:
    """A row's steps."""
    sizes = (int(row["micro_batch"]), int(row["seq_len"]))
    is_full = row["strategy"] == "FULL_SHARD"
    return [recorded(SHAPES[row["model"]], sizes, int(row["gpus"]), (row["act_ckpt"] == "full", is_full))]


def recorded(shape: tuple[int, int, int], sizes: tuple[int, int], gpus: int, ways: tuple[bool, bool]) -> Recording:
    """A step of one GPU.

    Args:
        shape: of the model.
        sizes: samples of so many words.
        gpus: that share parameters.
        ways: blocks are computed again; blocks are gathered again for it.
    """
    recomputes, gathers_again = ways
    with stage(gpus) as made:
        model = Model(shape, sizes[1])
        _shard(model, made, recomputes, gathers_again)
        local = [one.to_local() for one in model.parameters()]  # type: ignore[attr-defined]
        states = [torch.empty_like(one) for one in local for _ in range(2)]
        made.note(states, OPTIMIZER)
        words = torch.zeros(sizes, dtype=torch.int64)

        def step() -> None:
            made.recorder.phase = "forward"
            scores = model(words)
            FusedLoss.apply(scores.flatten(0, 1), False).sum().backward()  # type: ignore[no-untyped-call]
            made.recorder.phase = "update"
            del scores
            model.zero_grad(set_to_none=True)

        recording = made.run(model, step, steps=1)
        states.clear()
        return recording


def _shard(model: Model, made: Stage, recomputes: bool, gathers_again: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for number, block in enumerate(model.blocks):
        unit = checkpoint_wrapper(block) if recomputes else block
        model.blocks[number] = unit
        fully_shard(unit, mesh=made.mesh, mp_policy=policy, reshard_after_forward=gathers_again)
    fully_shard(model, mesh=made.mesh, mp_policy=policy)
