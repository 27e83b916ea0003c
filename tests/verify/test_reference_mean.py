"""The reference takes the gradient of the mean, as a plain loop does: what clamps gradients sees no sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.nouns.data_order import DataOrder
from paceline.train.seed import seed_everything
from paceline.verify.ranks.reference_step import take_steps

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor([i % 3 - 1.0])) for i in range(16)]
LIMIT = 0.02


class Clamped(torch.autograd.Function):
    """Clamps in the backward pass."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-LIMIT, LIMIT)


class Net(nn.Module):
    """Clamps in the way that `kind` says, and writes a buffer that its backward pass needs."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))
        if kind == "parameter":
            self.first.weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
        if kind == "module":
            self.last.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].clamp(-LIMIT, LIMIT),))

    def forward(self, inputs):
        self.calls.add_(1.0)
        hidden = self.first(inputs).tanh()
        if self.kind == "function":
            hidden = Clamped.apply(hidden)
        return self.last(hidden * self.calls)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def workload(kind, micro_batch_size):
    return paceline.Workload(
        model=lambda: Net(kind),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=DATA,
        batch_size=8,
        micro_batch_size=micro_batch_size,
    )


def plain_loop(kind, size):
    """The gradients of the first batch, and the loss."""
    seed_everything(0)
    model = Net(kind).double()
    order = DataOrder(0, len(DATA), 8)
    total = 0.0
    for start in range(0, 8, size):
        rows = [DATA[order.index(position)] for position in range(start, start + size)]
        batch = [torch.stack(parts).double() for parts in zip(*rows, strict=True)]
        mean = loss(model, batch)[0] / 8
        mean.backward()
        total += mean.item()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, total


@pytest.mark.parametrize("micro_batch_size", [None, 4, 2])
@pytest.mark.parametrize("kind", ["function", "parameter", "module"])
def test_backward_code_sees_the_mean(kind, micro_batch_size):
    found = take_steps(workload(kind, micro_batch_size), "float64", 1)
    expected, total = plain_loop(kind, micro_batch_size or 8)
    for name, gradient in expected.items():
        torch.testing.assert_close(found.tensors[f"1/gradient/{name}"], gradient)
    assert found.losses[0] == pytest.approx(total)
