"""`paceline.prepare`: pieces of a step on several ranks are those of one process, and mistakes are said in words."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.nouns.errors import (
    CheckpointError,
    CollectiveError,
    LossError,
    PacelineError,
    PlanError,
    UsageError,
    WorkloadError,
)
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.plan import Plan
from paceline.parallel.engine import agreement
from paceline.parallel.engine.loop import LoopEngine

from support.jobs import paceline as run_command
from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
STEPS = 5
INPUTS = torch.randn(STEPS, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = {
    1: [slice(0, 6)],
    2: [slice(0, 2), slice(2, 6)],
    3: [slice(0, 1), slice(1, 2), slice(2, 6)],
    4: [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6)],
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def values(*models):
    found = []
    for model in models:
        for parameter in model.parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found.append(whole.detach().clone())
    return found


def own(job, step):
    return INPUTS[step][PARTS[job.size][job.rank]]


class Alone:
    """A plain loop's `job`: what every piece is in one process, by torch alone."""

    rank, size = 0, 1

    def __init__(self, *models):
        self.models = models

    def backward(self, loss, weight=None, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def clip(self, max_norm, optimizer=None):
        groups = [optimizer] if optimizer else []
        parameters = [parameter for each in groups for group in each.param_groups for parameter in group["params"]]
        return float(nn.utils.clip_grad_norm_(parameters or [p for m in self.models for p in m.parameters()], max_norm))

    def gradients(self, optimizer=None):
        named = [pair for model in self.models for pair in model.named_parameters()]
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def prepared(plain, *objects):
    """The job, and the objects; of one process without Paceline if `plain`."""
    if plain:
        return Alone(*[each for each in objects if isinstance(each, nn.Module)]), *objects
    return paceline.prepare(*objects)


def usual(plain):
    job, model, optimizer = prepared(plain, *with_optimizer())
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = own(job, step)
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


def with_optimizer():
    # Ranks begin apart: rank 0's values are sent to the others.
    model = net(paceline.rank() if paceline.is_initialized() else 0)
    return model, sgd(model)


def accumulated(plain):
    """Two losses a step, of which the second leaves a part of the model out; gradients are cleared every other step."""
    job, model, optimizer = prepared(plain, *with_optimizer())
    for step in range(STEPS):
        batch = own(job, step)
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        job.backward(0.3 * model[0](batch).mean(), weight=len(batch))
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    return values(model)


def zeroed(plain):
    """Gradients are cleared to zeros, and summed before the second backward pass."""
    job, model, optimizer = prepared(plain, *with_optimizer())
    for step in range(STEPS):
        batch = own(job, step)
        optimizer.zero_grad(set_to_none=False)
        job.backward(model(batch).square().mean(), weight=len(batch))
        job.gradients()
        job.backward(model(batch).mean(), weight=len(batch))
        optimizer.step()
        optimizer.step()  # with the same gradients
    return values(model)


def clipped(plain):
    job, model, optimizer = prepared(plain, *with_optimizer())
    norms = []
    for step in range(STEPS):
        batch = own(job, step)
        optimizer.zero_grad()
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        norms.append(job.clip(0.1))
        for gradient in job.gradients().values():
            gradient.mul_(0.5)
        optimizer.step()
    return [*values(model), torch.tensor(norms, dtype=torch.float64)]


def two_optimizers(plain):
    """Two models; the second's optimizer shares a parameter with the first's, and steps every other time."""
    first, second = net(0), net(1)
    one = torch.optim.Adam(first.parameters(), lr=0.01)
    other = sgd(second)
    other.add_param_group({"params": [first[0].bias], "lr": 0.01})
    job, first, second, one, other = prepared(plain, first, second, one, other)
    for step in range(STEPS):
        batch = own(job, step)
        one.zero_grad()
        job.backward((first(batch) - second(batch)).square().mean(), weight=len(batch))
        one.step()
        if step % 2:
            job.backward(second(batch).square().mean(), weight=len(batch))
            job.clip(0.5, other)
            other.step()
            other.zero_grad()
    return values(first, second)


def grown(plain):
    """A part is frozen at first, and joins the optimizer later."""
    model = net()
    job, model, optimizer = prepared(plain, model, sgd(model[2]))
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        batch = own(job, step)
        optimizer.zero_grad()
        model.zero_grad()
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


def swapped(plain):
    """An optimizer gets as many other parameters in place of its first."""
    model = net()
    job, model, optimizer = prepared(plain, model, sgd(model[0], momentum=0))
    for step in range(STEPS):
        if step == 3:
            optimizer.param_groups[0]["params"] = list(model[2].parameters())
        batch = own(job, step)
        model.zero_grad()
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        optimizer.step()
    return values(model)


def frozen_before_the_update(plain):
    """A gradient counts though its parameter is frozen since; once it is a sum that the loop has kept."""
    job, model, optimizer = prepared(plain, *with_optimizer())
    for step in range(STEPS):
        batch = own(job, step)
        model.requires_grad_(True)
        if step != 3:
            optimizer.zero_grad()
        else:
            model[0].requires_grad_(False)
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        model[0].requires_grad_(False)
        optimizer.step()
    return values(model)


def partly_labelled(plain):
    """The mean over no labels is NaN on ranks whose samples have none."""
    job, model, optimizer = prepared(plain, *with_optimizer())
    for step in range(STEPS):
        optimizer.zero_grad()
        labels = torch.tensor([0, -100, -100, -100, -100, -100])[PARTS[job.size][job.rank]]
        loss = F.cross_entropy(model(own(job, step)), labels)
        job.backward(loss, weight=(labels != -100).sum())
        optimizer.step()
    return values(model)


def sparse(plain):
    """Sums of sparse gradients are kept, cleared to zeros, and updated with."""
    torch.manual_seed(0)
    model = nn.Embedding(12, 3, sparse=True).double()
    job, model, optimizer = prepared(plain, model, sgd(model, momentum=0))
    for step in range(STEPS):
        rows = torch.arange(6)[PARTS[job.size][job.rank]] + step
        job.backward((model(rows) - 1).square().mean(), weight=len(rows))
        if step == 1:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        if step == 2:
            optimizer.zero_grad()
    return values(model)


def whole_matrices(plain):
    """Muon needs whole matrices, Adafactor means of rows and columns."""
    model = net()
    muon = torch.optim.Muon([model[0].weight, model[2].weight], lr=0.01)
    factored = torch.optim.Adafactor([model[0].bias, model[2].bias], lr=0.01)
    job, model, muon, factored = prepared(plain, model, muon, factored)
    for step in range(STEPS):
        batch = own(job, step)
        muon.zero_grad()
        factored.zero_grad()
        job.backward((model(batch) - 1).square().mean(), weight=len(batch))
        muon.step()
        factored.step()
    return values(model)


class Block(nn.Module):
    """A repeated block, gathered by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs):
        return torch.tanh(self.linear(inputs))


def frozen_teacher():
    torch.manual_seed(2)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(2, 3)).double().requires_grad_(False).eval()


def replaced(plain):
    """Gradients of two losses are taken apart, and what they make together is put in their place (PCGrad)."""
    job, model, optimizer = prepared(plain, *with_optimizer())
    for step in range(STEPS):
        batch = own(job, step)
        parts = []
        for sign in (1.0, -0.5):
            optimizer.zero_grad()
            job.backward((sign * model(batch)).square().mean(), weight=len(batch))
            parts.append({name: gradient.clone() for name, gradient in job.gradients().items()})
        for name, parameter in model.named_parameters():
            parameter.grad = parts[0][name] - 0.1 * parts[1][name]
        job.clip(0.3)
        optimizer.step()
    return values(model)


def distilled(plain):
    """Gradients flow through the teacher, of which each rank keeps a part."""
    teacher, student = frozen_teacher(), net()
    optimizer = sgd(student)
    if plain:
        job = Alone(student)
    else:
        job, teacher, student, optimizer = paceline.prepare(teacher, student, optimizer, shard_frozen=True)
    for step in range(STEPS):
        batch = own(job, step)
        with torch.no_grad():
            targets = teacher(batch[:, :2])
        optimizer.zero_grad()
        loss = (teacher(student(batch)) - targets).square().mean() + teacher(student(batch).sin()).mean()
        job.backward(loss, weight=len(batch))
        optimizer.step()
    if not plain and job.size > 1:
        job.end_step()
        held = sum(parameter.to_local().numel() for parameter in teacher.parameters() if hasattr(parameter, "to_local"))
        whole = sum(parameter.numel() for parameter in teacher.parameters())
        assert held < whole * 0.7, (held, whole)
    return values(student)


def in_ranks(rank, loop, mesh=None, zero=1):
    if mesh is not None:
        os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh=mesh, zero=zero)))
    return loop(False)


LOOPS = [
    usual,
    accumulated,
    zeroed,
    clipped,
    two_optimizers,
    grown,
    whole_matrices,
    distilled,
    replaced,
    swapped,
    frozen_before_the_update,
    partly_labelled,
    sparse,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_ranks_end_as_a_plain_loop_does(loop):
    expected = loop(True)
    for ranks in (1, 2, 3):
        for found in run_ranks(ranks, in_ranks, loop):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replicate=2,shard=2"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_so_do_ranks_that_share_out_the_updates(loop, mesh):
    expected = loop(True)
    for found in run_ranks(Plan(mesh=mesh).world_size, in_ranks, loop, mesh):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replicate=2,shard=2"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop is not sparse], ids=lambda loop: loop.__name__)
def test_so_do_ranks_that_hold_parts(loop, mesh, zero):
    expected = loop(True)
    for found in run_ranks(Plan(mesh=mesh).world_size, in_ranks, loop, mesh, zero):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def apart(rank, function, *arguments):
    """Call a function where what hosts know travels apart from what devices compute, as on GPUs."""
    open_sums = LoopEngine.open_sums

    def split_apart(parallel, optimizers):
        open_sums(parallel, optimizers)
        length = parallel.agreement.on_device.length
        parallel.agreement.on_host = agreement._Message(parallel.comms.step, None, length, torch.device("cpu"))

    LoopEngine.open_sums = split_apart
    return function(rank, *arguments)


@pytest.mark.parametrize(("mesh", "zero"), [(None, 1), ("shard=2", 1), ("shard=2", 3)])
@pytest.mark.parametrize("loop", [usual, accumulated, two_optimizers, partly_labelled], ids=lambda loop: loop.__name__)
def test_so_do_ranks_whose_hosts_meet_by_themselves(loop, mesh, zero):
    expected = loop(True)
    for found in run_ranks(2, apart, in_ranks, loop, mesh, zero):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def state_elements(plain):
    job, model, optimizer = prepared(plain, *with_optimizer())
    batch = own(job, 0)
    job.backward(model(batch).square().mean(), weight=len(batch))
    optimizer.step()
    optimizer.step()
    return sum(each["momentum_buffer"].numel() for each in optimizer.state.values())


def test_loop_job_ranks_that_share_updates_hold_a_part_of_state():
    whole = state_elements(True)
    parts = run_ranks(2, in_ranks, state_elements, "shard=2")
    assert sum(parts) == whole
    assert max(parts) <= whole / 2 + 20  # the largest parameter has 20 elements


class Coupled(torch.optim.SGD):
    """Divides all gradients by the norm of all of them."""

    def step(self, closure=None):
        gradients = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        total = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(total)
        super().step()


def coupled(rank):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="shard=2", zero=1)))
    model = net()
    try:
        paceline.prepare(model, Coupled(model.parameters(), lr=0.1))
    except PlanError as error:
        return error.found
    return None


def test_loop_job_shard_refuses_optimizers_with_coupled_updates():
    for found in run_ranks(2, coupled):
        assert "Coupled" in found


def test_one_rank_takes_the_bits_of_a_plain_loop():
    (found,) = run_ranks(1, in_ranks, usual)
    assert all(torch.equal(mine, plain) for mine, plain in zip(found, usual(True), strict=True))


# Each loop breaks a rule on one rank or on all; what every rank is to be told.


def raw_backward(job, model, optimizer):
    model(own(job, 0)).mean().backward()
    optimizer.step()


def raw_after_ours(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=1)
    model(own(job, 0)).mean().backward()
    optimizer.step()


def clipped_by_torch(job, model, optimizer):
    with job.accumulate():
        job.backward(model(own(job, 0)).mean() * 100, weight=1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def raw_after_the_sum(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=1)
    job.gradients()
    model(own(job, 0)).mean().backward()
    optimizer.step()


def update_by_another_optimizer(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=1)
    sgd(model).step()


def closure(job, model, optimizer):
    optimizer.step(lambda: model(own(job, 0)).mean())


def no_weight(job, model, optimizer):
    job.backward(model(own(job, 0)).mean())


def nan_on_rank_1(job, model, optimizer):
    job.backward(model(own(job, 0)).mean() * (float("nan") if job.rank == 1 else 1), weight=1)


def weighs_nothing(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=0)


def negative_weight(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=-1)


def negative_tensor(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=torch.tensor(3.0 - 4 * job.rank))


def weighs_nan(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=torch.tensor(float("nan")))


def no_scalar(job, model, optimizer):
    job.backward(model(own(job, 0)), weight=1)


def a_number(job, model, optimizer):
    job.backward(model(own(job, 0)).mean().item(), weight=1)


def detached(job, model, optimizer):
    job.backward(model(own(job, 0)).mean().detach(), weight=1)


def bad_norm(job, model, optimizer):
    job.clip(0)


def infinite_gradient(job, model, optimizer):
    job.backward((model(own(job, 0)) * 0).sqrt().sum(), weight=1)
    job.clip(1.0)


def other_optimizer(job, model, optimizer):
    job.gradients(sgd(model))


def backward_on_rank_0(job, model, optimizer):
    if job.rank == 0:
        job.backward(model(own(job, 0)).mean(), weight=1)
    job.clip(1.0)


def other_optimizer_on_rank_1(job, model, optimizer):
    with job.accumulate():
        job.backward(model(own(job, 0)).mean(), weight=1)
    job.gradients(optimizer if job.rank else None)


def noise_by_rank(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=1)
    for gradient in job.gradients().values():
        gradient.add_(0.1 * job.rank)
    optimizer.step()
    job.save("nowhere")


def epochs_without_a_loader(job, model, optimizer):
    list(job.epochs(2))


def declared_step(job, model, optimizer):
    job.step(own(job, 0))


def declared_batches(job, model, optimizer):
    job.batches()


def no_score(job, model, optimizer):
    job.evaluate(TensorDataset(INPUTS[0]))


def after_the_end(job, model, optimizer):
    job.close()
    job.backward(model(own(job, 0)).mean(), weight=1)


def cleared_after_backward(job, model, optimizer):
    job.backward(model(own(job, 0)).mean(), weight=1)
    optimizer.zero_grad()
    optimizer.step()


def backward_twice(job, model, optimizer):
    loss = model(own(job, 0)).square().mean()
    loss.backward()
    job.backward(loss, weight=1)


def converted(job, model, optimizer):
    model.float()
    job.backward(model(own(job, 0).float()).mean(), weight=1)


def clipped_as_by_torch(job, model, optimizer):
    job.clip(model.parameters(), 1.0)


def logged_as_by_others(job, model, optimizer):
    job.log(torch.tensor(1.0))


def load_of_a_file(job, model, optimizer):
    job.load(__file__)


MISTAKES = [
    (cleared_after_backward, UsageError, "cleared after job.backward", "before job.backward(loss)"),
    (backward_twice, LossError, "let go in one that came before", "in place of loss.backward()"),
    (converted, WorkloadError, "0.weight is of torch.float32 now, and was of torch.float64", "before the optimizer"),
    (clipped_as_by_torch, UsageError, "it is <generator", "job.clip(1.0)"),
    (logged_as_by_others, UsageError, "it is tensor(1.)", "write job.log(accuracy=0.9)"),
    (load_of_a_file, CheckpointError, "it is a file", "torch.load with weights_only=True"),
    (raw_backward, UsageError, "made or changed by something else than job.backward", "write job.backward(loss)"),
    (raw_after_ours, UsageError, "made or changed by something else", "in place of loss.backward()"),
    (clipped_by_torch, UsageError, "gradient of 0.weight was made or changed", "job.clip(max_norm)"),
    (raw_after_the_sum, UsageError, "gradient of 0.weight was made or changed", "in place of loss.backward()"),
    (update_by_another_optimizer, UsageError, "this SGD is none of them", "hand it to paceline.prepare too"),
    (closure, UsageError, "handed a closure", "without a closure"),
    (no_weight, UsageError, "paceline.prepare was handed no loader", "weight=len(batch)"),
    (nan_on_rank_1, LossError, "it is NaN or infinite on rank 1", "job.clip(1.0)"),
    (weighs_nothing, LossError, "add up to 0", "job.backward(loss, n)"),
    (negative_weight, LossError, "it is -1", "over how many samples"),
    (negative_tensor, LossError, "that of rank 1 is negative", "over how many samples"),
    (weighs_nan, LossError, "NaN or infinite", "over how many samples"),
    (no_scalar, LossError, "its shape is (", "loss.mean()"),
    (a_number, LossError, "it is a float", "without .item()"),
    (detached, LossError, "no gradient leads", ".detach()"),
    (bad_norm, UsageError, "it is 0", "job.clip(1.0)"),
    (infinite_gradient, LossError, "although the loss is finite", "lower the learning rate"),
    (other_optimizer, UsageError, "this SGD is not", "hand it to paceline.prepare"),
    (backward_on_rank_0, CollectiveError, "calls job.backward", "let no rank leave out"),
    (other_optimizer_on_rank_1, CollectiveError, "(optimizer 1)", "let no rank leave out"),
    (noise_by_rank, CollectiveError, "differs between rank 0 and rank 1", "generator that has the same seed"),
    (epochs_without_a_loader, UsageError, "was handed none", "while job.step_number"),
    (declared_step, UsageError, "runs the loss of a paceline.Workload", "job.backward(loss) and optimizer.step()"),
    (declared_batches, UsageError, "those of a paceline.Workload", "iterate over the loader"),
    (no_score, UsageError, "score was left out", "job.evaluate(data, score)"),
    (after_the_end, UsageError, "the job is closed", "job.close() after the last step"),
]


def held(job):
    """What this rank has of each parameter."""
    named = job.parallel.named()
    return [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in named.values()]


def make_mistake(rank, mistake, mesh="replicate=2"):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh=mesh)))
    job, model, optimizer = paceline.prepare(*with_optimizer())
    before = held(job)
    try:
        mistake(job, model, optimizer)
    except PacelineError as error:
        if mistake not in (noise_by_rank, converted):
            assert all(torch.equal(now, then) for now, then in zip(held(job), before, strict=True))
        return type(error).__name__, error.found, error.fix, error.rank
    return None


@pytest.mark.parametrize("mesh", ["replicate=2", "shard=2"])
@pytest.mark.parametrize(
    ("mistake", "kind", "found", "fix"), MISTAKES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mistake_is_said_on_every_rank(mistake, kind, found, fix, mesh):
    if mesh == "shard=2" and mistake in (noise_by_rank, converted):
        return  # ranks have different rows, and nothing to compare; FSDP keeps the dtype
    if mesh == "shard=2" and mistake is backward_on_rank_0:
        found = "calls a model of which each rank has a part (model 1)"
    # Rows without replicas are sums already: torch clips them rightly.
    if mesh == "shard=2" and mistake is clipped_by_torch:
        mesh = "replicate=2,shard=2"
    answers = run_ranks(Plan(mesh=mesh).world_size, make_mistake, mistake, mesh)
    for answer in answers:
        assert answer is not None
        assert answer[0] == kind.__name__
        assert fix in answer[2]
    assert any(found in answer[1] for answer in answers), answers


@pytest.mark.parametrize(
    ("mistake", "kind", "found", "fix"),
    [mistake for mistake in MISTAKES if mistake[1] is not UsageError],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_hosts_that_meet_by_themselves_say_the_same(mistake, kind, found, fix):
    answers = run_ranks(2, apart, make_mistake, mistake, "replicate=2", timeout_s=60)
    for answer in answers:
        assert answer is not None
        assert answer[0] == kind.__name__
        assert fix in answer[2]
    assert any(found in answer[1] for answer in answers), answers


class Unsized(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return INPUTS[0][index]


class ReadOnce(IterableDataset):
    def __init__(self):
        self.rows = iter(INPUTS[0])

    def __iter__(self):
        return self.rows


def objects_of(*names):
    model = net()
    kinds = {
        "model": model,
        "optimizer": sgd(model),
        "loader": DataLoader(TensorDataset(INPUTS[0]), batch_size=2),
        "class": torch.optim.SGD,
        "data": TensorDataset(INPUTS[0]),
        "list": [model],
        "word": "cuda",
        "parameters": model.parameters(),
        "wrapped": nn.DataParallel(model),
        "empty": nn.Linear(2, 2, device="meta"),
        "scheduler of another": torch.optim.lr_scheduler.StepLR(sgd(net()), 2),
        "unsized": DataLoader(Unsized(), batch_size=2),
        "read once": DataLoader(ReadOnce(), batch_size=2),
        "settings": {"lr": 0.1},
        "function": model.forward,
        "lbfgs": torch.optim.LBFGS(model.parameters()),
        "other": sgd(net()),
        "distributed": DataLoader(
            TensorDataset(INPUTS[0]), sampler=DistributedSampler(INPUTS[0], num_replicas=2, rank=0)
        ),
        "whole": DataLoader(TensorDataset(INPUTS[0]), batch_size=None),
    }
    return [kinds[name] for name in names]


@pytest.mark.parametrize(
    ("names", "found", "fix"),
    [
        ([], "nothing", "prepare(model, optimizer, loader)"),
        (["model"], "handed Sequential", "prepare(model, optimizer, loader)"),
        (["optimizer"], "handed SGD", "prepare(model, optimizer, loader)"),
        (["model", "class"], "object 2 is", "SGD(...)"),
        (["model", "optimizer", "data"], "object 3 is", "DataLoader(data"),
        (["list", "optimizer"], "object 1 is", "hand in"),
        (["parameters", "optimizer"], "object 1 is <generator", "hand in the model itself"),
        (["wrapped", "optimizer"], "is a DataParallel", "leave DataParallel"),
        (["empty", "model", "optimizer"], "weight is on the meta device", "on the CPU"),
        (
            ["model", "optimizer", "scheduler of another"],
            "StepLR has another SGD",
            "of the optimizer that is handed in",
        ),
        (["model", "optimizer", "unsized"], "Unsized has no __len__", "def __len__"),
        (["model", "optimizer", "read once"], "again and again, which can be read once", "in __iter__"),
        (["model", "optimizer", "word"], "object 3 is 'cuda'", "prepare(model, optimizer, loader)"),
        (["model", "optimizer", "settings"], "object 3 is {'lr': 0.1}", "leave it out"),
        (["function", "optimizer"], "object 1 is", "call the loss in the loop"),
        (["model", "lbfgs"], "several times in a step", "AdamW"),
        (["model", "other"], "in none of them", "hand in its model too"),
        (["model", "optimizer", "loader", "loader"], "handed 2", "iterate over them as they are"),
        (["model", "optimizer", "distributed"], "DistributedSampler", "shuffle=True"),
        (["model", "optimizer", "whole"], "batch_size=None", "collate_fn"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_other_objects_are_refused_before_anything_is_changed(names, found, fix):
    with pytest.raises(WorkloadError) as caught:
        paceline.prepare(*objects_of(*names))
    assert found in caught.value.found
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (Plan(mesh="shard=2", compression="fp16"), "has none and bf16"),
        (Plan(mesh="shard=2", offload="on"), "keep their state where the parameters are"),
        (Plan(mesh="shard=2", zero=1, offload="on"), "keep their state where the parameters are"),
        (Plan(mesh="shard=2,tensor=2", zero=1), "shard shares out the update of whole ones"),
        (Plan(mesh="pipeline=2,tensor=2"), "pipeline needs"),
        (Plan(mesh="pipeline=2"), "pipeline needs"),
        (Plan(mesh="replicate=2", server=1), "server needs"),
        (Plan(mesh="replicate=2", checkpointing="full"), "used as they are"),
        (Plan(mesh="replicate=2", compile="on"), "used as they are"),
    ],
    ids=lambda value: value.line() if isinstance(value, Plan) else "",
)
def test_other_plans_are_refused(plan, found):
    with pytest.raises(PlanError) as caught:
        check_plan_of_loop(plan)
    assert found in caught.value.found


def nothing_frozen(rank):
    try:
        paceline.prepare(*with_optimizer(), shard_frozen=True)
    except WorkloadError as error:
        return error.fix
    return None


def test_models_that_are_trained_are_no_frozen_ones():
    for fix in run_ranks(2, nothing_frozen):
        assert "requires_grad_(False)" in fix


def noisy_order(job_rank):
    return random.Random(job_rank).sample(range(6), 6)


def sampled_by_rank(rank):
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=3, sampler=noisy_order(rank))
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    try:
        for (batch,) in loader:
            job.backward(model(batch).mean())
    except CollectiveError as error:
        return error.asked, error.fix
    return None


def test_samplers_that_differ_between_ranks_are_said():
    for asked, fix in run_ranks(2, sampled_by_rank):
        assert asked == "every rank should take its part of the same batch"
        assert "sampler a generator with a seed" in fix


def modes_and_state(rank):
    teacher = net(1).eval()
    student = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    data = TensorDataset(INPUTS.flatten(0, 1)[:7])
    loader = DataLoader(data, batch_size=4)
    optimizer = sgd(student)
    job, teacher, student, optimizer, loader = paceline.prepare(teacher, student, optimizer, loader)
    assert not teacher.training
    assert student.training
    assert len(loader) == 2
    assert loader.dataset is data
    for (batch,) in loader:
        optimizer.zero_grad()
        job.backward(F.mse_loss(student(batch), teacher(batch)))
        optimizer.step()

    def score(models, batch):
        difference = (models[1](batch[0]) - models[0](batch[0])).square().mean(1)
        return {"difference": (difference.sum(), len(difference))}

    student.eval()
    evaluated = job.evaluate(data, score)["difference"]
    assert not student.training
    return evaluated, student[1].running_var.tolist(), int(student[1].num_batches_tracked), job.position


def test_modes_buffers_and_evaluation_are_those_of_one_rank():
    """The last batch has 3 samples: with 4 ranks one has none."""
    (alone,) = run_ranks(1, modes_and_state)
    for ranks in (2, 4):
        for found in run_ranks(ranks, modes_and_state):
            assert found[0] == pytest.approx(alone[0], rel=1e-12)
            assert found[1] == pytest.approx(alone[1], rel=1e-12)
            assert found[2:] == alone[2:] == (2, 7)


def going_back(rank, folder):
    """Train, save in the middle, go back, and train the rest again."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = TensorDataset(INPUTS.flatten(0, 1))
    loader = DataLoader(data, batch_size=7, shuffle=True)
    job, model, optimizer, scheduler, loader = paceline.prepare(model, optimizer, scheduler, loader)
    ends = []

    def train():
        for _ in job.epochs(3):
            for (batch,) in loader:
                optimizer.zero_grad()
                job.backward((model(batch) + 0.1 * torch.randn(2) - 1).square().mean())  # draws: its state is saved
                optimizer.step()
                if not ends and job.step_number == 8:
                    job.save(folder)
            scheduler.step()
        ends.append(values(model))

    train()
    job.load(folder)
    assert job.step_number == 8
    assert job.position == 51
    train()
    return [torch.equal(first, again) for first, again in zip(*ends, strict=True)], job.step_number


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_goes_back_to_a_checkpoint_in_the_middle_of_a_pass(tmp_path, ranks):
    for same, steps in run_ranks(ranks, going_back, tmp_path / "saved"):
        assert all(same)
        assert steps == 15


def test_a_module_of_buffers_keeps_what_the_loop_counts(tmp_path):
    """As docs/loops.md shows: also what the loop counts after the update, before it asks for the next batch."""
    state = nn.Module()
    state.register_buffer("waited", torch.zeros((), dtype=torch.long))
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, state, model, optimizer, loader = paceline.prepare(state, model, optimizer, loader)
    for (batch,) in loader:
        job.backward(model(batch).mean())
        optimizer.step()
        state.waited += 1
    job.save(tmp_path / "saved")
    state.waited.zero_()
    job.load(tmp_path / "saved")
    job.close()
    assert int(state.waited) == 3


class LastSeen(nn.Module):
    """A buffer that each rank writes from its own samples."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, batch):
        self.seen.copy_(batch.sum())
        return self.inner(batch)


def buffers_after_the_passes(rank):
    model = LastSeen()
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for _ in job.epochs(1):
        for (batch,) in loader:
            job.backward(model(batch).mean())
            optimizer.step()
    return float(model.seen)


def test_buffers_are_equal_after_the_last_pass():
    first, second = run_ranks(2, buffers_after_the_passes)
    assert first == second


def looked_at_first(rank):
    """A loop looks at a batch before it begins."""
    model, optimizer = with_optimizer()
    data = TensorDataset(INPUTS.flatten(0, 1))
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    next(iter(loader))
    return pass_by_pass(job, model, optimizer, loader), job.step_number, job.position


def pass_by_pass(job, model, optimizer, loader):
    passes = []
    for epoch in job.epochs(3):
        passes.append(epoch)
        for (batch,) in loader:
            optimizer.zero_grad()
            job.backward(model(batch).mean())
            optimizer.step()
    assert job.last.step == job.step_number  # the last step has ended with the loop
    return passes


def in_loop(loop, loader=None, scheduler=None):
    """The notices of one rank's loop, and its error."""
    model, optimizer = with_optimizer()
    more = [] if scheduler is None else [scheduler(optimizer)]
    if loader is None:  # not `or`: a loader without batches is false
        loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, model, optimizer, loader, *more = paceline.prepare(model, optimizer, loader, *more)
    notices = []
    job.notice = lambda text, everywhere=False: notices.append(text)
    try:
        loop(job, model, optimizer, loader)
    except PacelineError as error:
        return notices, error
    return notices, None


def trains(job, model, optimizer, loader, clear=lambda optimizer, number: optimizer.zero_grad()):
    for number in job.epochs(2):
        for (batch,) in loader:
            clear(optimizer, number)
            job.backward(model(batch).mean())
            optimizer.step()


def clears_nothing(*objects):
    trains(*objects, clear=lambda optimizer, number: None)


def clears_to_zeros(*objects):
    trains(*objects, clear=lambda optimizer, number: optimizer.zero_grad(set_to_none=False))


def accumulates(job, model, optimizer, loader):
    for _ in job.epochs(2):
        for number, (batch,) in enumerate(loader):
            job.backward(model(batch).mean())
            if number == 2:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("loop", [trains, clears_nothing, clears_to_zeros, accumulates], ids=lambda loop: loop.__name__)
def test_gradients_that_nothing_clears_are_told(loop):
    notices, error = in_loop(loop)
    assert error is None
    assert any("which nothing has cleared" in notice for notice in notices) == (loop is clears_nothing)


def never_updates(job, model, optimizer, loader):
    for _ in job.epochs(3):
        for (batch,) in loader:
            job.backward(model(batch).mean())


def counts_by_a_text(job, model, optimizer, loader):
    list(job.epochs("3"))


def other_layer(job, model, optimizer, loader):
    model[2] = nn.Linear(5, 2).double()
    trains(job, model, optimizer, loader)


def uses_another_model(job, model, optimizer, loader):
    trains(job, net(1), optimizer, loader)


SHORT = {"batch_size": 9, "drop_last": True}
LOOPS_AT_FAULT = [
    (never_updates, {}, "no optimizer stepped", "optimizer.step() after job.backward(loss)"),
    (counts_by_a_text, {}, "it is '3' of type str", "write count=3"),
    (other_layer, {}, "2.weight is another parameter now", "before the optimizer is made"),
    (uses_another_model, {}, "no backward pass has reached", "of the models that paceline.prepare returned"),
    (trains, SHORT, "the first pass over it had none", "leave out drop_last=True"),
]


@pytest.mark.parametrize(
    ("loop", "options", "found", "fix"), LOOPS_AT_FAULT, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_loop_at_fault_is_told_before_its_second_pass(loop, options, found, fix):
    _, error = in_loop(loop, DataLoader(TensorDataset(INPUTS[0]), **{"batch_size": 2, **options}))
    assert found in error.found
    assert fix in error.fix


def test_samples_that_make_no_batch_are_told_by_the_loader():
    loader = DataLoader([torch.zeros(length) for length in (2, 3, 4)], batch_size=3)
    _, error = in_loop(trains, loader)
    assert "equal size" in error.found
    assert "hand the DataLoader collate_fn=..." in error.fix


def test_a_look_at_a_batch_is_no_pass():
    assert run_ranks(2, looked_at_first) == [([0, 1, 2], 12, 90)] * 2


def loops_over(rank, again):
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    try:
        for _ in job.epochs(2):
            if again:
                list(loader)
                list(loader)
            else:
                list(zip(loader, loader, strict=True))
    except UsageError as error:
        return error.found, error.fix
    return None


@pytest.mark.parametrize(
    ("again", "said", "fix"),
    [(True, "again in epoch 0", "for _ in range(n)"), (False, "job.backward was not called", "DataLoader of its own")],
)
def test_an_epoch_is_one_pass(again, said, fix):
    ((found, advice),) = run_ranks(1, loops_over, again)
    assert said in found
    assert fix in advice


def asks_an_earlier_iterator(rank):
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    earlier = iter(loader)
    try:
        for batches in (earlier, iter(loader), earlier):
            (batch,) = next(batches)
            job.backward(model(batch).mean())
            optimizer.step()
    except UsageError as error:
        return error.found
    return None


def test_two_iterators_at_once_are_refused():
    (found,) = run_ranks(1, asks_an_earlier_iterator)
    assert "an earlier iterator" in found


def goes_back_within(rank, folder):
    """Go back in the middle of a pass, to that pass; the sampler's own generator goes back too."""
    model, optimizer = with_optimizer()
    data = TensorDataset(INPUTS.flatten(0, 1))
    loader = DataLoader(data, batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(2))
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    seen = []
    has_loaded = False
    for epoch in job.epochs(2):
        for (batch,) in loader:
            optimizer.zero_grad()
            job.backward((model(batch) - 1).square().mean())
            optimizer.step()
            seen.append((epoch, job.step_number, batch.sum().item()))
            if job.step_number == 7:
                job.save(folder)
            if job.step_number == 9 and not has_loaded:
                has_loaded = True
                job.load(folder)
                break
    return seen


def test_a_loop_goes_back_within_a_pass(tmp_path):
    for seen in run_ranks(2, goes_back_within, tmp_path / "saved"):
        assert [(epoch, step) for epoch, step, _ in seen] == [
            *((step > 5, step) for step in range(1, 10)),
            *((1, step) for step in range(8, 11)),
        ]
        assert seen[7:9] == seen[9:11]


def saved_before_the_update(rank, folder):
    """Save when a batch is taken, or has a gradient, and go back; the next batch is that one again."""
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS.flatten(0, 1)), batch_size=7, shuffle=True)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    batches = iter(loader)
    for at in range(4):
        (batch,) = next(batches)
        optimizer.zero_grad()
        if at == 2:
            job.save(folder / "taken")
        job.backward(model(batch).square().mean())
        if at == 2:
            job.save(folder / "derived")
            expected = batch
            break
        optimizer.step()
    found = []
    for name in ("taken", "derived"):
        job.load(folder / name)
        (batch,) = next(iter(loader))
        optimizer.zero_grad()
        job.backward(model(batch).square().mean())
        optimizer.step()
        found.append((torch.equal(batch, expected), job.step_number, job.position))
    return found


