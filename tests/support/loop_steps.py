"""A loop's first steps for tests: as they are predicted, and as real ranks take them."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections import Counter
from dataclasses import asdict, replace

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_iter

import paceline
from compare import planner_peaks
from paceline.comm.compression import CastReducer
from paceline.comm.dtensor_parts import local
from paceline.comm.ledger import Ledger
from paceline.comm.reducer import SharedMemoryReducer
from paceline.nouns.patching import patched
from paceline.nouns.plan import Plan
from paceline.nouns.user_program import UserProgram
from paceline.parallel.observer import StepObserver
from paceline.parallel.optimizer_parts import parts_of
from paceline.profile.profile_loop import profile_loop
from paceline.train.loop_job import prepare as plain_prepare
from paceline.train.replicas import Replicas
from paceline.train.seed import seed_everything

from support.ranks import run_ranks


def predicted(file, line, rank=0, device="cpu"):
    """The loop's profile under a plan, from a process of its own."""
    return run_ranks(1, _predict, str(file), line, rank, device)[0]


def taken(file, line, steps):
    """What each real rank of a plan sends in each step, and holds after the last."""
    plan = Plan.parse(line)
    return run_ranks(plan.world_size, _take, str(file), replace(plan, check="off"), steps)


def _predict(_, file, line, rank, device):
    sys.argv = [file]
    return profile_loop(UserProgram(file), Plan.parse(line), rank, device)


class _Enough(BaseException):
    pass


class _Watch(StepObserver):
    def __init__(self, job, steps):
        self.job, self.steps = job, steps
        self.traffic = []
        self.ends_ns = []
        self.before = Counter(job.ledger.calls), Counter(job.ledger.payload_bytes)

    def parameters_updated(self, parameters, optimizer):
        ledger = self.job.ledger
        calls, sizes = self.before
        self.traffic.append(Ledger(ledger.calls - calls, ledger.payload_bytes - sizes).rows())
        self.before = Counter(ledger.calls), Counter(ledger.payload_bytes)
        self.ends_ns.append(time.time_ns())
        if len(self.traffic) == self.steps:
            raise _Enough


def _take(rank, file, plan, steps):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))
    sys.argv = [file]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.world_size))  # kernels' scratch memory depends on it
    watches, earlier = [], {}

    def prepare(*objects, **options):
        # These are there before the profiler is, which reports neither that they are made nor that they go.
        for model in objects:
            if isinstance(model, torch.nn.Module):
                earlier.update(_storages([*model.parameters(), *model.buffers()]))
        profiler.start()
        prepared = plain_prepare(*objects, **options)
        watches.append(_Watch(prepared[0], steps))
        prepared[0].parallel.observe(watches[0])
        return prepared

    planner_peaks.with_time_to_let_go()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    paceline.init()
    seed_everything(0)
    # A comparison of the ranks' parameters takes memory between steps, which nobody predicts: at most 64 KiB a time.
    with patched(paceline, prepare=prepare), patched(Replicas, after_step=lambda *_: None):
        try:
            runpy.run_path(file, run_name="__main__")
            watches[0].job.close(save=False)
        except _Enough:
            pass
    profiler.stop()
    watch = watches[0]
    job = watch.job
    now = _storages([*job.model.parameters(), *job.model.buffers()])
    stayed = sum(size for place, size in earlier.items() if place in now)
    began_ns = watch.ends_ns[-2] if len(watch.ends_ns) > 1 else 0
    job.world.barrier()
    return {"traffic": watch.traffic, "peak": stayed + _peak(profiler, began_ns), **_held(job)}


def _peak(profiler, began_ns):
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= began_ns:
            peak = max(peak, live)
    return peak


def _held(job):
    parameters = list(job.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parallel = job.parallel
    known_gradients = parallel.sums.known.values()
    gradients += [known.summed for known in known_gradients if known.summed is not None]  # kept until the next
    reducers = [bucket.reducer for target in parallel.sums.targets for bucket in target.replicate.buckets]
    reducers += [each.inside for each in reducers if isinstance(each, CastReducer)]
    reducers += [*parallel.agreement.reducers]
    states = [part.state for own in job.objects.optimizers for part in parts_of(own)]
    shared = [inbox for each in reducers if isinstance(each, SharedMemoryReducer) for inbox in each.inboxes]
    return {
        "shared": parallel.comms.data.size * _bytes(shared),
        "parameters": _bytes(parameters),
        "gradients": _bytes(gradients),
        "buckets": _bytes([reducer.outbox for reducer in reducers]),
        "optimizer": _bytes([value for state in states for value in tree_iter(list(state.values()))]),
        "buffers": _bytes(job.model.buffers()),
    }


def _bytes(values):
    return sum(_storages(values).values())


def _storages(values):
    """The bytes of the tensors' memory, by its place: several tensors may be views of one storage."""
    storages = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = local(value).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages
