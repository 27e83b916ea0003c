"""Unusual models, all of them right: the verifier must not call them bugs; and some that it must refuse."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline

from support.verifier_models import Decoder, Remembers, decoder, remembers


class InfMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.lin = nn.Linear(16, 50)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, ids):
        x = self.words(ids)
        return self.lin(torch.softmax(x @ x.transpose(1, 2) + self.mask, -1) @ x)


class Huge(Remembers):
    def __init__(self):
        super().__init__()
        self.register_buffer("floor", torch.tensor(torch.finfo(torch.float32).min))


class HugeMask(Remembers):
    def __init__(self):
        super().__init__()
        self.register_buffer("floor", torch.tensor(-1e9))


class Touch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.scale.clamp_(max=2.0)
        return self.last(torch.relu(self.first(x)) * self.scale)


class NoStats(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(6, 16),
            nn.BatchNorm1d(16, track_running_stats=False),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.g = torch.Generator().manual_seed(1)

    def forward(self, x):
        x = x + 0.1 * torch.randn(x.shape, generator=self.g).to(x)
        return self.last(torch.relu(self.first(x)))


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU()) for _ in range(3)])
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        for b in self.blocks:
            x = b(x)
        return self.last(x)


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    extra: object = None


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(16, 4)
        g = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.randn(16, 16, generator=g) * 0.1)
        self.np = nn.Parameter(torch.tensor(np.random.rand(16), dtype=torch.float32) * random.random())
        self.drop = nn.Dropout(0.2, inplace=True)
        self.lin = nn.Linear(16, 50)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(50, dtype=torch.bool))

    def forward(self, ids, **more):
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.seen[ids.flatten()] = True
        x = self.words(ids)
        x = self.frozen(x) + x @ self.own + self.np
        x = checkpoint(lambda y: torch.tanh(y @ self.own), x, use_reentrant=False)
        return Out(self.lin(self.drop(x)) * self.temperature, "text")


class Zoo2(Zoo):
    def forward(self, ids, **more):
        x = self.words(ids)
        x = self.frozen(x) + x @ self.own + self.np
        return Out(self.lin(self.drop(x)) * self.temperature, "text")


def zoo_loss(model, batch):
    out = model(batch["ids"])
    return F.cross_entropy(out.logits.flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch["ids"].numel()


def zoo(kind=Zoo, **parts):
    generator = torch.Generator().manual_seed(12)
    data = [{"ids": torch.randint(0, 50, (8,), generator=generator), "name": f"s{i}"} for i in range(40)]
    return paceline.Workload(
        **{
            "model": kind,
            "loss": zoo_loss,
            "data": data,
            "batch_size": 8,
            "clip_norm": 0.5,
            "optimizer": lambda m: torch.optim.AdamW(
                [
                    {"params": [p for p in m.parameters() if p.dim() > 1 and p.requires_grad], "weight_decay": 0.1},
                    {"params": [p for p in m.parameters() if p.dim() < 2 and p.requires_grad], "lr": 1e-3},
                ],
                lr=1e-2,
            ),
            "scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)),
            **parts,
        }
    )


def ids_job(kind, loss, **parts):
    generator = torch.Generator().manual_seed(12)
    data = list(torch.randint(0, 50, (40, 8), generator=generator))
    return paceline.Workload(
        **{
            "model": kind,
            "loss": loss,
            "data": data,
            "batch_size": 8,
            "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            **parts,
        }
    )


def same_word(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum"), torch.tensor(ids.numel())


def next_word_float(model, batch):
    labels = batch[:, 1:]
    return F.cross_entropy(
        model(batch[:, :-1]).float().flatten(0, 1), labels.flatten(), reduction="sum"
    ), labels.numel()


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def _pair(rows):
    return Pair(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))


def pair_classes(model, batch):
    return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch.y)


def item_classes(model, batch):
    scores = model(batch[0])
    if batch[0].abs().max().item() > 2.08:
        scores = scores * 2
    return F.cross_entropy(scores, batch[1], reduction="sum"), len(batch[1])


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lin = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 50)

    def forward(self, ids):
        return self.lin(self.words(ids))


_SHARED = []


def shared():
    if not _SHARED:
        torch.manual_seed(0)
        _SHARED.append(Touch2())
    return _SHARED[0]


class Touch2(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sgd_of_last(model):
    return torch.optim.SGD(model.last.parameters(), lr=0.1)


class Mixture(nn.Module):
    """A mixture of experts as transformers computes it: tokens sorted by expert, and grouped matrix products.

    torch has no such product in float64.
    """

    def __init__(self, experts=4, chosen=2, width=32, inner=64):
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.words, self.lin = nn.Embedding(50, width), nn.Linear(width, 50)
        self.router = nn.Linear(width, experts)
        self.first = nn.Parameter(torch.randn(experts, 2 * inner, width) / 8)
        self.second = nn.Parameter(torch.randn(experts, width, inner) / 8)

    def forward(self, ids):
        x = self.words(ids)
        tokens = x.flatten(0, 1)
        weights, places = torch.softmax(self.router(tokens), -1).topk(self.chosen)
        sorted_places, order = places.flatten().sort()
        counts = torch.histc(sorted_places.float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = tokens[order // self.chosen]
        gate, up = F.grouped_mm(rows, self.first.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, self.second.transpose(1, 2), offs=ends)
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return self.lin(x + rows[back].view(*x.shape[:2], self.chosen, -1).sum(2))


class Narrowed(nn.Module):
    """A table that is computed in float64 and kept in float32, as positions are in transformers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.register_buffer("table", torch.linspace(0, 3, 16, dtype=torch.float64).sin().to(torch.float32))

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) + self.table)


