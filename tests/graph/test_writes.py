"""What a model changes in its forward pass, its graph changes too, or the model is refused."""

import copy

import pytest
import torch
from torch import fx, nn
from updating import WIDE, assert_same, batches, captured_of, in_stages, loss, make, states_of, trained

from paceline.comm.pytree import tensors_in
from paceline.graph.capture import capture
from paceline.graph.functional import copy_states_that_are_read
from paceline.graph.skeleton import skeleton
from paceline.graph.stages import assign_stages
from paceline.graph.writes import Write, check_same_writes
from paceline.nouns.errors import WorkloadError

default_generator = torch.default_generator  # as `from torch import default_generator` gives it


EXACT, REFUSED = {}, {}


def exact(update):
    EXACT[update.__name__] = update
    return update


def refused(match):
    def note(update):
        REFUSED[update.__name__] = (update, match)
        return update

    return note


@exact
def one_chain_under_no_grad(net, x):
    with torch.no_grad():
        net.mean.mul_(0.9).add_(0.1 * x.mean(0))


@exact
def one_chain_with_gradients_on(net, x):
    net.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))


@exact
def one_write_after_another(net, x):
    net.mean.mul_(0.9)
    net.mean.add_(0.1 * x.detach().mean(0))
    net.count += len(x)


@exact
def through_data(net, x):
    net.mean.data.mul_(0.9).add_(0.1 * x.data.mean(0))


@exact
def through_detach(net, x):
    net.mean.detach().lerp_(x.detach().mean(0), 0.1)


@exact
def through_views(net, x):
    with torch.no_grad():
        net.table[1:3] = x[:2]
        net.table.view(-1)[3:7].mul_(0.5).add_(1.0)
        net.table[3, :2] = 0.3


@exact
def through_pieces(net, x):
    with torch.no_grad():
        upper, lower = net.table.chunk(2)
        upper.add_(x[:2])
        for row in lower:
            row.add_(0.1 * x.mean(0))


@exact
def through_out(net, x):
    with torch.no_grad():
        torch.add(net.mean * 0.9, x.mean(0) * 0.1, out=net.mean)
        torch.mul(net.table[0], 0.5, out=net.table[1])


@exact
def several_at_once(net, x):
    with torch.no_grad():
        torch._foreach_mul_([net.mean, net.table], 0.9)
        torch._foreach_add_([net.mean, net.table], [x.mean(0), x[:4]])


@exact
def by_copying(net, x):
    with torch.no_grad():
        net.mean.copy_(0.9 * net.mean + 0.1 * x.mean(0))


@exact
def in_inference_mode(net, x):
    with torch.inference_mode():
        net.mean.mul_(0.9).add_(0.1 * x.mean(0))


@exact
def by_index(net, x):
    with torch.no_grad():
        net.table[torch.arange(2)] = x[:2]
        net.table.index_copy_(0, (net.count % 4).view(1), x.mean(0, keepdim=True))
        net.table.scatter_add_(0, torch.zeros(2, WIDE, dtype=torch.long), x[:2])
        net.count.add_(1)


@exact
def by_mask(net, x):
    with torch.no_grad():
        net.mean.masked_fill_(x.mean(0) > 0, 0.5)
        net.mean[x.mean(0) < -0.2] = 0.1


@exact
def read_before_and_after(net, x):
    before = x * net.mean.clone()
    with torch.no_grad():
        net.mean.mul_(0.9).add_(0.1 * x.mean(0))
    return before + x * net.mean


@exact
def a_frozen_copy_that_follows(net, x):
    with torch.no_grad():
        for kept, now in zip(net.target.parameters(), net.first.parameters(), strict=True):
            kept.mul_(0.9).add_(now, alpha=0.1)
    return net.target(x[:, :4])


@exact
def statistics_of_norms(net, x):
    return net.norm(x) + net.instance(x.view(len(x), 2, 3)).flatten(1)


@exact
def statistics_that_nothing_reads(net, x):
    with torch.no_grad():
        net.norm(x)


@exact
def a_power_iteration(net, x):
    return net.spectral(x)


@exact
def into_the_batch(net, x):
    y = x.clone()
    y[:, 0] = 0
    return y


@exact
def behind_autograd(net, x):
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y


@exact
def values_without_gradients(net, x):
    with torch.inference_mode():
        mean = x.mean(0)
    return mean.clone()


@exact
def what_a_seed_is_asked_for(net, x):
    assert torch.initial_seed() == torch.default_generator.initial_seed()
    assert len(torch.get_rng_state()) == len(torch.default_generator.get_state())
    return x


@refused(r"add_.Tensor at .*test_writes.py:\d+ writes into a tensor of shape \(6,\).*register_buffer")
def a_plain_tensor_written(net, x):
    net.own.add_(x.detach().mean(0))
    return net.own


@refused("in the place of mean.*self.mean.copy_")
def a_buffer_replaced(net, x):
    net.mean = 0.9 * net.mean + 0.1 * x.detach().mean(0)


@refused("in the place of norm.running_mean")
def a_buffer_of_a_part_replaced(net, x):
    net.norm.running_mean = x.detach().mean(0)


@refused("in the place of late")
def a_buffer_made_later(net, x):
    if not hasattr(net, "late"):
        net.register_buffer("late", torch.zeros_like(x[0]))
    return net.late.add_(x.detach().mean(0))


@refused("gives mean other memory")
def other_memory(net, x):
    with torch.no_grad():
        net.mean.set_(x.mean(0).clone())


@refused("assigns to .data at .*test_writes.py")
def other_data(net, x):
    net.mean.data = 0.9 * net.mean.data + 0.1 * x.data.mean(0)


