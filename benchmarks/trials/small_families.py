"""Small models of families beside transformers': recurrent, of pictures, of graphs, flows, physics, recommendation.

`FAMILIES` has for each name a factory, a loss and a batch; `architectures.py --families` verifies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

BATCH, CLASSES = 8, 4
Result = tuple[torch.Tensor, int]
_generator = torch.Generator().manual_seed(0)


def _numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(BATCH, *sizes, generator=_generator)


def _whole(below: int, *sizes: int) -> torch.Tensor:
    return torch.randint(below, (BATCH, *sizes), generator=_generator)


def classes(model: Any, batch: Any) -> Result:
    """Cross entropy, summed."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def squares(model: Any, batch: Any) -> Result:
    """Squared differences, summed."""
    inputs, wanted = batch
    return F.mse_loss(model(inputs), wanted, reduction="sum"), len(wanted)


class Tagger(nn.Module):
    """A recurrent net over tokens."""

    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.net = kind(32, 32, 2, batch_first=True, **options)
        self.last = nn.Linear(32 * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(self.words(tokens))[0][:, -1])


class Cells(nn.Module):
    """A cell that the model calls itself, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(8, 64), nn.Linear(64, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        state = rows.new_zeros(len(rows), 64)
        for step in range(rows.shape[1]):
            state = self.cell(rows[:, step], state)
        return self.last(state)


def autoencoder() -> nn.Module:
    """Convolutions down, transposed convolutions up."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1),
    )  # fmt: skip


class UNet(nn.Module):
    """A denoiser: group norms, a time embedding, a connection over the lower level."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.down, self.time = nn.Conv2d(16, 32, 3, 2, 1), nn.Linear(16, 32)
        self.up, self.last = nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, picture: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angles = time[:, None] * torch.arange(8)
        upper = F.silu(self.norm(self.first(picture)))
        lower = F.silu(self.down(upper) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[..., None, None])
        return self.last(F.silu(self.up(torch.cat([F.interpolate(lower, scale_factor=2.0), upper], 1))))


def denoised(model: Any, batch: Any) -> Result:
    """The noise that a picture was given, drawn in the loss."""
    picture, time = batch
    noise, share = torch.randn_like(picture), time.cos()[:, None, None, None]
    blurred = share * picture + (1 - share * share).clamp_min(0).sqrt() * noise
    return F.mse_loss(model(blurred, time), noise, reduction="sum"), len(picture)


class MobileNet(nn.Module):
    """Batch norm, a convolution of each channel by itself, hard activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.each, self.mix, self.last = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 32, 1),
            nn.Linear(32, 4),
        )

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(F.hardswish(self.each(F.relu6(self.norm(self.first(picture))))))
        return self.last(F.adaptive_avg_pool2d(mixed, 1).flatten(1))


class GraphNet(nn.Module):
    """Messages along edges, added up at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, CLASSES)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        begin = torch.arange(16).repeat(2)
        end = (begin * 3 + 1) % 16

        def passed(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(values).index_add(1, end, values[:, begin])

        return self.last(passed(torch.relu(self.first(passed(nodes))))).mean(1)


class GraphAttention(nn.Module):
    """Attention along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, CLASSES)
        self.attention = nn.Parameter(torch.randn(128) / 8)
        self.register_buffer("edges", (torch.rand(16, 16) < 0.3) | torch.eye(16, dtype=torch.bool))

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        values = self.first(nodes)
        scores = (values @ self.attention[:64])[:, :, None] + (values @ self.attention[64:])[:, None, :]
        weights = F.leaky_relu(scores).masked_fill(~self.edges, -1e9).softmax(-1)
        return self.last(weights @ values).mean(1)


class Flow(nn.Module):
    """Affine couplings, and the logarithm of their determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        volume = values.new_zeros(len(values))
        for net in self.nets:
            kept, moved = values.chunk(2, 1)
            scale, shift = net(kept).chunk(2, 1)
            moved = moved * scale.tanh().exp() + shift
            volume = volume + scale.tanh().sum(1)
            values = torch.cat([moved, kept], 1)
        return values, volume


def likelihood(model: Any, batch: Any) -> Result:
    """Minus the logarithm of the density, without a constant."""
    values, volume = model(batch[0])
    return (values.pow(2).sum(1) / 2 - volume).sum(), len(values)


def residual(model: Any, batch: Any) -> Result:
    """An equation of physics: the loss takes gradients with respect to the inputs."""
    places = batch[0].detach().requires_grad_()
    values = model(places)
    (slopes,) = torch.autograd.grad(values.sum(), places, create_graph=True)
    return (slopes[:, :1] - slopes[:, 1:] + values).pow(2).sum(), len(places)


class Recommender(nn.Module):
    """Tables of categories, and products of every two of them (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, 16) for _ in range(4))
        self.dense = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        dense, categories = inputs
        rows = [self.dense(dense), *(table(categories[:, place]) for place, table in enumerate(self.tables))]
        stacked = torch.stack(rows, 1)
        first, second = torch.tril_indices(5, 5, -1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([stacked[:, 0], products], 1))


def bag() -> nn.Module:
    """The mean of a few rows of a table."""
    return nn.Sequential(nn.EmbeddingBag(100, 32, mode="mean"), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES))


