"""A refusal names the reason that holds."""

import re

import pytest
import torch
from torch import nn

from paceline.graph.capture import capture
from paceline.graph.skeleton import skeleton
from paceline.graph.tensor.explain import why_nothing_is_split
from paceline.verify.ranks.child import as_workload_error


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.last = kind(8, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.inner(x)[0][:, -1])


def loss(model, batch):
    return model(batch).square().sum(), len(batch)


SMALL = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("model", "batch", "says"),
    [
        (nn.Linear(1, 1), (4, 1), "no weight has a dimension that can be split in 2"),
        (SMALL, (64, 4), r"would send more than it saves at this size \(largest: 0.weight of 6x4\)"),
        (Recurrent(nn.LSTM), (4, 5, 8), "aten.lstm.input, which uses inner.weight_hh_l0 of 64x16, has no rule"),
        (Recurrent(nn.GRU), (4, 5, 8), "aten.gru.input, which uses .*, has no rule.*; to split other weights"),
        (nn.ConvTranspose2d(3, 8, 3), (2, 3, 4, 4), "aten.conv_transpose2d.input, which uses weight .*, has no rule"),
    ],
    ids=["too small", "does not pay", "LSTM", "GRU", "transposed convolution"],
)
def test_why_no_weight_is_split(model, batch, says):
    captured = capture(skeleton(model).train(), loss, torch.randn(batch), torch.device("cpu"))
    assert re.search(says, why_nothing_is_split(captured, 2))


def grouped():
    tensors = torch.randn(8, 16).double(), torch.randn(2, 16, 16).double()
    return torch._grouped_mm(*tensors, offs=torch.tensor([4, 8], dtype=torch.int32))


def mixed():
    return torch.randn(2, 2) @ torch.randn(2, 2).double()


def other():
    raise KeyError("hidden")


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (grouped, "a form of that operation which has it"),
        (mixed, "make tensors as wide as the model's"),
        (other, "start it alone"),
    ],
)
def test_what_verify_advises_where_a_step_fails(fails, says):
    with pytest.raises((RuntimeError, KeyError)) as error:
        fails()
    assert says in str(as_workload_error(error.value))
