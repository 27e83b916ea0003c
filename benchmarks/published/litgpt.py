"""LitGPT's fine-tuning recipes (Lightning-AI/litgpt, `config_hub/finetune`), whose README tells peak memory.

Told is `torch.cuda.max_memory_allocated` in units of 1e9 bytes, after training in bfloat16 throughout. Models are made
of plain operations; with LoRA the head works on 128 words at a time; Fabric widens what a model returns to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from paceline.nouns.profile import Recording
from published.pieces import Adapted, FourBitLinear, RmsNorm, rotate_half
from published.stage import Stage, default_dtype, stage

CHUNK = 128  # words that the head takes at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, in LitGPT's config.py."""

    layers: int = 16
    width: int = 4096
    heads: int = 32
    groups: int = 32
    head: int = 128
    inner: int = 16384
    words: int = 50688
    rotary: float = 1.0
    mlp: str = "gelu"  # or "silu", "gemma"
    norm: str = "rms"  # or "layer", "offset"
    has_bias: bool = False
    is_parallel: bool = False
    shares_norm: bool = False
    has_head_bias: bool = False
    is_gemma2: bool = False  # norms after the layers too, and capped attention
    is_late: bool = False  # from July 2024 on the norm's weight is multiplied in float32


_LLAMA: dict[str, Any] = {"layers": 32, "inner": 14336, "groups": 8, "mlp": "silu"}
SHAPES = {
    "falcon-7b": Shape(32, 4544, 71, 1, 64, 18176, 65024, norm="layer", is_parallel=True, shares_norm=True),
    "gemma-2b": Shape(18, 2048, 8, 1, 256, 16384, 256000, mlp="gemma", norm="offset"),
    "gemma-7b": Shape(28, 3072, 16, 16, 256, 24576, 256000, mlp="gemma", norm="offset"),
    "gemma-2-2b": Shape(26, 2304, 8, 4, 256, 9216, 256000, 1.0, "gemma", "offset", is_gemma2=True, is_late=True),
    "gemma-2-9b": Shape(42, 3584, 16, 8, 256, 14336, 256000, 1.0, "gemma", "offset", is_gemma2=True, is_late=True),
    "llama-2-7b": Shape(32, inner=11008, words=32000, mlp="silu"),
    "llama-3-8b": Shape(**_LLAMA, words=128256),
    "llama-3.1-8b": Shape(**_LLAMA, words=128256, is_late=True),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, mlp="silu", is_late=True),
    "llama-3.2-3b": Shape(28, 3072, 24, 8, 128, 8192, 128256, mlp="silu", is_late=True),
    "mistral-7b": Shape(**_LLAMA, words=32000),
    "phi-2": Shape(32, 2560, 32, 32, 80, 10240, 51200, 0.4, "gelu", "layer", True, True, True, True),
    "Phi-3-mini-4k-instruct": Shape(32, 3072, 32, 32, 96, 8192, 32064, mlp="silu"),
    "stablelm-base-alpha-3b": Shape(rotary=0.25, norm="layer", has_bias=True, is_parallel=True),
    "tiny-llama": Shape(22, 2048, 32, 4, 64, 5632, 32000, mlp="silu"),
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is trained.

    Attributes:
        rank: LoRA's; 0 trains everything.
        key, projection, mlp, head: which layers LoRA is beside, apart from queries and values.
        is_four_bit: the frozen layers are NF4, and AdamW's states are where torch's allocator does not see them.
        dropout: LoRA's.
        gpus: fully sharded over so many, with every block computed again.
        accumulates: over more than one micro-batch; gradients stay whole meanwhile.
    """

    rank: int = 0
    key: bool = False
    projection: bool = False
    mlp: bool = False
    head: bool = False
    is_four_bit: bool = False
    dropout: float = 0.05
    gpus: int = 1
    accumulates: bool = False


ALL: dict[str, Any] = {"key": True, "projection": True, "mlp": True, "head": True}
# The recipes' settings, config_hub/finetune/MODEL/METHOD.yaml. Of the table, "gemma-2b lora" with 14.31 GB is
# Gemma-2-2b's recipe. Those that train everything on several GPUs don't say so in the table: two for phi and stablelm,
# four for gemma; phi-3 and llama-3.2-3b can't have run on the one GPU of 24 GB that their recipes ask for.
TUNINGS: dict[tuple[str, str], Tuning] = {
    ("gemma-2b", "lora"): Tuning(8, **ALL, dropout=0.1),
    ("gemma-2-2b", "lora"): Tuning(8, **ALL, dropout=0.1),
    ("gemma-7b", "qlora"): Tuning(16, **ALL, dropout=0.1, is_four_bit=True),
    ("gemma-2-9b", "qlora"): Tuning(16, **ALL, dropout=0.1, is_four_bit=True),
    ("phi-2", "lora"): Tuning(8, **ALL),
    ("phi-2", "qlora"): Tuning(8, **ALL, is_four_bit=True),
    ("Phi-3-mini-4k-instruct", "lora"): Tuning(8, **ALL),
    ("Phi-3-mini-4k-instruct", "qlora"): Tuning(8, **ALL, is_four_bit=True),
    ("tiny-llama", "qlora"): Tuning(32, **ALL, is_four_bit=True),
    ("gemma-2b", "full"): Tuning(gpus=4, accumulates=True),
    ("phi-2", "full"): Tuning(gpus=2),
    ("stablelm-base-alpha-3b", "full"): Tuning(gpus=2, accumulates=True),
    ("Phi-3-mini-4k-instruct", "full"): Tuning(gpus=2),
    ("llama-3.2-3b", "full"): Tuning(gpus=4, accumulates=True),
    ("tiny-llama", "full"): Tuning(accumulates=True),
}
USUAL = {"full": Tuning(), "lora": Tuning(32), "qlora": Tuning(32, is_four_bit=True)}


def _linear(sizes: tuple[int, int], has_bias: bool, tuning: Tuning, is_adapted: bool) -> nn.Module:
    inner, outer = sizes
    if tuning.is_four_bit:
        layer: nn.Module = FourBitLinear(inner, outer, has_bias)
    else:
        layer = nn.Linear(inner, outer, bias=has_bias)
    if tuning.rank and is_adapted:
        return Adapted(layer, (inner, outer, tuning.rank), tuning.dropout)
    return layer.requires_grad_(not tuning.rank)


class AdaptedQkv(nn.Module):
    """Queries, keys and values from one product, LoRA beside two or all of them."""

    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.shape, self.tuning = shape, tuning
        queries, keys = shape.heads * shape.head, shape.groups * shape.head
        self.outs = (queries, keys, keys) if tuning.key else (queries, keys)
        self.whole = queries + 2 * keys
        self.frozen = _linear((shape.width, self.whole), shape.has_bias, tuning, is_adapted=False)
        self.first = nn.Parameter(torch.empty(tuning.rank * len(self.outs), shape.width))
        self.second = nn.Parameter(torch.empty(sum(self.outs), tuning.rank))

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`."""
        base = self.frozen(x)
        small = F.linear(F.dropout(x, self.tuning.dropout, self.training), self.first).transpose(-2, -1)
        weights = self.second.unsqueeze(-1)
        if self.shape.heads == self.shape.groups:
            parts = F.conv1d(small, weights, groups=len(self.outs))
        else:
            pairs = zip(small.chunk(len(self.outs), 1), weights.split(self.outs), strict=True)
            parts = torch.cat([F.conv1d(a, b) for a, b in pairs], 1)
        parts = parts.transpose(-2, -1)
        if not self.tuning.key:
            padded = parts.new_zeros(*parts.shape[:-1], self.whole)
            parts = padded.index_copy_(-1, torch.empty(sum(self.outs), dtype=torch.int64), parts)
        return base + parts * 0.5


