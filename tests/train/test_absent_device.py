"""A steady step gives a device its work and waits for nothing: on fake tensors of a device that is not there.

Every strategy's own step runs. What the host would have to wait for is counted by what it is, and each kind is seeded
once, to see that it is counted.
"""

from __future__ import annotations

import functools
import os
import traceback
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

import paceline
from paceline.comm import api, process_group
from paceline.comm.fake_process_group import fake_world
from paceline.comm.host_copy import HostCopy
from paceline.nouns.patching import patched
from paceline.nouns.plan import Plan
from paceline.parallel.engine import agreement
from paceline.parallel.replicate import buffers
from paceline.profile import simulate
from paceline.profile.step_observer import AbsentPeers
from paceline.train import loop_job, paths, replicas
from paceline.train import step as step_module

from support import absent_device, attention_models, expert_models
from support.ranks import preload, run_ranks

preload("paceline.profile.simulate", "torch.utils.backend_registration", "transformers.models.bert.modeling_bert")
COPY = "numbers are copied to the host"
READ = "a number is read"
SYNC = "a copy is waited for"
# What the host may do: copy the numbers that all ranks agree on, and exchange what never was on a device.
ALLOWED = {COPY: 1}
PLANS = {
    "replicate=1": {},
    "replicate=2": {},
    "replicate=2,compression=bf16": {},
    "shard=2,zero=1": {},
    "shard=2,zero=2": {"allreduce on the host": 1},
    "shard=2": {"allreduce on the host": 1},
    "replicate=2,shard=2": {"allreduce on the host": 1},
    "tensor=2": {},
    "tensor=2,sequence=on": {},
    "pipeline=2,micro_batches=2": {},
    "pipeline=2,micro_batches=2,schedule=interleaved": {},
    "replicate=2,tensor=2,pipeline=2,micro_batches=2": {},
    "shard=2,tensor=2": {},
}


def loss(model, batch):
    return model(batch).square().sum(), batch.shape[0]


def model():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(64, 64))


def workload(**parts):
    return paceline.Workload(
        **{
            "model": model,
            "loss": loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
            "data": list(torch.zeros(16, 64)),
            "batch_size": 8,
            **parts,
        }
    )


class Step(simulate.SimulatedStep):
    """A step that is watched from inside: what answers where tensors have no values comes after the watch."""

    watch = nullcontext

    @contextmanager
    def fake(self):
        with super().fake(), self.watch():
            yield


class Peers(AbsentPeers):
    """Counts what the host would wait for where it asks for numbers that nobody has here."""

    def has_overflown(self, flag):
        absent_device.SEEN[READ] += 1
        return False


def seen_all(rank, cells):
    """What a step of each cell is seen to do; the error where it takes none. In one process: its start takes longer."""
    absent_device.set_up()
    found = {}
    for cell in cells:
        try:
            found[cell] = seen(*cell)
        except Exception:
            found[cell] = traceback.format_exc()
    return found


@functools.cache
def all_seen():
    cells = [(workload, line, None) for line in PLANS]
    cells += [(make, line, None) for make, line, _ in OTHERS]
    cells += [(workload, "replicate=2", seed) for seed in SEEDS]
    cells.append((partly_used, "replicate=2", None))
    cells += [(make, line, None) for make, line in TABLED]
    return run_ranks(1, seen_all, cells)[0]


def seen(make, line, seed):
    plan = Plan.parse(line)
    with simulate._world(plan, 0):
        step = Step(make(), plan, 0, simulate.Simulation(place=absent_device.NAME))
        step.parallel.read_by(Peers(step.comms.step.size, sums_on_cpu=False))
        step.step()  # in the first step the optimizer makes its state
        if make in (tabled, masked):
            compare_buffers(step)
        absent_device.SEEN.clear()
        step.watch = absent_device.Watch
        with nullcontext() if seed is None else planted(seed):
            step.step()
        found = dict(absent_device.SEEN)
    return {what: count for what, count in found.items() if "on the device" not in what}


@pytest.mark.parametrize("line", PLANS)
def test_a_steady_step_waits_for_nothing(line):
    assert all_seen()[workload, line, None] == {**ALLOWED, **PLANS[line]}


def cut():
    return workload(micro_batch_size=2)


def clipped():
    return workload(clip_norm=1.0)


def clipped_by_fused():
    return workload(clip_norm=1.0, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))


def attention():
    return attention_models.workload("absolute", clip_norm=None)


def experts():
    return expert_models.workload("mixture", clip_norm=None)


def long():
    """Activations that are large enough to be offloaded: 512 KiB and more."""
    return workload(data=list(torch.zeros(16, 512, 64)))


OFFLOADED = "checkpointing=offload"
OTHERS = [
    (cut, "replicate=2", {}),
    (cut, "shard=2", {"allreduce on the host": 1}),
    (attention, "context=2", {}),
    (attention, "context=2,tensor=2", {}),
    # Of all blocks but the last, what enters its layer, its norm and its activation function.
    (long, f"replicate=2,{OFFLOADED}", {COPY: 1 + 9}),
    (long, f"shard=2,{OFFLOADED}", {COPY: 1 + 9, "allreduce on the host": 1}),
    (long, f"tensor=2,{OFFLOADED}", {COPY: 1 + 9}),
    (long, f"pipeline=2,micro_batches=2,{OFFLOADED}", {COPY: 1 + 6}),
    # How many rows come from each rank: a message's sizes are the host's.
    (experts, "expert=2", {SYNC: 2}),
    # Adam and AdamW with fused=True leave an update out by themselves: the norm is copied while they work.
    (clipped_by_fused, "replicate=2", {COPY: 2}),
    (clipped_by_fused, "shard=2", {COPY: 2, "allreduce on the host": 1}),
    # Of others the host has to know before whether it is finite.
    (clipped, "replicate=2", {READ: 1}),
    (clipped, "tensor=2", {READ: 1}),
]


