"""Gradients are those of one process, whether a backward pass or the update sums them, whatever the loop does."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.nouns.errors import CollectiveError, LossError, PacelineError, UsageError
from paceline.nouns.plan import Plan
from paceline.parallel.engine.agreement import Agreement
from paceline.parallel.replicate.replicate_strategy import Replicate

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
STEPS = 7
COMPARED = (1, 2, 3)  # steps after which the ranks compare their parameters
AT = 4  # the step in which a loop does something else; those before it are alike
INPUTS = torch.randn(STEPS, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = {
    1: [slice(0, 6)],
    2: [slice(0, 2), slice(2, 6)],
    4: [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6)],
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


class Alone:
    """What the pieces are in one process, by torch alone."""

    rank, size = 0, 1

    def __init__(self, models):
        self.models = models

    def backward(self, loss, weight=None, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def clip(self, max_norm):
        return float(nn.utils.clip_grad_norm_([p for model in self.models for p in model.parameters()], max_norm))

    def gradients(self):
        return {}

    @contextmanager
    def accumulate(self, when=True):
        yield

    def end_step(self):
        pass


def prepared(plain, *objects):
    if plain:
        return Alone([each for each in objects if isinstance(each, nn.Module)]), *objects
    return paceline.prepare(*objects)


def one_model(plain):
    model = net()
    return prepared(plain, model, sgd(model))


def own(job, step):
    return INPUTS[step][PARTS[job.size][job.rank]]


def values(*models):
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def each_step(loop):
    """A loop that calls `loop(job, model, optimizer, step, batch)` for each step."""

    def whole(plain):
        job, model, optimizer = one_model(plain)
        for step in range(STEPS):
            loop(job, model, optimizer, step, own(job, step))
        return values(model)

    whole.__name__ = loop.__name__
    return whole


def pull(job, model, batch, factor=1.0):
    job.backward(factor * (model(batch) - 1).square().mean(), weight=len(batch))


def usual(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    optimizer.step()


def clips(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    job.clip(0.1)
    optimizer.step()


def one_more_backward(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    if step == AT:
        pull(job, model, batch.sin(), 0.3)
    optimizer.step()


def one_fewer_backward(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    if step != AT:
        pull(job, model, batch.sin(), 0.3)
    optimizer.step()


def no_update(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    if step != AT:
        optimizer.step()


def kept_without_an_update(job, model, optimizer, step, batch):
    if step != AT + 1:
        optimizer.zero_grad()
    pull(job, model, batch)
    if step != AT:
        optimizer.step()


def cleared_before_the_update(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    if step >= AT:
        optimizer.zero_grad()
    optimizer.step()


def cleared_in_part(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    if step == AT:
        model[2].weight.grad = None
        model[0].bias.grad.zero_()
    optimizer.step()


def begun_again(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    if step == AT:
        optimizer.zero_grad()
        pull(job, model, batch.sin())
    optimizer.step()


def zeros(job, model, optimizer, step, batch):
    optimizer.zero_grad(set_to_none=False)
    pull(job, model, batch)
    optimizer.step()


def zeros_now_and_then(job, model, optimizer, step, batch):
    optimizer.zero_grad(set_to_none=step % 3 == 0)
    pull(job, model, batch)
    optimizer.step()
    if step == AT:
        optimizer.step()


def kept(job, model, optimizer, step, batch):
    if step < 3 or step == AT:
        optimizer.zero_grad()
    pull(job, model, batch)
    optimizer.step()


def accumulated(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    for part in range(3 if step != AT else 2):
        pull(job, model, batch * (1 + part), 0.2)
    optimizer.step()


def accumulated_as_said(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    last = 2 if step != AT else 1
    for part in range(last + 1):
        with job.accumulate(part < last):
            pull(job, model, batch * (1 + part), 0.2)
    optimizer.step()


def accumulated_alone(job, model, optimizer, step, batch):
    """No pass outside: the update sums."""
    optimizer.zero_grad()
    with job.accumulate():
        pull(job, model, batch, 0.2)
        pull(job, model, batch.sin(), 0.3)
    optimizer.step()


def accumulated_on_sums(job, model, optimizer, step, batch):
    """Gradients that are sums already are there before those of one rank."""
    if step % 3 == 0:
        optimizer.zero_grad()
    pull(job, model, batch, 0.2)
    with job.accumulate():
        pull(job, model, batch.sin(), 0.3)
    if step != AT:
        pull(job, model, batch.cos(), 0.1)
    optimizer.step()


def clipped_by_torch(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def replaced_between_passes(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    for parameter in model.parameters():
        parameter.grad = 0.5 * parameter.grad
    pull(job, model, batch.sin(), 0.3)
    optimizer.step()


def rewritten(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5)
    optimizer.step()


def rewritten_later(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    if step > AT:
        for parameter in model.parameters():
            parameter.grad.data.mul_(0.5)
    optimizer.step()


def rewritten_at_the_end(job, model, optimizer, step, batch):
    """In the last step, which the loop ends itself."""
    optimizer.zero_grad()
    pull(job, model, batch)
    if step == STEPS - 1:
        model[4].bias.grad.data.mul_(0.5)
    optimizer.step()
    if step == STEPS - 1:
        job.end_step()


def rewritten_in_one_place(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    model[0].weight.grad.data[1] = 0
    optimizer.step()


def frozen_between(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    model.requires_grad_(True)
    if step == AT:
        model[0].requires_grad_(False)
    pull(job, model, batch)
    if step == AT + 1:
        model[2].requires_grad_(False)
    optimizer.step()


def weightless(job, model, optimizer, step, batch):
    """From one step on some samples count nothing."""
    optimizer.zero_grad()
    counts = torch.arange(6)[PARTS[job.size][job.rank]] < (6 if step < AT else 2)
    losses = (model(batch) - 1).square().mean(1)
    job.backward((losses * counts).sum() / counts.sum().clamp(min=1), weight=int(counts.sum()))
    optimizer.step()


def twice_through_the_graph(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    loss = (model(batch) - 1).square().mean()
    job.backward(loss, weight=len(batch), retain_graph=True)
    if step != AT:
        job.backward(0.5 * loss, weight=len(batch))
    optimizer.step()


def penalized(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    batch = batch.clone().requires_grad_()
    output = model(batch).square()
    (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    job.backward(output.mean() + slope.square().sum(1).mean(), weight=len(batch))
    optimizer.step()


def reentrant(job, model, optimizer, step, batch):
    """The gradients of one layer come twice in a backward pass."""
    optimizer.zero_grad()
    batch = batch.clone().requires_grad_()
    hidden = checkpoint(model[0], batch, use_reentrant=True) + checkpoint(model[0], batch.sin(), use_reentrant=True)
    job.backward(model[1:](hidden).square().mean(), weight=len(batch))
    optimizer.step()


def regrouped(job, model, optimizer, step, batch):
    """The optimizer loses a parameter between the backward pass and the update."""
    optimizer.zero_grad()
    pull(job, model, batch)
    if step == AT:
        del optimizer.param_groups[0]["params"][1]
    optimizer.step()


def adversarial(plain):
    """Two models by turns; from one step on the second's update comes every other time."""
    first, second = net(0), net(1)
    job, first, second, one, other = prepared(plain, first, second, sgd(first), torch.optim.Adam(second.parameters()))
    for step in range(STEPS):
        batch = own(job, step)
        one.zero_grad()
        pull(job, lambda batch: first(batch) - second(batch), batch)
        one.step()
        other.zero_grad()
        pull(job, lambda batch: first(batch).sin() * second(batch), batch)
        if step < AT or step % 2:
            other.step()
    return values(first, second)


