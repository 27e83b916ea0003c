"""`optimizer_states`: Adam's moments in few bits are those of one process under any plan, and survive a checkpoint."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
import warnings
from dataclasses import asdict

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.reshard import bits_of, take
from paceline.comm import api
from paceline.nouns.errors import CheckpointError, PlanError
from paceline.nouns.patching import patched
from paceline.nouns.plan import Plan
from paceline.nouns.profile import OPTIMIZER
from paceline.nouns.shard_spec import Cut, ShardSpec
from paceline.parallel.low_precision_states import (
    is_packed,
    lower_in_place,
    memory_of,
    pieces_of,
    put_together,
    spec_of_piece,
    updated_whole,
    with_low_precision,
)
from paceline.parallel.optimizer_list import OptimizerList
from paceline.profile.simulate import simulate, step_traffic
from paceline.train import snapshot
from paceline.train.count_memory import count_memory
from paceline.train.job import Job

from support.closed_traffic import by_operation
from support.ranks import run_ranks

pytest.importorskip("torchao", reason="needs the extra lowbits")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, as it is imported

STATES = ("8bit", "4bit", "float8")
PLANS = ("replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "tensor=2")
STEPS = 4
CPU = torch.device("cpu")
# By name: rows of each parameter, all of 128 columns. Of two ranks' halves of `odd` none is whole blocks.
ROWS = {"even": 64, "odd": 66, "small": 10}


class Net(nn.Module):
    """Has a weight whose rows are whole blocks on two ranks, one whose are not, and one that stays in full."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(128, ROWS["even"])
        self.odd = nn.Linear(128, ROWS["odd"])
        self.small = nn.Linear(128, ROWS["small"])

    def forward(self, inputs):
        return torch.cat([self.even(inputs), self.odd(inputs), self.small(inputs)], 1)


def loss(model, batch):
    return (model(batch) - 1).square().sum(), len(batch)


def samples():
    random = torch.Generator().manual_seed(0)
    return list(torch.randn(8 * STEPS, 128, generator=random))


def workload(**parts):
    values = {
        "model": Net,
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "data": samples(),
        "batch_size": 8,
        "micro_batch_size": 4,  # one process sums gradients as two ranks do
        "steps": STEPS,
    }
    return paceline.Workload(**{**values, **parts})


def not_compiled():
    """Have torchao's update run as it is written: a compiler takes seconds for each shape."""
    return patched(torch, compile=lambda function, **_: function)


def state_of(job):
    """The bits that this rank holds of parameters and moments, and which part of each they are."""
    held = job.parallel.local_shards()
    parts = snapshot.model_parts(job.model, held, job.size)
    more, _ = snapshot.optimizer_state(job.model, job.optimizer, held, job.size)
    return {name: (bits_of(part.tensor)[0].clone(), part.shard.shard_spec) for name, part in {**parts, **more}.items()}


def train(plan, steps=STEPS, load=None, save=None):
    with not_compiled():
        job = Job(workload(steps=steps), Plan.parse(plan))
        if load is not None:
            job.load(load)
        losses = [job.step(batch) for batch in job.batches()]
        if save is not None:
            job.save(save)
        state = state_of(job)
        job.close()
    return losses, state


def train_all(rank, plans):
    api.init()
    return {plan: train(plan) for plan in plans}


@functools.cache
def alone(states):
    return run_ranks(1, train_all, [f"replicate=1,optimizer_states={states}"])[0][
        f"replicate=1,optimizer_states={states}"
    ]


@functools.cache
def together(states):
    return run_ranks(2, train_all, [f"{plan},optimizer_states={states}" for plan in PLANS], timeout_s=300)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("states", STATES)
def test_two_ranks_end_with_the_bits_of_one_process(states, plan):
    _, expected = alone(states)
    answers = [answer[f"{plan},optimizer_states={states}"] for answer in together(states)]
    if plan == "tensor=2":  # its matrix products are of other sizes, and round otherwise
        for name, (whole, _) in expected.items():
            if name.startswith("model/"):
                for _, state in answers:
                    part, spec = state[name]
                    expected_part = take(whole, spec).view(torch.float32)
                    torch.testing.assert_close(part.view(torch.float32), expected_part, rtol=1e-3, atol=1e-3)
        return
    assert any(name.endswith(".codes/odd.weight") for _, state in answers for name in state)
    for _, state in answers:
        for name, (part, spec) in state.items():
            whole = expected[name][0]
            assert torch.equal(part, take(whole, spec)), name


