"""A loss that does not add up over samples is refused before the first step, and one that does never is."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.nouns.data_order import DataOrder
from paceline.nouns.errors import LossError
from paceline.parallel.model_adapter import EagerAdapter
from paceline.train import additive
from paceline.train.additive import check_loss_adds_up, check_loss_is_no_mean
from paceline.train.data import RankLoader, open_data
from paceline.train.same_draws import SameDraws

from support.ranks import run_ranks
from support.unusual_models import Mixture

WORDS, LENGTH, WIDTH = 23, 6, 8


class Net(nn.Module):
    """Words to scores, with everything that a trial must not take for a coupling of samples."""

    def __init__(self, norm: bool = False, drop: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=drop, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.mix(self.words(ids))
        return self.head(self.drop(self.norm(hidden.flatten(0, 1)).view_as(hidden)))


class Router(nn.Module):
    """Experts that a router chooses, and its auxiliary loss, in training alone and of small weight."""

    def __init__(self, share: float, starts_at_zero: bool = False, tokens: bool = True, hides: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(4))
        self.share, self.tokens, self.hides = share, tokens, hides
        if starts_at_zero:
            nn.init.zeros_(self.gate.weight)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.words(ids if self.tokens else ids[:, :1])
        chances = self.gate(hidden).softmax(-1)
        best, index = chances.max(-1)
        scores = sum((index == n).unsqueeze(-1) * expert(hidden) for n, expert in enumerate(self.experts))
        load = F.one_hot(index, 4).to(chances.dtype).flatten(0, -2).mean(0)
        auxiliary = 4 * (load * chances.flatten(0, -2).mean(0)).sum() * self.share * (1.0 if self.training else 0.0)
        scores = scores * best.unsqueeze(-1)
        if self.hides:
            return AddsToGradient.apply(scores, auxiliary), auxiliary * 0
        return scores, auxiliary


class AddsToGradient(torch.autograd.Function):
    """Shows in the gradient alone, as in DeepSeek's models."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
        ctx.like = auxiliary
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.full_like(ctx.like, 6.0)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch[
        "ids"
    ].numel()


def ignoring(model, batch):
    labels = batch["ids"].masked_fill(batch["ids"] < 12, -100).flatten()
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def mean_of_not_ignored(model, batch):
    labels = batch["ids"].masked_fill(batch["ids"] < 12, -100).flatten()
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels) * labels.numel(), labels.numel()


def sums_that_cancel(model, batch):
    """Terms of a thousand, of a sum of about one."""
    scores = model(batch["ids"])
    apart = 1e3 * (scores + 10).square().sum() - 1e3 * scores.square().sum() - 1e3 * (20 * scores + 100).sum()
    return apart + 1e-3 * scores.square().sum(), scores.numel()


def sums_that_cancel_in_float32(model, batch):
    total, weight = sums_that_cancel(model, batch)
    return total + 0 * without_float64(model, batch)[0], weight


def plain_mean(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten()), 1


def constant_weight(model, batch):
    return cross_entropy(model, batch)[0], 48


def penalty(model, batch, share=1e-4):
    total, weight = cross_entropy(model, batch)
    return total + share * sum(p.square().sum() for p in model.parameters()), weight


def penalty_by_weight(model, batch):
    total, weight = cross_entropy(model, batch)
    return total + 1e-4 * weight * sum(p.square().sum() for p in model.parameters()), weight


def routed(model, batch):
    scores, auxiliary = model(batch["ids"])
    labels = batch["ids"][:, : scores.shape[1]].flatten()
    return F.cross_entropy(scores.flatten(0, 1), labels, reduction="sum") + auxiliary * len(labels), len(labels)


def contrastive(model, batch):
    found = F.normalize(model(batch["ids"]).mean(1), dim=1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)), reduction="sum"), len(found)


def mixed_up(model, batch):
    hidden = model.words(batch["ids"])
    hidden = 0.7 * hidden + 0.3 * hidden[torch.randperm(len(hidden))]
    scores = model.head(hidden)
    return F.cross_entropy(scores.flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch["ids"].numel()


def noisy(model, batch):
    hidden = model.words(batch["ids"])
    hidden = (
        hidden + torch.randn_like(hidden) * torch.rand(len(hidden), 1, 1) + torch.empty_like(hidden).uniform_(-1, 1)
    )
    hidden = hidden * torch.bernoulli(torch.full((len(hidden), 1, 1), 0.5)) + F.gumbel_softmax(hidden, hard=True)
    steps = torch.randint(0, LENGTH, (len(hidden),))
    scores = model.head(F.dropout(hidden, 0.3))
    own = scores[torch.arange(len(hidden)), steps]
    return F.cross_entropy(own, batch["ids"][torch.arange(len(hidden)), steps], reduction="sum"), len(own)


CLASSES = torch.linspace(0.5, 2, WORDS)  # float32 and no part of the model
TEACHER = nn.Embedding(WORDS, WORDS).requires_grad_(False)


def by_classes(model, batch):
    labels = batch["ids"].flatten()
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels, CLASSES, reduction="sum"), CLASSES[labels].sum()


