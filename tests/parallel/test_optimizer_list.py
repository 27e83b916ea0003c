"""A workload with several optimizers ends where one process does, under every plan, and comes back."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.reshard import take
from paceline.comm import api
from paceline.nouns.errors import CheckpointError, PacelineError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.parallel.optimizer_list import OptimizerList
from paceline.train import snapshot
from paceline.train.job import Job

from support.ranks import run_ranks
from support.whole_optimizers import GlobalStep, Lamb, muon_and_adamw, workload

TOLERANCE = 1e-10


def sgd_adagrad_lamb(model):
    """Three, of which one has two groups and one has state from the start; a tuple."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    norms = [parameter for name, parameter in named if "norm" in name]
    words = [parameter for name, parameter in named if "words" in name]
    matrices = [parameter for name, parameter in named if "norm" not in name and "words" not in name]
    groups = [{"params": matrices[::2]}, {"params": matrices[1::2], "lr": 0.02}]
    return torch.optim.SGD(norms, lr=0.1, momentum=0.9), torch.optim.Adagrad(words, lr=0.01), Lamb(groups)


def one_in_a_list(model):
    return [torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)]


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


MAKES = {make.__name__: make for make in (muon_and_adamw, sgd_adagrad_lamb, one_in_a_list)}
PLANS = {
    2: ("replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "tensor=2", "pipeline=2"),
    4: ("replicate=2,shard=2", "shard=2,tensor=2", "pipeline=2,shard=2", "pipeline=2,tensor=2"),
}
CELLS = [(make, plan) for make in MAKES for plans in PLANS.values() for plan in plans]


def job_of(make, plan, **parts):
    parts.setdefault("scheduler", step_lr)
    return Job(workload("lamb", optimizer=make, **parts), Plan.parse(plan))


def state_of(job):
    """What this rank holds of the model and of the optimizers' state, and which part it is."""
    held = job.parallel.local_shards()
    parts = snapshot.model_parts(job.model, held, job.size)
    more, description = snapshot.optimizer_state(job.model, job.optimizer, held, job.size)
    state = {name: (part.tensor.clone(), part.shard.shard_spec) for name, part in {**parts, **more}.items()}
    return state, description["owners"]


def train_all(rank, cells):
    api.init()
    results = {}
    for make, plan in cells:
        job = job_of(MAKES[make], plan)
        steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
        results[make, plan] = steps, *state_of(job)
        job.close()
    return results


@functools.cache
def results(size):
    cells = [(make, "replicate=1") for make in MAKES]
    if size > 1:
        cells = [cell for cell in CELLS if cell[1] in PLANS[size]]
    return run_ranks(size, train_all, cells, timeout_s=300)


@pytest.mark.parametrize(("make", "plan"), CELLS)
def test_it_ends_where_one_process_does(make, plan):
    steps, whole, owners = results(1)[0][make, "replicate=1"]
    assert {owners[name] for name in owners} == set(range(1, 1 + len(MAKES[make](workload("lamb").model()))))
    seen = set()
    for answers in results(Plan.parse(plan).world_size):
        other_steps, state, other_owners = answers[make, plan]
        assert other_owners.items() <= owners.items()
        for step, other_step in zip(steps, other_steps, strict=True):
            assert other_step == pytest.approx(step, rel=TOLERANCE)
        for name, (tensor, shard_spec) in state.items():
            expected = take(whole[name][0], shard_spec)
            torch.testing.assert_close(tensor, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: n + m)
        seen |= state.keys()
    assert seen == whole.keys()


def test_in_one_process_it_is_a_plain_loop_with_both():
    """The plain loop has no Paceline in it."""
    declared = workload("lamb", optimizer=muon_and_adamw, batch_size=24, clip_norm=None)
    api.init()
    job = Job(declared, Plan())
    model = copy.deepcopy(job.model)
    optimizers = muon_and_adamw(model)
    batch = torch.utils.data.default_collate(declared.data)
    losses = []
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = declared.loss(model, batch)
        (total / count).backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(total.detach()) / count)
    assert [job.step(each) for each in job.batches()] == pytest.approx(losses, rel=TOLERANCE)
    for parameter, other in zip(job.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=TOLERANCE, atol=TOLERANCE)


def save_and_go_on(rank, folder, make, plan):
    api.init()
    job = job_of(MAKES[make], plan)
    batches = job.batches()
    for _ in range(3):
        job.step(next(batches))
    job.save(folder)
    return [job.step(batch) for batch in batches], state_of(job)[0]


