"""BERT as it was trained in 2018 to 2021, attention by plain operations: NVIDIA's, DeepSpeed's baseline, Google's.

NVIDIA (DeepLearningExamples) pre-trains with LAMB and fine-tunes on SQuAD with Adam, in float32 or with apex O2: the
model in float16, a float32 copy, gradients in both. The words' scores are made for every position. DeepSpeed's table
(bert-finetuning) compares itself with that. Google's (google-research/bert) is TensorFlow 1.11 in float32 with Adam:
predicted is the same network in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.nouns.profile import OPTIMIZER, Recording
from published.stage import default_dtype, depth, stage
from published.zero import FlatOptimizer, Keeping


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a BERT."""

    width: int
    layers: int
    heads: int
    words: int = 30528


SHAPES = {"BERT-Base": Shape(768, 12, 12), "BERT-Large": Shape(1024, 24, 16)}


class Block(nn.Module):
    """Attention by plain operations, and feed-forward; norms after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Of `x` (samples, words, width)."""
        batch, length, width = x.shape

        def split(one: Tensor) -> Tensor:
            return one.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        shares = F.softmax(query @ key.transpose(-1, -2) / 8.0 + mask, -1)
        mixed = (F.dropout(shares, 0.1) @ value).transpose(1, 2).contiguous().view(batch, length, width)
        x = self.norms[0](F.dropout(self.out(mixed), 0.1) + x)
        return self.norms[1](F.dropout(self.down(F.gelu(self.up(x))), 0.1) + x)


class Model(nn.Module):
    """BERT with a head for words or for an answer's ends."""

    def __init__(self, shape: Shape, has_words: bool) -> None:
        super().__init__()
        width = shape.width
        self.words, self.places = nn.Embedding(shape.words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(depth(shape.layers)))
        self.last = nn.Linear(width, width if has_words else 2)
        self.last_norm = nn.LayerNorm(width) if has_words else None
        self.bias = nn.Parameter(torch.zeros(shape.words)) if has_words else None

    def forward(self, words: Tensor) -> Tensor:
        """The loss."""
        batch, length = words.shape
        mask = torch.zeros(batch, 1, 1, length)
        x = self.words(words) + self.places(torch.zeros_like(words)) + self.places(torch.zeros_like(words))
        x = F.dropout(self.norm(x), 0.1)
        for block in self.blocks:
            x = block(x, mask)
        x = self.last(x)
        if self.last_norm is None:
            return sum((F.cross_entropy(one, words[:, 0]) for one in x.unbind(-1)), torch.zeros(()))
        x = self.last_norm(F.gelu(x)) @ self.words.weight.t() + self.bias
        return F.cross_entropy(x.view(-1, x.shape[-1]), words.flatten())


def predicted(row: dict[str, str]) -> list[Recording]:
    """A row's steps; for Google's the largest batch that it says fits, or one sample where it says none does."""
    is_google = row["source"].startswith("google")
    batch = max(int(row["value"]), 1) if is_google else int(row["micro_batch"])
    has_words = "pretrain" in row["note"]
    return [recorded(SHAPES[row["model"]], has_words, row["precision"] == "fp16", (batch, int(row["seq_len"])))]


def why_not(row: dict[str, str]) -> str | None:
    """Why a row is not predicted."""
    return "fused kernels of DeepSpeed's own" if row["framework"].startswith("DeepSpeed") else None


def recorded(shape: Shape, has_words: bool, is_half: bool, sizes: tuple[int, int]) -> Recording:
    """Steps of one GPU.

    Args:
        shape: of the model.
        has_words: pre-training; else an answer's ends.
        is_half: apex O2; else float32.
        sizes: samples of so many words.
    """
    with stage() as made:
        with default_dtype(torch.float16 if is_half else torch.float32):
            model = Model(shape, has_words)
        words = torch.zeros(sizes, dtype=torch.int64)
        update: Callable[[], None]
        if is_half:
            update = FlatOptimizer(model, Keeping(keeps_wide=True, flattens=False), made).step
        else:
            states = [torch.empty_like(one) for one in model.parameters() for _ in range(2)]
            made.note(states, OPTIMIZER)
            update = model.zero_grad

        def step() -> None:
            made.recorder.phase = "forward"
            with default_dtype(torch.float16 if is_half else torch.float32):
                loss = model(words)
            loss.backward()
            made.recorder.phase = "update"
            update()

        return made.run(model, step, steps=1)
