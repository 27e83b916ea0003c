"""Loops of one's own under `tensor`: pieces of the models train as the whole ones of one process do."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict, dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job", "paceline.parallel.split_forward")
STEPS = 4
MESHES = ["tensor=2", "replicate=2,tensor=2"]
INPUTS = torch.randn(STEPS, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = {1: [slice(0, 6)], 2: [slice(0, 2), slice(2, 6)]}


class Norm(nn.Module):
    """Two layers with batch norm and dropout of 0; it returns two things."""

    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=1.0):
        if self.training:
            with torch.no_grad():
                self.calls.add_(scale)
        hidden = torch.tanh(self.norm(self.up(x)))
        return {"out": self.down(hidden) * scale, "hidden": hidden}


class Alone:
    """A plain loop's `job`, by torch alone."""

    data_rank, data_size = 0, 1

    def __init__(self, *models):
        self.models = models

    def backward(self, loss, weight=None, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def clip(self, max_norm, optimizer=None):
        groups = optimizer.param_groups if optimizer else [{"params": [p for m in self.models for p in m.parameters()]}]
        return float(nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], max_norm))

    def all_reduce(self, tensor):
        return tensor

    def all_gather(self, tensor, grad=False):
        return tensor


def prepared(plain, *objects):
    if plain:
        return Alone(*[each for each in objects if isinstance(each, nn.Module)]), *objects
    return paceline.prepare(*objects)


def ended(job, *models):
    """Every parameter and buffer, whole."""
    if isinstance(job, Alone):
        return [tensor.detach().clone() for model in models for tensor in (*model.parameters(), *model.buffers())]
    found = []
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_cut = name in model.forward.placements
            found.append((model.forward.full_tensor(name, tensor) if is_cut else tensor).detach().clone())
    return found


def own(job, step):
    return INPUTS[step][PARTS[job.data_size][job.data_rank]]


def make(seed=0, kind=Norm):
    torch.manual_seed(seed)
    return kind().double()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def usual(plain):
    """Inputs that want gradients, two calls in a step, and clipping by the norm of the whole."""
    model = make(0 if plain else paceline.rank())
    job, model, optimizer = prepared(plain, model, adam(model))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = own(job, step)
        inputs = batch.clone().requires_grad_()
        outputs = model(inputs)
        (slopes,) = torch.autograd.grad(outputs["hidden"].square().sum(), inputs, retain_graph=True)
        loss = (outputs["out"] - 1).square().mean() + 0.1 * (slopes * batch).mean()
        job.backward(loss + model(2 * batch, scale=0.5)["out"].abs().mean(), weight=len(batch))
        norms.append(torch.tensor(job.clip(0.1), dtype=torch.float64))
        optimizer.step()
    assert plain or model.forward.is_split
    return [*ended(job, model), *norms]


def evaluated_first(plain):
    """The first call is in evaluation mode and inference mode; later ones are of other shapes."""
    model = make()
    job, model, optimizer = prepared(plain, model, adam(model))
    model.eval()
    with torch.inference_mode():
        seen = [model(INPUTS[0][:3])["out"].clone()]
    with torch.no_grad():
        seen.append(model(INPUTS[0][:3])["out"])
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = own(job, step)
        job.backward(model(batch)["out"].square().mean(), weight=len(batch))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        seen.append(model(INPUTS[0])["out"])
    return [*ended(job, model), *[each.clone() for each in seen]]


def accumulated(plain):
    """Gradients of two passes, kept from one step to the next; a part is frozen on the way."""
    model = make()
    job, model, optimizer = prepared(plain, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        batch = own(job, step)
        job.backward(model(batch)["out"].square().mean() / 2, weight=len(batch))
        job.backward(model(batch)["hidden"].mean() / 2, weight=len(batch))
        optimizer.step()
        if step % 2:
            optimizer.zero_grad(set_to_none=False)
        if step == 2:
            model.down.requires_grad_(False)
    return ended(job, model)


def penalized(plain):
    """A gradient inside the loss, of a model without batch norm; two models and optimizers."""

    def net():
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 8))

    one, other = make(0, net), make(1, net)
    job, one, other, first, second = prepared(plain, one, other, adam(one), adam(other))
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        batch = own(job, step)
        between = one(batch).requires_grad_()
        (slope,) = torch.autograd.grad(other(between).sum(), between, create_graph=True)
        job.backward((slope.norm(dim=1) - 1).square().mean() + other(one(batch)).mean(), weight=len(batch))
        job.clip(0.5, second)
        first.step()
        second.step()
    return ended(job, one, other)


def whole_matrices(plain):
    """Muon needs whole matrices, Adafactor whole rows and columns; parameters come later."""
    model = make(0, lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 8)))
    muon = torch.optim.Muon([model[0].weight], lr=0.01)
    factored = torch.optim.Adafactor([model[4].weight], lr=0.01)
    rest = adam(nn.ParameterList([model[0].bias, model[2].bias, model[4].bias]))
    job, model, muon, factored, rest = prepared(plain, model, muon, factored, rest)
    for step in range(STEPS):
        if step == 2:
            muon.add_param_group({"params": [model[2].weight], "lr": 0.02})
        model.zero_grad()
        batch = own(job, step)
        job.backward((model(batch) - batch).square().mean(), weight=len(batch))
        for optimizer in (muon, factored, rest):
            optimizer.step()
    return ended(job, model)