def test_a_batch_without_an_update_is_taken_again_after_a_load(tmp_path):
    for found in run_ranks(2, saved_before_the_update, tmp_path):
        assert found == [(True, 3, 21)] * 2


def updates_without_the_loader(rank):
    """A loop counts passes, and makes its batches itself."""
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for _ in job.epochs(2):
        optimizer.zero_grad()
        job.backward(model(own(job, 0)).mean(), weight=1)
        optimizer.step()
    return job.step_number, job.total_steps


def test_a_loop_may_leave_its_loader_alone():
    assert run_ranks(1, updates_without_the_loader) == [(2, 0)]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(4, dtype=torch.float64)


def left_early(rank):
    """A loop that leaves passes by `break`, over a stream without an end."""
    model, optimizer = with_optimizer()
    job, model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(Endless(), batch_size=4))
    passes = []
    for epoch in job.epochs(3):
        passes.append(epoch)
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            job.backward(model(batch).mean())
            optimizer.step()
            if number == 1:
                break
    return passes, job.step_number, job.position


def test_a_loop_may_leave_its_passes():
    assert run_ranks(2, left_early) == [([0, 1, 2], 6, 24)] * 2


def look_at_a_batch(job, model, loader):
    next(iter(loader))
    for _ in job.epochs(2):
        next(iter(loader))


