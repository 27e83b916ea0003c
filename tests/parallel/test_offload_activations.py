"""Activations that wait in the host's memory give the gradients that they give without, bit for bit.

The device is the CPU with streams that are as late as they may be: see `support/delayed_copies.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.parallel import offload_activations
from paceline.parallel.offload_activations import OffloadedActivations, check_can_offload, offload_blocks

from support.delayed_copies import DelayedCopies

WIDTH = 16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch):
    """Small tensors are offloaded too; one thread computes them faster than two."""
    monkeypatch.setattr(offload_activations, "LEAST_BYTES", 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    """Linear layers around what a test is about."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH, WIDTH), 0.5))

    def forward(self, x, *more):
        return x + self.second(self.inner(self.first(x), *more))

    def inner(self, x):
        return x.tanh()[..., :WIDTH]


class Views(Block):
    """Three views of one storage, one of them transposed, one expanded."""

    def inner(self, x):
        query, key, value = x.chunk(3, -1)
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value * value[:, :1].expand_as(value)


class Dropping(Block):
    def inner(self, x):
        return nn.functional.dropout(nn.functional.gelu(x[..., :WIDTH]), 0.3, self.training)


class InPlace(Block):
    """Writes to what nothing has saved before."""

    def inner(self, x):
        x.relu_()
        x = x[..., :WIDTH].exp() * 1.0
        return x.mul_(2.0).sigmoid_()


class Shared(Block):
    """Reads a mask that every block reads; the same tensor is saved by several operations."""

    def inner(self, x, mask):
        x = x[..., :WIDTH]
        return x * mask * x + x.sin() * x.cos() * mask


class Nested(Block):
    """Returns tensors in a dict, of which one has no gradient."""

    def forward(self, x):
        if isinstance(x, dict):
            x = x["values"][0] + x["values"][1]
        x = super().forward(x)
        return {"values": (x.sin(), x.cos()), "largest": x.argmax(-1)}


class Buffers(Block):
    """Saves a buffer, a view of it, and what is computed from a parameter alone."""

    def inner(self, x):
        return x[..., :WIDTH] * self.scale[0] @ self.scale @ self.second.weight.double().float()


class Checkpointed(Block):
    """Computes a part of itself again."""

    def inner(self, x):
        return checkpoint(lambda x: (x.sin() * x.exp())[..., :WIDTH], x, use_reentrant=False).tanh()


class Reentrant(Block):
    def inner(self, x):
        return checkpoint(lambda x: (x.sin() * x.exp())[..., :WIDTH], x, use_reentrant=True).tanh()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(context, x, y):
        product = x * y
        context.save_for_backward(x, y, product)
        return product

    @staticmethod
    def backward(context, gradient):
        x, y, product = context.saved_tensors
        return gradient * (y + product), gradient * x


class OwnFunction(Block):
    def inner(self, x):
        return Own.apply(x[..., :WIDTH], x[..., WIDTH : 2 * WIDTH])


class Complex(Block):
    """Complex numbers, their conjugates, and other types."""

    def inner(self, x):
        x = torch.fft.fft(x[..., :WIDTH] / WIDTH)
        return (x * x.conj()).real * (x.real > 0) + x.imag.double().pow(2).float()


class InnerGradient(Block):
    """Takes a gradient in its forward pass, and returns something that depends on it."""

    def inner(self, x):
        if not torch.is_grad_enabled():
            return x[..., :WIDTH]
        energy = (x.sin() * x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force[..., :WIDTH] * x[..., :WIDTH]


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x):
        x = self.before(x)
        more = (x.detach().sigmoid(),) if self.kind is Shared else ()
        for block in self.blocks:
            x = block(x, *more)
        return x["values"][0] if isinstance(x, dict) else x


class Twice(Model):
    """Every block is called twice, and the first once more at the end."""

    def forward(self, x):
        for block in self.blocks:
            x = block(block(x))
        return self.blocks[0](x)