@pytest.mark.parametrize(("make", "line", "waits"), OTHERS)
def test_what_other_steps_wait_for(make, line, waits):
    assert all_seen()[make, line, None] == {**ALLOWED, **waits}


def partly_used():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.used(x)

    return workload(model=Partly)


def test_where_this_rank_has_no_gradient_the_others_are_asked():
    assert all_seen()[partly_used, "replicate=2", None][READ] >= 1


def tabled():
    class Tabled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()
            self.register_buffer("table", torch.zeros(64), persistent=False)
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x):
            return self.inner(x) + self.table + self.mean

    return workload(model=Tabled)


def compare_buffers(step):
    """Have buffers' values compared, as those of a GPU are, and take the steps in which all of them are."""
    buffers.FakeTensor = type("NoTensor", (), {})
    FakeTensor.tolist = numbers_of
    for _ in range(3):
        step.step()
    assert absent_device.SEEN[READ] > 0


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.register_buffer("mask", torch.ones(512, 64), persistent=False)  # large enough not to be held twice

    def forward(self, x):
        return self.inner(x) * self.mask[0]


def masked():
    return workload(model=lambda: nn.Sequential(*(Masked() for _ in range(4))))


TABLED = [(tabled, line) for line in ("replicate=2", "shard=2", "replicate=2,shard=2,zero=1")]
TABLED += [
    (masked, f"{line},checkpointing={how}") for line in ("replicate=2", "shard=2") for how in ("full", "selective")
]


@pytest.mark.parametrize(("make", "line"), TABLED)
def test_after_the_first_steps_no_buffers_value_is_waited_for(make, line):
    waits = {"allreduce on the host": 1} if "shard" in line and "zero=1" not in line else {}
    assert all_seen()[make, line, None] == {**ALLOWED, **waits}


def _read(tensor):
    float(tensor)


def _copy_back(tensor):
    tensor.cpu()


def _copy_there(tensor):
    torch.zeros(3).to(tensor.device)


def _compare(tensor):
    torch.equal(tensor, tensor)


def _select(tensor):
    with suppress(DynamicOutputShapeException):
        tensor.new_ones(4).nonzero()


def _gather_on_host(tensor):
    torch.distributed.all_reduce(torch.zeros(1))


def _wait_for_stream(tensor):
    torch.get_device_module(tensor.device).current_stream().synchronize()


def _wait_for_device(tensor):
    torch.get_device_module(tensor.device).synchronize()


SEEDS = {
    "read": (_read, {READ: 1}),
    "copy back": (_copy_back, {SYNC: 1}),
    "copy there": (_copy_there, {SYNC: 1}),
    "compare": (_compare, {"tensors are compared": 1}),
    "select": (_select, {"a shape depends on values": 1}),
    "gather": (_gather_on_host, {"allreduce on the host": 1}),
    "stream": (_wait_for_stream, {"a stream is waited for": 1}),
    "device": (_wait_for_device, {"the device is waited for": 1}),
}


@contextmanager
def planted(seed):
    """Have a step wait for the device in one way."""
    wait = SEEDS[seed][0]
    before = step_module.check_finite

    def check_finite(stats):
        wait(torch.zeros((), device=absent_device.NAME))
        before(stats)

    with patched(step_module, check_finite=check_finite):
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_is_seen(seed):
    assert all_seen()[workload, "replicate=2", seed] == {**ALLOWED, **SEEDS[seed][1]}


def numbers_of(tensor):
    if tensor.device.type != "cpu":
        absent_device.SEEN[READ] += 1
    return [0.0] * tensor.numel()


def seen_in_loop(rank, size, clips):
    """What a steady step of a loop of one's own waits for; the ranks' numbers, which nobody has here, are all well."""
    absent_device.set_up()
    device = torch.device(absent_device.NAME, 0)
    process_group.RankInfo.device = property(lambda info: device)
    HostCopy.read = lambda copy: [0.0] * copy.numbers.numel()
    agreement.Agreement.read = lambda agreed, call, sums: agreement.Agreed(1.0, 1.0, False, [])
    agreement.Agreement._check_same = lambda agreed, call, by_rank: None
    FakeTensor.tolist = numbers_of
    replicas.FIRST_STEPS = paths.FIRST_STEPS = 0  # in the first steps, and at checkpoints, ranks are compared
    loop_job._check_loss = lambda loss: None  # it takes what has no values for a graph's
    nn.Module.to = lambda module, *arguments: module
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_world(0, size), mode:
        os.environ.update(PACELINE_WORLD_SIZE=str(size), PACELINE_LOCAL_SIZE=str(size))
        api.init()
        with device:
            net = model()
        job, net, optimizer = paceline.prepare(net, torch.optim.AdamW(net.parameters()))
        for number in range(4):
            batch = torch.zeros(8, 64, device=device)
            with absent_device.Watch() if number == 3 else nullcontext():
                absent_device.SEEN.clear()
                optimizer.zero_grad()
                job.backward(net(batch).square().mean(), weight=8)
                if clips:
                    with suppress(DataDependentOutputException):
                        job.clip(1.0)
                optimizer.step()
    return {what: count for what, count in absent_device.SEEN.items() if "on the device" not in what}


@pytest.mark.parametrize(
    ("size", "clips", "waits"),
    [(1, False, {}), (1, True, {READ: 1}), (2, False, {COPY: 1, "allreduce on the host": 2})],
)
def test_what_a_loop_of_its_own_waits_for(size, clips, waits):
    (found,) = run_ranks(1, seen_in_loop, size, clips)
    assert found == {**ALLOWED, **waits}