class Attention(nn.Module):
    """Causal attention of groups of queries."""

    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.shape = shape
        whole = (shape.heads + 2 * shape.groups) * shape.head
        if tuning.rank:
            self.attn: nn.Module = AdaptedQkv(shape, tuning)
        else:
            self.attn = nn.Linear(shape.width, whole, bias=shape.has_bias)
        self.proj = _linear((shape.heads * shape.head, shape.width), shape.has_bias, tuning, tuning.projection)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of `x` (samples, words, width)."""
        shape, (batch, length, _) = self.shape, x.shape
        times = shape.heads // shape.groups
        qkv = self.attn(x).view(batch, length, shape.groups, times + 2, shape.head).permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((times, 1, 1), 2)
        if times > 1:
            key, value = (one.expand(batch, shape.groups, times, length, shape.head) for one in (key, value))
        query, key, value = (one.reshape(batch, -1, length, shape.head) for one in (query, key, value))
        turned = int(shape.rotary * shape.head)
        query, key = (
            torch.cat((rotate_half(one[..., :turned], cos, sin), one[..., turned:]), -1) for one in (query, key)
        )
        mix = _capped if shape.is_gemma2 else F.scaled_dot_product_attention
        mixed = mix(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, shape.heads * shape.head))


def _capped(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Attention with scores kept below a cap, by plain operations."""
    scores = query @ key.mT * 0.1
    scores = torch.tanh(scores / 50) * 50
    mask = torch.ones(query.shape[2], query.shape[2], dtype=query.dtype).triu(1)
    return F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(query.dtype) @ value


class Mlp(nn.Module):
    """The feed-forward layers."""

    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        sizes = (shape.width, shape.inner)
        self.up = _linear(sizes, shape.has_bias, tuning, tuning.mlp)
        self.gate = None if shape.mlp == "gelu" else _linear(sizes, shape.has_bias, tuning, tuning.mlp)
        self.down = _linear((shape.inner, shape.width), shape.has_bias, tuning, tuning.mlp)
        self.kind = shape.mlp

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.gate(x), self.up(x)
        return self.down((F.silu(gate) if self.kind == "silu" else F.gelu(gate, approximate="tanh")) * up)


