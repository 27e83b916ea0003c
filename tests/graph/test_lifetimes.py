"""A captured graph does not depend on who keeps the frames of the capture alive."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from paceline.graph.capture import capture
from paceline.nouns.errors import WorkloadError

CPU = torch.device("cpu")


class Positions(nn.Module):
    """Makes tensors by factory functions, uses one twice, and writes into one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        places = torch.arange(8, dtype=x.dtype)
        mask = torch.full((8, 8), float("-inf")).triu(1)
        sums = torch.zeros(8, dtype=x.dtype)
        sums += places
        return self.layer(x * places) + torch.softmax(mask, -1).sum(0) + places.cos() + sums


def loss(model, batch):
    return model(batch).square().sum(), len(batch)


def operations(captured):
    names = {node: number for number, node in enumerate(captured.graph.nodes)}
    return [(str(n.target), tuple(names[source] for source in n.all_input_nodes)) for n in captured.graph.nodes]


def captured_while_frames_are_kept(model, function, batch):
    frames = []

    def keep(frame, event, argument):
        frames.append(frame)

    sys.setprofile(keep)
    try:
        return capture(model, function, batch, CPU)
    finally:
        sys.setprofile(None)
        assert len(frames) > 1000, "no frame was kept: the test is void"
        frames.clear()


def test_a_graph_is_the_same_while_frames_are_kept_alive():
    model, batch = Positions(), torch.randn(4, 8)
    plain, kept = capture(model, loss, batch, CPU), captured_while_frames_are_kept(model, loss, batch)
    assert not kept.constants
    assert operations(kept) == operations(plain)


def test_the_frames_of_a_caught_error_change_nothing():
    errors = []

    def with_an_error(model, batch):
        try:
            torch.arange(3.0).view(2)
        except RuntimeError as error:
            errors.append(error)
        return loss(model, batch)

    model, batch = Positions(), torch.randn(4, 8)
    assert operations(capture(model, with_an_error, batch, CPU)) == operations(capture(model, loss, batch, CPU))
    assert errors


def test_a_value_of_an_earlier_batch_is_still_refused():
    kept = []

    def remembers(model, batch):
        kept.append(batch * 2)
        return loss(model, batch + kept[0])

    for _ in range(2):
        with pytest.raises(WorkloadError, match="change the variable kept"):
            capture(Positions(), remembers, torch.randn(4, 8), CPU)
    assert not kept
