"""Experts in a loop of a module's own code are found by trying out that what they make is added up."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.graph.capture import capture
from paceline.graph.expert.expert_layout import no_experts, spread_experts
from paceline.graph.expert.own_experts import OwnExperts, own_experts
from paceline.graph.own_modules import OwnModule
from paceline.graph.skeleton import skeleton
from paceline.nouns.errors import PlanError

WIDTH, COUNT = 4, 4


class Layer(nn.Module):
    """Experts in a list, and what is made of their results."""

    def __init__(self, expert=lambda: nn.Linear(WIDTH, WIDTH), after=lambda layer, x, made: made, experts=COUNT):
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, experts), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([expert() for _ in range(experts)])
        self.after = after
        self.register_buffer("hits", torch.zeros(experts))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            where, slot = torch.where(chosen == number)
            made.index_add_(0, where, self.experts[number](x[where]) * weights[where, slot, None])
        return self.after(self, x, made)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        made = self.layer(self.first(x))
        return self.last(made[0] if isinstance(made, tuple) else made)


def summed(model, batch):
    return model(batch).pow(2).sum(), len(batch)


def captured_of(layer, kind=Net):
    return capture(skeleton(kind(layer)).train(), summed, torch.ones(6, WIDTH), torch.device("cpu"))


def found_in(layer, num_ranks=2):
    (call,) = [node.target for node in captured_of(layer).graph.nodes if isinstance(node.target, OwnModule)]
    return own_experts(call, num_ranks)


def two_layers():
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.5), nn.Linear(6, WIDTH))


FOUND = {
    "one list": (Layer(), OwnExperts(COUNT, (), (), False, (True,), False)),
    "dropout in them": (Layer(two_layers), OwnExperts(COUNT, (), (), True, (True,), False)),
    "a shared expert": (
        Layer(after=lambda layer, x, made: layer.shared(x) + made),
        OwnExperts(COUNT, (), (), False, (True,), True),
    ),
    "the router's scores, too": (
        Layer(after=lambda layer, x, made: (made * 2, layer.router(x))),
        OwnExperts(COUNT, (), (), False, (True, False), False),
    ),
    "five": (Layer(experts=5), OwnExperts(5, (), (), False, (True,), False)),
}


@pytest.mark.parametrize("name", FOUND)
def test_modules_whose_results_are_added_up_are_experts(name):
    layer, expected = FOUND[name]
    found = found_in(layer)
    assert isinstance(found, OwnExperts), found
    assert (found.count, found.draws, found.are_sums, found.has_rest) == (
        expected.count,
        expected.draws,
        expected.are_sums,
        expected.has_rest,
    )
    assert found.paths == tuple((f"experts.{number}",) for number in range(found.count))
    assert all(
        set(states) == {f"{path}.{name}" for name, _ in layer.experts[0].named_parameters()}
        for states, (path,) in zip(found.states, found.paths, strict=True)
    )


class OneAfterAnother(Layer):
    """Each of its experts gets what the one before has made."""

    def forward(self, x):
        if x.sum() < -9e9:
            return x
        for expert in self.experts:
            x = expert(x)
        return x


def counted(layer, x, made):
    with torch.no_grad():
        layer.hits += 1
    return made


REFUSED = {
    "normalized together": (Layer(after=lambda layer, x, made: layer.norm(made)), "not the sum"),
    "multiplied by what others make": (Layer(after=lambda layer, x, made: made * made), "not the sum"),
    "one after another": (OneAfterAnother(), "not the sum"),
    "noise beside them": (
        Layer(after=lambda layer, x, made: F.dropout(made, 0.5, layer.training)),
        "draws random numbers outside",
    ),
    "a buffer": (Layer(after=counted), "writes into its buffers"),
    "fewer than ranks": (Layer(experts=2), "no list of 3 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_not(name):
    layer, said = REFUSED[name]
    found = found_in(layer, 3 if name == "fewer than ranks" else 2)
    assert isinstance(found, str)
    assert said in found


def test_a_weight_that_others_use_stays_whole():
    class Tied(Net):
        def forward(self, x):
            return super().forward(x) + x @ self.layer.experts[0].weight

    captured = captured_of(Layer(), Tied)
    layout = spread_experts(captured, 2)
    assert not layout.called
    assert "layer.experts.0.weight is used more than once" in layout.refused["layer"]
    error = no_experts(captured, 2, layout.refused)
    assert "layer, which runs by its own code, can't be spread" in error.found


def test_each_parameter_of_an_expert_has_one_rank():
    layout = spread_experts(captured_of(Layer(experts=5)), 2)
    assert layout.owners == {
        f"layer.experts.{number}.{name}": int(number > 2) for number in range(5) for name in ("weight", "bias")
    }


def test_a_rank_without_an_expert_is_refused():
    with pytest.raises(PlanError, match="has 5, which leave a rank without one"):
        spread_experts(captured_of(Layer(experts=5)), 4)