def evaluate_each_pass(job, model, loader):
    for _ in job.epochs(2):
        for (batch,) in loader:
            job.backward(model(batch).mean())
            job.optimizer.step()
        list(loader)


def evaluate_uncounted_passes(job, model, loader):
    for _ in range(2):
        for (batch,) in loader:
            job.backward(model(batch).mean())
            job.optimizer.step()
        list(loader)


@pytest.mark.parametrize(
    "loop",
    [look_at_a_batch, evaluate_each_pass, evaluate_uncounted_passes],
    ids=lambda loop: loop.__name__,
)
def test_a_pass_that_does_not_train_is_refused(loop):
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    with pytest.raises(UsageError) as caught:
        loop(job, model, loader)
    job.close()
    said = "again in epoch 0" if loop is evaluate_each_pass else "job.backward was not called"
    assert said in caught.value.found
    assert "DataLoader" in caught.value.fix


def test_a_resumed_pass_may_leave_out_the_batches_that_are_left():
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=4)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    job.cut.go_to(0, 1)  # as a checkpoint in the pass does
    counts = []
    for _ in job.epochs(2):
        counts.append(0)
        for (batch,) in loader:
            if len(batch) == 4:  # leaves out the short last batch
                job.backward(model(batch).mean())
            counts[-1] += 1
    job.close()
    assert counts == [1, 2]


