"""A rank's training step on fake tensors: what it allocates, computes and sends, without a device.

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
BRIEF = 2  # micro-batches: from the second on gradients are there already, and each is like the one before
# What fake tensors can't answer.
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextmanager
def unnoticed() -> Iterator[None]:
    """transformers computes other masks where it sees fake tensors: it is not to see that they are."""
    name = "transformers.utils.import_utils"
    has_it = hasattr(sys.modules.get(name), "is_fake_tensor")
    with mock.patch(f"{name}.is_fake_tensor", return_value=False) if has_it else contextlib.nullcontext():
        yield


@dataclass(frozen=True, slots=True)
class How:
    """On what a step is tried out.

    Args:
        device: "cpu", or "cuda": with the operations that a GPU would run.
        is_real: with values, in memory.
        is_brief: of many micro-batches, two are enough.
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
        self.workload, self.rank, self.asked_device = workload, rank, how.device
        self.plan, self.transport = plan, plan.transport
        if not plan.server:
            self.plan = dataclasses.replace(plan, transport="gloo")
        self.mesh, self.device, self.ledger = Mesh.parse(plan.mesh), torch.device("cpu"), Ledger()
        self.mode = None if how.is_real else FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = Allocations()
        self.recorder.fake_mode = self.mode
        self.recorder.is_answering = not how.is_real
        is_apart = plan.offload == "on" and how.device != "cpu"
        self.host = HostMemory(self.recorder) if is_apart else None
        self.recorder.sees_scratch = how.device == "cpu" and not how.is_real
        alone = Mesh.parse("replicate=1")  # workers of servers don't speak to each other
        comms = open_comms(alone, 0, self.ledger) if plan.server else open_comms(self.mesh, rank, self.ledger)
        loader = RankLoader(
            open_data("data", workload.data),
            workload,
            self.mesh.data_part(rank),
            self.mesh.data_size,
            self.device,
            cut_into(plan, self.mesh, workload),
        )
        example = loader.example() if plan.world_size > 1 else None
        self._note_batch(example)
        seed_everything(workload.seed)
        placed = parallelize_model(workload, comms, self.plan, self.device, example, self.fake)
        self.notices = placed.notices
        _check_dense(placed, alone if plan.server else self.mesh)
        if placed.couples_samples and loader.pieces_wanted and not plan.micro_batches:
            loader = dataclasses.replace(loader, pieces_wanted=1)
        self.batch = next(loader.training(0, loader.order(workload.batch_size).batch_at(0).stop))
        self.times = 1.0  # that what is rehearsed happens in a step
        if how.is_brief and len(self.batch.microbatches) > BRIEF and self.mesh.size("pipeline") == 1:
            self.times = len(self.batch.microbatches) / BRIEF
        self._make_programs(placed)
        with self.fake():
            self.parallel = make_parallel(placed, workload, comms, self.plan, (self.device, rank))
            self.optimizer = prepare.make_optimizer(workload, self.parallel.model)
        prepare.keep_own(self.optimizer, self.mesh)
        self.recorder.names = {module: name for name, module in self.parallel.model.named_modules()}
        self._answer_for_the_others(self.parallel)
        self.servers = self._join_servers(len(loader.data)) if plan.server else []
        self._name_what_stays()

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Where tensors have no values and are watched."""
        mode = self.mode if self.mode is not None else contextlib.nullcontext()
        copying = copies_from_host() if self.host is not None else contextlib.nullcontext()
        with as_on_gpu(self.asked_device, self.recorder), unnoticed(), copying, mode, self.recorder.watching():
            yield

    def step(self) -> None:
        """One training step."""
        recorder, workload = self.recorder, self.workload
        recorder.phase = "forward"
        recorder.recording.last_step = len(recorder.recording.events)
        recorder.operations.clear()
        recorder.modules.clear()
        with self.fake():
            microbatches = self.batch.microbatches
            if self.mode is not None:
                microbatches = [map_tensors(one, self.mode.from_tensor) for one in microbatches]
            for one in microbatches:
                self._note_batch(one)
            count = round(len(microbatches) / self.times)
            facts = (False, round(self.batch.longest / self.times))
            clip_norm = None if self.plan.server else workload.clip_norm
            train_step(microbatches[:count], self.parallel, self.optimizer, clip_norm, facts)
        self._name_what_stays()

    def shared_bytes(self) -> int:
        """What this rank maps for the ranks of its host, where sums go through shared memory."""
        ranks = self.mesh.size("replicate")
        halves = sum(2 * reducer.outbox.nbytes for reducer in self._reducers())
        can_share = self.asked_device == "cpu" and not self.plan.server and self.transport in ("auto", "shared_memory")
        return halves * ranks if can_share and 1 < ranks <= MAX_RANKS and halves <= MAX_BYTES else 0

    def _join_servers(self, samples: int) -> list[dict[str, int]]:
        """Take up a connection that nobody answers; what each server would hold."""
        parallel = cast("ServerParallel", self.parallel)
        with contextlib.nullcontext() if self.mode is None else self.mode:
            # A GPU's worker keeps them in its host's memory.
            join_nobody(parallel, self.optimizer, samples, self.recorder if self.asked_device == "cpu" else None)
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
            known = len(split.programs)
            program = split.program("loss", self.workload.loss, batch)
            self.recorder.note_all(program.captured.constants.items(), BUFFERS)
            if len(split.programs) > known:
                self._note_batch(batch)  # the graph keeps the batch that it was captured with

    def _answer_for_the_others(self, parallel: Parallel) -> None:
        """What ranks tell one another in a step has no values here: all is well."""
        recorder = self.recorder

        def read() -> StepStats:
            changed = [parallel.comms.step.size if one else 0 for one in parallel.buffers.changed]
            return StepStats(1.0, 1.0, False, [], changed)

        parallel.stats.read = read  # type: ignore[method-assign]
        shard = getattr(parallel.placed, "shard", None)
        if shard is not None:
            grad_usage = shard.grad_usage
            if shard.groups is not None:
                shard.groups.collective_order.sums_on_cpu = self.asked_device == "cpu"
            grad_usage.find_unused = functools.partial(_find_unused, grad_usage)
            self._name_what_is_gathered(shard)
        begin_step = parallel.placed.begin_step
        reduce_gradients, update = parallel.reduce_gradients, parallel.update

        def begun() -> None:
            recorder.phase = "gather"
            begin_step()
            recorder.phase = "forward"

        def reduced() -> StepStats:
            recorder.phase = "reduce"
            stats = reduce_gradients()
            recorder.note_all(_gradients(parallel), GRADIENTS)
            if self.host is not None:
                self.host.note(gradient for _, gradient in _gradients(parallel))
            return stats

        def updated(optimizer: torch.optim.Optimizer) -> None:
            recorder.phase = "update"
            update(optimizer)
            recorder.note_all(_state(parallel, optimizer), OPTIMIZER)

        parallel.placed.begin_step = begun  # type: ignore[method-assign]
        parallel.reduce_gradients, parallel.update = reduced, updated  # type: ignore[method-assign]

    def _name_what_is_gathered(self, shard: Any) -> None:
        """FSDP2's whole parameters, which come and go."""
        recorder, watch = self.recorder, shard._watch

        def watched(prefix: str, module: torch.nn.Module) -> None:
            watch(prefix, module)
            whole = [(f"{prefix}{name}", p) for name, p in module.named_parameters() if not is_part(p)]
            recorder.note_all(whole, GATHERED)

        shard._watch = watched

    def _name_what_stays(self) -> None:
        recorder, model = self.recorder, self.parallel.model
        recorder.note_all(self.parallel.placed.updated().items(), PARAMETERS)
        recorder.note_all(model.named_parameters(), PARAMETERS)
        recorder.note_all(model.named_buffers(), BUFFERS)
        if self.host is not None:
            self.host.note(self.parallel.placed.updated().values())
            self.host.note(state for _, state in _state(self.parallel, self.optimizer))
        for reducer in self._reducers():
            recorder.note_all((("gradient buckets", one) for one in [*reducer.inboxes, reducer.outbox]), COMMUNICATION)


