"""A model whose forward pass does what a test asks for, in its own code and as a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from paceline.comm.collectives import AxisComm
from paceline.comm.ledger import Ledger
from paceline.comm.pytree import tensors_in
from paceline.graph.capture import Captured, capture
from paceline.graph.skeleton import skeleton
from paceline.graph.stage_writes import check_stage_writes
from paceline.graph.stages import assign_stages, cut_out

WIDE = 6
Update = Callable[[Any, Any], Any]


class Net(nn.Module):
    """A layer, something that happens to its result, another layer."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(4, WIDE), nn.Linear(WIDE, 1), nn.Linear(WIDE, 1)
        self.register_buffer("mean", torch.zeros(WIDE))
        self.register_buffer("table", torch.zeros(4, WIDE))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.target = nn.Linear(4, WIDE).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDE)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDE, WIDE))
        self.limited = nn.Embedding(4, WIDE, max_norm=0.1)
        self.steps: Any = 0
        self.seen: list[Any] = []
        self.scale: Any = None
        self.table_of: dict[str, Any] = {"mean": 0, "count": 0}
        self.before: Any = None
        self.far_before: Any = None
        self.own = torch.zeros(WIDE, dtype=torch.float64)
        self.update = update

    def forward(self, x: Any) -> Any:
        hidden = torch.tanh(self.first(x))
        added = self.update(self, hidden)
        hidden = hidden - self.mean - self.table.sum(0) - 0.01 * self.count
        return self.last(hidden if added is None else hidden + added)


def loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


def make(update: Update) -> Net:
    torch.manual_seed(1)
    return Net(update).double().train()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    for _ in range(3):
        yield {name: torch.randn(6, size, generator=random).double() for name, size in (("x", 4), ("y", 1))}


def trained(model: nn.Module, run: Callable[[Any], Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and every state at the end."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        total, _ = run(batch)
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, copy.deepcopy(states_of(model))


def states_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def captured_of(model: nn.Module, function: Any = loss) -> Captured:
    return capture(skeleton(model).train(), function, next(batches()), torch.device("cpu"))


def in_stages(model: nn.Module, count: int, function: Any = loss) -> Callable[[Any], Any]:
    """Run the captured graph in stages, each with states of its own, as ranks have them."""
    captured = captured_of(model, function)
    stages = cut_out(captured, assign_stages(captured, count), count)
    check_stage_writes(stages, captured, {}, [AxisComm("tensor", 0, (0,), None, Ledger())])
    own = states_of(model)

    def run(batch: Any) -> Any:
        values: list[Any] = []
        for stage in stages:
            given = [own[name] for name in stage.states]
            leaves = [tensors_in(batch)[index] for index in stage.inputs]
            values = fx.GraphModule(captured.constants, stage.graph)(*given, *leaves, *values)
        return captured.rebuild(list(values))

    return run


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    for name, tensor in wanted[1].items():
        torch.testing.assert_close(
            found[1][name], tensor, rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n} {text}"
        )
