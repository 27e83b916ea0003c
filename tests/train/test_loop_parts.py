"""Loops whose models are in parts (`shard` with zero=2 and 3): whatever a loop does ends as in one process."""

from __future__ import annotations

import copy
import gc
import json
import os
import weakref
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.nouns.errors import CollectiveError, LossError, PacelineError, PlanError, UsageError, WorkloadError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.plan import Plan
from paceline.train.loop_job import LoopJob

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
STEPS = 4
INPUTS = torch.randn(STEPS, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = {
    1: [slice(0, 6)],
    2: [slice(0, 2), slice(2, 6)],
    4: [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6)],
}


class Block(nn.Module):
    """Gathered by itself under zero=3."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs):
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Net(nn.Module):
    """Blocks, a scalar, a part that nobody uses, and a method beside forward."""

    def __init__(self, outputs=3, recomputes=False):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Block(5) for _ in range(3)])
        self.head = nn.Linear(5, outputs)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(5, 2)
        self.recomputes = recomputes

    def encode(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recomputes else block(hidden)
        return hidden

    def forward(self, inputs):
        return self.scale * self.head(self.encode(inputs))


def net(seed=0, **settings):
    torch.manual_seed(seed)
    return Net(**settings).double()


def adamw(*models):
    return torch.optim.AdamW([each for model in models for each in model.parameters()], lr=0.05, weight_decay=0.1)


class Alone:
    """A plain loop's `job`, by torch alone."""

    rank, size = 0, 1

    def backward(self, loss, weight=None, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def clip(self, max_norm, optimizer):
        groups = optimizer.param_groups
        return float(nn.utils.clip_grad_norm_([one for group in groups for one in group["params"]], max_norm))

    def gathered(self):
        return torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()


def prepared(plain, *objects):
    return (Alone(), *objects) if plain else paceline.prepare(*objects)


def own(job, step):
    return INPUTS[step][PARTS[job.size][job.rank]]


def values(*models):
    found = []
    for model in models:
        for parameter in model.parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found.append(whole.detach().clone())
    return found


def usual(plain):
    model = net()
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        optimizer.zero_grad()
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


def recomputed(plain):
    model = net(recomputes=True)
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        loss = (model(batch) - 1).square().mean()
        optimizer.zero_grad()  # after the forward pass
        job.backward(loss, weight=len(batch))
        optimizer.step()
    return values(model)


def parts_by_themselves(plain):
    """Methods beside forward, and modules that are called outside of the model, before it and after."""
    model = net()
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        optimizer.zero_grad()
        hidden = model.blocks[1](model.first(batch))
        job.backward(hidden.square().mean(), weight=len(batch))
        job.backward(model.encode(batch).mean() + model(batch).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


def penalty_alone(plain):
    """A backward pass on whose way no output of the model lies."""
    model = net(outputs=1)
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step).clone().requires_grad_(True)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        job.backward((slope.norm(dim=1) - 1).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


def adversaries(plain):
    """A penalty beside a loss; the critic is frozen while the other model is trained."""
    critic, maker = net(1, outputs=1), net(2, outputs=4)
    job, critic, maker, of_critic, of_maker = prepared(plain, critic, maker, adamw(critic), adamw(maker))
    for step in range(STEPS):
        batch = own(job, step)
        made = maker(batch.sin())
        of_critic.zero_grad()
        mixed = (0.3 * batch + 0.7 * made.detach()).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(made.detach()).mean() - critic(batch).mean() + (slope.norm(dim=1) - 1).square().mean()
        job.backward(loss, weight=len(batch))
        job.clip(0.5, of_critic)
        of_critic.step()
        critic.requires_grad_(False)
        of_maker.zero_grad()
        job.backward(-critic(maker(batch.sin())).mean(), weight=len(batch))
        of_maker.step()
        critic.requires_grad_(True)
    return values(critic, maker)


def critic_not_frozen(plain):
    """Gradients that the other model's loss leaves in the critic are cleared, and not used."""
    critic, maker = net(1, outputs=1), net(2, outputs=4)
    job, critic, maker, of_critic, of_maker = prepared(plain, critic, maker, adamw(critic), adamw(maker))
    for step in range(STEPS):
        batch = own(job, step)
        of_maker.zero_grad()
        job.backward(critic(maker(batch)).mean(), weight=len(batch))
        of_maker.step()
        if step % 2:
            of_critic.zero_grad()
        job.backward(critic(batch).square().mean(), weight=len(batch))
        of_critic.step()
    return values(critic, maker)


def kept(plain):
    """Gradients of earlier steps stay, of parts that this step uses and of parts that it does not."""
    model = net()
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        loss = model(batch).square().mean() if step % 2 == 0 else model.first(batch).square().mean()
        job.backward(loss, weight=len(batch))
        optimizer.step()
        if step == 2:
            optimizer.zero_grad(set_to_none=False)
    return values(model)


def twice(plain):
    """Two forward passes before one backward pass, and two backward passes through one graph."""
    model = net()
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        optimizer.zero_grad()
        one, other = model(batch), model(batch.cos())
        with torch.no_grad():
            target = model(batch.sin())
        job.backward((one - other).square().mean(), weight=len(batch), retain_graph=True)
        job.backward((one - target).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


def weights_in_the_loss(plain):
    model = net()
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        optimizer.zero_grad()
        with job.gathered():
            size = sum(parameter.square().sum() for parameter in model.parameters())
            tied = torch.tanh(batch) @ model.first.weight.T @ model.blocks[0].linear.weight
        job.backward(tied.square().mean() + 0.1 * size, weight=len(batch))
        optimizer.step()
    return values(model)


def averaged(plain):
    """A moving average, read between a forward pass and its backward pass too."""
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    job, model, average, optimizer = prepared(plain, model, average, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        loss = (model(batch) - average(batch)).square().mean() + model(batch).mean()
        with torch.no_grad(), job.gathered():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        optimizer.zero_grad()
        job.backward(loss, weight=len(batch))
        optimizer.step()
    return values(model, average)


def clipped_by_torch(plain):
    """Rows without replicas are sums after the backward pass, so torch's own function finds the norm."""
    model = net()
    del model.scale
    model.scale = 1.5  # a scalar would stay whole, and not be a sum yet
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        optimizer.zero_grad()
        job.backward((model(batch) - 1).square().mean() * 100, weight=len(batch))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return values(model)


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm: it needs whole parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-3)
        return super().step(closure)


def whole_updates(plain):
    model = net()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    by_norm = Normed(matrices, lr=0.05, momentum=0.9)
    by_adam = torch.optim.AdamW(others, lr=0.05)
    job, model, by_norm, by_adam = prepared(plain, model, by_norm, by_adam)
    for step in range(STEPS):
        batch = own(job, step)
        by_norm.zero_grad()
        by_adam.zero_grad()
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        by_adam.step()
        by_norm.step()
    return values(model)


def after_a_bad_batch(plain):
    """A loss that is not finite is left out, and the loop goes on."""
    model = net()
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        if step == 1 and plain:
            continue
        if step == 1 and job.rank == job.size - 1:
            batch = batch / 0
        optimizer.zero_grad()
        try:
            job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        except LossError:
            continue
        optimizer.step()
    return values(model)


def uneven_calls(plain):
    """Ranks call a model as often as they like while it is gathered."""
    model = net()
    job, model, optimizer = prepared(plain, model, adamw(model))
    for step in range(STEPS):
        batch = own(job, step)
        with torch.no_grad(), job.gathered():
            targets = torch.cat([model(sample[None]) for sample in batch]).sin()
        optimizer.zero_grad()
        job.backward((model(batch) - targets).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


LOOPS = [
    usual,
    recomputed,
    parts_by_themselves,
    penalty_alone,
    adversaries,
    critic_not_frozen,
    kept,
    twice,
    weights_in_the_loss,
    averaged,
    whole_updates,
    after_a_bad_batch,
    uneven_calls,
]


def in_ranks(rank, loop, mesh, zero):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh=mesh, zero=zero)))
    return loop(False)


@pytest.mark.parametrize(("mesh", "zero"), [("shard=2", 3), ("shard=2", 2), ("replicate=2,shard=2", 3)])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_ranks_with_parts_end_as_a_plain_loop_does(loop, mesh, zero):
    expected = loop(True)
    for found in run_ranks(Plan(mesh=mesh).world_size, in_ranks, loop, mesh, zero):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def sizes(rank, zero):
    """What this rank holds between steps: elements of parameters, of gradients and of the optimizer's state."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="shard=2", zero=zero)))
    model = net()
    whole = sum(parameter.numel() for parameter in model.parameters())
    job, model, optimizer = paceline.prepare(model, adamw(model))
    job.backward(model(own(job, 0)).square().mean(), weight=len(own(job, 0)))
    gradients = sum(local.numel() for local in map(local_of, job.gradients().values()))
    optimizer.step()
    job.end_step()
    parameters = sum(local_of(parameter).numel() for parameter in model.parameters())
    state = sum(local_of(each["exp_avg"]).numel() for each in optimizer.state.values())
    return whole, parameters, gradients, state


def local_of(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def test_torch_clips_rows_without_replicas():
    expected = clipped_by_torch(True)
    for found in run_ranks(2, in_ranks, clipped_by_torch, "shard=2", 3):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("zero", [2, 3])
def test_between_steps_each_rank_holds_its_rows_alone(zero):
    first, second = run_ranks(2, sizes, zero)
    whole = first[0]
    used = whole - (5 * 2 + 2)  # of the layer that nobody uses there is no gradient
    assert first[1] + second[1] == whole + 1  # the scalar is on both
    assert first[2] + second[2] == first[3] + second[3] == used + 1
    for held in (*first[1:], *second[1:]):
        assert held <= 0.61 * whole  # five rows are cut into three and two


class Together(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.first = other.first


def with_state(model):
    optimizer = adamw(model)
    model(INPUTS[0]).mean().backward()
    optimizer.step()
    return model, optimizer


def sharing(model):
    return model, Together(model), adamw(model)


class Coupled(torch.optim.SGD):
    """Divides all gradients by the norm of all of them."""

    def step(self, closure=None):
        gradients = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        total = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(total)
        super().step()


def coupled(model):
    return model, Coupled(model.parameters(), lr=0.1)


def sparse(model):
    model.table = nn.Embedding(4, 2, sparse=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def refused(rank, make):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="shard=2")))
    try:
        paceline.prepare(*make(net()))
    except PacelineError as error:
        return type(error).__name__, error.found, error.fix
    return None


@pytest.mark.parametrize(
    ("make", "kind", "found", "fix"),
    [
        (with_state, WorkloadError, "AdamW has state of whole parameters", "taken no step"),
        (sharing, WorkloadError, "0.first.weight and 1.first.weight are one parameter", "one module that holds both"),
        (coupled, PlanError, "Coupled updates a parameter from the others", "replicate"),
        (sparse, WorkloadError, "the gradient of table.weight is sparse", "sparse=False"),
    ],
)
def test_what_can_not_be_cut_is_refused_before_the_first_step(make, kind, found, fix):
    for answer in run_ranks(2, refused, make):
        assert answer is not None
        assert answer[0] == kind.__name__
        assert found in answer[1]
        assert fix in answer[2]


def changed_inside(job, model, optimizer):
    with torch.no_grad(), job.gathered():
        model.first.weight.mul_(1 + job.rank)


def one_call_more(job, model, optimizer):
    if job.rank == 1:
        model(own(job, 0))
    job.backward(model(own(job, 0)).mean(), weight=1)


def one_gathers(job, model, optimizer):
    if job.rank == 0:
        with job.gathered():
            pass
    job.backward(model(own(job, 0)).mean(), weight=1)


def gathered_at_the_end(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=1)
    optimizer.step()
    if job.rank == 0:
        with job.gathered():
            pass
    job.end_step()


def raw_backward(job, model, optimizer):
    model(own(job, 0)).mean().backward()
    optimizer.step()


def make_mistake(rank, mistake):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="shard=2")))
    model = net()
    job, model, optimizer = paceline.prepare(model, adamw(model))
    try:
        mistake(job, model, optimizer)
    except PacelineError as error:
        return type(error).__name__, error.found, error.fix
    return None


@pytest.mark.parametrize(
    ("mistake", "kind", "found", "fix"),
    [
        (changed_inside, CollectiveError, "are not those of this rank", "draw from a generator with the same seed"),
        (
            one_call_more,
            CollectiveError,
            "calls a model of which each rank has a part (model 1)",
            "with job.gathered():",
        ),
        (one_gathers, CollectiveError, "enters job.gathered", "let no rank leave out"),
        (gathered_at_the_end, CollectiveError, "enters job.gathered", "let no rank leave out"),
        (raw_backward, UsageError, "made or changed by something else", "write job.backward(loss)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_said_on_every_rank_that_has_parts(mistake, kind, found, fix):
    answers = run_ranks(2, make_mistake, mistake)
    for answer in answers:
        assert answer is not None
        assert answer[0] == kind.__name__
        assert fix in answer[2]
    assert any(found in answer[1] for answer in answers), answers


def test_loop_parts_refuse_unsupported_compression_before_start():
    with pytest.raises(PlanError) as caught:
        check_plan_of_loop(Plan(mesh="replicate=2,shard=2", compression="topk"))
    assert "none and bf16" in caught.value.found
    check_plan_of_loop(Plan(mesh="shard=2", compression="bf16"))


def scored(rank):
    """Rank 1 has no sample."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="shard=2")))
    model = net()
    job, model, _ = paceline.prepare(model, adamw(model))

    def score(model, batch):
        return {"mean": (model(batch).sum(), len(batch))}

    return job.evaluate([INPUTS[0][0]], score)["mean"]


def test_a_rank_without_samples_evaluates_along():
    expected = net()(INPUTS[0][:1]).sum().item()
    assert run_ranks(2, scored) == pytest.approx([expected, expected])


def with_a_list(rank, has_list):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="shard=2")))
    said = []
    LoopJob.notice = lambda job, text: said.append(text)
    model = net()
    parameters = list(model.parameters()) if has_list else []
    paceline.prepare(model, adamw(model))
    return len(parameters), said


