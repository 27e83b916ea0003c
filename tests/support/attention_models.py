"""Small models with attention of every kind, written as people write them: what `context` splits the sequence of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline

from support.rank_comparisons import two_steps

WORDS, WIDTH, LENGTH, BATCH = 40, 16, 16, 4


def heads_of(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2)


def joined(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Attention and a feed-forward part; `attend` is what the models differ in."""

    heads, groups, dropout = 4, 4, 0.0

    def __init__(self):
        super().__init__()
        inner = WIDTH // self.heads * self.groups
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, *more):
        normed = self.norm(x)
        query, key, value = heads_of(self.query(normed), self.heads), self.key(normed), self.value(normed)
        made = self.attend(query, heads_of(key, self.groups), heads_of(value, self.groups), *more)
        x = x + F.dropout(self.out(joined(made)), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Absolute(Layer):
    def attend(self, query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, mask[:, None, None])


class Rotary(Layer):
    groups = 2

    def attend(self, query, key, value):
        places = torch.arange(query.shape[-2], device=query.device)
        angles = places[:, None] / 100 ** (torch.arange(2) / 2)
        cos, sin = (torch.cat([part, part], -1)[None, None].to(query.dtype) for part in (angles.cos(), angles.sin()))

        def turned(x):
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        return F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True, enable_gqa=True)


class Alibi(Layer):
    """Written by hand: slopes times distances, and later positions hidden."""

    def attend(self, query, key, value):
        length = query.shape[-2]
        places = torch.arange(length, device=query.device)
        slopes = torch.tensor([2.0**-n for n in range(self.heads)]).view(-1, 1, 1)
        bias = slopes * (places[None] - places[:, None]).to(query.dtype)
        later = torch.full((length, length), -torch.inf, dtype=query.dtype).triu(1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return torch.softmax(scores + bias + later, -1) @ value


class Relative(Layer):
    """A bias by distance that is learned, as T5's."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(2 * LENGTH, self.heads)

    def attend(self, query, key, value):
        places = torch.arange(query.shape[-2], device=query.device)
        bias = self.bias(places[None] - places[:, None] + LENGTH).permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(query, key, value, bias, scale=1.0)


class Window(Layer):
    """Written by hand: each position sees the five before it."""

    def attend(self, query, key, value):
        places = torch.arange(query.shape[-2], device=query.device)
        distance = places[:, None] - places[None]
        seen = (distance >= 0) & (distance < 6)
        scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(query.dtype)
        return torch.matmul(F.dropout(weights, 0.0, self.training), value)


class Grouped(Layer):
    """One head of keys for all, repeated as transformers does."""

    groups = 1

    def attend(self, query, key, value):
        repeated = (len(query), self.heads, *key.shape[2:])
        key, value = (part.expand(repeated) for part in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Convolved(Layer):
    """A depthwise convolution that looks back, as Mamba's, and one that looks both ways, before attention."""

    def __init__(self):
        super().__init__()
        self.back = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.both = nn.Conv1d(WIDTH, WIDTH, 3, padding="same", dilation=2)

    def forward(self, x):
        across = x.transpose(1, 2)
        across = F.silu(self.back(across)[..., : x.shape[1]]) + self.both(across)
        return super().forward(x + across.transpose(1, 2))

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Dropped(Layer):
    dropout = 0.1

    def attend(self, query, key, value):
        dropped = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)


class Reader(nn.Module):
    """Words with learned positions through layers of a kind."""

    def __init__(self, kind, length=LENGTH, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(length, WIDTH) / 8)
        self.layers = nn.ModuleList([kind() for _ in range(layers)])
        self.last = nn.Linear(WIDTH, WORDS)
        self.takes_mask = kind is Absolute

    def forward(self, ids, mask):
        x = self.words(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, mask.bool()) if self.takes_mask else layer(x)
        return self.last(x)