def _find_unused(grad_usage: Any) -> list[str]:
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


def rehearse(workload: Workload, plan: Plan, rank: int = 0, device: str = "cpu", is_brief: bool = False) -> Profile:
    """What `rank` allocates, computes and sends in a step.

    Args:
        workload: what is trained.
        plan: how.
        rank: of the plan's world.
        device: "cpu" or "cuda", which need not be there.
        is_brief: rehearse two micro-batches of many: memory is the same, operations are multiplied.

    Raises:
        PlanError: the plan has what can't be tried out beforehand.
        WorkloadError: the model's path depends on values, and the plan has more than one rank.
    """
    _check(plan, device)
    state = torch.get_rng_state()
    try:
        return _rehearsed(workload, plan, rank, How(device, is_brief=is_brief))
    except _NEEDS_VALUES as error:
        if plan.world_size > 1:
            raise WorkloadError(
                f"a step of rank {rank} under {plan.line()} on fake tensors (shapes, no data)",
                f"the model asks for values ({error})",
                "profile it in one process: paceline profile, where a real step can be measured",
            ) from None
        torch.set_rng_state(state)
        profile = _rehearsed(workload, plan, rank, How(device, is_real=True, is_brief=is_brief))
        profile.notices.append(f"a real step was measured on the CPU: the model asks for values ({error})")
        return profile