def test_a_list_of_whole_parameters_is_named():
    for length, said in run_ranks(2, with_a_list, True):
        assert len(said) == 1
        assert f"{length - 1} parameters, such as first.weight" in said[0]  # the scalar stays whole, and the same
    for _, said in run_ranks(2, with_a_list, False):
        assert said == []


def left_of_a_teacher(rank):
    teacher, student = net(1).requires_grad_(False), net()
    matrices = [weakref.ref(parameter) for parameter in teacher.parameters() if parameter.dim()]
    paceline.prepare(teacher, student, adamw(student), shard_frozen=True)
    gc.collect()
    return sum(reference() is not None for reference in matrices)


def test_nothing_refers_to_a_whole_teacher():
    assert run_ranks(2, left_of_a_teacher) == [0, 0]


def state_dicts(rank):
    """Whole ones inside `job.gathered()`, of which the loop keeps what it is given; elsewhere an error."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="shard=2")))
    teacher, model = net(1).requires_grad_(False), net()
    job, teacher, model, optimizer = paceline.prepare(teacher, model, adamw(model), shard_frozen=True)
    batch = INPUTS[0][rank : rank + 1]
    job.backward((model(batch) - teacher(batch)).square().mean(), weight=1)
    optimizer.step()
    with job.gathered():
        whole = [model.state_dict(), teacher.state_dict(), model.first.state_dict()]
    optimizer.zero_grad()
    job.backward((model(batch) - teacher(batch)).square().mean(), weight=1)  # frees what was gathered
    said = []
    for ask in (model.state_dict, teacher.state_dict, model.first.state_dict, lambda: copy.deepcopy(model)):
        try:
            ask()
        except WorkloadError as error:
            said.append(error.found)
    return whole, said


def test_state_dicts_of_parts_are_whole_or_refused():
    for (student, teacher, first), said in run_ranks(2, state_dicts):
        assert {name: value.shape for name, value in student.items()} == {
            name: value.shape for name, value in net().state_dict().items()
        }
        assert all(type(value) is torch.Tensor for value in student.values())
        torch.testing.assert_close(dict(teacher), dict(net(1).state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(first["weight"], student["first.weight"], rtol=0, atol=0)
        assert not torch.equal(first["weight"], net().first.weight)
        assert len(said) == 4
        assert all("this rank's rows alone" in each for each in said)


def save_before_the_backward_pass(rank, plan, folder):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    model = net()
    optimizer = adamw(model)
    job, model, optimizer = paceline.prepare(model, optimizer)
    for step in range(STEPS):
        own = INPUTS[step][PARTS[job.size][job.rank]]
        loss = model(own).square().mean()  # the scalar of the whole model stays gathered from here on
        if step == 2:
            job.save(folder)
        optimizer.zero_grad()
        job.backward(loss, weight=len(own))
        optimizer.step()
        job.settle()
    return {name: job.parallel.models.full_tensor(each).clone() for name, each in job.parallel.named().items()}


@pytest.mark.parametrize("plan", ["shard=2", "shard=2,zero=2"])
def test_loop_parts_are_saved_between_call_and_backward_pass(tmp_path, plan):
    (alone,) = run_ranks(1, save_before_the_backward_pass, "replicate=1", tmp_path / "alone")
    for found in run_ranks(2, save_before_the_backward_pass, plan, tmp_path / "both"):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-10)