def test_passes_before_the_checkpoint_are_named_once(monkeypatch):
    model, optimizer = with_optimizer()
    loader = DataLoader(TensorDataset(INPUTS[0]), batch_size=2)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    job.cut.go_to(2, 1)  # as a checkpoint does
    said = []
    monkeypatch.setattr(job, "notice", said.append)
    counts = [len([job.backward(model(batch).mean()) for (batch,) in loader]) for _ in range(4)]
    job.close()
    assert counts == [0, 0, 2, 3]
    assert [text.partition(",")[0] for text in said] == ["2 passes over the data came before the checkpoint"]


def early_end(rank):
    """Rank 0 takes a step more than rank 1."""
    job, model, optimizer = paceline.prepare(*with_optimizer())
    try:
        for step in range(3 - rank):
            optimizer.zero_grad()
            job.backward(model(own(job, step)).mean(), weight=1)
            optimizer.step()
        job.close()
    except PacelineError as error:
        return type(error).__name__, str(error)
    return None


def test_a_rank_that_takes_fewer_steps_is_told():
    answers = run_ranks(2, early_end, timeout_s=60)
    kind, said = answers[0]
    assert kind == "PeerLostError"
    assert said.startswith("[rank 0, step 3]")
    assert "waits for rank 1" in said


LOOP = """
import torch, paceline
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job, model, optimizer = paceline.prepare(model, optimizer)
"""