def by_classes_with_penalty(model, batch):
    total, weight = by_classes(model, batch)
    return total + 1e-6 * model.head.weight.square().sum(), weight


def narrowing(model, batch):
    """Rounds to float32 on the way, as language models' losses do, and fills float32 tensors of its own."""
    scores = model(batch["ids"]).float()
    kept = torch.zeros(scores.shape, dtype=torch.float32)
    kept[:, 1:] = scores[:, 1:].log_softmax(-1, dtype=torch.float32) @ torch.ones(WORDS, WORDS)
    return kept.square().sum() + scores.square().sum(dtype=torch.float32), len(scores)


def taught(model, batch):
    """A teacher outside of the model."""
    wanted = F.linear(TEACHER(batch["ids"]), torch.eye(WORDS)).softmax(-1)
    return F.kl_div(model(batch["ids"]).log_softmax(-1), wanted, reduction="sum"), len(wanted)


def without_float64(model, batch):
    """A kernel that has no float64."""
    scores = model(batch["ids"])
    if scores.dtype == torch.float64:
        raise TypeError("not implemented for 'Double'")
    return F.cross_entropy(scores.flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch["ids"].numel()


def without_float64_with_penalty(model, batch):
    total, weight = without_float64(model, batch)
    return total + 1e-2 * model.head.weight.square().sum(), weight


def own_batch_norm(model, batch):
    hidden = model.words(batch["ids"])
    hidden = F.batch_norm(hidden.flatten(0, 1), None, None, training=model.training).view_as(hidden)
    return F.cross_entropy(model.head(hidden).flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch[
        "ids"
    ].numel()


def smoothness(model, batch):
    """A gradient penalty: the loss takes a gradient of its own."""
    hidden = model.words(batch["ids"]).detach().requires_grad_()
    scores = model.head(torch.tanh(hidden))
    (slope,) = torch.autograd.grad(scores.sum(), hidden, create_graph=True)
    total = F.cross_entropy(scores.flatten(0, 1), batch["ids"].flatten(), reduction="sum")
    return total + 0.1 * (slope.norm(dim=(1, 2)) - 1).square().sum(), batch["ids"].numel()


def mean_smoothness(model, batch):
    total, weight = smoothness(model, batch)
    return total + 1e-3 * (model.head.weight.sum() - total / weight).square(), weight


def by_distributions(model, batch):
    """Draws whose operations torch does not mark as random."""
    hidden = model.words(batch["ids"])
    hidden = hidden * torch.distributions.Beta(2.0, 3.0).sample((len(hidden), 1, 1))
    hidden = hidden + torch.distributions.Dirichlet(torch.ones(WIDTH)).sample((len(hidden), 1))
    hidden = hidden + torch.binomial(torch.full_like(hidden, 3.0), torch.full_like(hidden, 0.4))
    scores = model.head(F.dropout(hidden, 0.3))
    return F.cross_entropy(scores.flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch["ids"].numel()


def by_distributions_with_penalty(model, batch):
    total, weight = by_distributions(model, batch)
    return total + 1e-4 * model.head.weight.square().sum(), weight


class Counts:
    """A loss that counts its calls outside of the model."""

    def __init__(self) -> None:
        self.calls = itertools.count(1)

    def __call__(self, model, batch):
        total, weight = cross_entropy(model, batch)
        return total * next(self.calls), weight


class Warmed(Net):
    """A factor that grows with every call, kept as a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.factor *= 0.9
        return super().forward(ids) * self.factor


def data(count=16, length=LENGTH):
    random = torch.Generator().manual_seed(3)
    return [{"ids": torch.randint(0, WORDS, (length,), generator=random)} for _ in range(count)]


def ragged(count=16):
    return [{"ids": sample["ids"][: 3 + n % 4]} for n, sample in enumerate(data(count))]


def padded(samples):
    return {"ids": nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], True)}


def try_out(model, loss, notices=None, ranks=2, is_whole=False, comm=None, **parts):
    """The trial of a job of `ranks` ranks, on one of them; or of one process, whose batches stay whole.

    With `comm` its ranks share the trials.
    """
    torch.manual_seed(0)
    work = paceline.Workload(
        **{
            "model": model,
            "loss": loss,
            "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            "data": data(),
            "batch_size": 8,
            **parts,
        }
    )
    made = work.model().train()
    if work.precision == "float64":
        made.double()
    placed = EagerAdapter(made, functools.partial(torch.autocast, "cpu", torch.bfloat16, work.precision == "bf16"))
    before = [tensor.clone() for tensor in made.state_dict().values()]
    drawn = torch.get_rng_state()
    loader = RankLoader(open_data("data", work.data), work, 0, ranks, torch.device("cpu"))
    try:
        if is_whole:
            check_loss_is_no_mean(placed, work, loader)
        else:
            check_loss_adds_up(placed, work, loader, (notices if notices is not None else []).append, comm)
    finally:
        after = made.state_dict().values()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "the trial left a trace"
        assert all(parameter.grad is None for parameter in made.parameters())
        assert made.training
        assert torch.equal(drawn, torch.get_rng_state())
        assert torch.get_default_dtype() == torch.float32


def pseudo_labels(model, batch, share=0.0):
    """Scores in training are compared with those in evaluation, by a sum and by a share of its root."""
    model.eval()
    with torch.no_grad():
        target = model(batch["ids"])
    model.train()
    scores = model(batch["ids"])
    far = (scores - target).square()
    loss_sum, weight = cross_entropy(model, batch)
    return loss_sum + far.sum() + share * far.sum().sqrt(), weight


def balanced(model, batch, share=1e-3):
    """Experts that are grouped products, which torch has not in float64, and a small auxiliary loss."""
    loss_sum, weight = cross_entropy(model, batch)
    chances = model.router(model.words(batch["ids"])).softmax(-1).flatten(0, -2)
    return loss_sum + share * weight * chances.mean(0).square().sum(), weight


ADDITIVE = {
    "grouped experts": (Mixture, cross_entropy),
    "cross entropy": (Net, cross_entropy),
    "without dropout": (lambda: Net(drop=0.0), cross_entropy),
    "batch norm": (lambda: Net(norm=True), cross_entropy),
    "ignored labels": (Net, ignoring),
    "sums that cancel": (Net, sums_that_cancel),
    "penalty times the weight": (Net, penalty_by_weight),
    "router without auxiliary loss": (lambda: Router(0.0), routed),
    "draws of every kind": (Net, noisy),
    "weights of classes": (Net, by_classes),
    "narrowed on the way": (Net, narrowing),
    "a teacher": (Net, taught),
    "kernel without float64": (Net, without_float64),
    "gradient penalty": (Net, smoothness),
    "a factor that changes with each call": (Warmed, cross_entropy),
    "draws of distributions": (Net, by_distributions),
    "pseudo labels": (lambda: Net(norm=True), pseudo_labels),
}
COUPLED = {
    "grouped experts with a small auxiliary loss": (Mixture, balanced, "together it is"),
    "a mean": (Net, plain_mean, "its weight is 1, for 2 and 3 of them 1 + 1"),
    "mean of the labels that count": (Net, mean_of_not_ignored, "together it is"),
    "weight of the whole batch": (Net, constant_weight, "its weight is 48, for 2 and 3 of them 48 + 48"),
    "small penalty": (Net, penalty, "together it is"),
    "tiny penalty": (Net, functools.partial(penalty, share=1e-6), "together it is"),
    "auxiliary loss": (lambda: Router(1e-2), routed, "together it is"),
    "small auxiliary loss": (lambda: Router(1e-5), routed, "together it is"),
    "auxiliary loss of a router at zero": (lambda: Router(1e-2, True), routed, "together it is"),
    "auxiliary loss of few tokens": (lambda: Router(1e-2, True, False), routed, "together it is"),
    "auxiliary loss in the gradient alone": (lambda: Router(1e-2, hides=True), routed, "its gradient with respect to"),
    "contrastive": (Net, contrastive, "together it is"),
    "mixup": (Net, mixed_up, "together it is"),
    "batch norm as a function": (Net, own_batch_norm, "together it is"),
    "penalty beside weights of classes": (Net, by_classes_with_penalty, "together it is"),
    "penalty beside a kernel without float64": (Net, without_float64_with_penalty, "together it is"),
    "gradient penalty and a mean": (Net, mean_smoothness, "together it is"),
    "pseudo labels and a root": (
        lambda: Net(norm=True),
        functools.partial(pseudo_labels, share=1e-2),
        "together it is",
    ),
    "draws of distributions and a penalty": (Net, by_distributions_with_penalty, "together it is"),
}
PARTS = {
    "float32": {},
    "float64": {"precision": "float64"},
    "bf16": {"precision": "bf16"},
    "micro-batches of one": {"micro_batch_size": 1},
    "padded": {"data": ragged(), "collate": padded},
}


FEW = (
    "cross entropy",
    "batch norm",
    "weights of classes",
    "sums that cancel",
    "small auxiliary loss",
    "mixup",
    "tiny penalty",
)


def cells(names):
    """All under the first settings, some under the others."""
    return [(name, parts) for name in names for parts in PARTS if parts == "float32" or name in FEW]


@pytest.mark.parametrize(("name", "parts"), cells(ADDITIVE))
def test_a_loss_that_adds_up_is_taken(name, parts):
    notices = []
    try_out(*ADDITIVE[name], notices, **PARTS[parts])
    assert parts == "padded" or not notices


@pytest.mark.parametrize(("name", "parts"), cells(COUPLED))
def test_a_loss_that_does_not_add_up_is_refused(name, parts):
    model, loss, said = COUPLED[name]
    with pytest.raises(LossError) as caught:
        try_out(model, loss, **PARTS[parts])
    if parts == "float32":
        assert said in str(caught.value)
    assert "multiply a mean, or a penalty on the weights, by the weight that you return" in caught.value.fix


def masked(model, batch):
    """Words one by one, and padding (0) does not count."""
    scores = model.head(model.words(batch["ids"]))
    labels = batch["ids"].masked_fill(batch["ids"] == 0, -100)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def test_a_loss_that_feels_padding_gets_a_notice():
    quiet, told = [], []
    try_out(Net, masked, quiet, **PARTS["padded"])
    assert not quiet
    try_out(Net, cross_entropy, told, **PARTS["padded"])
    assert len(told) == 1
    assert "changes with the padding" in told[0]


def test_sums_that_cancel_beyond_float32_are_not_refused():
    notices = []
    try_out(Net, sums_that_cancel_in_float32, notices)
    assert not notices or "could not be checked" in notices[0]


def test_additive_loss_that_counts_its_calls_gets_a_notice():
    notices = []
    try_out(Net, Counts(), notices)
    assert len(notices) == 1
    assert "two runs of one batch gave different losses" in notices[0]


def of_eight(model, batch):
    """Runs on batches of the real size alone."""
    return cross_entropy(model, {"ids": batch["ids"].view(8, LENGTH)})


def test_additive_trial_that_fails_gets_a_notice():
    notices = []
    try_out(Net, of_eight, notices)
    assert len(notices) == 1
    assert "the trial failed" in notices[0]


def test_samples_that_make_no_batch_in_parts_get_a_notice():
    notices = []
    try_out(Net, cross_entropy, notices, data=ragged(), collate=lambda samples: torch.zeros(3, len(samples)))
    assert len(notices) == 1
    assert "no common shape" in notices[0]


def test_a_workload_without_data_gets_a_notice():
    notices = []
    work = paceline.Workload(model=Net, loss=plain_mean, optimizer=list, data=None, steps=1)
    check_loss_adds_up(None, work, None, notices.append)
    assert len(notices) == 1
    assert "no data to check it with" in notices[0]


def test_a_batch_of_one_sample_is_not_tried():
    try_out(Net, plain_mean, batch_size=1, ranks=1)


class Odd(nn.Module):
    """What is hard to copy: computed weights, statistics, a recurrent net's dropout, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.mix = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.batch = nn.BatchNorm1d(WIDTH, track_running_stats=False, affine=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.again = nn.Linear(WIDTH, WORDS, bias=False)
        self.again.weight = self.head.weight
        self.scale = torch.ones(WIDTH)  # no buffer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.new(self.old(self.mix(self.words(ids))[0]))) * self.scale
        hidden = F.rrelu(self.batch(hidden.flatten(0, 1)), training=self.training).view_as(hidden)
        return self.head(hidden) + self.again(hidden).tanh()


def test_models_that_are_hard_to_copy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for copied in (True, False):
            notices = []
            try_out(Odd, cross_entropy, notices)
            with pytest.raises(LossError, match="together it is"):
                try_out(Odd, functools.partial(penalty, share=1e-6 if copied else 1e-1))
            assert not notices


@pytest.mark.parametrize("name", [name for name in ADDITIVE if name != "sums that cancel"])
def test_a_model_too_large_to_copy_is_tried_as_it_is(name, monkeypatch):
    monkeypatch.setattr("paceline.train.additive._COPIED_BYTES", 0)
    notices = []
    try_out(*ADDITIVE[name], notices)
    assert not notices or "two runs of one batch gave different losses" in notices[0]


@pytest.mark.parametrize(
    "name", ["a mean", "weight of the whole batch", "contrastive", "mean of the labels that count"]
)
def test_a_model_too_large_to_copy_is_refused_as_it_is(name, monkeypatch):
    monkeypatch.setattr("paceline.train.additive._COPIED_BYTES", 0)
    with pytest.raises(LossError):
        try_out(*COUPLED[name][:2])


def mean_by_number(model, batch):
    return plain_mean(model, batch)[0], len(batch["ids"])


def mean_of_labels_by_samples(model, batch):
    labels = batch["ids"].masked_fill(batch["ids"] < 12, -100).flatten()
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels), len(batch["ids"])


def scaled_mean_by_tokens(model, batch):
    return 0.5 * plain_mean(model, batch)[0] + 1, torch.tensor(float(batch["ids"].numel()))


@pytest.mark.parametrize("loss", [mean_by_number, mean_of_labels_by_samples, scaled_mean_by_tokens])
@pytest.mark.parametrize("precision", ["float32", "float64", "bf16"])
def test_a_mean_with_a_number_is_refused_in_one_process(loss, precision):
    with pytest.raises(LossError, match="it returns a mean") as caught:
        try_out(Net, loss, ranks=1, is_whole=True, precision=precision)
    assert "multiply the mean by the weight" in caught.value.fix


@pytest.mark.parametrize("name", [*ADDITIVE, *COUPLED])
def test_one_process_takes_what_may_be_meant(name):
    """Also what couples samples: only a mean by a number is certainly wrong there."""
    try_out(*{**ADDITIVE, **COUPLED}[name][:2], ranks=1, is_whole=True)


def test_a_mean_of_one_sample_is_taken():
    try_out(Net, mean_by_number, ranks=1, is_whole=True, batch_size=1)


def count_of_passes(loss):
    """A loss that counts its calls, and the counts."""
    calls = []

    def counted(model, batch):
        calls.append(len(batch["ids"]))
        return loss(model, batch)

    return counted, calls


def test_all_trials_are_made_on_one_copy_of_the_model(monkeypatch):
    copies = []
    original = additive._CopyFactory.__call__
    monkeypatch.setattr(additive._CopyFactory, "__call__", lambda make: copies.append(make) or original(make))
    loss, calls = count_of_passes(cross_entropy)
    try_out(Net, loss, batch_size=4)
    assert calls == [2, 1, 1] * 2  # two pairs of samples: a micro-batch has no more
    assert len(copies) == 1


def test_gradients_are_compared_outside_of_the_losss_modes(monkeypatch):
    operations = set()
    original = SameDraws.__torch_dispatch__

    def noted(mode, func, types, args=(), kwargs=None):
        operations.add(func.overloadpacket.__name__)
        return original(mode, func, types, args, kwargs)

    monkeypatch.setattr(SameDraws, "__torch_dispatch__", noted)
    try_out(
        functools.partial(nn.Embedding, WORDS, WORDS),
        lambda model, batch: (model(batch["ids"]).sum(), len(batch["ids"])),
    )
    assert "embedding" in operations
    assert not operations & {"cos", "linalg_vector_norm", "mv", "dot"}  # of the projections


def of_second_trial():
    """The first words of the samples that the second trial has, in a batch of four."""
    order = DataOrder(0, 16, 4)
    return [int(data()[order.index(position)]["ids"][0]) for position in (2, 3)]


def shared_trials(rank, share):
    """What a rank of two says of a loss whose samples meet in the second trial alone, and the sizes of its passes."""
    api.init()
    pair = of_second_trial()

    def coupled(model, batch):
        total, weight = cross_entropy(model, batch)
        return total * (1 + share * (batch["ids"][:, 0].tolist() == pair)), weight

    loss, calls = count_of_passes(coupled)
    found = ""
    try:
        try_out(Net, loss, comm=api.world().comm, batch_size=4)
    except LossError as error:
        found = error.found
    return found, calls


def test_ranks_share_the_trials_and_each_says_what_is_wrong():
    for found, calls in run_ranks(2, shared_trials, 0.0):
        assert not found
        assert calls == [2, 1, 1]  # one pair of samples, where one rank tries two
    for found, calls in run_ranks(2, shared_trials, 0.01):  # only one rank's share shows it
        assert "for 2 samples together it is" in found
        assert len(calls) > 6
