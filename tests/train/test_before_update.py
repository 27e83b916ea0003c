"""A function of the user's own between backward and update: the same on any number of ranks as in one process."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch

import paceline
from paceline.comm import api
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.kill_and_resume_checks import check_goes_on, check_verified
from support.ranks import run_ranks
from support.whole_optimizers import muon_and_adamw, workload

TOLERANCE = 1e-10
SEEN = []


def signs(gradients):
    """Keeps the names, freezes one, and takes others by their sign."""
    SEEN.append({name: gradient.clone() for name, gradient in gradients.items()})
    gradients["row"].zero_()
    for name, gradient in gradients.items():
        if name.startswith("first"):
            gradient.copy_(gradient.sign() * gradient.abs().sqrt())


def noisy(gradients):
    """Draws, by torch and by Python."""
    for gradient in gradients.values():
        gradient += torch.randn_like(gradient) / 100 * random.random()


FUNCTIONS = {"signs": signs, "noisy": noisy}
CELLS = [
    (kind, plan, parts)
    for kind in FUNCTIONS
    for plan in ("replicate=2", "replicate=4")
    for parts in ({}, {"clip_norm": None, "micro_batch_size": 1})
]


def declared(kind, **parts):
    return workload("list", before_update=FUNCTIONS[kind], **parts)


def train_all(rank, cells):
    api.init()
    results = []
    for kind, plan, parts in cells:
        SEEN.clear()
        job = Job(declared(kind, **parts), Plan.parse(plan))
        steps = [(job.step(batch), job.last.gradient_norm or 0.0) for batch in job.batches()]
        results.append((steps, list(SEEN), {name: value.clone() for name, value in job.model.state_dict().items()}))
        job.close()
    return results


@functools.cache
def results(size):
    cells = [(kind, f"replicate={size}", parts) for kind, plan, parts in CELLS if plan == "replicate=2"]
    return run_ranks(size, train_all, cells, timeout_s=300)


@pytest.mark.parametrize("cell", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hand_in_and_take_what_one_process_does(ranks, cell):
    steps, seen, state = results(1)[0][cell]
    assert len(steps) == 5
    first = results(ranks)[0][cell]
    for answers in results(ranks):
        other_steps, other_seen, other_state = answers[cell]
        for step, other in zip(steps, other_steps, strict=True):
            assert other == pytest.approx(step, rel=TOLERANCE)
        for gradients, others in zip(seen, other_seen, strict=True):
            assert gradients.keys() == others.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(others[name], gradient, rtol=TOLERANCE, atol=TOLERANCE)
        for name, value in state.items():
            torch.testing.assert_close(other_state[name], value, rtol=TOLERANCE, atol=TOLERANCE)
            assert torch.equal(other_state[name], first[2][name])  # bit for bit between ranks


def test_in_one_process_it_is_a_plain_loop():
    """The plain loop has no Paceline in it: the function comes before the clipping."""
    api.init()
    job = Job(declared("signs", batch_size=24), Plan())
    model = copy.deepcopy(job.model)
    optimizers = muon_and_adamw(model)
    batch = torch.utils.data.default_collate(job.workload.data)
    losses = []
    for _ in range(5):
        model.zero_grad()
        total, count = job.workload.loss(model, batch)
        (total / count).backward()
        signs({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(total.detach()) / count)
    assert [job.step(batch) for batch in job.batches()] == pytest.approx(losses, rel=TOLERANCE)
    for parameter, other in zip(job.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-9)


def test_it_has_the_names_of_what_has_a_gradient():
    SEEN.clear()
    api.init()
    job = Job(declared("signs"), Plan())
    job.step(next(job.batches()))
    trained = {name for name, parameter in job.model.named_parameters() if parameter.requires_grad}
    assert SEEN[0].keys() == trained
    assert "frozen.weight" not in trained


@pytest.mark.parametrize("before", [0, 4])
def test_what_it_draws_comes_again_after_a_checkpoint(tmp_path, before):
    api.init()
    job = Job(declared("noisy"), Plan())
    batches = job.batches()
    for _ in range(2):
        job.step(next(batches))
    job.save(tmp_path / "saved")
    expected = [job.step(batch) for batch in batches]
    again = Job(declared("noisy"), Plan())
    batches = again.batches()
    for _ in range(before):
        again.step(next(batches))
    again.load(tmp_path / "saved")
    assert [again.step(batch) for batch in again.batches()] == expected


def test_what_it_draws_leaves_dropout_alone():
    api.init()
    job = Job(declared("noisy"), Plan())
    state, others = torch.get_rng_state(), random.getstate()
    job.step(next(job.batches()))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == others


def replaces(gradients):
    gradients["row"] = gradients["row"] * 2


def removes(gradients):
    del gradients["row"]


def adds(gradients):
    gradients["more"] = torch.ones(2)


def empties(gradients):
    gradients.clear()


WRONG = {
    "another tensor": (replaces, "it put another tensor in the place of row"),
    "a removed one": (removes, "it removed row"),
    "one more": (adds, "it added more"),
    "none left": (empties, "it removed back.weight|it removed first.bias"),
    "a returned dict": (lambda g: {name: 2 * value for name, value in g.items()}, "it returned {"),
    "a returned number": (lambda g: 3, "it returned 3 of type int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_before_update_may_change_only_the_gradients(case):
    function, found = WRONG[case]
    api.init()
    job = Job(workload("lamb", before_update=function), Plan())
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    batch = next(job.batches())
    with pytest.raises(WorkloadError) as caught:
        job.step(batch)
    assert any(each in str(caught.value) for each in found.split("|")), str(caught.value)
    assert caught.value.step == 1
    assert "\n  fix: write gradients[name].copy_" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(job.model.parameters(), before, strict=True))


NO_FUNCTION = {
    "a number": (3, "it is 3 of type int"),
    "a dict": ({"row": 1}, "it is {'row': 1}"),
    "a function of nothing": (lambda: None, "can't be called so"),
    "a function of two": (lambda model, gradients: None, "can't be called so"),
    "text": ("clip", "it is 'clip' of type str"),
}


@pytest.mark.parametrize("case", NO_FUNCTION)
def test_what_is_no_function_of_the_gradients_is_refused_at_once(case):
    value, found = NO_FUNCTION[case]
    with pytest.raises(WorkloadError) as caught:
        workload("lamb", before_update=value)
    assert "the workload's before_update should be a function of (gradients)" in str(caught.value)
    assert found in str(caught.value)


REFUSED = {
    "shard=2": "under shard no rank has them so",
    "shard=2,zero=1": "under shard no rank has them so",
    "tensor=2": "under tensor no rank has them so",
    "pipeline=2": "under pipeline no rank has them so",
    "server": "under server no rank has them so",
}


def start(rank):
    api.init()
    texts = {}
    for line in REFUSED:
        plan = Plan(mesh="replicate=2", server=1) if line == "server" else Plan.parse(line)
        try:
            Job(declared("signs"), plan)
        except PacelineError as error:
            texts[line] = str(error)
    return texts


def test_before_update_needs_a_plan_with_whole_gradients():
    for texts in run_ranks(2, start):
        for line, found in REFUSED.items():
            assert found in texts[line]
            assert "to clip by the norm, set clip_norm" in texts[line]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_rank(gradients):
    gradients["gain"] += paceline.rank()


def train_apart(rank, ways):
    api.init()
    answers = []
    for has_own_batches in ways:
        batches = {"data": None, "batch_size": 0} if has_own_batches else {}
        declared = workload("lamb", optimizer=sgd, before_update=by_rank, clip_norm=None, **batches)
        job = Job(declared, Plan(mesh="replicate=2"))
        own = torch.utils.data.default_collate(workload("lamb").data[:4])
        try:
            for batch in [own] * 3 if has_own_batches else job.batches():
                job.step(batch)
        except PacelineError as error:
            answers.append((str(error), job.step_number))
    return answers


def test_before_update_difference_between_ranks_is_told_on_all():
    for answers in run_ranks(2, train_apart, (False, True)):
        assert len(answers) == 2
        for text, steps in answers:
            assert "after step 1 gain differs between rank 0 and rank 1" in text
            assert steps == 1


FILE = """
import os, signal, torch
import paceline
from support.whole_optimizers import workload

def before_update(gradients):
    for gradient in gradients.values():
        gradient += torch.randn_like(gradient) / 10
    gradients["row"].zero_()

workload = workload("list", before_update=before_update, steps=11, data=[
    {"ids": torch.arange(6) * number % 97, "labels": torch.arange(6) + number} for number in range(21)])
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if job.step_number == int(os.environ.get("KILL_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
    print("ends at", job.step_number, repr(sum(float(p.detach().sum()) for p in job.model.parameters())))
"""


@pytest.mark.slow
@pytest.mark.complete  # in one process above; killed: test_streams.py
def test_a_killed_run_goes_on_bit_for_bit_and_verify_agrees(tmp_path):
    file = tmp_path / "changed.py"
    file.write_text(FILE)
    check_goes_on(tmp_path, file)
    check_verified(tmp_path, file)