def _rehearsed(workload: Workload, plan: Plan, rank: int, how: How) -> Profile:
    with fake_world(0 if plan.server else rank, 1 if plan.server else plan.world_size):
        rehearsal = SimulatedStep(workload, plan, rank, how)
        for _ in range(STEPS):
            rehearsal.ledger.calls.clear()
            rehearsal.ledger.payload_bytes.clear()
            rehearsal.step()
        recorder = rehearsal.recorder
        recorder.has_ended = True
        microbatches = rehearsal.batch.microbatches
        notices = [
            *rehearsal.notices,
            *(
                f"{path or 'the loss'} asks for a tensor's values: each was taken for 1, and its path is a guess"
                for path in recorder.asked
            ),
        ]
        recording, host_bytes = recorder.recording, 0
        if rehearsal.host is not None:
            recording, host_bytes = rehearsal.host.apart()
        return Profile(
            plan.line(),
            rank,
            how.device,
            -(-len(rehearsal.batch.positions) // (max(len(microbatches), 1) * rehearsal.mesh.data_size)),
            workload.precision,
            recording,
            {name: work.times(rehearsal.times) for name, work in recorder.operations.items()},
            {name: work.times(rehearsal.times) for name, work in recorder.modules.items()},
            rehearsal.ledger.rows(),
            rehearsal.shared_bytes(),
            notices,
            rehearsal.servers,
            host_bytes,
        )


def _check_dense(placed: Any, mesh: Mesh) -> None:
    if mesh.size("replicate") > 1 and placed.sparse():
        raise WorkloadError(
            "to predict a step without training",
            f"ranks exchange the rows of {min(placed.sparse())} that their samples use: how many depends on the data",
            "make the embedding with sparse=False, or predict a plan of one process",
        )


def _check(plan: Plan, device: str) -> None:
    refused = [
        (plan.compile == "on", "compile=on", "leave compile out: what it fuses is not known beforehand"),
        (plan.compression == "topk", "compression=topk", "leave it out: what it sends depends on the values"),
    ]
    for is_asked, what, fix in refused:
        if is_asked:
            raise PlanError("to predict a step without training", f"the plan has {what}, which can't be predicted", fix)