def gathered(plain):
    """A loss over the whole batch, from the ranks with other samples."""
    model = make()
    job, model, optimizer = prepared(plain, model, adam(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = own(job, step)
        out = model(batch)["out"]
        everything = job.all_gather(out, grad=True)
        assert len(everything) == 6
        assert float(job.all_reduce(torch.tensor(float(len(batch))))) == 6
        job.backward((out @ everything.T).logsumexp(1).mean(), weight=len(batch))
        optimizer.step()
    return ended(job, model)


def loaded(plain):
    """The last batch has one sample: some ranks only keep pace. Evaluation counts each sample once."""
    model = make()
    data = TensorDataset(INPUTS.reshape(-1, 8)[:21])
    loader = DataLoader(data, batch_size=5)
    job, model, optimizer, loader = prepared(plain, model, adam(model), loader)
    for (batch,) in loader:
        optimizer.zero_grad()
        # Batch norm of one sample has no variance.
        model.norm.training = len(batch) > 1 or not plain
        if not plain:
            model.norm.training = job.part.of > 1
        job.backward(model(batch)["out"].square().mean())
        optimizer.step()
    if plain:
        model.eval()
        with torch.no_grad():
            mean = model(data.tensors[0])["out"].mean()
    else:
        mean = job.evaluate(data, lambda model, batch: {"mean": (model(batch[0])["out"].mean(1).sum(), len(batch[0]))})
        mean = torch.tensor(mean["mean"], dtype=torch.float64)
    return [*ended(job, model), mean]


LOOPS = [usual, evaluated_first, accumulated, penalized, whole_matrices, gathered, loaded]


def on_rank(rank, loop, mesh):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh=mesh)))
    paceline.init()
    return loop(False)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("mesh", MESHES)
def test_pieces_train_as_whole_models_do(mesh, loop):
    ranks = 2 if mesh == "tensor=2" else 4
    expected = loop(True)
    for found in run_ranks(ranks, on_rank, loop, mesh):
        assert len(found) == len(expected)
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-9)


class Values(Norm):
    """Its path depends on values."""

    def forward(self, x):
        return self.down(self.up(x) if x.sum() > 0 else -self.up(x))


