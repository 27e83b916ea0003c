"""Run a rank's training step on fake tensors: what it allocates, computes and sends, without a device.

It is the job's own code that runs, strategies and all, in a world of ranks that are not there. So memory and traffic
are those of a real step: no formula that could differ from it. A model whose path depends on values can't run so; in
one process its step is measured on real tensors instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from paceline.comm.fake_process_group import fake_world
from paceline.comm.fully_shard import copies_from_host, is_part
from paceline.comm.ledger import Ledger
from paceline.comm.pytree import map_tensors, tensors_in
from paceline.comm.shared_memory import MAX_BYTES, MAX_RANKS
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.profile import (
    BUFFERS,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    Profile,
)
from paceline.nouns.workload import Workload
from paceline.parallel.apply import Parallel, open_comms
from paceline.parallel.step_stats import StepStats
from paceline.profile.allocation_trace import Allocations, with_places
from paceline.profile.gpu_dispatch import as_on_gpu
from paceline.profile.simulate_offload import HostMemory
from paceline.profile.simulate_servers import join_nobody, servers_memory
from paceline.train import prepare
from paceline.train.data import RankLoader, cut_into, open_data
from paceline.train.parallelize import make_parallel, parallelize_model
from paceline.train.seed import seed_everything
from paceline.train.step import train_step

if TYPE_CHECKING:
    from paceline.parallel.server import ServerParallel

STEPS = 2  # in the first the optimizer makes its state
BRIEF = 2  # micro-batches: from the second on gradients exist already, and each is like the one before
# What fake tensors can't answer.
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextmanager
def unnoticed() -> Iterator[None]:
    """Hide from transformers that tensors are fake: it computes other masks for those."""
    name = "transformers.utils.import_utils"
    # Only if the user's file has imported it.
    if not hasattr(sys.modules.get(name), "is_fake_tensor"):
        yield
        return
    with mock.patch(f"{name}.is_fake_tensor", return_value=False):
        yield


@dataclass(frozen=True, slots=True)
class How:
    """The way in which a step is simulated.

    Args:
        device: "cpu", or "cuda": with the operations that a GPU would run.
        is_real: tensors have values, and memory.
        is_brief: of many micro-batches two are run.
    """

    device: str = "cpu"
    is_real: bool = False
    is_brief: bool = False


class SimulatedStep:
    """One rank of a job, ready to step.

    Args:
        workload: what is trained; its data gives the shapes of batches.
        plan: how.
        rank: whose step; inside a `fake_world` of the plan's size.
        how: on what.
    """

    def __init__(self, workload: Workload, plan: Plan, rank: int, how: How) -> None:
        self.workload = workload
        self.rank = rank
        self.asked_device = how.device
        self.plan = plan
        self.transport = plan.transport
        if not plan.server:
            # Shared memory needs the other ranks; `shared_bytes` counts what it would take.
            self.plan = dataclasses.replace(plan, transport="gloo")
        self.mesh = Mesh.parse(plan.mesh)
        self.device = torch.device("cpu")  # also for a GPU's step: `as_on_gpu` exchanges what runs
        self.ledger = Ledger()
        self.mode = None if how.is_real else FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = self._make_recorder(how)
        has_host_memory = plan.offload == "on" and how.device != "cpu"
        self.host = HostMemory(self.recorder) if has_host_memory else None
        loader, placed = self._place()
        self.batch = next(loader.training(0, loader.order(workload.batch_size).batch_at(0).stop))
        self.times = 1.0  # how often what is simulated happens in a step
        if how.is_brief and len(self.batch.microbatches) > BRIEF and self.mesh.size("pipeline") == 1:
            self.times = len(self.batch.microbatches) / BRIEF
        self._make_programs(placed)
        with self.fake():
            self.parallel = make_parallel(placed, workload, self.comms, self.plan, (self.device, rank))
            self.optimizer = prepare.make_optimizer(workload, self.parallel.model)
        prepare.keep_own(self.optimizer, self.mesh, self.parallel.placed)
        self.recorder.names = {module: name for name, module in self.parallel.model.named_modules()}
        self._answer_for_the_others(self.parallel)
        self.servers: list[dict[str, int]] = []
        if plan.server:
            self.servers = self._join_servers(len(loader.data))
        self._name_what_stays()

    def _make_recorder(self, how: How) -> Allocations:
        recorder = Allocations()
        recorder.fake_mode = self.mode
        recorder.is_answering = not how.is_real
        recorder.sees_scratch = how.device == "cpu" and not how.is_real
        return recorder

    def _place(self) -> tuple[RankLoader, Any]:
        """Make the loader and this rank's part of the model, without values."""
        workload = self.workload
        mesh = self.mesh
        if self.plan.server:  # workers of servers don't speak to each other
            mesh = Mesh.parse("replicate=1")
        comm_rank = 0 if self.plan.server else self.rank
        self.comms = open_comms(mesh, comm_rank, self.ledger)
        loader = RankLoader(
            open_data("data", workload.data),
            workload,
            self.mesh.data_part(self.rank),
            self.mesh.data_size,
            self.device,
            cut_into(self.plan, self.mesh, workload),
        )
        example = loader.example() if self.plan.world_size > 1 else None
        self._note_batch(example)
        seed_everything(workload.seed)
        placed = parallelize_model(workload, self.comms, self.plan, self.device, example, self.fake)
        self.notices = placed.notices
        _check_dense(placed, mesh)
        if placed.couples_samples and loader.pieces_wanted and not self.plan.micro_batches:
            loader = dataclasses.replace(loader, pieces_wanted=1)
        return loader, placed

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Let tensors have no values, and watch what is allocated."""
        mode = self.mode if self.mode is not None else contextlib.nullcontext()
        copying = copies_from_host() if self.host is not None else contextlib.nullcontext()
        with as_on_gpu(self.asked_device, self.recorder), unnoticed(), copying, mode, self.recorder.watching():
            yield

    def step(self) -> None:
        """Take one training step."""
        recorder = self.recorder
        recorder.phase = "forward"
        recorder.recording.last_step = len(recorder.recording.events)  # the event at which the step begins
        recorder.operations.clear()
        recorder.modules.clear()
        with self.fake():
            microbatches = self.batch.microbatches
            if self.mode is not None:
                microbatches = [map_tensors(batch, self.mode.from_tensor) for batch in microbatches]
            for batch in microbatches:
                self._note_batch(batch)
            count = round(len(microbatches) / self.times)
            longest = round(self.batch.longest / self.times)
            clip_norm = None if self.plan.server else self.workload.clip_norm
            train_step(microbatches[:count], self.parallel, self.optimizer, clip_norm, (False, longest))
        self._name_what_stays()

    def shared_bytes(self) -> int:
        """Return what this rank maps for the ranks of its host, where sums go through shared memory; else 0."""
        if self.asked_device != "cpu" or self.plan.server or self.transport not in ("auto", "shared_memory"):
            return 0
        ranks = self.mesh.size("replicate")
        # Two inboxes for each reducer, filled in turn, each as long as its outbox; every rank maps those of all ranks.
        bytes_of_rank: int = sum(2 * reducer.outbox.nbytes for reducer in self._reducers())
        if ranks == 1 or ranks > MAX_RANKS or bytes_of_rank > MAX_BYTES:
            return 0
        return bytes_of_rank * ranks

    def _join_servers(self, samples: int) -> list[dict[str, int]]:
        """Open a connection that nobody answers; return what each server would hold."""
        parallel = cast("ServerParallel", self.parallel)
        # A GPU's worker keeps the connection's memory on its host.
        recorder = self.recorder if self.asked_device == "cpu" else None
        with contextlib.nullcontext() if self.mode is None else self.mode:
            join_nobody(parallel, self.optimizer, samples, recorder)
            return servers_memory(parallel, self.workload.deterministic)

    def _reducers(self) -> list[Any]:
        return [bucket.reducer for bucket in self.parallel.replicate.buckets] + [self.parallel.stats.reducer]

    def _note_batch(self, batch: Any) -> None:
        self.recorder.note_all((("batch", tensor) for tensor in tensors_in(batch)), INPUTS)

    def _make_programs(self, placed: Any) -> None:
        """Capture what a split model runs, while the batch has values."""
        split = getattr(placed, "split", None)
        if split is None:
            return
        split.watch = with_places(self.recorder)
        for batch in self.batch.microbatches:
            count = len(split.programs)
            program = split.program("loss", self.workload.loss, batch)
            self.recorder.note_all(program.captured.constants.items(), BUFFERS)
            if len(split.programs) > count:  # it was captured now
                self._note_batch(batch)  # the graph keeps the batch that it was captured with

    def _answer_for_the_others(self, parallel: Parallel) -> None:
        """Give an answer that all is well wherever ranks read values that others sent, and set phases on the way."""

        # The sum that all ranks read has values of ranks that are not there. It must say that all is well, and agree
        # with what this rank says of its buffers: otherwise a step would branch into an error.
        def read() -> StepStats:
            step_ranks = parallel.comms.step.size
            changed = [step_ranks if is_changed else 0 for is_changed in parallel.buffers.changed]
            return StepStats(1.0, 1.0, False, [], changed)

        parallel.stats.read = read  # type: ignore[method-assign]
        shard = getattr(parallel.placed, "shard", None)
        if shard is not None:
            grad_usage = shard.grad_usage
            if shard.groups is not None:
                shard.groups.collective_order.sums_on_cpu = self.asked_device == "cpu"
            grad_usage.find_unused = functools.partial(_find_unused, grad_usage)
            self._name_what_is_gathered(shard)
        self._set_phases(parallel)

    def _set_phases(self, parallel: Parallel) -> None:
        """Tell the recorder the phases of a step, and name gradients and optimizer states as soon as they exist."""
        recorder = self.recorder
        # Gradients and states are named when they exist, since fresh ones can't be told from temporaries before.
        begin_step = parallel.placed.begin_step
        reduce_gradients = parallel.reduce_gradients
        update = parallel.update

        def recorded_begin_step() -> None:
            recorder.phase = "gather"
            begin_step()
            recorder.phase = "forward"

        def recorded_reduce_gradients() -> StepStats:
            recorder.phase = "reduce"
            stats = reduce_gradients()
            recorder.note_all(_gradients(parallel), GRADIENTS)
            if self.host is not None:
                self.host.note(gradient for _, gradient in _gradients(parallel))
            return stats

        def recorded_update(optimizer: torch.optim.Optimizer) -> None:
            recorder.phase = "update"
            update(optimizer)
            recorder.note_all(_state(parallel, optimizer), OPTIMIZER)

        parallel.placed.begin_step = recorded_begin_step  # type: ignore[method-assign]
        parallel.reduce_gradients = recorded_reduce_gradients  # type: ignore[method-assign]
        parallel.update = recorded_update  # type: ignore[method-assign]

    def _name_what_is_gathered(self, shard: Any) -> None:
        """Name FSDP2's full parameters, which are allocated and freed in every step."""
        recorder = self.recorder
        watch = shard._watch

        def recorded_watch(prefix: str, module: torch.nn.Module) -> None:
            watch(prefix, module)
            full = []
            for name, parameter in module.named_parameters():
                if not is_part(parameter):
                    full.append((f"{prefix}{name}", parameter))
            recorder.note_all(full, GATHERED)

        shard._watch = recorded_watch

    def _name_what_stays(self) -> None:
        """Name what is there between steps: parameters, buffers, and the memory of reducers."""
        recorder = self.recorder
        model = self.parallel.model
        recorder.note_all(self.parallel.placed.updated().items(), PARAMETERS)
        recorder.note_all(model.named_parameters(), PARAMETERS)
        recorder.note_all(model.named_buffers(), BUFFERS)
        if self.host is not None:
            self.host.note(self.parallel.placed.updated().values())
            self.host.note(state for _, state in _state(self.parallel, self.optimizer))
        for reducer in self._reducers():
            for buffer in (*reducer.inboxes, reducer.outbox):
                recorder.note_all([("gradient buckets", buffer)], COMMUNICATION)