@refused("writes into last.weight")
def a_trained_parameter(net, x):
    with torch.no_grad():
        net.last.weight.mul_(0.9)


@refused("writes into limited.weight")
def rows_made_shorter(net, x):
    return net.limited(torch.arange(len(x)) % 4)


@refused("requires_grad of last.weight is set to False")
def frozen_on_the_way(net, x):
    net.last.requires_grad_(False)
    result = net.last(x)
    net.last.requires_grad_(True)
    return result


@refused("requires_grad of last.weight is set to False")
def frozen_by_assignment(net, x):
    net.last.weight.requires_grad = False


@refused("takes gradients itself")
def a_backward_pass_inside(net, x):
    net.other(x.detach()).sum().backward()


@refused("gives other.weight other memory, or a gradient")
def a_gradient_written(net, x):
    net.other.weight.grad = torch.ones_like(net.other.weight)


@refused("sets the state of torch's random numbers at .*test_writes.py")
def seeded(net, x):
    torch.manual_seed(0)
    return torch.dropout(x, 0.5, True)


@refused("sets the state of torch's random numbers at .*test_writes.py")
def seeded_through_the_generator(net, x):
    torch.default_generator.manual_seed(0)
    return torch.dropout(x, 0.5, True)


@refused("sets the state of torch's random numbers at .*test_writes.py")
def seeded_by_chance(net, x):
    torch.random.default_generator.seed()
    return torch.dropout(x, 0.5, True)


@refused("sets the state of torch's random numbers at .*test_writes.py")
def seeded_for_a_while(net, x):
    state = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    return torch.dropout(x, 0.5, True)


@refused("sets the state of torch's random numbers in its forward pass")
def seeded_through_a_name(net, x):
    default_generator.manual_seed(0)
    return torch.dropout(x, 0.5, True)


@refused("sets the state of torch's random numbers at .*test_writes.py")
def seeded_on_devices(net, x):
    torch.cuda.manual_seed_all(0)
    return torch.dropout(x, 0.5, True)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", EXACT)
def test_a_graph_writes_what_the_model_writes(name, stages):
    wanted, model = make(EXACT[name]), make(EXACT[name])
    start = copy.deepcopy(states_of(model))
    assert_same(trained(model, in_stages(model, stages)), trained(wanted, lambda batch: loss(wanted, batch)))
    assert not torch.equal(start["first.weight"], states_of(model)["first.weight"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_lose_is_refused(name):
    update, match = REFUSED[name]
    model, alone = make(update), make(update)
    trained(alone, lambda batch: loss(alone, batch))  # in one process it trains
    with pytest.raises(WorkloadError, match=f"(?s){match}"):
        captured_of(model)


def test_the_batch_is_left_as_it_was():
    def masked(model, batch):
        batch["x"][:, 0] = 0
        batch["y"].mul_(2)
        return loss(model, batch)

    model, batch = make(one_chain_under_no_grad), next(batches())
    kept = copy.deepcopy(batch)
    captured = captured_of(model, masked)
    given = {**{node: states_of(model)[name] for name, node in captured.states.items()}}
    given |= dict(zip(captured.inputs, tensors_in(batch), strict=True))
    placeholders = [given[node] for node in captured.graph.nodes if node.op == "placeholder"]
    (total, _) = captured.rebuild(list(fx.GraphModule(captured.constants, captured.graph)(*placeholders)))
    assert all(torch.equal(batch[name], kept[name]) for name in kept)
    torch.testing.assert_close(total, masked(make(one_chain_under_no_grad), kept)[0])


def test_a_graph_that_lost_a_write_is_noticed(monkeypatch):
    """A pass that leaves an operation out; a pass that has one write into a copy."""
    wanted = [Write("mean", "aten.mul_.Tensor", "model.py:6"), Write("mean", "aten.add_.Tensor", "model.py:7")]
    with pytest.raises(WorkloadError, match=r"add_.Tensor at model.py:7 writes into mean, and its graph would not"):
        check_same_writes(wanted, wanted[:1], "its graph")

    def misled(graph, states):
        for node in [node for node in graph.nodes if node.target is torch.ops.aten.mul_.Tensor]:
            with graph.inserting_before(node):
                node.replace_input_with(node.args[0], graph.call_function(torch.ops.aten.clone.default, node.args[:1]))
        return copy_states_that_are_read(graph, states)

    monkeypatch.setattr("paceline.graph.capture.copy_states_that_are_read", misled)
    with pytest.raises(WorkloadError, match=r"mul_.Tensor at .*test_writes.py:\d+ writes into mean"):
        captured_of(make(one_chain_under_no_grad))


class Ends(nn.Module):
    """Reads a buffer in its first operation and writes into it in its last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = x - self.mean
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.mean.add_(x.detach().mean(0))
        return x.sum(1, keepdim=True)


def test_what_two_stages_would_share_stays_in_one():
    torch.manual_seed(1)
    model = Ends().double()
    wanted = copy.deepcopy(model)
    captured = captured_of(model)
    stages = assign_stages(captured, 2)
    touching = {stages[node] for node in stages if captured.states["mean"] in node.all_input_nodes}
    assert len(touching) == 1
    assert_same(trained(model, in_stages(model, 2)), trained(wanted, lambda batch: loss(wanted, batch)))


def test_batch_norm_in_evaluation_mode_writes_nothing():
    model = nn.Sequential(nn.BatchNorm1d(4)).eval()
    captured = capture(skeleton(model), lambda model, batch: model(batch), torch.zeros(3, 4), torch.device("cpu"))
    assert captured.log == []