@pytest.mark.parametrize(
    ("head", "call"),
    [
        ("", "paceline.prepare"),
        ("from paceline import prepare\n", "prepare"),
        ("from paceline import prepare as begin\n", "begin"),
        ("import paceline as pl\n", "pl.prepare"),
        ("from paceline.integrations.accelerate import Accelerator\n", "Accelerator"),
        ("from paceline.integrations.transformers import Trainer\n", "Trainer"),
        ("from paceline.integrations import lightning as pl\n", "pl.Strategy"),
    ],
    ids=["module", "function", "function-as", "module-as", "accelerate", "transformers", "lightning"],
)
@pytest.mark.parametrize("command", [["run"], ["verify"], ["plan"]])
def test_the_command_says_it_before_it_starts_a_process(tmp_path, command, head, call):
    file = tmp_path / "loop.py"
    file.write_text(head + LOOP.replace("paceline.prepare", call))
    ended = run_command(tmp_path, *command, "--plan", "pipeline=2", file)
    assert ended.code == 2
    assert "found: pipeline needs the loss as a function" in ended.err
    assert "paceline.Workload" in ended.err
    assert not (tmp_path / "runs").exists()


SCRIPTS = {
    "accelerate": "from paceline.integrations.accelerate import Accelerator\nAccelerator()\n",
    "transformers": "from paceline.integrations import transformers\nclass A(transformers.TrainerMixin):\n    pass\n",
    "trl": "from paceline.integrations.trl import SFTTrainer as Trainer\n",
    "lightning": "import paceline.integrations.lightning\npaceline.integrations.lightning.Strategy()\n",
}
REFUSED_FLAGS = [(script, ["--resume"]) for script in SCRIPTS]
# The first has the default value.
REFUSED_FLAGS += [("lightning", flags) for flags in (["--checkpoint-every", "100"], ["--keep", "2"])]