class Translator(nn.Module):
    """torch's own encoder and decoder: packed projections, masks of -inf, attention from one sequence to another."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, mask):
        memory = self.encoder(self.words(ids[:, :12]))
        later = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=memory.dtype)
        return self.last(self.decoder(self.words(ids), memory, tgt_mask=later))


class Patches(nn.Module):
    """Patches of an image behind a class token, which alone is read at the end."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH) / 8)
        self.layers = nn.ModuleList([Absolute(), Absolute()])
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(image), -1, -1), x], 1) + self.places
        seen = torch.ones(x.shape[:2], dtype=torch.bool)
        for layer in self.layers:
            x = layer(x, seen)
        return self.last(x[:, 0])


def word_loss(model, batch):
    scores = model(batch["ids"], batch["mask"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()


def next_word_loss(model, batch):
    """A mean over the words that count, of scores that are shifted by one."""
    scores = model(batch["ids"], batch["mask"])[:, :-1]
    labels = torch.where(batch["mask"] == 1, batch["ids"], -100)[:, 1:]
    count = (labels != -100).sum()
    return F.cross_entropy(scores.reshape(-1, WORDS), labels.reshape(-1)) * count, count


def mean_loss(model, batch):
    """A mean over positions, and one over everything."""
    scores = model(batch["ids"], batch["mask"])
    rows = F.cross_entropy(scores.mean(1), batch["labels"][:, 0], reduction="sum")
    return rows + F.mse_loss(scores, torch.zeros_like(scores)) * len(scores) + scores.mean() * len(scores), len(scores)


def image_loss(model, batch):
    scores = model(batch["image"].to(model.token.dtype))
    return F.cross_entropy(scores, batch["label"], reduction="sum"), len(batch["label"])


def rows():
    random = torch.Generator().manual_seed(5)
    made = []
    for index in range(3 * BATCH):
        ids = torch.randint(3, WORDS, (LENGTH,), generator=random)
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH - index % 4 :] = 0
        labels = torch.randint(3, WORDS, (LENGTH,), generator=random)
        image = torch.randn(3, 16, 16, generator=random)
        label = torch.randint(0, 10, (), generator=random)
        made.append({"ids": ids, "mask": mask, "labels": labels, "image": image, "label": label})
    return made


def _reader(kind) -> Callable[[], nn.Module]:
    return lambda: Reader(kind)


KINDS = {"absolute": Absolute, "rotary": Rotary, "alibi": Alibi, "relative": Relative, "window": Window,
         "one_group": Grouped, "convolved": Convolved, "drops": Dropped}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "absolute": (_reader(Absolute), word_loss),
    "rotary": (_reader(Rotary), next_word_loss),
    "alibi": (_reader(Alibi), word_loss),
    "relative": (_reader(Relative), mean_loss),
    "window": (_reader(Window), word_loss),
    "one_group": (_reader(Grouped), word_loss),
    "convolved": (_reader(Convolved), word_loss),
    "cross": (Translator, word_loss),
    "patches": (Patches, image_loss),
    "drops": (_reader(Dropped), word_loss),
}


def workload(name: str, **parts: Any) -> paceline.Workload:
    model, loss = MODELS[name]
    return two_steps(**{"model": model, "loss": loss, "data": rows(), "batch_size": BATCH, **parts})


def shallow_workload(name: str, **parts: Any) -> paceline.Workload:
    """The same with one layer, where the model has a choice."""
    kind = KINDS.get(name)
    model = MODELS[name][0] if kind is None else lambda: Reader(kind, layers=1)
    return workload(name, model=model, **parts)


def long_workload(name: str, **parts: Any) -> paceline.Workload:
    """The same in float32 on sequences of 512, which outweigh the parameters."""
    random = torch.Generator().manual_seed(7)
    made = []
    for _ in range(2 * BATCH):
        ids = torch.randint(3, WORDS, (512,), generator=random)
        made.append({"ids": ids, "mask": torch.ones(512, dtype=torch.long), "labels": ids})
    return workload(name, model=lambda: Reader(KINDS[name], 512), data=made, precision="float32", **parts)