def load_and_go_on(rank, folder, make, plan, is_back):
    api.init()
    job = job_of(MAKES[make], plan)
    if is_back:
        for batch in job.batches():
            job.step(batch)
    job.load(folder)
    return [job.step(batch) for batch in job.batches()], state_of(job)[0]


SAVED = [
    ("muon_and_adamw", "replicate=2", "replicate=2"),
    ("sgd_adagrad_lamb", "pipeline=2", "pipeline=2"),
    ("muon_and_adamw", "shard=2", "shard=2"),
    ("sgd_adagrad_lamb", "shard=2,tensor=2", "shard=2,tensor=2"),
    ("muon_and_adamw", "shard=2,tensor=2", "replicate=1"),
    ("sgd_adagrad_lamb", "replicate=1", "pipeline=2,shard=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "plan", "other"), SAVED)
def test_all_of_them_come_back(tmp_path, make, plan, other):
    folder = str(tmp_path / "saved")
    ranks, others = Plan.parse(plan).world_size, Plan.parse(other).world_size
    before = run_ranks(ranks, save_and_go_on, folder, make, plan)
    count = len(MAKES[make](workload("lamb").model()))
    assert set(read_manifest(tmp_path / "saved")["optimizer"]["owners"].values()) == set(range(1, count + 1))
    for is_back in (False, True):
        after = run_ranks(others, load_and_go_on, folder, make, other, is_back)
        if plan != other:
            assert after[0][0] == pytest.approx(before[0][0], rel=TOLERANCE)
            continue
        for (losses, state), (expected_losses, expected) in zip(after, before, strict=True):
            assert losses == expected_losses
            assert all(torch.equal(state[name][0], expected[name][0]) for name in expected)


def swapped(model):
    return muon_and_adamw(model)[::-1]


def with_a_group_more(model):
    matrices, others = muon_and_adamw(model)
    first, *rest = others.param_groups[0]["params"]
    return matrices, torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=0.01)


def of_another_class(model):
    return [torch.optim.SGD(matrices(model), lr=0.01, momentum=0.9), muon_and_adamw(model)[1]]


@pytest.mark.parametrize(
    "other", [swapped, with_a_group_more, of_another_class, one_in_a_list, lambda m: Lamb(m.parameters())]
)
def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path, other):
    api.init()
    job = job_of(muon_and_adamw, "replicate=1", scheduler=None)
    job.step(next(job.batches()))
    job.save(tmp_path / "saved")
    again = job_of(other, "replicate=1", scheduler=None)
    before = [parameter.detach().clone() for parameter in again.model.parameters()]
    with pytest.raises(CheckpointError, match="make the optimizer as it was when the checkpoint was saved"):
        again.load(tmp_path / "saved")
    for parameter, value in zip(again.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 2 and parameter.requires_grad]


def others(model):
    return [parameter for parameter in model.parameters() if parameter.dim() != 2 and parameter.requires_grad]


def twice(model):
    one = torch.optim.AdamW(model.parameters())
    return [one, one]


