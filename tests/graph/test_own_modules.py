"""Modules whose code is no graph of operations run by it, forward and backward, as one call of the graph."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from paceline.graph.capture import capture
from paceline.graph.own_modules import OwnModules
from paceline.graph.skeleton import skeleton
from paceline.nouns.errors import WorkloadError

from support.looped_experts import LoopedExperts

CPU = torch.device("cpu")
WIDTH = 4


class Net(nn.Module):
    """Two layers of which `part` is between; `twice`: it is called again with its own result."""

    def __init__(self, part, twice=False):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)
        self.twice = twice

    def forward(self, x):
        x = self.part(self.first(x))
        return self.last(self.part(x) if self.twice else x)


class ByCode(nn.Module):
    """A linear layer, and what a test does with its output."""

    def __init__(self, code):
        super().__init__()
        self.linear, self.code = nn.Linear(WIDTH, WIDTH), code
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("table", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return self.code(self, self.linear(x))


class Tree(nn.Module):
    """A module with another of its class in it."""

    def __init__(self, depth):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = Tree(depth - 1) if depth else None

    def forward(self, x):
        x = branches(self, self.linear(x))
        return x if self.inner is None else self.inner(x)


class Recurrent(nn.Module):
    """An LSTM with a path by values, called by keyword; it returns a dictionary with None in it."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(rows=x, scale=2.0)["out"][0]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, rows, scale, state=None):
        made, (state, _) = self.lstm(rows)
        return {"out": (made * scale if made.sum() > 0 else made, None), "state": state}


def tied(net):
    net.part.linear.weight = net.first.weight
    return net