class Block(nn.Module):
    """Attention and feed-forward, one after the other or side by side."""

    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.shape = shape
        self.norms = nn.ModuleList(_norm(shape) for _ in range(4 if shape.is_gemma2 else 2 - shape.shares_norm))
        self.attention, self.mlp = Attention(shape, tuning), Mlp(shape, tuning)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of `x`."""
        normed = self.norms[0](x)
        mixed = self.attention(normed, cos, sin)
        if self.shape.is_parallel:
            return self.mlp(normed if self.shape.shares_norm else self.norms[1](x)) + mixed + x
        if self.shape.is_gemma2:
            x = self.norms[2](mixed) + x
            return self.norms[3](self.mlp(self.norms[1](x))) + x
        x = mixed + x
        return self.mlp(self.norms[1](x)) + x


def _norm(shape: Shape) -> nn.Module:
    if shape.norm == "layer":
        return nn.LayerNorm(shape.width)
    return RmsNorm(shape.width, shape.norm == "offset", shape.is_late)


class Model(nn.Module):
    """A decoder as LitGPT has it."""

    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape, tuning) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.scores = _linear((shape.width, shape.words), shape.has_head_bias, tuning, tuning.head)
        if tuning.rank:
            for one in (self.words, *self.modules()):
                if isinstance(one, nn.Embedding | nn.LayerNorm | RmsNorm):
                    one.requires_grad_(False)

    def forward(self, words: Tensor, cos: Tensor, sin: Tensor, chunk: int) -> list[Tensor]:
        """Scores in float32, in chunks of so many words."""
        x = self.words(words)
        if self.shape.norm == "offset":
            x = x * self.shape.width**0.5
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return [one.float() for one in [self.scores(part) for part in x.split(chunk or x.shape[1], 1)]]


def why_not(row: dict[str, str]) -> str | None:
    """Why a row is not predicted."""
    return None if row["strategy"] in USUAL else f"the method {row['strategy']}"


def predicted(row: dict[str, str]) -> list[Recording]:
    """A row's steps."""
    name, method = row["model"], row["strategy"]
    if (name, method, row["value"]) == ("gemma-2b", "lora", "14.31"):
        name = "gemma-2-2b"
    tuning = TUNINGS.get((name, method), USUAL[method])
    return [recorded(SHAPES[name], tuning, int(row["micro_batch"]), int(row["seq_len"]))]


def recorded(shape: Shape, tuning: Tuning, batch: int, length: int) -> Recording:
    """Steps of one GPU.

    Args:
        shape, tuning: which model, and what of it is trained.
        batch, length: samples of so many words.
    """
    with stage(tuning.gpus) as made:
        with default_dtype(torch.bfloat16):
            model = Model(shape, tuning)
        if tuning.gpus > 1:
            _shard(model, made)
        trained = [one for one in model.parameters() if one.requires_grad]
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD if tuning.is_four_bit else torch.optim.AdamW
        optimizer = make(trained, lr=1e-4, foreach=True)
        turned = int(shape.rotary * shape.head)
        cos, sin = torch.empty(length, turned), torch.empty(length, turned)
        words = torch.zeros(batch, length, dtype=torch.int64)
        kept: list[Tensor] = []  # scores and loss live until the next ones are there
        loss = words

        def micro_batch(chunk: int) -> None:
            nonlocal kept, loss
            made.recorder.phase = "forward"
            kept = model(words, cos, sin, chunk)
            loss = _loss(kept, words, chunk)
            loss.backward()

        def step() -> None:
            chunk = CHUNK if tuning.rank else 0
            if tuning.accumulates:
                _sync(model, tuning, False)
                micro_batch(chunk)
                _sync(model, tuning, True)
            micro_batch(chunk)
            made.recorder.phase = "update"
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # it validates now and then, with whole scores
                _loss(model(words, cos, sin, 0), words, 0, len(words) * length)

        return made.run(model, step)


def _shard(model: Model, made: Stage) -> None:
    for number, block in enumerate(model.blocks):
        wrapped = checkpoint_wrapper(block)
        model.blocks[number] = wrapped
        fully_shard(wrapped, mesh=made.mesh)
    fully_shard(model, mesh=made.mesh, reshard_after_forward=False)


def _sync(model: nn.Module, tuning: Tuning, is_on: bool) -> None:
    if tuning.gpus > 1:
        model.set_requires_gradient_sync(is_on)  # type: ignore[operator]


def _loss(scores: list[Tensor], words: Tensor, chunk: int, rows: int = CHUNK) -> Tensor:
    if not chunk:
        flat = scores[0][:, :-1, :].reshape(-1, scores[0].shape[-1])
        pairs = zip(flat.split(rows), words[:, 1:].reshape(-1).split(rows), strict=True)
        return torch.cat([F.cross_entropy(a, b, reduction="none") for a, b in pairs]).mean()
    scores[-1] = scores[-1][:, :-1, :]
    parts = [
        F.cross_entropy(a.reshape(-1, a.shape[-1]), b.reshape(-1), reduction="none")
        for a, b in zip(scores, words[:, 1:].split(chunk, 1), strict=True)
    ]
    return torch.cat(parts).mean()
