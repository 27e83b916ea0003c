"""torchtitan's Llama (pytorch/torchtitan, docs/performance.md, benchmarks/): FSDP2, bfloat16 beside float32.

Told are `torch.cuda.max_memory_reserved` in units of 2^30 bytes, and what ran and what did not. Its rotary positions
are plain operations, and so was its norm by the end of 2024. The tables of mid-2024 are taken to be made with its fused
norm, which keeps what enters it and one number a row; that is an assumption: with the plain one Llama-2-13B would need
81.8 GiB of the 78 that there are, and it did run.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.nouns.profile import INPUTS, Recording
from published.stage import stage

aten = torch.ops.aten
_SAVED = (aten.mm.default, aten._scaled_dot_product_flash_attention.default)


@dataclass(frozen=True)
class Sizes:
    """Of a Llama."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    words: int


LLAMA = {
    "Llama-3.1-8B": Sizes(4096, 32, 32, 8, 14336, 128256),
    "Llama-3-8B": Sizes(4096, 32, 32, 8, 14336, 128256),
    "Llama-2-13B": Sizes(5120, 40, 40, 40, 13824, 32000),
    "Llama-2-70B": Sizes(8192, 80, 64, 8, 28672, 32000),
    "Llama-3-70B": Sizes(8192, 80, 64, 8, 28672, 128256),
}


FUSED = ("4d88a8a44", "395a52627")  # the table's revisions of mid-2024


class Norm(nn.Module):
    """By plain operations, or fused: then it keeps what enters it and one number a row."""

    def __init__(self, width: int, is_fused: bool) -> None:
        super().__init__()
        self.weight, self.is_fused = nn.Parameter(torch.ones(width)), is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `x`."""
        if self.is_fused:
            return F.layer_norm(x, (x.shape[-1],), self.weight)  # it keeps the same
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs as complex numbers, turned in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, sizes: Sizes, is_fused: bool) -> None:
        super().__init__()
        self.sizes, width, head = sizes, sizes.width, sizes.width // sizes.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, heads * head, bias=False)
            for heads in (sizes.heads, sizes.key_heads, sizes.key_heads, sizes.heads)
        )
        self.gate, self.up = (nn.Linear(width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, width, bias=False)
        self.norms = nn.ModuleList([Norm(width, is_fused), Norm(width, is_fused)])

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Of `x` (samples, words, width)."""
        x = x + self.attend(self.norms[0](x), turns)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Causal attention; keys and values are repeated for their queries."""
        batch, length, sizes = *x.shape[:2], self.sizes
        head, times = sizes.width // sizes.heads, sizes.heads // sizes.key_heads
        query, key, value = (layer(x).view(batch, length, -1, head) for layer in (self.query, self.key, self.value))
        query, key = turned(query, turns), turned(key, turns)

        def repeated(one: torch.Tensor) -> torch.Tensor:
            wide = one[:, :, :, None, :].expand(batch, length, sizes.key_heads, times, head)
            return wide.reshape(batch, length, sizes.heads, head)

        query, key, value = (one.transpose(1, 2) for one in (query, repeated(key), repeated(value)))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1))


class Llama(nn.Module):
    """A decoder with a head of its own."""

    def __init__(self, sizes: Sizes, length: int, is_fused: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(Block(sizes, is_fused) for _ in range(sizes.layers))
        self.norm, self.scores = Norm(sizes.width, is_fused), nn.Linear(sizes.width, sizes.words, bias=False)
        half = sizes.width // sizes.heads // 2
        self.register_buffer("turns", torch.empty(length, half, dtype=torch.complex64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores."""
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.scores(self.norm(x))


def every_second_product() -> Any:
    """Selective recomputation by operation: attention and every second matrix product are kept."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        is_product = operation is aten.mm.default
        products[context.is_recompute] += is_product
        is_kept = operation in _SAVED and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute(model: Llama, how: str) -> None:
    """Have blocks computed again in the backward pass: none, all ("full"), every second, or by operation."""
    for number, layer in enumerate(model.layers):
        if how == "selective op":
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False, context_fn=every_second_product)
        elif how == "full" or (how == "selective layer" and number % 2 == 0):
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False)
        else:
            continue
        model.layers[number] = wrapped


def shard(model: Llama, mesh: Any) -> None:
    """Every block a unit of its own; the last is not gathered again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        is_last = number == len(model.layers) - 1
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_last)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def why_not(row: dict[str, str]) -> str | None:
    """Why a row is not predicted. Compiled kernels and float8 are predicted: as the eager job."""
    split = re.search(r"\b(TP|PP|CP(?!1\b))\d*", row["strategy"])
    if split:
        return f"{split[1]} with {'float8 products' if 'loat8' in row['strategy'] else 'compiled kernels'}"
    return None if row["micro_batch"] and row["seq_len"] else "its batch is not said"


def predicted(row: dict[str, str]) -> list[Recording]:
    """Two steps of rank 0, as a row of the table describes them."""
    batch, length, is_fused = int(row["micro_batch"]), int(row["seq_len"]), row["rev"] in FUSED
    sizes = LLAMA[row["model"]]
    with stage(int(row["gpus"])) as made:
        model = Llama(sizes, length, is_fused)
        recompute(model, row["act_ckpt"])
        shard(model, made.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        words, labels = (torch.randint(0, sizes.words, (batch, length)) for _ in range(2))
        made.note([words, labels], INPUTS)

        def step() -> None:
            scores = model(words)
            loss = F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
            del scores
            loss.backward()  # type: ignore[no-untyped-call]
            made.recorder.phase = "update"
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

        return [made.run(model, step)]