class Closure(torch.optim.AdamW):
    """Has an LBFGS inside."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.inner = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])


# What `optimizer` returns, the plan, the error and what it says. On one rank: all is found before the first step.
REFUSED = {
    "nothing in the list": (lambda m: [], "it returned none"),
    "a class": (lambda m: [torch.optim.AdamW, torch.optim.SGD(m.parameters())], "number 0 of the 2 that it returned is <class"),
    "parameters": (lambda m: list(m.parameters()), "number 0 of the"),
    "a scheduler": (lambda m: [torch.optim.AdamW(m.parameters()), None], "number 1 of the 2 that it returned is None"),
    "a list in the list": (lambda m: [muon_and_adamw(m)], "number 0 of the 1 that it returned is ["),
    "a dict": (lambda m: {"all": torch.optim.AdamW(m.parameters())}, "return several as a list"),
    "nothing": (lambda m: None, "it made a NoneType"),
    "one of them twice": (twice, "number 1 of the 2 that it returned is there twice"),
    "a parameter in two": (lambda m: [torch.optim.AdamW(matrices(m)), torch.optim.SGD(m.parameters())], "row is in number 0 and in number 1"),
    "one tied weight in two": (lambda m: [torch.optim.AdamW(m.parameters()), torch.optim.SGD([m.back.weight])], "words.weight is in number 0 and in number 1"),
    "parameters in none": (lambda m: [torch.optim.AdamW(matrices(m))], "gain, first.bias, second.bias and 2 more are in none of the 1"),
    "one parameter in none": (lambda m: [torch.optim.AdamW(matrices(m)), torch.optim.SGD(others(m)[1:])], "is in none of the 2"),
    "a parameter of another model": (lambda m: [torch.optim.AdamW(m.parameters()), torch.optim.SGD([nn.Parameter(torch.ones(3))])], "that is not the model's"),
    "one that wants a closure": (lambda m: [torch.optim.AdamW(matrices(m)), torch.optim.LBFGS(others(m))], "LBFGS evaluates the loss several times"),
    "a closure inside": (lambda m: [Closure(m.parameters())], "LBFGS evaluates the loss several times"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_list_of_optimizers_is_refused(case):
    make, found = REFUSED[case]
    api.init()
    with pytest.raises(WorkloadError) as caught:
        job_of(make, "replicate=1")
    text = str(caught.value)
    assert found in text, text
    assert "\n  fix: " in text


class OfSeveral(torch.optim.SGD):
    """Made of two, and does not say that whole parameters are enough."""

    def __init__(self, model):
        super().__init__(matrices(model), lr=0.1)
        self.others = torch.optim.SGD(others(model), lr=0.1)


# Under a plan of two ranks: the plan, what `optimizer` returns, what the error says.
REFUSED_BY_PLAN = [
    ("shard=2", lambda m: [torch.optim.AdamW(matrices(m)), GlobalStep(others(m))], "GlobalStep updates a parameter from the others"),
    ("tensor=2", lambda m: [torch.optim.AdamW(matrices(m)), GlobalStep(others(m))], "GlobalStep updates a parameter from the others"),
    ("pipeline=2", lambda m: [GlobalStep(matrices(m)), torch.optim.AdamW(others(m))], "write replicate in place of pipeline"),
    ("shard=2,offload=on", muon_and_adamw, "leave offload out"),
    ("pipeline=2", lambda m: [OfSeveral(m)], "the workload's optimizer is made of several (OfSeveral with SGD inside)"),
    ("shard=2", lambda m: [torch.optim.AdamW(matrices(m))], "in none of the 1"),
    ("tensor=2", lambda m: [torch.optim.AdamW(m.parameters()), torch.optim.SGD(others(m))], "in number 0 and in number 1"),
    ("pipeline=2", lambda m: [torch.optim.AdamW(matrices(m)), torch.optim.SGD(others(m)[1:])], "is in none of the 2"),
    ("server=1", muon_and_adamw, "it returns 2 (Muon, AdamW), and servers run one"),
]  # fmt: skip


def refuse_all(rank):
    api.init()
    texts = []
    for plan, make, _ in REFUSED_BY_PLAN:
        try:
            parsed = Plan(mesh="replicate=2", server=1) if plan == "server=1" else Plan.parse(plan)
            Job(workload("lamb", optimizer=make), parsed)
            texts.append("")
        except PacelineError as error:
            texts.append(str(error))
    return texts


def test_optimizer_list_unfit_for_a_plan_is_refused_on_all_ranks():
    for texts in run_ranks(2, refuse_all):
        for (plan, _, found), text in zip(REFUSED_BY_PLAN, texts, strict=True):
            assert found in text, (plan, text)
            assert "fix:" in text


def test_the_list_says_what_it_has():
    api.init()
    job = job_of(muon_and_adamw, "replicate=1")
    assert isinstance(job.optimizer, OptimizerList)
    assert [type(one) for one in job.optimizer] == [torch.optim.Muon, torch.optim.AdamW]
    assert job.optimizer[1].param_groups[0] is job.optimizer.param_groups[1]
    with pytest.raises(UsageError, match=r"write job\.optimizer\[0\]\.add_param_group"):
        job.optimizer.add_param_group({"params": []})
    job.step(next(job.batches()))
    again = job_of(muon_and_adamw, "replicate=1").optimizer
    again.load_state_dict(job.optimizer.state_dict())
    assert len(again[1].state) == len(job.optimizer[1].state) > 0
    job.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in job.model.parameters())


def test_one_optimizer_may_still_leave_parameters_out():
    """A head that is trained alone, say; a list says of each parameter whose it is."""
    api.init()
    job = job_of(lambda model: torch.optim.AdamW(matrices(model)), "replicate=1")
    assert job.step(next(job.batches())) > 0