def together(plain):
    """One backward pass for two optimizers; later one of them leaves updates out."""
    first, second = net(0), net(1)
    job, first, second, one, other = prepared(plain, first, second, sgd(first), torch.optim.Adam(second.parameters()))
    for step in range(STEPS):
        batch = own(job, step)
        one.zero_grad()
        other.zero_grad()
        pull(job, lambda batch: first(batch) - second(batch), batch)
        if step == 2:
            job.clip(0.5)
        other.step()
        if step != AT:
            one.step()
    return values(first, second)


def shared(plain):
    """Two optimizers have a parameter together: the first's sum is part of what the second updates with."""
    first, second = net(0), net(1)
    one, other = sgd(first), sgd(second)
    other.add_param_group({"params": [first[0].bias], "lr": 0.01})
    job, first, second, one, other = prepared(plain, first, second, one, other)
    for step in range(STEPS):
        batch = own(job, step)
        one.zero_grad()
        other.zero_grad()
        pull(job, lambda batch: first(batch) - second(batch), batch)
        one.step()
        other.step()
    return values(first, second)


class Normed(nn.Module):
    """Its backward pass sums over the ranks too."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, batch):
        return self.net(self.norm(batch))


def normed(plain):
    model = Normed()
    job, model, optimizer = prepared(plain, model, sgd(model))
    for step in range(STEPS):
        usual(job, model, optimizer, step, own(job, step))
    return values(model)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 4, sparse=True)
        self.net = net()

    def forward(self, rows):
        return self.net(self.table(rows))


def sparse(plain):
    model = Words().double()
    job, model, optimizer = prepared(plain, model, sgd(model, momentum=0))
    for step in range(STEPS):
        rows = torch.arange(6)[PARTS[job.size][job.rank]] + step % 5
        optimizer.zero_grad()
        pull(job, model, rows)
        if step == AT:
            pull(job, model, rows)
        optimizer.step()
    return values(model)


LOOPS = [
    *map(
        each_step,
        [
            usual,
            clips,
            one_more_backward,
            one_fewer_backward,
            no_update,
            kept_without_an_update,
            cleared_before_the_update,
            cleared_in_part,
            begun_again,
            zeros,
            zeros_now_and_then,
            kept,
            accumulated,
            accumulated_as_said,
            accumulated_alone,
            accumulated_on_sums,
            clipped_by_torch,
            replaced_between_passes,
            rewritten,
            rewritten_later,
            rewritten_at_the_end,
            rewritten_in_one_place,
            frozen_between,
            weightless,
            twice_through_the_graph,
            penalized,
            reentrant,
            regrouped,
        ],
    ),
    adversarial,
    together,
    shared,
    normed,
    sparse,
]


def in_ranks(rank, name, settings, loops=LOOPS):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(**settings)))
    (loop,) = [each for each in loops if each.__name__ == name]
    return loop(False)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_that_does_something_else_ends_as_a_plain_one(loop):
    expected = loop(True)
    for ranks, more in ((1, {}), (2, {}), (2, {"transport": "gloo"}), (4, {"bucket_bytes": 200})):
        settings = {"mesh": f"replicate={ranks}", "bucket_bytes": 64, **more}
        for found in run_ranks(ranks, in_ranks, loop.__name__, settings):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["usual", "one_more_backward", "adversarial", "together"])
def test_so_does_one_whose_updates_are_shared_out(name):
    (loop,) = [each for each in LOOPS if each.__name__ == name]
    for found in run_ranks(4, in_ranks, name, {"mesh": "replicate=2,shard=2", "zero": 1, "bucket_bytes": 64}):
        torch.testing.assert_close(found, loop(True), rtol=1e-11, atol=1e-13)


def counted(rank, name, settings):
    """How many messages, sums of all gradients and sums in a backward pass there were, and where the loop ended."""
    counts = {"messages": 0, "sums": 0, "overlapping": 0}

    def counting(of, method, key):
        plain = getattr(of, method)

        def call(self, *arguments):
            counts[key] += 1
            return plain(self, *arguments)

        setattr(of, method, call)

    counting(Agreement, "_finish_sum", "messages")
    counting(Replicate, "reduce_gradients", "sums")
    counting(Replicate, "begin_last_backward", "overlapping")
    return in_ranks(rank, name, settings), counts


@pytest.mark.parametrize(
    ("name", "messages", "sums", "overlapping"),
    [
        ("usual", STEPS, STEPS, STEPS - 1),  # the first pass shows whether it communicates by itself
        ("clips", STEPS, STEPS, STEPS - 1),
        ("accumulated", 3 * STEPS - 1, 3 * STEPS - 1, 3 * STEPS - 2),
        ("accumulated_as_said", 3 * STEPS - 1, STEPS, STEPS),
        ("accumulated_alone", 3 * STEPS, STEPS, 0),  # a message more at each update, which sums
        ("zeros", STEPS, STEPS, STEPS - 1),
        ("normed", STEPS, STEPS, 0),
    ],
)
def test_a_step_communicates_no_more_than_it_needs(name, messages, sums, overlapping):
    for _, counts in run_ranks(2, counted, name, {"mesh": "replicate=2", "bucket_bytes": 64}):
        # Ends of steps: those whose parameters are compared over the ranks. Statistics are buffers, which the end of
        # each step makes equal; the loop leaves the last one open.
        ends = STEPS - 1 if name == "normed" else len(COMPARED)
        assert counts == {"messages": messages + ends, "sums": sums, "overlapping": overlapping}


@pytest.mark.parametrize("compression", ["bf16", "topk", "powersgd"])
def test_compression_keeps_what_it_leaves_out_of_each_pass(compression):
    settings = {"mesh": "replicate=2", "compression": compression, "bucket_bytes": 64}
    first, second = run_ranks(2, in_ranks, "accumulated", settings)
    assert all(torch.equal(here, there) for here, there in zip(first, second, strict=True))


def nan(job, model, optimizer, batch):
    optimizer.zero_grad(set_to_none=False)
    pull(job, model, batch, float("nan") if job.rank == 1 else 1.0)


def clipped_in_an_accumulation(job, model, optimizer, batch):
    """Each rank would clip by the norm of its own samples."""
    optimizer.zero_grad()
    with job.accumulate():
        pull(job, model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def raw_before_ours(job, model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).mean().backward()
    pull(job, model, batch)
    optimizer.step()


def raw_after_ours(job, model, optimizer, batch):
    optimizer.zero_grad()
    pull(job, model, batch)
    model(batch).mean().backward()
    optimizer.step()


def raw_in_place_of_ours(job, model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()


def mistaken(rank, mistake):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="replicate=2", bucket_bytes=64)))
    job, model, optimizer = one_model(False)
    for step in range(AT):
        usual(job, model, optimizer, step, own(job, step))
    before = values(model)
    try:
        mistake(job, model, optimizer, own(job, AT))
    except PacelineError as error:
        same = all(torch.equal(now, then) for now, then in zip(values(model), before, strict=True))
        gradients = [0.0 if p.grad is None else float(p.grad.abs().sum()) for p in model.parameters()]
        return type(error), same, gradients
    return None


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        (nan, LossError),
        (clipped_in_an_accumulation, UsageError),
        (raw_before_ours, UsageError),
        (raw_after_ours, UsageError),
        (raw_in_place_of_ours, UsageError),
    ],
    ids=lambda value: value.__name__,
)
def test_a_mistake_is_said_before_the_update(mistake, kind):
    for found, is_same, gradients in run_ranks(2, mistaken, mistake):
        assert found is kind
        assert is_same
        if mistake is nan:
            assert gradients == [0.0] * 6


def one_rank_leaves_out_an_update(job, optimizer):
    if job.rank == 0:
        optimizer.step()


def one_rank_clips(job, optimizer):
    if job.rank == 0:
        job.clip(0.1)
    optimizer.step()


def one_rank_accumulates(job, optimizer):
    optimizer.step()
    job.end_step()


def apart(rank, mistake):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="replicate=2", bucket_bytes=64)))
    job, model, optimizer = one_model(False)
    usual(job, model, optimizer, 0, own(job, 0))
    optimizer.zero_grad()
    pull(job, model, own(job, 1))
    mistake(job, optimizer)
    optimizer.zero_grad()
    try:
        with job.accumulate(mistake is one_rank_accumulates and rank == 0):
            pull(job, model, own(job, 2))
    except PacelineError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (one_rank_leaves_out_an_update, "updates (optimizer 1)"),
        (one_rank_clips, "job.clip"),
        (one_rank_accumulates, "inside job.accumulate"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_do_other_things_find_out_in_the_next_pass(mistake, said):
    texts = []
    for kind, text in run_ranks(2, apart, mistake):
        assert kind is CollectiveError
        texts.append(text)
    assert any(said in text for text in texts), texts


def raises_on(rank, failing):
    """A backward pass raises on some ranks, the loop goes on with the next batch, and all end alike."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="replicate=2", bucket_bytes=64)))
    job, model, optimizer = one_model(False)

    def fail(gradient):
        raise MemoryError("as a backward pass does that is too large")

    for step in range(STEPS):
        optimizer.zero_grad()
        handle = model[0].weight.register_hook(fail) if step == AT and rank in failing else None
        try:
            pull(job, model, own(job, step))
        except MemoryError:
            assert handle is not None
        if step != AT:
            optimizer.step()
        if handle is not None:
            handle.remove()
    return values(model)


def left_out(job, model, optimizer, step, batch):
    optimizer.zero_grad()
    if step != AT:
        pull(job, model, batch)
        optimizer.step()


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_a_loop_goes_on_after_a_backward_pass_that_raised(failing):
    expected = each_step(left_out)(True)
    for found in run_ranks(2, raises_on, failing):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