class Inside(Model):
    """A block calls the one before it."""

    def forward(self, x):
        self.blocks[1].inner = lambda x: self.blocks[0](x[..., :WIDTH]) * x[..., :WIDTH]
        return super().forward(x)


class CheckpointedBlocks(Model):
    """The person computes whole blocks again."""

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x.sin(), use_reentrant=number % 2 == 1) * x
        return x


KINDS = (Block, Views, Dropping, InPlace, Shared, Nested, Buffers, Checkpointed, Reentrant, OwnFunction, Complex)
MODELS = {kind.__name__: (Model, kind) for kind in (*KINDS, InnerGradient)}
MODELS |= {kind.__name__: (kind, Views) for kind in (Twice, CheckpointedBlocks)}
MODELS["Inside"] = (Inside, Block)


def make(name):
    torch.manual_seed(0)
    kind, block = MODELS[name]
    return kind(block)


def batches(count):
    torch.manual_seed(1)
    return [torch.randn(2, 8, WIDTH) for _ in range(count)]


def one_after_another(model):
    for batch in batches(2):
        model(batch).square().sum().backward()


def all_forward_first(model):
    for total in [model(batch).square().sum() for batch in batches(2)]:
        total.backward()


def last_first(model):
    for total in [model(batch).square().sum() for batch in batches(2)][::-1]:
        total.backward()


def penalty(model):
    """A gradient of gradients."""
    (batch,) = batches(1)
    batch.requires_grad_()
    (slope,) = torch.autograd.grad(model(batch).square().sum(), batch, create_graph=True)
    slope.square().sum().backward()


def kept(model):
    """A graph that is used three times, with other passes between."""
    first, second = batches(2)
    total = model(first).square().sum()
    total.backward(retain_graph=True)
    model(second).square().sum().backward()
    total.backward(retain_graph=True)
    unused = model(second)  # no backward pass comes to it
    total.backward()
    del unused


def dropped(model):
    """Graphs that are let go of before, during and after their backward pass; an evaluation between."""
    first, second = batches(2)
    model(first)
    with torch.no_grad():
        model(first)
    outputs = model(second)
    torch.autograd.grad(outputs.sum(), model.blocks[-1].second.weight)
    del outputs
    model(first).square().sum().backward()


PASSES = (one_after_another, all_forward_first, last_first, kept, dropped, penalty)
# Without gradients a re-entrant checkpoint warns; it has none of second order.
NO_CHECKPOINTS = ("Reentrant", "CheckpointedBlocks")


def gradients(model, passes):
    torch.manual_seed(2)
    passes(model)
    return [parameter.grad for parameter in model.parameters()]


def compared(model, passes):
    """Run with and without offloading; return the streams, once all graphs are gone."""
    other = copy.deepcopy(model)
    alone = gradients(model, passes)
    offloaded = offload_blocks(other, CPU)
    with DelayedCopies() as offloaded.streams:
        found = gradients(other, passes)
    for gradient, own in zip(found, alone, strict=True):
        assert (gradient is None) == (own is None)
        assert gradient is None or torch.equal(gradient, own)
    assert not offloaded.known
    assert not offloaded.arriving
    assert [reference() for reference in offloaded.passes if reference() is not None] == []
    return offloaded.streams


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits(name):
    for passes in PASSES:
        if name in NO_CHECKPOINTS and passes in (dropped, penalty):
            continue
        streams = compared(make(name), passes)
        assert streams.seen["copies"] >= 3, passes  # of each block but the last at least one tensor
        assert streams.seen["host waits"] == 0


def begun(name):
    """A model, and what it has offloaded after a forward pass."""
    model = make(name)
    offloaded = offload_blocks(model, CPU)
    offloaded.streams = DelayedCopies()
    with offloaded.streams:
        outputs = model(batches(1)[0])
    return model, offloaded, outputs


def on_device(offloaded):
    """Numbers of the passes of which something is on the device."""
    found = []
    for reference in offloaded.passes:
        owner = reference()
        if owner is not None and any(memory.flat is not None for memory in owner.saved()):
            found.append(owner.number)
    return found


