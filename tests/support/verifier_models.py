"""What the verifier is tried on: small models with everything that a strategy can get wrong."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import paceline

from support.whole_optimizers import Lamb, MuonAdamW

VOCABULARY, LENGTH, WIDTH, HEADS = 301, 8, 16, 4  # an odd vocabulary: its pieces are uneven


class Attention(nn.Module):
    """Heads with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.share = 0.0

    def forward(self, x, cosine, sine):
        def heads(y):
            return y.view(*y.shape[:2], HEADS, -1).transpose(1, 2)

        query, key = (turned(heads(layer(x)), cosine, sine) for layer in (self.query, self.key))
        value = heads(self.value(x))
        share = self.share if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=share, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


def turned(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, cosine, sine):
        x = x + self.attention(self.norm1(x), cosine, sine)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class HeadDropout(Block):
    """Dropout inside of attention, where `tensor` splits heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention.share = 0.3


class HiddenDropout(Block):
    """Dropout in the middle of the feed-forward layers, where `tensor` splits."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, cosine, sine):
        x = x + self.attention(self.norm1(x), cosine, sine)
        return x + self.down(self.dropout(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Embedding, two blocks, a head tied to the embedding."""

    def __init__(self, block=Block) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block(), block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        size = WIDTH // HEADS
        rates = 1.0 / (100.0 ** (torch.arange(0, size, 2, dtype=torch.float64) / size))
        angles = torch.arange(ids.shape[1], dtype=torch.float64)[:, None] * torch.cat((rates, rates))
        x = self.words(ids)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))


class Remembers(nn.Module):
    """Batch norm, and a buffer of its own that follows the mean input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean(0) * 0.1)
        return self.last(torch.relu(self.norm(self.first(x))))


def next_word(model, batch):
    scores = model(batch[:, :-1])
    labels = batch[:, 1:].masked_fill(batch[:, 1:] == 0, -100)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def decoder(**parts):
    random = torch.Generator().manual_seed(11)
    return paceline.Workload(
        **{
            "model": Decoder,
            "loss": next_word,
            "optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
            "data": list(torch.randint(0, VOCABULARY, (40, LENGTH + 1), generator=random)),
            "batch_size": 8,
            "clip_norm": 0.5,
            **parts,
        }
    )


def remembers(**parts):
    random = torch.Generator().manual_seed(12)
    return paceline.Workload(
        **{
            "model": Remembers,
            "loss": classes,
            "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
            "data": [(torch.randn(6, generator=random), torch.tensor(i % 3)) for i in range(40)],
            "batch_size": 8,
            **parts,
        }
    )


def scheduled():
    return decoder(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))


def grouped():
    def optimizer(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 1e-2
        )

    return decoder(optimizer=optimizer)


class Scaled(Decoder):
    """A parameter without dimensions, which `shard` leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids):
        return super().forward(ids) * self.scale


class Augmented(torch.utils.data.Dataset):
    """Samples with noise that is drawn as they are loaded."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((6,), index / 40) + torch.randn(6), torch.tensor(index % 3)


SUBJECTS = {
    "heads": lambda: decoder(model=lambda: Decoder(HeadDropout)),
    "scaled": lambda: decoder(model=Scaled),
    "short": lambda: decoder(micro_batch_size=3, clip_norm=1e3),
    "augmented": lambda: remembers(model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3)), data=Augmented()),
    "scheduled": scheduled,
    "grouped": grouped,
    "decoder": decoder,
    "hidden": lambda: decoder(model=lambda: Decoder(HiddenDropout)),
    "micro": lambda: decoder(micro_batch_size=2),
    "remembers": remembers,
    "lamb": lambda: decoder(optimizer=lambda m: Lamb(m.parameters())),
    "muon": lambda: decoder(optimizer=MuonAdamW),
    "plain": lambda: decoder(clip_norm=None, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
}
