"""Samples that meet in an operation, and samples that do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.graph.capture import capture
from paceline.graph.loss_is_additive import coupled_at
from paceline.graph.skeleton import skeleton

SAMPLES = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.lstm, self.by_time = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8)
        self.gru = nn.GRU(8, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.rnn = nn.RNN(8, 8, batch_first=True)
        self.conv, self.up = nn.Conv1d(8, 8, 3, groups=8, padding=1), nn.ConvTranspose1d(8, 4, 2, stride=2)
        self.embedding = nn.Embedding(7, 8)
        self.register_buffer("codes", torch.randn(5, 8))


APART = {
    "diff_of_two": lambda net, x: x.diff(prepend=x[:, :, :1] - 1),
    "made": lambda net, x: x * x.new_ones(()) * x.new_zeros((4, 8)).add(2),
    "repeat_heads": lambda net, x: x.view(len(x), 4, 2, 4).repeat_interleave(2, dim=2),
    "repeat_batch": lambda net, x: x.repeat_interleave(3, dim=0),
    "repeat": lambda net, x: x.repeat(1, 2, 1),
    "index_table": lambda net, x: net.codes[x.argmax(-1) % 5],
    "index_cols": lambda net, x: x[:, torch.tensor([0, 2])],
    "index_last": lambda net, x: x[:, :, torch.tensor([0, 2])],
    "index_two": lambda net, x: x[:, torch.tensor([0, 2]), torch.tensor([0, 2])],
    "cdist": lambda net, x: torch.cdist(x, net.codes),
    "cdist2": lambda net, x: torch.cdist(x[:, 0], net.codes),
    "lstm": lambda net, x: net.lstm(x)[0],
    "gru": lambda net, x: net.gru(x)[1],
    "lstm_t": lambda net, x: net.by_time(x.transpose(0, 1))[0],
    "rnn": lambda net, x: net.rnn(x)[0],
    "diff": lambda net, x: x.diff(dim=-1),
    "sort": lambda net, x: x.sort(-1)[0],
    "topk": lambda net, x: x.topk(2, -1)[0],
    "argmin": lambda net, x: F.one_hot(x.argmin(-1), 8) * x,
    "maxd": lambda net, x: x.max(-1)[0],
    "pad": lambda net, x: F.pad(x, (1, 1)),
    "gconv": lambda net, x: net.conv(x.transpose(1, 2)),
    "convT": lambda net, x: net.up(x.transpose(1, 2)),
    "interp": lambda net, x: F.interpolate(x, scale_factor=2.0),
    "var": lambda net, x: x.var(-1),
    "logsumexp": lambda net, x: x.logsumexp(-1),
    "cumprod": lambda net, x: x.cumprod(-1),
    "roll": lambda net, x: x.roll(1, 1),
    "tril": lambda net, x: x.tril(),
    "unfold": lambda net, x: x.unfold(-1, 2, 2),
    "fft": lambda net, x: torch.fft.rfft(x, dim=-1).abs(),
    "cos": lambda net, x: F.cosine_similarity(x[:, 0], x[:, 1], dim=-1),
    "normalize": lambda net, x: F.normalize(x, dim=-1),
    "index_select": lambda net, x: x.index_select(1, torch.tensor([0, 1])),
    "scatter": lambda net, x: torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0) * x,
    "anyd": lambda net, x: (x > 0).any(-1) * x[:, :, 0],
    "prod": lambda net, x: x.prod(-1),
    "amin": lambda net, x: x.amin(-1),
    "mp": lambda net, x: F.max_pool1d(x, 2),
    "bmm": lambda net, x: torch.bmm(x, x.transpose(1, 2)),
    "emb": lambda net, x: net.embedding(x.argmax(-1) % 7),
    "gather": lambda net, x: x.gather(1, torch.zeros(len(x), 1, 8, dtype=torch.long)),
    "movedim": lambda net, x: x.movedim(0, 1),
    "swap": lambda net, x: x.swapaxes(1, 2),
    "median": lambda net, x: x.median(-1)[0],
    "std": lambda net, x: x.std(-1),
    "norm": lambda net, x: x.norm(dim=-1),
    "tile": lambda net, x: x.tile((1, 1, 2)),
    "glu": lambda net, x: F.glu(x),
    "meanall": lambda net, x: x.mean((1, 2)),
    "clampmin": lambda net, x: x.clamp(min=x.mean(-1, keepdim=True)),
    "with_a_dimension": lambda net, x: torch.atleast_3d(x),
    "bincount": lambda net, x: F.one_hot(x.argmax(-1), 8).sum(1) * x[:, 0],
    "buckets": lambda net, x: torch.bucketize(x.detach(), torch.tensor([0.0, 1.0])) * x,
    "lerp": lambda net, x: torch.lerp(x, x * 2, 0.3),
    "chunk": lambda net, x: torch.cat(x.chunk(2, -1), -1),
    "hub": lambda net, x: F.huber_loss(x, x * 0, reduction="none"),
    "rotary": lambda net, x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turns()).flatten(-2),
    "polar": lambda net, x: torch.polar(x.exp(), x).conj().imag,
    "complex": lambda net, x: torch.complex(x, net.codes[:1, None]).angle(),
    "fft2": lambda net, x: torch.fft.irfft2(torch.fft.rfft2(x).real + 1),
    "stft": lambda net, x: torch.stft(x.flatten(1), 8, window=torch.ones(8).to(x), return_complex=True).abs(),
    "dispatch": lambda net, x: torch.einsum("bsec,bsd->becd", x.unflatten(-1, (4, 2)).softmax(1), x),
    "dots": lambda net, x: torch.einsum("...sd,...td->...st", x, x),
    "bilinear": lambda net, x: torch.einsum("b...i,ij,b...j->b...", x, net.first.weight, x),
    "diagonal": lambda net, x: torch.einsum("b i i -> b i", x[:, :, :4]),
}
TOGETHER = {
    "diff0": lambda net, x: x.diff(dim=0),
    "cumsum0": lambda net, x: x.cumsum(0),
    "index": lambda net, x: x[torch.tensor([1, 0, 2, 3, 4, 5])] * x,
    "cdist": lambda net, x: torch.cdist(x[:, 0], x[:, 0]),
    "lstm": lambda net, x: net.by_time(x)[0],
    "sort0": lambda net, x: x.sort(0)[0] * x,
    "roll0": lambda net, x: x.roll(1, 0) * x,
    "flip": lambda net, x: x.flip(0) * x,
    "argmax0": lambda net, x: net.codes[x.argmax(0) % 5].sum() * x,
    "topk0": lambda net, x: x.topk(6, 0)[0] * x,
    "pad0": lambda net, x: F.pad(x, (0, 0, 0, 0, 1, 0))[:-1] * x,
    "repeat0": lambda net, x: (x.repeat(2, 1, 1).view(2, SAMPLES, 4, 8)[:, :1] * x).square(),
    "rollall": lambda net, x: x.roll(1) * x,
    "logsum0": lambda net, x: x.logsumexp(0) * x,
    "var0": lambda net, x: x.var(0) * x,
    "repflat": lambda net, x: x.repeat_interleave(2).view(2 * SAMPLES, 4, 8)[: len(x)] * x,
    "idxb": lambda net, x: x[x.argmax(0)[0] % 6] * x[0],
    "scatter0": lambda net, x: torch.zeros_like(x).scatter(0, x.argmax(0, keepdim=True), 1.0) * x,
    "unfold0": lambda net, x: x.unfold(0, 2, 1) ** 2,
    "norm0": lambda net, x: F.normalize(x, dim=0),
    "gather0": lambda net, x: x.gather(0, torch.zeros(len(x), 4, 8, dtype=torch.long)) * x,
    "tril": lambda net, x: x[:, :, :6].permute(1, 0, 2).tril().permute(1, 0, 2) * x[:, :, :6],
    "conv": lambda net, x: net.conv(x.permute(1, 2, 0)) ** 2,
    "fft0": lambda net, x: torch.fft.fft(x, dim=0).abs(),
    "fft2": lambda net, x: torch.fft.fft2(x[:, 0]).abs(),
    "pairs": lambda net, x: torch.view_as_complex(x[:, 0].t().contiguous().view(8, 3, 2)).abs().square(),
    "einsum": lambda net, x: torch.einsum("b...d,a...d->ba", x, x),
    "sum of three": lambda net, x: torch.einsum("bsd,bsd,bse", x, x, x),
    "diagonal": lambda net, x: torch.einsum("bbs->bs", x[:, None, 0].expand(SAMPLES, SAMPLES, 8).contiguous()),
    "other rows": lambda net, x: torch.einsum("bsd,bt->bst", x, net.codes[torch.tensor([0, 1, 2, 3, 4, 0])]),
}


def turns():
    return torch.polar(torch.ones(4, 4), torch.arange(16.0).view(4, 4))


# The others take a while in all; these were told to meet in models that people train.
FIRST = (
    "repeat_heads", "index_table", "index_cols", "cdist", "lstm", "gru", "diff", "gconv", "pad",
    "rotary", "dispatch", "einsum", "other rows",
    "diff0", "index", "roll0", "pad0", "tril", "scatter0",
)  # fmt: skip


def cases(functions):
    return [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in functions]


def loss_of(function):
    return lambda net, batch: (function(net, net.first(batch)).square().sum(), len(batch))


def meeting(function):
    torch.manual_seed(1)
    net, batch = Net().double(), torch.randn(SAMPLES, 4, 8).double()
    return net, batch, coupled_at(capture(skeleton(net).train(), loss_of(function), batch, torch.device("cpu")))


@pytest.mark.parametrize("name", cases(APART))
def test_what_treats_each_sample_by_itself_does_not_couple(name):
    net, batch, met = meeting(APART[name])
    assert met is None, met.target
    whole = loss_of(APART[name])(net, batch)[0]
    parts = [loss_of(APART[name])(net, part)[0] for part in batch.split(2)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", cases(TOGETHER))
def test_what_mixes_samples_couples(name):
    _, _, met = meeting(TOGETHER[name])
    assert met is not None
