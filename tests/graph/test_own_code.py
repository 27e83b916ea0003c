"""Calls that a graph keeps as they are: their own backward pass runs, and what they must not do is refused."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from paceline.graph.capture import capture
from paceline.graph.stages import assign_stages, assignment_of
from paceline.nouns.errors import WorkloadError

from support.unusual_models import Leaky

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.change = nn.Linear(4, 4), change

    def forward(self, x):
        return self.change(self, self.first(x))


def summed(model, batch):
    return model(batch).pow(2).sum(), len(batch)


def captured_of(change, loss=summed, batch=None):
    torch.manual_seed(0)
    model = Net(change).double()
    batch = torch.randn(3, 4, dtype=torch.float64) if batch is None else batch
    return model, batch, capture(model, loss, batch, CPU)


def gradients_by_graph(model, batch, captured):
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {node: states[name] for name, node in captured.states.items()}
    values.update({node: batch for node in captured.inputs})
    run = fx.GraphModule(captured.constants, captured.graph)
    results = run(*(values[node] for node in captured.graph.nodes if node.op == "placeholder"))
    return torch.autograd.grad(results[0], list(model.parameters()))


def both_backwards(model, x):
    positive, bent = Leaky.apply(x, 0.3)
    return positive + bent


class Scaled(torch.autograd.Function):
    """A tensor in a list, one by keyword place, and a dtype; the gradient is not that of its operations."""

    @staticmethod
    def forward(ctx, tensors, factor, dtype):
        return tensors[0].to(dtype) * factor

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient.sum(), None


KEPT = {
    "two results and a number": both_backwards,
    "twice": lambda model, x: both_backwards(model, both_backwards(model, x)),
    "under no_grad": lambda model, x: x * Leaky.apply(x.detach(), 0.5)[0],
}


@pytest.mark.parametrize("name", KEPT)
def test_its_own_backward_pass_runs(name):
    model, batch, captured = captured_of(KEPT[name])
    expected = torch.autograd.grad(summed(model, batch)[0], list(model.parameters()))
    for one, other in zip(gradients_by_graph(model, batch, captured), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert any("Leaky" in str(node.target) for node in captured.graph.nodes)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_the_ctc_loss_is_one_call(reduction):
    lengths = torch.full((3,), 6), torch.tensor([2, 1, 2])
    labels = torch.tensor([[1, 2], [3, 0], [2, 2]])

    def loss(model, batch):
        scores = F.log_softmax(model(batch), -1).transpose(0, 1)
        return F.ctc_loss(scores, labels, *lengths, reduction=reduction).sum(), len(batch)

    batch = torch.randn(3, 6, 4, dtype=torch.float64)
    model, batch, captured = captured_of(lambda model, x: x, loss, batch)
    expected = torch.autograd.grad(loss(model, batch)[0], list(model.parameters()))
    for one, other in zip(gradients_by_graph(model, batch, captured), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def reads_more(model, x):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x @ model.first.weight

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Reads.apply(x)


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1, 3

    @staticmethod
    def backward(ctx, gradient, count):
        return gradient


class Branches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.sum() > 0 else x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


REFUSED = {
    "a tensor of the model's": (reads_more, "uses a tensor that is none of its arguments"),
    "a write": (lambda model, x: Writes.apply(x), "writes into one of its arguments"),
    "a number": (lambda model, x: Counts.apply(x)[0], "returns something else than tensors"),
    "a function": (lambda model, x: Scaled.apply([x], len, torch.float64), "called with a builtin_function"),
    "a path by values": (lambda model, x: Branches.apply(x), "looks at values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_call_must_not_do_is_refused(name):
    change, said = REFUSED[name]
    with pytest.raises(WorkloadError, match=said) as error:
        captured_of(change)
    assert "replicate or shard" in str(error.value)


def masked_by_vmap(model, x):
    """A mask of positions, as transformers makes some, with a value of the model in it."""
    places = torch.arange(4)
    limit = model.first.bias.detach().gt(0)

    def seen(query, key):
        return (query >= key) | limit[key]

    for dims in ((None, 0), (0, None)):
        seen = torch.vmap(seen, in_dims=dims)
    return x @ seen(places, places).to(x.dtype)


VMAPPED = {
    "a mask": masked_by_vmap,
    "rows": lambda model, x: torch.vmap(lambda row: row.tanh() * x.sum())(x),
    "along another dimension, by name": lambda model, x: torch.func.vmap(
        lambda pair, factor: pair["a"] * factor + pair["b"].mean(), in_dims=({"a": 1, "b": None}, None), out_dims=1
    )({"a": x, "b": x}, 3.0),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_what_vmap_comes_to_is_in_the_graph(name):
    model, batch, captured = captured_of(VMAPPED[name])
    expected = torch.autograd.grad(summed(model, batch)[0], list(model.parameters()))
    for one, other in zip(gradients_by_graph(model, batch, captured), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert not captured.constants


@pytest.mark.parametrize(
    "change",
    [
        lambda model, x: torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x),
        lambda model, x: torch.func.jacrev(lambda row: row.sin())(x[0]) @ x[0] + x,
        lambda model, x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    ],
)
def test_gradients_by_torch_func_are_refused(change):
    with pytest.raises(WorkloadError, match=r"takes gradients itself \(torch.func\)"):
        captured_of(change)


def fills(value):
    def fill(model, x):
        x = x * 1
        x[x.detach()[..., 0] > 0] = value(model, x)
        return x

    return fill


FILLED = {
    "a number": fills(lambda model, x: 0.5),
    "a row of the model's": fills(lambda model, x: model.first.bias.tanh()),
    "a number of the model's": fills(lambda model, x: model.first.bias.sum()),
}


@pytest.mark.parametrize("name", FILLED)
def test_what_a_mask_writes_is_chosen_element_by_element(name):
    model, batch, captured = captured_of(FILLED[name])
    targets = [node.target for node in captured.graph.nodes]
    assert torch.ops.aten.where.self in targets
    assert torch.ops.aten.index_put.default not in targets
    expected = torch.autograd.grad(summed(model, batch)[0], list(model.parameters()))
    for one, other in zip(gradients_by_graph(model, batch, captured), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_rows_of_their_own_are_put_where_the_mask_says():
    def fill(model, x):
        mask = torch.tensor([True, False, True])
        return x.index_put((mask,), x[:2] * 2)

    model, batch, captured = captured_of(fill)
    assert torch.ops.aten.index_put.default in [node.target for node in captured.graph.nodes]
    expected = torch.autograd.grad(summed(model, batch)[0], list(model.parameters()))
    for one, other in zip(gradients_by_graph(model, batch, captured), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_the_same_code_is_cut_alike():
    """Calls that are kept are made anew by each capture."""

    def change(model, x):
        for _ in range(4):
            x = both_backwards(model, model.first(x))
        return x

    first = captured_of(change)[2]
    assignment = assignment_of(first, assign_stages(first, 2))
    second = captured_of(change, batch=torch.randn(5, 4, dtype=torch.float64))[2]
    # A state's stages say nothing here: all layers are one.
    assert list(assign_stages(second, 2, assignment).values()) == assignment.stages
    assert set(assignment.stages) == {0, 1}