@pytest.mark.parametrize(("script", "flags"), REFUSED_FLAGS)
def test_flags_that_a_trainer_does_not_follow_are_refused(script, flags, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPTS[script])
    ended = run_command(tmp_path, "run", *flags, "train.py")
    assert ended.code == 2
    assert f"{flags[0]} does not apply to train.py" in ended.err
    assert not (tmp_path / "runs").exists()


SHORT = """
import sys
for _ in range(2):
    job.backward(model(torch.ones(2, 2)).mean(), weight=2)
    optimizer.step()
sys.exit()
"""


def test_a_loop_shorter_than_the_verification_may_end_by_exit(tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(LOOP + SHORT)
    ended = run_command(tmp_path, "verify", "-n", "2", file)
    assert ended.code == 0, ended.err
    assert "2 losses and " in ended.out


def test_loop_job_checkpoint_has_changes_made_after_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PACELINE_PLAN", '{"checkpoint_every": 2}')
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    loader = DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), batch_size=1)
    job, model, optimizer, plateau, loader = paceline.prepare(model, optimizer, plateau, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        job.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        job.evaluate(loader.dataset, lambda model, batch: {"loss": (model(batch[0]).sum(), 1)})
        plateau.step(float(job.step_number))  # it gets worse with each
        if job.step_number == 5:
            break
    job.close()
    for step in (2, 4):
        manifest = json.loads((tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
        assert manifest["scheduler"]["last_epoch"] == step
        assert manifest["loop"] == {"pass": 0, "batch": step}


def test_a_share_is_in_the_gradient_and_not_in_the_record():
    """Parts of a batch, of which each adds its share."""
    model, optimizer = with_optimizer()
    job, model, optimizer = paceline.prepare(model, optimizer)
    expected = (net()(INPUTS[0]) - 1).square().mean()
    for part in (slice(0, 2), slice(2, 6)):
        rows = INPUTS[0][part]
        share = len(rows) / 6
        job.backward((model(rows) - 1).square().mean() * share, weight=len(rows), share=share)
    gradients = {name: gradient.clone() for name, gradient in job.gradients().items()}
    optimizer.step()
    job.end_step()
    assert job.last.loss == pytest.approx(expected.item(), rel=1e-12)
    alone = net()
    (alone(INPUTS[0]) - 1).square().mean().backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    for share in (0, -1.0, True, float("inf"), None):
        with pytest.raises(LossError, match="share"):
            job.backward(model(INPUTS[0]).mean(), weight=6, share=share)