class Objects(torch.autograd.Function):
    """Is handed a module, reads its weight, and has a backward pass of its own."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(module.linear.weight)
        return x @ module.linear.weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].t() * 3, None


def branches(part, x):
    return x * 2 if x.sum() > 0 else x - part.linear.bias


def selects(part, x):
    kept = x[x > 0]
    return x * kept.pow(2).mean() if len(kept) else x


def loops(part, x):
    for _ in range(int(x.abs().sum().item()) % 3):
        x = torch.tanh(part.linear(x))
    return x


def differentiates(part, x):
    y = part.linear(x).sin()
    (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + inner


def recomputes(part, x):
    return checkpoint(lambda x: branches(part, part.linear(x)).relu(), x, use_reentrant=False)


def hooks(part, x):
    x = x * 1
    x.register_hook(lambda gradient: gradient * 3)
    return x


def writes(part, x):
    with torch.no_grad():
        part.seen += (x.flatten(0, -2) > 0).sum(0)
    return x * part.seen / part.seen.max() if x.sum() > 0 else x - part.seen


def writes_by_chance(part, x):
    if x.sum() < 0:
        with torch.no_grad():
            part.seen += 1
    return x * 1


def returns_what_it_is_handed(part, x):
    return x if x.sum() > 0 else x + 0.0


def keeps_a_note(part, x):
    part.largest = x.detach().max()
    part.count = len(x)
    return x * (2 if part.largest > 1 else 3)


CODES = {
    "a branch": branches,
    "a mask": selects,
    "a loop": loops,
    "autograd.grad": differentiates,
    "a checkpoint": recomputes,
    "a hook": hooks,
    "an autograd function with an object": lambda part, x: Objects.apply(x, part),
    "numpy": lambda part, x: x * float(x.detach().numpy().mean()),
    "a buffer that it writes": writes,
    "a result that is its argument": returns_what_it_is_handed,
    "attributes that nobody else reads": keeps_a_note,
    "without gradients": lambda part, x: x + (x.detach() if x.sum() > 0 else torch.zeros_like(x)),
    "a cast to what it is": lambda part, x: branches(part, part.linear.double()(x)),
}
NETS = {name: (lambda code=code: Net(ByCode(code))) for name, code in CODES.items()} | {
    "experts": lambda: Net(LoopedExperts(WIDTH)),
    "twice": lambda: Net(ByCode(branches), twice=True),
    "a part of a part": lambda: Net(nn.Sequential(nn.Tanh(), ByCode(branches), nn.Tanh())),
    "one in another of its class": lambda: Net(Tree(2)),
    "a weight that others have, too": lambda: tied(Net(ByCode(branches))),
    "a recurrent layer": lambda: Net(Recurrent()),
    "under no_grad": lambda: Shielded(ByCode(branches)),
    "a result that others write into": lambda: Adds(ByCode(branches)),
}


def mean_square(model, batch):
    return model(batch).pow(2).sum(), len(batch)


def captured_of(model, loss=mean_square, batch=None):
    batch = torch.ones(3, 2, WIDTH, dtype=torch.float64) if batch is None else batch
    own = OwnModules()
    return capture(skeleton(model), loss, batch, CPU, own), own


def by_graph(model, captured, batch):
    """The graph's results on a model's own states."""
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {node: states[name] for name, node in captured.states.items()}
    values.update(dict.fromkeys(captured.inputs, batch))
    run = fx.GraphModule(captured.constants, captured.graph)
    return run(*(values[node] for node in captured.graph.nodes if node.op == "placeholder"))


def step(model, results):
    model.zero_grad()
    results[0].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return results[0].detach(), gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("name", NETS)
def test_its_code_runs_on_every_batch(name):
    torch.manual_seed(0)
    model = NETS[name]().double()
    captured, own = captured_of(model)
    assert own.reasons
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for seed in range(6):  # of both signs, and of any number of rows that are kept
        batch = torch.randn(3, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        model.load_state_dict(buffers, strict=False)
        loss, gradients, written = step(model, mean_square(model, batch))
        model.load_state_dict(buffers, strict=False)
        found_loss, found, found_written = step(model, by_graph(model, captured, batch))
        torch.testing.assert_close(found_loss, loss, rtol=1e-13, atol=0)
        for key, gradient in gradients.items():
            assert (found[key] is None) == (gradient is None), key
            if gradient is not None:
                torch.testing.assert_close(found[key], gradient, rtol=1e-12, atol=1e-14)
        for key, value in written.items():
            torch.testing.assert_close(found_written[key], value, rtol=1e-13, atol=0)
            if key != "part.seen":
                assert torch.equal(value, buffers[key])


class Whole(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return branches(None, super().forward(x)) if x.sum() > -9e9 else x


class Reads(Net):
    """Uses what its part has set in an attribute."""

    def forward(self, x):
        x = self.part(self.first(x))
        return self.last(x) + self.part.largest


class Adds(Net):
    """Writes into what its part returns, and reads what it handed to the part."""

    def forward(self, x):
        x = self.first(x)
        made = self.part(x)
        made += 1
        return self.last(x + made)


class Shielded(Net):
    """Computes its part without gradients."""

    def forward(self, x):
        with torch.no_grad():
            shift = self.part(x)
        return self.last(self.first(x) + shift)


class Collects(Net):
    """Uses what a hook of a layer within its part has seen."""

    def __init__(self, part):
        super().__init__(part)
        self.part.linear.register_forward_hook(
            lambda module, arguments, result: setattr(Collects, "seen", result.detach())
        )

    def forward(self, x):
        x = self.part(self.first(x))
        return self.last(x) + self.seen.mean()


class Hooks(Net):
    """Puts the hook on in forward."""

    def forward(self, x):
        handle = self.part.linear.register_forward_hook(lambda module, arguments, result: result * 2)
        x = self.part(self.first(x))
        handle.remove()
        return self.last(x)


def counts(part, x):
    part.steps += 1
    return x * part.steps if x.sum() > 0 else x


def remembers(part, x):
    part.mean = 0.9 * part.mean + x.detach().mean()
    return x * part.mean if x.sum() > 0 else x


def net_of(code, kind=Net, **attributes):
    net = kind(ByCode(code))
    vars(net.part).update(attributes)
    return net


def borrows():
    net = net_of(lambda part, x: part.others[0](x) if x.sum() > 0 else x)
    vars(net.part)["others"] = [net.first]
    return net


def with_batch_norm():
    net = Net(ByCode(lambda part, x: part.norm(branches(part, x))))
    net.part.norm = nn.BatchNorm1d(2)
    return net


def called_with_an_object():
    class Hands(Net):
        def forward(self, x):
            return self.last(self.part.inner(self.first(x), self))

    class Takes(nn.Module):
        def forward(self, x, model):
            return x if x.sum() > 0 else -x

    net = Hands(nn.Module())
    net.part.inner = Takes()
    return net


def grows(part, x):
    part.sums.append(x.detach().sum())
    return branches(part, x)


def decays(part, x):
    with torch.no_grad():
        part.linear.weight.mul_(0.9)
    return branches(part, x)


class Passes(nn.Module):
    """Returns what it is handed, by chance."""

    def forward(self, x):
        return x if x.sum() > -9e9 else x * 2


class Doubles(nn.Module):
    """Returns what it is handed unless it is positive, as made-up values are."""

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Writes(nn.Module):
    def forward(self, x):
        x += 1
        return x if x.sum() > 0 else -x


def replaces(part, x):
    part.seen = part.seen + 1
    return branches(part, x)


REFUSED = {
    "the model itself": (Whole, "looks at values"),
    "a counter": (lambda: net_of(counts, steps=0), "changes its attribute steps"),
    "a value of an earlier batch": (lambda: net_of(remembers, mean=torch.zeros(())), "changes its attribute mean"),
    "what it was handed, written into": (lambda: Adds(Passes()), "and that is written into afterwards"),
    "a list that grows": (lambda: net_of(grows, sums=[]), "changes its attribute sums"),
    "an attribute that others read": (lambda: net_of(keeps_a_note, Reads), "part.*|meta"),
    "a value that a hook has seen": (lambda: net_of(branches, Collects), "does not return is used outside"),
    "a hook that is put on in forward": (lambda: net_of(branches, Hooks), "hooks of its Linear"),
    "a layer of others": (borrows, "none of its own"),
    "batch norm": (with_batch_norm, "batch norm"),
    "an object": (called_with_an_object, "called with a Hands"),
    "an object as result": (lambda: net_of(lambda part, x: (branches(part, x), part)), "returns a ByCode"),
    "a write into its argument": (lambda: Net(Writes()), "writes into a tensor that it is handed"),
    "a write into a weight": (lambda: net_of(decays), "writes into linear.weight"),
    "another buffer": (lambda: net_of(replaces), "in the place of seen"),
    "a seed": (lambda: net_of(lambda part, x: [torch.manual_seed(1), branches(part, x)][1]), "not seed"),
    "a reentrant checkpoint": (
        lambda: net_of(lambda part, x: checkpoint(lambda x: branches(part, x), x, use_reentrant=True)),
        "use_reentrant=False",
    ),
    "no tensor": (lambda: net_of(lambda part, x: float(x.sum())), "returns no tensor"),
    "a cast": (
        lambda: net_of(lambda part, x: branches(part, part.linear.float()(x.float()).double())),
        "casts or moves",
    ),
    "nothing that runs": (lambda: net_of(lambda part, x: x.sum().item() @ x), "can't run by its own code"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_its_code_must_not_do_is_refused(name):
    make, said = REFUSED[name]
    with pytest.raises(WorkloadError, match=said) as error:
        captured_of(make().double())
    print(error.value)
    assert "replicate or shard" in str(error.value) or said == "casts or moves"


def test_own_module_that_returns_a_later_batch_itself_is_refused():
    """Where its result is written into, the code would write into what it was handed, too."""
    model = Adds(Doubles()).double()
    captured, _ = captured_of(model)
    batch = torch.ones(3, 2, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
        model.first.bias.zero_()
    by_graph(model, captured, batch)
    with pytest.raises(WorkloadError, match="written into afterwards"):
        by_graph(model, captured, -batch)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (lambda part, x: x if x.sum() > 0 else x[..., :2].repeat(1, 1, 2)[:2], "the shapes of what it returns depend"),
        (lambda part, x: (x, None) if x.sum() > 0 else (x, 1), "what it returns beside tensors depends"),
        (writes_by_chance, "whether it writes into seen depends"),
    ],
)
def test_what_a_later_batch_does_otherwise_is_refused_in_words(code, said):
    class First(Net):
        def forward(self, x):
            made = self.part(x)
            return self.last(self.first(made[0] if isinstance(made, tuple) else made))

    model = First(ByCode(code)).double()
    with torch.no_grad():
        model.part.linear.weight.copy_(torch.eye(WIDTH))
        model.part.linear.bias.zero_()
    captured, _ = captured_of(model)
    batch = torch.ones(3, 2, WIDTH, dtype=torch.float64)
    by_graph(model, captured, batch)
    with pytest.raises(WorkloadError, match=said) as error:
        by_graph(model, captured, -batch)
    assert "replicate or shard" in str(error.value)


def test_a_large_module_is_not_made_to_see_what_it_returns():
    """Four GiB of weights: what it returns is learnt from as many numbers as a row has."""

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 1 << 27), nn.Linear(1 << 27, WIDTH)

        def forward(self, x):
            return x if x.sum() > 0 else self.down(self.up(x))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = Net(Large())
    captured, own = captured_of(model, batch=torch.ones(3, 2, WIDTH))
    assert "part" in own.reasons
    assert tuple(captured.output[0].meta["val"].shape) == ()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 512
