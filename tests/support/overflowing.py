"""A model of which one parameter's gradient overflows in some steps, and its data."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

BATCH, STEPS, WIDTH = 8, 8, 16
OVERFLOWS = [2, 3, 6]  # these steps have a sample whose gradient is beyond the largest number
# In float64 autocast changes nothing: only the scale is tried, exactly. In float32 products are of float16.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-2}
SPIKES = {torch.float64: 1e307, torch.float32: 3e37}


class Net(torch.nn.Module):
    """Has a parameter whose gradient overflows alone: under shard and pipeline one rank has it."""

    def __init__(self):
        super().__init__()
        first, last = torch.nn.Linear(WIDTH, 32), torch.nn.Linear(32, WIDTH)
        self.layers = torch.nn.Sequential(first, torch.nn.LayerNorm(32), torch.nn.GELU(), last)
        self.out = torch.nn.Linear(WIDTH, 1, bias=False)
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs, spikes):
        # A spike is no part of the value, and all of the gradient.
        return self.out(self.layers(inputs)) + self.shift + spikes * (self.shift - self.shift.detach())


def model(dtype):
    return Net().to(dtype)


def loss(model, batch):
    inputs, targets, spikes = batch
    # Divided, so that no other gradient is beyond float16.
    return (model(inputs, spikes) - targets).square().sum() / 100, len(inputs)


def data(dtype, spiked):
    """Samples of which those at the places `spiked` make a gradient overflow."""
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCH * STEPS, WIDTH, generator=random, dtype=dtype)
    spikes = torch.zeros(BATCH * STEPS, 1, dtype=dtype)
    spikes[spiked] = SPIKES[dtype]
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 3, spikes)
