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
from paceline.graph.stages import _crossing_bytes, assign_stages, assignment_of, computed_anew, cut_out

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


def fill(out, x):
    """Write two halves of `out` by slices, and read it by an operation that has no other input."""
    half = WIDE // 2
    out[:, :half] = x[:, half:]
    out[:, half:] += x[:, :half]
    return torch.tanh(out)


def into_zeros(net, x):
    return fill(torch.zeros(x.shape[0], WIDE, dtype=x.dtype), x) + x


def into_new_zeros(net, x):
    return fill(x.new_zeros(x.shape), x) + x


def into_ones_like(net, x):
    return fill(torch.ones_like(x), x) + x


def into_full(net, x):
    return fill(torch.full(x.shape, 0.5, dtype=x.dtype), x) + x


def into_numbers(net, x):
    return fill(torch.arange(x.numel(), dtype=x.dtype).view(x.shape), x) + x


def into_unit_rows(net, x):
    return fill(torch.eye(x.shape[0], WIDE, dtype=x.dtype), x) + x


def into_a_constant(net, x):
    return fill(torch.tensor([[0.5] * WIDE] * 6, dtype=x.dtype), x) + x


def into_empty(net, x):
    out = torch.empty(WIDE, x.shape[0], dtype=x.dtype).t()
    out.narrow(1, 0, 4).copy_(x[:, :4])
    out.narrow(1, 4, 4).zero_().add_(x[:, 4:])
    return out.cos()


def by_rows(net, x):
    out = torch.zeros(x.shape, dtype=x.dtype)
    for row in range(x.shape[0]):
        out.select(0, row).copy_(x[row])
    return out.exp()


def one_after_another(net, x):
    """What is read of the first is all that the second is filled with."""
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[:, :2] = x[:, :2]
    out[:, 3:] = x[:, 3:]
    following = torch.ones(x.shape, dtype=x.dtype)
    following[:, 1:] = out.cos()[:, 1:]
    following[:1] = out.sin()[:1]
    return following.exp()


def read_between(net, x):
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[:, :4] = x[:, :4]
    half = out.exp()
    out[:, 4:] = x[:, 4:]
    return half.cos() + out.exp()


def in_frequencies(net, x):
    spectrum = torch.fft.rfft(x)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[:, :2] = spectrum[:, :2]
    out[:, 3:] = spectrum[:, 3:].conj()
    return torch.view_as_real(out.exp()).flatten(1)[:, :WIDE]


FILLED = (
    into_zeros, into_new_zeros, into_ones_like, into_full, into_numbers, into_unit_rows, into_a_constant, into_empty,
    by_rows, one_after_another, read_between, in_frequencies,
)  # fmt: skip
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
    assert check_every_cut(estimator) > 5


@pytest.mark.parametrize("filling", FILLED)
def test_what_is_filled_by_parts_can_be_cut_around(filling):
    assert check_every_cut(filling) > 2


def check_every_cut(estimator):
    """Compare the gradients of every cut with those of the whole; return how many cuts there are."""
    torch.manual_seed(1)
    model = Net(estimator).double()
    batch = (torch.randn(6, 4).double(), torch.randn(6, 1).double())
    captured = capture(skeleton(model).train(), loss, batch, torch.device("cpu"))
    anew = computed_anew(captured)
    nodes = [node for node in captured.graph.nodes if node.op == "call_function" and node not in anew]
    crossing = _crossing_bytes(captured, nodes)
    places = [place for place in range(1, len(nodes)) if crossing[place] < math.inf]
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
    return len(places)


class Counting(nn.Module):
    """Its two modes are two graphs; the second is cut as the states lie, and fills one tensor from both stages."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x):
        out = torch.zeros(x.shape[0], WIDE, dtype=x.dtype)
        hidden = torch.tanh(self.first(x))
        if self.training:
            return self.last(hidden)
        out[:, :4] = hidden[:, :4]
        out[:, 4:] = self.last(hidden)[:, 4:]
        return torch.tanh(out)


def test_a_graph_cut_as_its_states_lie_fills_in_one_stage():
    model = Counting().double()
    batch = (torch.randn(6, 4).double(), torch.randn(6, 1).double())
    trained = capture(skeleton(model).train(), loss, batch, torch.device("cpu"))
    first = assignment_of(trained, assign_stages(trained, 2))
    captured = capture(skeleton(model).eval(), loss, batch, torch.device("cpu"))
    stages = cut_out(captured, assign_stages(captured, 2, first), 2)
    states = dict(model.named_parameters())
    whole = copy.deepcopy(model).eval()
    loss(whole, batch)[0].backward()
    run_cut(captured, stages, states, batch)
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