def _find_unused(grad_usage: Any) -> list[str]:
    """Exchange what `grad_usage` does, but return this rank's own answer."""
    grad_usage.comm.all_reduce(torch.zeros(len(grad_usage.used) + 1 + grad_usage.comm.size, dtype=torch.int64))
    return [name for name, index in grad_usage.number.items() if not grad_usage.used[index]]


def _gradients(parallel: Parallel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parallel.placed.updated().items():
        if parameter.grad is not None:
            yield name, parameter.grad


def _state(parallel: Parallel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parallel.placed.updated().items():
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                yield name, value


def simulate(workload: Workload, plan: Plan, rank: int = 0, device: str = "cpu", is_brief: bool = False) -> Profile:
    """Simulate a step and return what `rank` allocates, computes and sends in it.

    Args:
        workload: the workload that is trained.
        plan: how.
        rank: of the plan's world.
        device: "cpu" or "cuda", which need not be there.
        is_brief: simulate two micro-batches of many: memory is the same, operations are multiplied.

    Raises:
        PlanError: the plan has what can't be tried out beforehand.
        WorkloadError: the model's path depends on values, and the plan has more than one rank.
    """
    _check(plan)
    state = torch.get_rng_state()  # the simulation seeds; a second try must begin as the first did
    try:
        return _simulate(workload, plan, rank, How(device, is_brief=is_brief))
    except _NEEDS_VALUES as error:
        if plan.world_size > 1:
            raise WorkloadError(
                f"can't simulate a step of rank {rank} under {plan.line()} on fake tensors",
                f"the model asks for values ({error})",
                "profile it in one process: paceline profile, where a real step can be measured",
            ) from None
        torch.set_rng_state(state)
        profile = _simulate(workload, plan, rank, How(device, is_real=True, is_brief=is_brief))
        profile.notices.append(f"a real step was measured on the CPU: the model asks for values ({error})")
        return profile


def _simulate(workload: Workload, plan: Plan, rank: int, how: How) -> Profile:
    """Take the steps in a world that has no other ranks, and return the last one's profile."""
    with _world(plan, rank):
        simulated = SimulatedStep(workload, plan, rank, how)
        for _ in range(STEPS):  # cleared each time: the ledger and the work are the last step's
            simulated.ledger.calls.clear()
            simulated.ledger.payload_bytes.clear()
            simulated.step()
        recorder = simulated.recorder
        recorder.has_ended = True
        notices = list(simulated.notices)
        for path in recorder.asked:
            asking = path or "the loss"
            notices.append(f"{asking} asks for a tensor's values: each was taken for 1, and its path is a guess")
        recording = recorder.recording
        host_bytes = 0
        if simulated.host is not None:
            recording, host_bytes = simulated.host.apart()
        micro_batches = max(len(simulated.batch.microbatches), 1) * simulated.mesh.data_size
        samples = -(-len(simulated.batch.positions) // micro_batches)  # of one micro-batch, rounded up
        return Profile(
            plan.line(),
            rank,
            how.device,
            samples,
            workload.precision,
            recording,
            {name: work.times(simulated.times) for name, work in recorder.operations.items()},
            {name: work.times(simulated.times) for name, work in recorder.modules.items()},
            simulated.ledger.rows(),
            simulated.shared_bytes(),
            notices,
            simulated.servers,
            host_bytes,
        )


def _world(plan: Plan, rank: int) -> contextlib.AbstractContextManager[None]:
    """Return a world in which other ranks are not there; a worker of servers is alone in its own."""
    if plan.server:
        return fake_world(0, 1)
    return fake_world(rank, plan.world_size)


def _check_dense(placed: Any, mesh: Mesh) -> None:
    """Raise WorkloadError for sparse gradients that ranks would exchange."""
    if mesh.size("replicate") > 1 and placed.sparse():
        raise WorkloadError(
            "can't predict a step without training",
            f"ranks exchange the rows of {min(placed.sparse())} that their samples use: how many depends on the data",
            "make the embedding with sparse=False, or predict a plan of one process",
        )


def _check(plan: Plan) -> None:
    """Raise PlanError for what can't be simulated."""
    asked = "can't predict a step without training"
    if plan.compile == "on":
        fix = "leave compile out: what it fuses is not known beforehand"
        raise PlanError(asked, "the plan has compile=on, which can't be predicted", fix)
    if plan.compression == "topk":
        fix = "leave it out: what it sends depends on the values"
        raise PlanError(asked, "the plan has compression=topk, which can't be predicted", fix)