class Other(nn.Module):
    """What is no tensor, in and out."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, seen=None):
        return self.down(torch.tanh(self.up(x))), Opaque()

    def encode(self, x):
        return self.up(x)


class Opaque:
    """Neither a tensor nor a plain value."""


@dataclass
class Loop:
    """A loop that is refused: its model, and what it does with the model."""

    model: object
    does: object
    words: tuple[str, str]


def plain():
    return make(0, Other)


def step(job, model, optimizer, loss):
    job.backward(loss, weight=1)
    optimizer.step()
    job.end_step()


def trained(job, model, optimizer):
    step(job, model, optimizer, model(INPUTS[0])[0].mean())


def shared():
    one = nn.Linear(8, 8)
    return one, nn.Sequential(one, nn.ReLU())


def unseen(job, model, optimizer):
    """On a GPU nothing is compared before the loss."""
    model.forward._check_same_call = lambda key, digest: None
    step(job, model, optimizer, model(INPUTS[job.rank])[0].mean())


KEPT = []


def hooked():
    model = plain()
    model.up.register_forward_hook(lambda module, inputs, output: KEPT.append(output.mean()))
    return model


def backward_hooked():
    model = plain()
    model.up.register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


def gradient_hooked():
    model = plain()
    model.up.weight.register_hook(lambda gradient: gradient)
    return model


def after(does):
    """The loop takes a step, and then does something."""

    def run(job, model, optimizer):
        trained(job, model, optimizer)
        does(job, model, optimizer)

    return run


REFUSED = {
    "values": Loop(lambda: make(0, Values), trained, ("path should depend on shapes", "looks at values")),
    "nothing": Loop(lambda: make(0, lambda: nn.BatchNorm1d(8)), trained, ("split over 2 ranks by tensor", "")),
    "argument": Loop(plain, lambda job, model, _: model(INPUTS[0], Opaque()), ("called with tensors", "has a Opaque")),
    "output": Loop(plain, lambda job, model, _: model(INPUTS[0])[1].size, ("output is tensors", "uses a Opaque")),
    "function": Loop(
        plain, after(lambda job, model, _: model.encode(INPUTS[0])), ("call the model itself", "a Linear")
    ),
    "state": Loop(plain, after(lambda job, model, _: model.state_dict()), ("pieces of the model's", "state_dict")),
    "copy": Loop(plain, lambda job, model, _: copy.deepcopy(model), ("can't be copied", "a copy of the Other")),
    "gradients": Loop(
        plain,
        lambda job, model, _: (job.backward(model(INPUTS[0])[0].mean(), weight=1), job.gradients()),
        ("returns whole gradients", "pieces of them"),
    ),
    "arguments": Loop(
        plain, lambda job, model, _: model(INPUTS[job.rank]), ("with the same arguments", "rank 0 to rank 1")
    ),
    "batches": Loop(
        plain,
        after(lambda job, model, optimizer: step(job, model, optimizer, model(INPUTS[job.rank])[0].mean())),
        ("with the same arguments", "are at different calls"),
    ),
    "batches, where calls are not compared": Loop(
        plain,
        after(lambda job, model, optimizer: unseen(job, model, optimizer)),
        ("call a model with the same arguments", "rank 0 and rank 1"),
    ),
    "one rank": Loop(
        plain,
        after(lambda job, model, _: model(INPUTS[0][: 1 + job.rank])),
        ("call the same models", "are at different calls"),
    ),
    "gradients off": Loop(
        plain,
        after(lambda job, model, _: (torch.set_grad_enabled(job.rank == 0), model(INPUTS[0]))),
        ("call the same models", "are at different calls"),
    ),
    "norms": Loop(
        plain,
        after(lambda job, model, optimizer: step(job, model, optimizer, sum(p.norm() for p in model.parameters()))),
        ("element by element", "the loop calls norm on one"),
    ),
    "changed": Loop(
        plain,
        lambda job, model, optimizer: (
            job.backward(model(INPUTS[0])[0].mean(), weight=1),
            optimizer.step(),
            model.down.bias.data.add_(job.rank),
            job.end_step(),
        ),
        ("have the same values in them", "down.bias differs between"),
    ),
    "gather": Loop(plain, lambda job, model, _: paceline.all_gather(INPUTS[0]), ("more than once", "the same samples")),
    "sum": Loop(plain, lambda job, model, _: paceline.all_reduce(INPUTS[0]), ("more than once", "the same samples")),
    "kept": Loop(
        hooked, lambda job, model, _: job.backward(model(INPUTS[0])[0].mean() + KEPT[-1], 1), ("a hook", "kept")
    ),
    "backward hook": Loop(backward_hooked, None, ("keep what the model", "up has a hook in the backward pass")),
    "compiled": Loop(lambda: torch.compile(plain(), backend="eager"), None, ("as they are", "Other is compiled")),
    "hook on a gradient": Loop(gradient_hooked, None, ("keep what the model", "up.weight has a hook")),
    "shared": Loop(shared, None, ("parameters of their own", "0.weight belongs")),
    "sparse": Loop(lambda: nn.Embedding(9, 4, sparse=True), None, ("should be dense", "weight is sparse")),
}


def refused(rank, name):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="tensor=2")))
    loop = REFUSED[name]
    try:
        made = loop.model()
        models = made if isinstance(made, tuple) else (made,)
        job, *models, optimizer = paceline.prepare(*models, torch.optim.SGD(models[-1].parameters(), lr=0.1))
        loop.does(job, models[0], optimizer)
    except PacelineError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_under_tensor_is_said_on_every_rank(name):
    for found in run_ranks(2, refused, name):
        for words in REFUSED[name].words:
            assert words in found


def differs(rank):
    """The first replica of two can split the model for its samples, the other can't."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="replicate=2,tensor=2")))
    job, model, _ = paceline.prepare(*(lambda model: (model, adam(model)))(plain()))
    try:
        model(INPUTS[0], *([Opaque()] if job.data_rank else []))
    except PacelineError as error:
        return str(error)


def test_ranks_that_could_split_a_model_hear_of_one_that_can_not():
    first, second, third, fourth = run_ranks(4, differs)
    assert "rank 2 can't" in first
    assert "rank 2 can't" in second
    assert "has a Opaque" in third
    assert "has a Opaque" in fourth


def replaced(rank):
    """A model that can't be split beside one that can stays whole; what optimizers have before is cut along."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="tensor=2")))
    small, large = make(1, lambda: nn.PReLU()), plain()
    optimizer = torch.optim.Adam([*small.parameters(), *large.parameters()], lr=0.01)
    for parameter in [*small.parameters(), *large.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    job, small, large, optimizer = paceline.prepare(small, large, optimizer)
    step(job, large, optimizer, small(large(INPUTS[0])[0]).mean())
    cut = optimizer.state[large.up.weight]["exp_avg"].shape, large.up.weight.shape, small.weight.shape
    return cut, small.forward.is_split, large.forward.is_split


def test_split_forward_leaves_an_unsplittable_model_whole():
    for (moment, piece, whole), *is_split in run_ranks(2, replaced):
        assert moment == piece == (8, 8)
        assert whole == (1,)
        assert is_split == [False, True]


def dropped(rank, mesh):
    """Dropout, without split of its values, and of split ones."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh=mesh)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    job, model, optimizer = paceline.prepare(model, adam(model))
    losses = []
    for number in range(STEPS):
        if number == 2:
            model[3].p = 0.0
        optimizer.zero_grad()
        loss = model(INPUTS[number]).square().mean()
        job.backward(loss, weight=6)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_dropout_draws_what_one_process_draws():
    (alone,) = run_ranks(1, dropped, "replicate=1")
    for losses in run_ranks(2, dropped, "tensor=2"):
        assert losses == pytest.approx(alone, rel=1e-9)