@pytest.mark.parametrize("states", STATES)
def test_a_moment_in_pieces_is_put_together_as_it_was(states):
    optimizer = with_low_precision(torch.optim.Adam([nn.Parameter(torch.zeros(32, 384))]), states)
    for key in ("exp_avg", "exp_avg_sq"):
        moment = optimizer._new_buffer(torch.zeros(32, 384), key == "exp_avg")
        values = torch.rand(32, 384)
        moment.copy_(values)
        pieces = pieces_of(key, moment)
        assert {tensor.shape[0] for tensor in pieces.values()} == {32 * 384 // math.lcm(384, moment.block_size)}
        again = put_together(optimizer, torch.empty(32, 384), key, pieces)
        assert torch.equal(again.dequantize(), moment.dequantize())
        other = {name: tensor[1:] for name, tensor in pieces.items()}
        assert put_together(optimizer, torch.empty(32, 384), key, other) is None
        assert put_together(optimizer, torch.empty(4, 384), key, pieces) is None
        # The pieces of rows are the rows of the pieces.
        for part in range(2):
            spec = ShardSpec((32, 384), (Cut(0, (32,), part, 2),))
            rows = optimizer._new_buffer(torch.zeros(16, 384), key == "exp_avg")
            rows.copy_(values[16 * part : 16 * part + 16])
            for name, piece in pieces_of(key, rows).items():
                own = take(pieces[name], spec_of_piece(spec, tuple(pieces[name].shape)))
                assert torch.equal(bits_of(piece)[0], bits_of(own)[0])


@pytest.mark.parametrize(
    ("shape", "cut", "is_whole"),
    [
        ((64, 128), None, False),
        ((64, 128), Cut(0, (64,), 0, 2), False),
        ((64, 128), Cut(0, (64,), 0, 4), True),  # 2048 elements each are in full, and the whole is not
        ((66, 128), Cut(0, (66,), 1, 2), True),  # 33 rows are 16.5 blocks
        ((64, 128), Cut(1, (128,), 0, 2), True),  # columns are not consecutive
        ((64, 128), Cut(0, (32, 32), 0, 2), True),  # nor are rows of two blocks
        ((10, 128), Cut(0, (10,), 0, 2), False),  # all is in full
        ((10, 128), Cut(1, (128,), 0, 2), False),
        ((33, 272), Cut(0, (33,), 0, 2), True),  # the whole is no number of blocks, and 16 rows are
        ((3, 4096), Cut(0, (3,), 0, 2), False),  # 2 rows and 1
        ((3, 4096), Cut(0, (3,), 0, 4), True),  # the last rank has none
    ],
)
def test_what_is_updated_whole(shape, cut, is_whole):
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = with_low_precision(torch.optim.AdamW([parameter]), "8bit")
    spec = ShardSpec(shape, () if cut is None else (cut,))
    assert updated_whole(optimizer, lambda _: spec) == ({parameter} if is_whole else set())
    assert updated_whole(optimizer, None) == {parameter}


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(("states", "ending"), [("8bit", "8bit"), ("4bit", "4bit"), ("float8", "Fp8")])
def test_groups_keep_their_settings(make, states, ending):
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    groups = [{"params": [first], "lr": 0.1, "name": "first"}, {"params": [second], "weight_decay": 0.5}]
    made = with_low_precision(make(groups, lr=0.2, betas=(0.8, 0.9), eps=1e-6, fused=True), states)
    assert type(made).__name__ == f"{make.__name__}{ending}"
    assert [group["params"] for group in made.param_groups] == [[first], [second]]
    assert [float(group["lr"]) for group in made.param_groups] == pytest.approx([0.1, 0.2])
    assert [group["weight_decay"] for group in made.param_groups] == [make([first]).defaults["weight_decay"], 0.5]
    for group in made.param_groups:
        assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.8, 0.9), 1e-6, False)
    assert made.param_groups[0]["name"] == "first"


def test_adam_that_decays_apart_is_adamw():
    parameter = nn.Parameter(torch.zeros(4))
    made = with_low_precision(torch.optim.Adam([parameter], decoupled_weight_decay=True), "8bit")
    assert type(made).__name__ == "AdamW8bit"


class OwnAdam(torch.optim.Adam):
    """May do anything."""


def stepped():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    return optimizer


def several(*kinds):
    return OptimizerList([kind([nn.Parameter(torch.zeros(4, 4))]) for kind in kinds])