def test_two_blocks_are_on_the_device_at_most():
    model = make("Block")
    offloaded = offload_blocks(model, CPU)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(on_device(offloaded)))
        block.second.register_full_backward_hook(lambda *_: seen.append(on_device(offloaded)))
    with DelayedCopies() as offloaded.streams:
        total = model(batches(1)[0]).square().sum()
        assert seen == [[1], [2], [3], [4]]
        total.backward()
    assert seen[4:] == [[3, 4], [2, 3], [1, 2], [1]]


def test_a_tensor_that_all_blocks_save_is_copied_once_and_stays():
    _, offloaded, outputs = begun("Shared")
    saved = [reference().saved() for reference in offloaded.passes]
    (mask,) = set.intersection(*({id(memory) for memory in memories} for memories in saved))
    copied = {id(memory) for memories in saved[:-1] for memory in memories if memory.host is not None}
    assert mask in copied
    assert offloaded.streams.seen["copies"] == len(copied)
    assert [memory.flat is not None for memory in saved[0] if id(memory) == mask] == [True]
    with offloaded.streams:
        outputs.sum().backward()
    assert offloaded.streams.seen["copies"] == 2 * len(copied) - 1


def test_an_evaluation_moves_nothing():
    model, offloaded, outputs = begun("Views")
    copies = offloaded.streams.seen["copies"]
    with offloaded.streams, torch.no_grad():
        model(batches(1)[0])
    assert offloaded.streams.seen["copies"] == copies
    assert on_device(offloaded) == [4]
    del outputs


def test_a_storage_leaves_with_all_of_its_views():
    _, offloaded, outputs = begun("Views")
    views = [memory for memory in offloaded.passes[0]().saved() if len(memory.views) > 1]
    del outputs
    assert views
    assert all(memory.host is not None and memory.flat is None for memory in views)


def test_a_small_view_of_a_large_storage_stays():
    _, offloaded, outputs = begun("Shared")  # its operations save a third of what its first layer makes
    (left,) = [memory for memory in offloaded.passes[0]().saved() if memory.host is None]
    assert left.flat.nbytes == 3 * sum(left.views.values())
    del outputs


def test_parameters_buffers_and_small_tensors_stay(monkeypatch):
    model = make("Buffers")
    offloaded = offload_blocks(model, CPU)
    states = {state.untyped_storage().data_ptr() for state in (*model.parameters(), *model.buffers())}
    saved = []
    can_leave = OffloadedActivations._can_leave

    def watched(offloaded, owner, tensor):
        leaves = can_leave(offloaded, owner, tensor)
        saved.append((leaves, tensor.untyped_storage().data_ptr() in states, tensor.nbytes))
        return leaves

    monkeypatch.setattr(OffloadedActivations, "_can_leave", watched)
    with DelayedCopies() as offloaded.streams:
        one_after_another(model)
    leaving = [nbytes for leaves, is_state, nbytes in saved if leaves]
    assert leaving
    assert not any(is_state for leaves, is_state, _ in saved if leaves)
    assert any(is_state for _, is_state, _ in saved)
    monkeypatch.setattr(offload_activations, "LEAST_BYTES", 2**20)
    saved.clear()
    assert compared(make("Buffers"), one_after_another).seen["copies"] == 0
    assert saved
    assert not any(leaves for leaves, *_ in saved)


def test_autocasts_copy_of_a_weight_stays():
    """It is held on to until autocast ends: a copy on the host would save nothing."""
    model = make("Block")
    offloaded = offload_blocks(model, CPU)
    with DelayedCopies() as offloaded.streams, torch.autocast("cpu", torch.bfloat16):
        outputs = model(batches(1)[0])
    saved = [memory for reference in offloaded.passes for memory in reference().saved()]
    sizes = {memory.views.popitem()[0][0] for memory in saved}
    assert sizes
    assert not {(WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH)} & sizes
    del outputs