class Depth(nn.Module):
    """Stochastic depth, in the forms of transformers and of torchvision."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        kept = torch.floor(0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device))
        x = x + torch.tanh(self.middle(x)) / 0.7 * kept
        x = x + 0.1 * torch.relu(self.middle(x)) * torch.empty(x.shape[0], 1, dtype=x.dtype).bernoulli_(0.5)
        return self.last(x)


class Noisy(nn.Module):
    """A mask of random features and noise, drawn inside of a block that activation checkpointing computes again."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([NoisyBlock(), NoisyBlock()])
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        order = torch.rand(x.shape[0], 32, dtype=x.dtype, device=x.device).argsort(1)
        x = torch.where(order < 8, 0.0, x) + 0.1 * torch.randn_like(x)
        return x + torch.tanh(self.linear(x))


def noisy_classes(model, batch):
    """The loss draws too, outside of every module."""
    inputs, labels = batch
    scores = model(inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype))
    return F.cross_entropy(scores, labels, reduction="sum"), len(labels)


class Leaky(torch.autograd.Function):
    """A backward pass that no operation says; a number beside the tensors, and two results."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x.clamp_min(0), x.tanh()

    @staticmethod
    def backward(ctx, positive, bent):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, positive, ctx.slope * positive) + 0.5 * bent, None


class OwnBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        positive, bent = Leaky.apply(self.first(x), 0.3)
        return self.last(torch.relu(self.middle(positive)) + bent)


class Heard(nn.Module):
    """Labels aligned with time, by the CTC loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(50, 64), nn.Linear(64, 12)

    def forward(self, ids):
        return self.last(torch.tanh(self.first(ids)))


def aligned_labels(model, ids):
    scores = F.log_softmax(model(ids), -1).transpose(0, 1)
    samples = len(ids)
    lengths = torch.full((samples,), ids.shape[1]), torch.full((samples,), 2)
    return F.ctc_loss(scores, ids[:, :2] % 11 + 1, *lengths, reduction="sum"), samples


class Normalized(nn.Module):
    """Weights of a length and a direction, and one with a mask."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first, self.middle, self.last = norm(nn.Linear(6, 64)), nn.Linear(64, 64), norm(nn.Linear(64, 3), dim=1)
        self.register_buffer("mask", (torch.arange(64 * 64).reshape(64, 64) % 3 > 0).float())

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(torch.relu(F.linear(x, self.middle.weight * self.mask, self.middle.bias)))


class Skipping(nn.Module):
    """A part that skips layers by chance, and draws noise and dropout in those that it does not skip."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.body = SkippingLayers()

    def forward(self, x):
        return self.last(self.body(self.first(x)))


class Recurrent(nn.Module):
    """A layer of torch that draws between the layers that it has inside."""

    def __init__(self):
        super().__init__()
        self.rnn, self.last = nn.LSTM(2, 16, 3, batch_first=True, dropout=0.4), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.rnn(x.unflatten(1, (3, 2)))[0][:, -1])


class SkippingLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU()) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + layer(x + 0.1 * torch.randn_like(x))
        return x


class Cplx(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.w = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, x):
        y = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.w, n=16)
        return self.last(y)


UNUSUAL = {
    "ownbackward": lambda: remembers(model=OwnBackward),
    "ctc": lambda: ids_job(Heard, aligned_labels),
    "normalized": lambda: remembers(model=Normalized),
    "depth": lambda: remembers(model=Depth),
    "noisy": lambda: remembers(model=Noisy, loss=noisy_classes),
    "mixture": lambda: ids_job(Mixture, same_word),
    "narrowed": lambda: remembers(model=Narrowed),
    "infmask": lambda: ids_job(InfMask, same_word),
    "huge": lambda: remembers(model=Huge),
    "hugemask": lambda: remembers(model=HugeMask),
    "touch": lambda: remembers(model=Touch),
    "nostats": lambda: remembers(model=NoStats),
    "dropped": lambda: remembers(model=Dropped),
    "zoo": zoo,
    "zoo2": lambda: zoo(Zoo2),
    "zoo3": lambda: zoo(Zoo2, clip_norm=None),
    "partial": lambda: remembers(model=Touch2, clip_norm=0.05, optimizer=sgd_of_last),
    "upcast": lambda: decoder(loss=next_word_float, clip_norm=None, optimizer=sgd),
    "upcast_adam": lambda: decoder(loss=next_word_float),
    "half": lambda: decoder(model=lambda: Decoder().bfloat16(), loss=next_word_float, clip_norm=None),
    "bnrms": lambda: remembers(optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2)),
    "bnada": lambda: remembers(optimizer=lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-1)),
    "dataclass": lambda: remembers(model=Touch2, loss=pair_classes, collate=_pair),
    "sparse": lambda: ids_job(Sparse, same_word, clip_norm=0.05),
    "lambda": lambda: decoder(scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s))),
    "skipping": lambda: remembers(model=Skipping),
    "recurrent": lambda: remembers(model=Recurrent),
    "complex": lambda: remembers(model=Cplx),
}


class Rnn0(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.last = nn.GRU(6, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x):
        h = torch.zeros(1, x.shape[0], 16)
        return self.last(self.rnn(x[:, None], h)[0][:, -1])


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(3)

    def forward(self, x):
        return self.first(x)


REFUSED = {
    "a shared model": (lambda: remembers(model=shared), "replicate=2", "return the same parameters"),
    "float32 made in forward": (lambda: remembers(model=Rnn0), "replicate=2", "x.new_zeros"),
    "a branch by item()": (lambda: remembers(model=Touch2, loss=item_classes), "replicate=2", "for 5 samples together"),
}