WEIGHT = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: torch.optim.SGD([WEIGHT], 0.1), "a SGD, and only torch.optim's Adam and AdamW"),
        (lambda: OwnAdam([WEIGHT]), "a OwnAdam, and only"),
        (lambda: several(torch.optim.AdamW, torch.optim.Muon), "a Muon, and only"),
        (lambda: torch.optim.Adam([WEIGHT], amsgrad=True), "amsgrad=True"),
        (lambda: torch.optim.Adam([WEIGHT], maximize=True), "maximize=True"),
        (lambda: torch.optim.Adam([WEIGHT], capturable=True), "capturable=True"),
        (lambda: torch.optim.Adam([WEIGHT], differentiable=True), "differentiable=True"),
        (stepped, "has state already"),
        (lambda: torch.optim.Adam([nn.Parameter(torch.zeros(4).double())]), "is float64, and torchao's"),
        (lambda: torch.optim.Adam([nn.Parameter(torch.zeros(4).cfloat())]), "is complex64, and torchao's"),
        (
            lambda: torch.optim.Adam(
                [{"params": [WEIGHT], "decoupled_weight_decay": True}, {"params": [nn.Parameter(torch.zeros(4))]}]
            ),
            "some of its groups have decoupled_weight_decay",
        ),
    ],
)
def test_what_torchao_has_not_is_refused(make, found):
    with pytest.raises(PlanError) as caught:
        with_low_precision(make(), "8bit")
    assert found in caught.value.found
    assert caught.value.asked == "the plan's optimizer_states=8bit"


def test_several_adams_are_a_list():
    made = with_low_precision(several(torch.optim.AdamW, torch.optim.Adam), "4bit")
    assert [type(one).__name__ for one in made] == ["AdamW4bit", "Adam4bit"]


def resume(rank, folder, plan, others):
    """The end of a job without interruption, and of jobs that went on from its second step under other plans."""
    api.init()
    ends = {"": train(plan)[1]}
    train(plan, steps=2, save=folder)
    for other in others:
        ends[other] = train(other, load=folder)[1]
    return ends


@pytest.mark.parametrize("states", STATES)
def test_a_resumed_job_ends_with_the_same_bits_under_any_plan(states, tmp_path):
    plan = f"shard=2,optimizer_states={states}"
    others = [f"{other},optimizer_states={states}" for other in ("shard=2", "replicate=2", "shard=2,zero=1")]
    for ends in run_ranks(2, resume, str(tmp_path / "saved"), plan, others, timeout_s=300):
        uncut = ends[others[1]]
        for name, (part, spec) in ends[""].items():
            assert torch.equal(part, ends[others[0]][name][0]), name
            assert torch.equal(part, take(uncut[name][0], spec)), name


def load_other(rank, folder):
    api.init()
    train("replicate=1,optimizer_states=8bit", steps=1, save=folder)
    refusals = []
    for plan in ("replicate=1", "replicate=1,optimizer_states=4bit"):
        try:
            train(plan, load=folder)
        except CheckpointError as error:
            refusals.append((error.asked, error.found, error.fix))
    return refusals


def test_a_checkpoint_in_other_bits_is_refused(tmp_path):
    (refusals,) = run_ranks(1, load_other, str(tmp_path / "saved"))
    assert len(refusals) == 2
    for (asked, found, fix), here in zip(refusals, ("full", "4bit"), strict=True):
        assert "AdamW8bit" in asked
        assert found.endswith(f"optimizer_states={here}")
        assert "write optimizer_states=8bit" in fix


def test_low_precision_optimizer_refuses_a_moment_saved_in_full():
    model = Net()
    optimizer = with_low_precision(torch.optim.AdamW(model.parameters()), "8bit")
    saved = {
        "class": "AdamW8bit",
        "numbers": {},
        "groups": [{"parameters": [name for name, _ in model.named_parameters()]}],
    }
    full = {"optimizer/exp_avg/even.weight": torch.zeros(ROWS["even"], 128)}
    with pytest.raises(CheckpointError, match="in full"):
        snapshot.restore_optimizer(model, optimizer, full, saved, {})
    small = {"optimizer/exp_avg/small.weight": torch.ones(ROWS["small"], 128)}
    snapshot.restore_optimizer(model, optimizer, small, saved, {})
    assert optimizer.state[model.small.weight]["exp_avg"].sum() == ROWS["small"] * 128


def state_bytes(rank, plan):
    api.init()
    with not_compiled():
        job = Job(workload(steps=1), Plan.parse(plan))
        for batch in job.batches():
            job.step(batch)
        found = count_memory([job.model], job.optimizer, CPU)["optimizer state"]
        job.close()
    return found


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("axes", ["replicate=1", "shard=2"])
def test_a_simulated_step_has_the_bytes_of_the_real_states(axes, states):
    plan = Plan.parse(f"{axes},optimizer_states={states}")
    for rank, real in enumerate(run_ranks(plan.world_size, state_bytes, plan.line())):
        profile = simulate(workload(), plan, rank)
        predicted = sum(block.nbytes for block in profile.recording.blocks if block.kind == OPTIMIZER)
        assert abs(predicted / real - 1) < 0.005, (rank, predicted, real)
        full = simulate(workload(), Plan.parse(axes), rank)
        assert predicted < 0.5 * sum(block.nbytes for block in full.recording.blocks if block.kind == OPTIMIZER)


TRAFFIC_PLANS = ("shard=2", "tensor=2")


