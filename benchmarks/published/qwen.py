"""Qwen's fine-tuning (QwenLM/Qwen, README, "Profiling of Memory and Speed"): Hugging Face's Trainer on A100-80GB.

One sample in a micro-batch, every block computed again in the backward pass, flash attention. How memory was measured
is not said; taken is what a process has, in units of 1e9 bytes: torch's reserved memory and the CUDA context. Nor is it
said which of DeepSpeed's configurations trained everything: only ZeRO-2's buffers give the numbers of one GPU, and
only ZeRO-3 has room on two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.nouns.profile import OPTIMIZER, Recording
from published.pieces import RmsNorm, adamw_of_2_0, rotate_half
from published.stage import Stage, default_dtype, stage
from published.zero import FlatOptimizer, Keeping

RANK = 64
MICRO_BATCHES = 2  # of 8: from the second on each is like the one before


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model: config.json."""

    width: int
    layers: int
    heads: int
    inner: int
    words: int


SHAPES = {
    "Qwen-1.8B": Shape(2048, 24, 16, 5504, 151936),
    "Qwen-7B": Shape(4096, 32, 32, 11008, 151936),
    "Qwen-14B": Shape(5120, 40, 40, 13696, 152064),
    "Qwen-72B": Shape(8192, 80, 64, 24576, 152064),
}


class GptqLinear(nn.Module):
    """A frozen layer of four bits a number, AutoGPTQ's way: widened by plain operations, and kept for backward."""

    def __init__(self, inner: int, outer: int, has_bias: bool) -> None:
        super().__init__()
        self.shape = (inner, outer)
        self.packed = nn.Parameter(torch.empty(inner * outer // 8, dtype=torch.int32), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(inner // 128, outer), requires_grad=False)
        self.zeros = nn.Parameter(torch.empty(inner // 128 * outer // 8, dtype=torch.int32), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outer), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the weight, and the bias."""
        shifted = torch.empty(self.shape, dtype=torch.int32)
        small = shifted.to(torch.int8)
        del shifted
        weight = self.scales.repeat_interleave(128, 0) * (small & 15)
        y = x @ weight
        return y if self.bias is None else y + self.bias


class Lora(nn.Module):
    """peft's layer: the small matrices in float32, so what enters them is widened."""

    def __init__(self, frozen: nn.Module, inner: int, outer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.frozen = frozen
        self.first = nn.Linear(inner, RANK, bias=False, dtype=dtype)
        self.second = nn.Linear(RANK, outer, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`."""
        base = self.frozen(x)
        wide = F.dropout(x.to(self.first.weight.dtype), 0.05, self.training)
        return (base + self.second(self.first(wide)) * 0.25).to(base.dtype)


Make = Callable[..., nn.Module]


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, shape: Shape, make: Make) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.head = shape.heads, width // shape.heads
        self.norms = nn.ModuleList([RmsNorm(width), RmsNorm(width)])
        self.qkv, self.proj = make(width, 3 * width, True), make(width, width, False)
        self.up, self.gate, self.down = (
            make(width, shape.inner, False),
            make(width, shape.inner, False),
            make(shape.inner, width, False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of `x` (samples, words, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).split(width, 2)
        query, key, value = (one.view(batch, length, self.heads, self.head) for one in parts)
        query, key = (rotate_half(one.float(), cos, sin).to(value.dtype) for one in (query, key))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()
        x = self.proj(mixed.view(batch, length, width)) + x
        y = self.norms[1](x)
        return x + self.down(self.up(y) * F.silu(self.gate(y)))


class Model(nn.Module):
    """A decoder with a head of its own."""

    def __init__(self, shape: Shape, make: Make) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape, make) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, words: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the scores."""
        x = self.words(words)
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=True)
        scores = self.scores(self.norm(x))
        shifted = scores[:, :-1, :].contiguous()
        return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), words[:, 1:].reshape(-1)), scores


def _maker(method: str) -> Make:
    """How a layer is made: plain, or frozen with LoRA beside it."""

    def make(inner: int, outer: int, has_bias: bool) -> nn.Module:
        if method == "Q-LoRA":
            return Lora(GptqLinear(inner, outer, has_bias), inner, outer, torch.float16)
        layer = nn.Linear(inner, outer, bias=has_bias)
        return layer if method == "Full-parameter" else Lora(layer, inner, outer, torch.float32)

    return make


def why_not(row: dict[str, str]) -> str | None:
    """Why a row is not predicted."""
    known = ("LoRA", "Q-LoRA", "Full-parameter", "LoRA+ZeRO3")
    return None if row["strategy"] in known else f"the method {row['strategy']}"


def predicted(row: dict[str, str]) -> list[Recording]:
    """A row's steps, of one of its GPUs."""
    return [recorded(SHAPES[row["model"]], row["strategy"], int(row["seq_len"]), int(row["gpus"]))]


def recorded(shape: Shape, method: str, length: int, gpus: int) -> Recording:
    """Steps of one GPU.

    Args:
        shape: which model.
        method: "LoRA", "Q-LoRA", "Full-parameter" or "LoRA+ZeRO3".
        length: words of a sample.
        gpus: that share the work.
    """
    lora = method.split("+")[0]
    is_split = gpus > 1
    with stage(gpus) as made:
        with default_dtype(torch.float16 if lora == "Q-LoRA" else torch.bfloat16):
            model = Model(shape, _maker(lora))
        if lora != "Full-parameter":
            for name, one in model.named_parameters():
                one.requires_grad_(".first." in name or ".second." in name)
        update = _optimizer(model, lora, made)
        words = torch.zeros(1, length, dtype=torch.int64)
        half = (length, 1, shape.width // shape.heads)
        cos, sin = (torch.empty(half, dtype=torch.float32) for _ in range(2))
        has_autocast = lora == "LoRA" and not is_split

        def step() -> None:
            for _ in range(MICRO_BATCHES):
                made.recorder.phase = "forward"
                with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
                    loss, scores = model(words, cos, sin)
                if has_autocast:
                    scores = scores.float()  # Accelerate widens what a model returns
                del scores
                loss.backward()
            made.recorder.phase = "update"
            update()

        return made.run(model, step)


def _optimizer(model: Model, method: str, made: Stage) -> Callable[[], None]:
    trained = [one for one in model.parameters() if one.requires_grad]
    if made.mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=made.mesh)
        fully_shard(model, mesh=made.mesh)
        return _shared_update(model, made)
    if method == "LoRA":
        states: list[Tensor] = []

        def update() -> None:
            if not states:
                states.extend(torch.zeros_like(one) for one in trained for _ in range(2))
                made.note(states, OPTIMIZER)
            adamw_of_2_0(states[: len(trained)])
            model.zero_grad()

        return update
    keeping = Keeping(shares_gradients=True, buckets=2, bucket=200_000_000)
    return FlatOptimizer(model, keeping, made).step


def _shared_update(model: nn.Module, made: Stage) -> Callable[[], None]:
    """ZeRO-3's: float32 copies and states of this rank's parts; gradients widened a thousand million at a time."""
    local: list[Tensor] = [one.to_local() for one in model.parameters() if one.requires_grad]  # type: ignore[attr-defined]
    count = sum(one.numel() for one in local)
    states = [torch.empty(count, dtype=torch.float32) for _ in range(3)]
    made.note(states, OPTIMIZER)

    def update() -> None:
        wide = torch.empty(min(count, 10**9), dtype=torch.float32)
        del wide
        model.zero_grad()
        assert states

    return update