class Heard(nn.Module):
    """Scores of letters over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(8, 64, 3, padding=1), nn.Linear(64, 10)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(sound)).transpose(1, 2))


def aligned(model: Any, batch: Any) -> Result:
    """The CTC loss."""
    sound, letters = batch
    scores = F.log_softmax(model(sound), -1).transpose(0, 1)
    lengths = torch.full((len(sound),), sound.shape[-1]), torch.full((len(sound),), letters.shape[1])
    return F.ctc_loss(scores, letters, *lengths, reduction="sum"), len(sound)


class Fourier(nn.Module):
    """Fourier transforms in place of attention (FNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows + torch.fft.fft2(rows).real
        return self.last((rows + self.second(F.gelu(self.first(rows)))).mean(1))


class Straight(torch.autograd.Function):
    """A clamp whose gradient is another one's."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return values.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        return gradient * (values > 0) * 0.9


class OwnBackward(nn.Module):
    """A net with an autograd function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(Straight.apply(self.first(rows)))


class Codebook(nn.Module):
    """The nearest code, with a gradient that goes past it (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 8)
        self.codes = nn.Parameter(torch.randn(32, 64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values = self.first(rows)
        nearest = self.codes[torch.cdist(values, self.codes).argmin(-1)]
        return self.last(values + (nearest - values).detach() + 0.1 * (nearest - values))


def normalized(norm: Any) -> nn.Module:
    """Weights that a parametrization makes."""
    return nn.Sequential(norm(nn.Linear(8, 64)), nn.ReLU(), norm(nn.Linear(64, CLASSES)))


class Encoder(nn.Module):
    """torch's own transformer layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.words, self.last = nn.Embedding(50, 32), nn.Linear(32, CLASSES)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.words(tokens)).mean(1))


def mixture_density(model: Any, batch: Any) -> Result:
    """Minus the logarithm of a mixture of normal densities."""
    inputs, wanted = batch
    shares, means, widths = model(inputs).chunk(3, 1)
    densities = F.log_softmax(shares, 1) - ((wanted - means) / widths.exp()) ** 2 / 2 - widths
    return -torch.logsumexp(densities, 1).sum(), len(inputs)


class Masked(nn.Module):
    """A random quarter of the patches is seen, and all are rebuilt (MAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 12)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.hidden = nn.Parameter(torch.zeros(1, 1, 32))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        samples, length, _ = patches.shape
        order = torch.rand(samples, length, dtype=patches.dtype).argsort(1)
        seen = order[:, : length // 4, None].expand(-1, -1, 32)
        values = self.block(torch.gather(self.first(patches), 1, seen))
        full = torch.cat([values, self.hidden.expand(samples, length - length // 4, -1)], 1)
        return self.last(torch.gather(full, 1, order.argsort(1)[..., None].expand(-1, -1, 32)))


def rebuilt(model: Any, batch: Any) -> Result:
    """Squared differences from what went in."""
    return F.mse_loss(model(batch[0]), batch[0], reduction="sum"), len(batch[0])


def _dense(inner: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inner, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))


FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "lstm": (Tagger, classes, (_whole(50, 12), _whole(CLASSES))),
    "gru-both-ways": (lambda: Tagger(nn.GRU, bidirectional=True), classes, (_whole(50, 12), _whole(CLASSES))),
    "gru-cell": (Cells, classes, (_numbers(6, 8), _whole(CLASSES))),
    "autoencoder": (autoencoder, squares, (_numbers(3, 16, 16), _numbers(3, 16, 16))),
    "denoiser": (UNet, denoised, (_numbers(3, 16, 16), _numbers())),
    "mobile-net": (MobileNet, classes, (_numbers(3, 16, 16), _whole(CLASSES))),
    "graph-net": (GraphNet, classes, (_numbers(16, 8), _whole(CLASSES))),
    "graph-attention": (GraphAttention, classes, (_numbers(16, 8), _whole(CLASSES))),
    "flow": (Flow, likelihood, (_numbers(8), _numbers())),
    "physics": (lambda: _dense(2, 1), residual, (_numbers(2), _numbers())),
    "recommender": (Recommender, classes, ((_numbers(8), _whole(100, 4)), _whole(CLASSES))),
    "embedding-bag": (bag, classes, (_whole(100, 5), _whole(CLASSES))),
    "ctc": (Heard, aligned, (_numbers(8, 20), 1 + _whole(9, 4))),
    "fourier": (Fourier, classes, (_numbers(8, 16), _whole(CLASSES))),
    "own-backward": (OwnBackward, classes, (_numbers(8), _whole(CLASSES))),
    "codebook": (Codebook, squares, (_numbers(8), _numbers(8))),
    "weight-norm": (lambda: normalized(weight_norm), classes, (_numbers(8), _whole(CLASSES))),
    "spectral-norm": (lambda: normalized(spectral_norm), classes, (_numbers(8), _whole(CLASSES))),
    "encoder": (Encoder, classes, (_whole(50, 12), _whole(CLASSES))),
    "mixture-density": (lambda: _dense(8, 15), mixture_density, (_numbers(8), _numbers(1))),
    "masked": (Masked, rebuilt, (_numbers(16, 12), _numbers())),
}