def traffic(rank, plans):
    api.init()
    found = []
    for plan in plans:
        with not_compiled():
            job = Job(workload(), Plan.parse(f"{plan},optimizer_states=8bit"))
            batch = next(iter(job.batches()))
            job.ledger.calls.clear()
            job.ledger.payload_bytes.clear()
            job.step(batch)
            found.append(by_operation(job.ledger.rows()))
            job.close()
    return found


def test_the_ledger_counts_what_was_predicted():
    for rank, found in enumerate(run_ranks(2, traffic, TRAFFIC_PLANS)):
        for text, rows in zip(TRAFFIC_PLANS, found, strict=True):
            plan = Plan.parse(f"{text},optimizer_states=8bit")
            assert rows == by_operation(step_traffic(workload(), plan, rank)), text
            # Under `shard` one weight alone travels: a half of its values and gradients there, and its values back.
            whole = 4 * ROWS["odd"] * 128
            _, sent = rows["all_to_all", text.partition("=")[0]]
            assert text == "tensor=2" or whole <= sent <= 2 * whole


def test_memory_of_a_moment_is_that_of_its_parts():
    optimizer = with_low_precision(torch.optim.Adam([WEIGHT]), "8bit")
    moment = optimizer._new_buffer(torch.zeros(64, 128), True)
    assert is_packed(moment)
    assert sum(tensor.nbytes for tensor in memory_of(moment)) == 64 * 128 + 4 * 32 + 4 * 256
    assert memory_of(WEIGHT)[0] is WEIGHT


@pytest.mark.complete  # its compiler takes half a minute, and is torchao's
def test_the_compiled_update_is_the_one_as_written():
    ends = []
    for _ in range(2):
        parameter = nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128))
        optimizer = with_low_precision(torch.optim.AdamW([parameter], lr=0.01), "8bit")
        for step in range(2):
            parameter.grad = parameter.detach() * (step + 1)
            if ends:
                with not_compiled():
                    optimizer.step()
            else:
                optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-4)


def loop(plan, count, load=None, save=None):
    """A loop of one's own: `count` steps, and what its parameters and states are then."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with not_compiled():
        job, model, same, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)
        assert same is optimizer
        if load is not None:
            job.load(load)
        batches = iter(loader)
        for _ in range(count):
            optimizer.zero_grad()
            value = (model(next(batches)) - 1).square().mean()
            job.backward(value)
            optimizer.step()
            scheduler.step()
        if save is not None:
            job.save(save)
        state = state_of(job)
        job.close()
    return state, type(optimizer).__name__, float(optimizer.param_groups[0]["lr"])


def loops(rank, plans, folder):
    api.init()
    found = {}
    for plan in plans:
        path = f"{folder}/{plan}"
        found[plan] = loop(plan, STEPS), loop(plan, 2, save=path), loop(plan, STEPS - 2, load=path)
    return found


@functools.cache
def loop_alone():
    with tempfile.TemporaryDirectory() as folder:
        (found,) = run_ranks(1, loops, ["replicate=1,optimizer_states=8bit"], folder)
    return found["replicate=1,optimizer_states=8bit"]


def test_a_loop_has_the_same_optimizer_with_other_states():
    (state, kind, rate), _, resumed = loop_alone()
    assert kind == "AdamW8bit"
    assert rate == pytest.approx(0.01 / (1 + STEPS))
    assert any(name.endswith("exp_avg.codes/odd.weight") for name in state)
    for name, (part, _) in state.items():
        assert torch.equal(part, resumed[0][name][0]), name


def test_a_loop_of_two_ranks_ends_where_one_does(tmp_path):
    plans = [f"{plan},optimizer_states=8bit" for plan in PLANS]
    expected = loop_alone()[0][0]
    for found in run_ranks(2, loops, plans, str(tmp_path), timeout_s=300):
        for plan, ((state, _, _), _, (resumed, _, _)) in found.items():
            for name, (part, spec) in state.items():
                assert torch.equal(part, resumed[name][0]), (plan, name)
                if name.startswith("model/"):
                    whole = take(expected[name][0], spec).view(torch.float32)
                    torch.testing.assert_close(part.view(torch.float32), whole, rtol=1e-3, atol=1e-3)


def test_a_scheduler_that_was_made_before_sees_the_steps():
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    lower_in_place(optimizer, "8bit")
    parameter.grad = torch.ones(8)
    called = []
    optimizer.register_step_pre_hook(lambda *arguments: called.append(arguments))
    with warnings.catch_warnings(), not_compiled():
        warnings.simplefilter("error", UserWarning)
        optimizer.step()
        scheduler.step()
    assert len(called) == 1
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    assert "fused" not in optimizer.param_groups[0]
    assert float(parameter.detach()[0]) == pytest.approx(-0.1, rel=1e-4)
