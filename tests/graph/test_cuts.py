"""A graph can be cut at every place that the planner may choose: gradients are those of the whole."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from paceline.comm.pytree import tensors_in
from paceline.graph.capture import capture
from paceline.graph.skeleton import skeleton
from paceline.graph.stages import _crossing_bytes, computed_anew, cut_out

WIDE = 8


def rounded(net, x):
    return x + (x.round() - x).detach()


def by_sign(net, x):
    return x + (x.sign() - x).data


def without_gradients(net, x):
    with torch.no_grad():
        error = x.sign() - x
    return x + error


def hard_choice(net, x):
    """As gumbel_softmax(hard=True) makes it, without its noise."""
    soft = x.softmax(-1)
    best = soft.max(-1, keepdim=True)[1]
    return torch.zeros_like(x).scatter_(-1, best, 1.0) - soft.detach() + soft


def one_hot(net, x):
    return F.one_hot(x.argmax(-1), WIDE).to(x) + x - x.detach()


def ones_and_zeros(net, x):
    return torch.where(x > 0, torch.ones_like(x), torch.zeros_like(x)) + x - x.detach()


def largest_alone(net, x):
    values, places = x.topk(3, -1)
    return torch.zeros_like(x).scatter(-1, places, values)


def nearest_code(net, x):
    nearest = torch.cdist(x, net.codes).argmin(1)
    chosen = F.embedding(nearest, net.codes)
    return x + (chosen - x).detach() + 0.1 * (x.detach() - chosen)


ESTIMATORS = (
    rounded, by_sign, without_gradients, hard_choice, one_hot, ones_and_zeros, largest_alone, nearest_code,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self, estimator):
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDE), nn.Linear(WIDE, 1)
        self.codes = nn.Parameter(torch.randn(5, WIDE))
        self.estimator = estimator

    def forward(self, x):
        return self.last(self.estimator(self, torch.tanh(self.first(x))))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def run_cut(captured, stages, states, batch):
    """Forwards and backwards through two stages as the pipeline does it."""
    first, second = (fx.GraphModule(captured.constants, stage.graph) for stage in stages)
    leaves = tensors_in(batch)
    given = [[states[name] for name in stage.states] + [leaves[index] for index in stage.inputs] for stage in stages]
    sent = list(first(*given[0]))
    received = [v.detach().clone().requires_grad_(f) for v, f in zip(sent, stages[1].has_gradient, strict=True)]
    captured.rebuild(list(second(*given[1], *received)))[0].backward()
    roots = [value for value, flows in zip(sent, stages[0].sends_gradient, strict=True) if flows]
    back = [value for value, flows in zip(received, stages[1].has_gradient, strict=True) if flows]
    if roots:
        torch.autograd.backward(roots, [v.grad if v.grad is not None else torch.zeros_like(v) for v in back])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_straight_through_estimators_can_be_cut_anywhere(estimator):
    torch.manual_seed(1)
    model = Net(estimator).double()
    batch = (torch.randn(6, 4).double(), torch.randn(6, 1).double())
    captured = capture(skeleton(model).train(), loss, batch, torch.device("cpu"))
    anew = computed_anew(captured)
    nodes = [node for node in captured.graph.nodes if node.op == "call_function" and node not in anew]
    crossing = _crossing_bytes(captured, nodes)
    places = [place for place in range(1, len(nodes)) if crossing[place] < math.inf]
    assert len(places) > 5
    whole = copy.deepcopy(model)
    loss(whole, batch)[0].backward()
    for place in places:
        cut = copy.deepcopy(model)
        stages = cut_out(captured, {node: int(index >= place) for index, node in enumerate(nodes)}, 2)
        run_cut(captured, stages, dict(cut.named_parameters()), batch)
        for found, wanted in zip(cut.parameters(), whole.parameters(), strict=True):
            zeros = torch.zeros_like(wanted)
            torch.testing.assert_close(
                zeros if found.grad is None else found.grad, zeros if wanted.grad is None else wanted.grad
            )
