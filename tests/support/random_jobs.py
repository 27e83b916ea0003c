"""Random small models, losses, optimizers and meshes, as plain values that any process can build again."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.nouns.mesh import AXES

WITHOUT_EXPERTS = tuple(axis for axis in AXES if axis != "expert")  # the random models have none

WORDS, LENGTH = 50, 6


class Residual(nn.Module):
    def __init__(self, width, kind, inner):
        super().__init__()
        self.norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": nn.Identity}[kind](width)
        self.up, self.down = nn.Linear(width, inner, bias=kind != "rms"), nn.Linear(inner, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(F.silu(self.up(self.norm(x)))))


class Attends(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        query, key, value = (p.view(*p.shape[:2], self.heads, -1).transpose(1, 2) for p in parts)
        share = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=share)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self, blocks, heads, is_tied, inner):
        super().__init__()
        width = 4 * heads
        self.words = nn.Embedding(WORDS, width)
        make = {"attends": lambda: Attends(width, heads)}
        self.blocks = nn.ModuleList([make[b]() if b in make else Residual(width, b, inner) for b in blocks])
        self.head = nn.Linear(width, WORDS, bias=not is_tied)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Vision(nn.Module):
    def __init__(self, norm, channels):
        super().__init__()
        norms = {"batch": nn.BatchNorm2d, "group": lambda c: nn.GroupNorm(1, c), "none": nn.Identity}
        self.first, self.norm = nn.Conv2d(3, channels, 3, padding=1), norms[norm](channels)
        self.second, self.head = nn.Conv2d(channels, 2 * channels, 3, stride=2), nn.Linear(2 * channels, 5)

    def forward(self, images):
        x = F.max_pool2d(torch.relu(self.norm(self.first(images))), 2)
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


def next_word(model, batch):
    labels = batch[:, 1:].masked_fill(batch[:, 1:] < 5, -100)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    ),
}


def build(facts):
    """The Workload of some drawn facts."""
    random = torch.Generator().manual_seed(facts["seed"])
    kind, shape = facts["model"]
    if kind == "language":
        model, loss = (lambda: Language(**shape)), next_word
        data = list(torch.randint(0, WORDS, (facts["samples"], LENGTH + 1), generator=random))
    else:
        model, loss = (lambda: Vision(**shape)), classes
        data = [(torch.randn(3, 8, 8, generator=random), torch.tensor(i % 5)) for i in range(facts["samples"])]
    schedule = (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)) if facts["is_scheduled"] else None
    names = ("batch_size", "micro_batch_size", "clip_norm", "seed")
    parts = {name: facts[name] for name in names}
    if kind == "vision" and shape["norm"] == "batch":
        parts["micro_batch_size"] = None  # else the result depends on the cut by definition
    optimizer = OPTIMIZERS[facts["optimizer"]]
    return paceline.Workload(model=model, loss=loss, optimizer=optimizer, data=data, scheduler=schedule, **parts)


blocks = st.lists(st.sampled_from(["layer", "rms", "none", "attends"]), min_size=2, max_size=4)
languages = st.fixed_dictionaries(
    {"blocks": blocks, "heads": st.integers(1, 4), "is_tied": st.booleans(), "inner": st.integers(5, 24)}
)
visions = st.fixed_dictionaries({"norm": st.sampled_from(["batch", "group", "none"]), "channels": st.integers(3, 9)})
jobs = st.fixed_dictionaries(
    {
        "model": st.tuples(st.just("language"), languages) | st.tuples(st.just("vision"), visions),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "samples": st.integers(10, 30),
        "batch_size": st.integers(4, 9),
        "micro_batch_size": st.none() | st.integers(1, 4),
        "clip_norm": st.none() | st.sampled_from([0.1, 10.0]),
        "is_scheduled": st.booleans(),
        "seed": st.integers(0, 9),
    }
)


@st.composite
def plans(draw):
    """Axes whose product is at most four, and options."""
    sizes, left = {}, 4
    for axis in draw(st.permutations(WITHOUT_EXPERTS)):
        size = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n <= left]))
        sizes[axis], left = size, left // size
    words = [f"{axis}={size}" for axis, size in sizes.items()]
    if sizes["pipeline"] > 1:
        words.append(f"schedule={draw(st.sampled_from(['1f1b', 'gpipe', 'zero_bubble']))}")
    if sizes["tensor"] > 1 and draw(st.booleans()):
        words.append("sequence=on")
    if sizes["shard"] > 1:
        words.append(f"zero={draw(st.integers(1, 3))}")
    return ",".join(words)