class WritesLater(Block):
    """Writes to what an operation has saved: an error in torch."""

    def inner(self, x):
        x = x[..., :WIDTH].exp()
        y = x.sin()
        x.mul_(2.0)
        return y


class WritesBefore(Model):
    """Writes to what the block before has saved, while it is copied."""

    def forward(self, x):
        x = self.blocks[0](x)
        saved = x + 1.0  # saves nothing itself
        inner = self.blocks[2].inner
        self.blocks[1].inner = lambda x: inner(x) * saved.sin()
        self.blocks[2].inner = lambda x: inner(x) * saved.mul_(2.0)
        return self.blocks[3](self.blocks[2](self.blocks[1](x)))


@pytest.mark.parametrize(("kind", "block"), [(Model, WritesLater), (WritesBefore, Block)])
def test_what_is_written_after_it_was_saved_is_an_error(kind, block):
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = kind(block)
        with DelayedCopies() as streams:
            if is_offloaded:
                offload_blocks(model, CPU).streams = streams
            total = model(batches(1)[0]).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()


class Failing(Block):
    def inner(self, x):
        result = super().inner(x.exp())
        if self.fails:
            raise ValueError("seeded")
        return result

    fails = False


@pytest.mark.parametrize("number", range(4))
def test_after_an_error_in_a_forward_pass_training_goes_on(number):
    torch.manual_seed(0)
    model = Model(Failing)

    def passes(model):
        for fails in (False, True, False):
            model.blocks[number].fails = fails
            try:
                model(batches(1)[0]).sum().backward()
            except ValueError:
                assert fails

    compared(model, passes)


def test_a_step_takes_no_more_pinned_memory_than_the_one_before():
    model = make("Views")
    offloaded = offload_blocks(model, CPU)
    taken = []
    offloaded.observer.host_memory_taken = taken.append
    with DelayedCopies() as offloaded.streams:
        one_after_another(model)
        once = len(taken)
        one_after_another(model)
    assert 0 < once == len(taken)
    assert sum(len(memories) for memories in offloaded.free.values()) == once


def _no_wait(monkeypatch):
    monkeypatch.setattr(OffloadedActivations, "_wait", lambda offloaded, arrival: None)


def _no_wait_before_free(monkeypatch):
    let_go = OffloadedActivations._let_go

    def early(offloaded):
        offloaded.leaving = [(0, owner, memories) for _, owner, memories in offloaded.leaving]
        let_go(offloaded)

    monkeypatch.setattr(OffloadedActivations, "_let_go", early)


def _no_hold_of_what_returns(monkeypatch):
    fetch = OffloadedActivations._fetch

    def without(offloaded, owner):
        fetch(offloaded, owner)
        for arrival in offloaded.arriving:
            arrival.tensors.clear()

    monkeypatch.setattr(OffloadedActivations, "_fetch", without)


def _no_wait_for_what_was_computed(monkeypatch):
    monkeypatch.setattr("support.delayed_copies.Stream.wait_stream", lambda stream, other: None)


FAULTS = {
    _no_wait: ("one_after_another", "assert"),
    _no_wait_before_free: ("one_after_another", "read freed"),
    _no_hold_of_what_returns: ("dropped", "write to freed"),
    _no_wait_for_what_was_computed: ("one_after_another", "does not wait"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_seen(fault, monkeypatch):
    passes, words = FAULTS[fault]
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        compared(make("Views"), globals()[passes])


def test_there_is_nothing_to_offload_on_a_cpu():
    with pytest.raises(PlanError) as caught:
        check_can_offload("cpu")
    assert caught.value.found == "the model is on cpu"
    check_can_offload("cuda")
    with pytest.raises(PlanError, match="can't be compiled"):
        Plan.parse("replicate=2,checkpointing=offload,compile=on")


def test_a_model_without_blocks_has_nothing_to_offload():
    assert offload_blocks(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), CPU) is None
