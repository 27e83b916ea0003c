"""Run a rank's training step on fake tensors: what it allocates, computes and sends, without a device.

It is the job's own code that runs, strategies and all, in a world of ranks that are not there. So memory and traffic
are those of a real step: no formula that could differ from it. A model whose path depends on values can't run so; in
one process its step is measured on real tensors instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from paceline.comm.fake_process_group import fake_world
from paceline.comm.ledger import Ledger
from paceline.comm.pytree import map_tensors, tensors_in
from paceline.comm.reducer import Reducer
from paceline.comm.shared_memory import MAX_BYTES, MAX_RANKS
from paceline.graph.grouped_mm import register_fake
from paceline.nouns.errors import PacelineError, PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.patching import patched
from paceline.nouns.plan import Plan
from paceline.nouns.profile import BUFFERS, INPUTS, PARAMETERS, Profile
from paceline.nouns.workload import Workload
from paceline.parallel.engine.declared import DeclaredEngine, strategy_of
from paceline.parallel.engine.engine import RankPlace
from paceline.parallel.float8 import multiply_as_gpu
from paceline.parallel.low_precision_states import not_compiled
from paceline.parallel.model_adapter import ModelAdapter
from paceline.parallel.offload_activations import check_can_offload
from paceline.profile.allocation_trace import Allocations, with_places
from paceline.profile.gpu_dispatch import as_on_gpu
from paceline.profile.simulate_offload import HostMemory
from paceline.profile.simulate_servers import join_absent_servers
from paceline.profile.step_observer import AbsentPeers, MemoryObserver, name_what_stays, reducers_of, states_of
from paceline.torch_private.fsdp import copies_from_host
from paceline.torch_private.operations import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from paceline.train.assemble import Assembly
from paceline.train.data import open_data
from paceline.train.step import train_step

STEPS = 2  # in the first the optimizer makes its state
Rows = list[dict[str, Any]]  # of a ledger
_COPIES = 4  # of a trained parameter: itself, its gradient, Adam's two moments
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
    with patched(sys.modules[name], is_fake_tensor=lambda *arguments: False):
        yield


@dataclass(frozen=True, slots=True)
class Simulation:
    """The settings of a simulated step.

    Args:
        device: "cpu", or "cuda": with the operations that a GPU would run.
        is_real: True if tensors have values, and memory.
        is_brief: True if only two of many micro-batches are run.
        place: the device of the tensors; the CPU for a GPU's step too, as `as_on_gpu` exchanges what runs.
        capacity: the bytes of the device; a step of which more live at once is not taken to its end. None: any number.
        measures_scratch: True if memory that kernels of the CPU allocate inside themselves is measured.
    """

    device: str = "cpu"
    is_real: bool = False
    is_brief: bool = False
    place: str = "cpu"
    capacity: int | None = None
    measures_scratch: bool = True


class SimulatedStep:
    """One rank of a job, ready to step.

    Args:
        workload: the workload that is trained; its data gives the shapes of batches.
        plan: the mesh and options under which it is trained.
        rank: the rank whose step is simulated, inside a `fake_world` of the plan's size.
        simulation: the settings of the simulation.
    """

    def __init__(self, workload: Workload, plan: Plan, rank: int, simulation: Simulation) -> None:
        self.workload = workload
        self.rank = rank
        self.asked_device = simulation.device
        self.plan = plan
        self.transport = plan.transport
        # Shared memory needs the other ranks; `shared_bytes` counts what it would take.
        self.plan = plan.without_shared_memory()
        self.device = torch.device(simulation.place)
        self.ledger = Ledger()
        register_fake()
        self.mode = None if simulation.is_real else FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = self._make_recorder(simulation)
        has_shards = plan.offload == "on"
        has_host_memory = simulation.device != "cpu" and (has_shards or plan.checkpointing == "offload")
        self.host = HostMemory(self.recorder, has_shards) if has_host_memory else None
        if self.host is None:  # of a recording of both, what is the host's is known at its end
            self.recorder.capacity = simulation.capacity
        place = RankPlace(rank, self.device)
        assembly = Assembly(workload, self.plan, place, lambda: open_data("data", workload.data), self.ledger)
        # Batches have values, which say shapes and paths; `step` brings them where the model is.
        assembly.loader = replace(assembly.loader, device=torch.device("cpu"))
        self.mesh = assembly.mesh
        self.comms = assembly.comms
        placed = self._place_model(assembly)
        if simulation.device != "cpu" and plan.float8 != "off":
            multiply_as_gpu(placed.model)
        loader = assembly.loader
        self.batch = next(loader.training(0, loader.order(workload.batch_size).batch_at(0).stop))
        self.current: list[Any] = []  # a GPU's micro-batches of this step,
        self.ahead: list[Any] = []  # and those of the next, which come meanwhile
        self.times = 1.0  # how often what is simulated happens in a step
        if simulation.is_brief and len(self.batch.microbatches) > BRIEF and self.mesh.size("pipeline") == 1:
            self.times = len(self.batch.microbatches) / BRIEF
        self._make_programs(placed)
        assembly.finish(placed, self.fake)
        assert isinstance(assembly.parallel, DeclaredEngine)
        self.parallel = assembly.parallel
        self.optimizer = assembly.optimizer
        self.recorder.names = {module: name for name, module in self.parallel.model.named_modules()}
        self.parallel.read_by(AbsentPeers(self.comms.step.size, sums_on_cpu=simulation.device == "cpu"))
        self.parallel.observe(MemoryObserver(self.recorder, self.host))
        self.servers = self._join_servers(loader.samples)
        self._name_what_stays()

    def _make_recorder(self, simulation: Simulation) -> Allocations:
        recorder = Allocations()
        recorder.fake_mode = self.mode
        recorder.is_answering = not simulation.is_real
        recorder.sees_scratch = simulation.measures_scratch and simulation.device == "cpu" and not simulation.is_real
        return recorder

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Let tensors have no values, and watch what is allocated."""
        mode = self.mode if self.mode is not None else contextlib.nullcontext()
        has_shards = self.host is not None and self.host.has_shards
        copying = copies_from_host() if has_shards else contextlib.nullcontext()
        watching = self.recorder.watching()
        plain = not_compiled(self.plan.optimizer_states)
        with as_on_gpu(self.asked_device, self.recorder), unnoticed(), plain, copying, mode, watching:
            yield

    def _place_model(self, assembly: Assembly) -> ModelAdapter:
        """Make this rank's part of the model, without values."""
        example = assembly.example()
        self._record_batch(example)
        placed = assembly.place_model(example, self.fake)
        self.notices = placed.notices
        check_dense(placed, self.comms.gradients.size)
        return placed

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
                microbatches = [map_tensors(batch, self._as_placed) for batch in microbatches]
            if self.asked_device != "cpu" and self.workload.precision != "float64":
                microbatches = self._look_ahead(microbatches)
            for batch in microbatches:
                self._record_batch(batch)
            count = round(len(microbatches) / self.times)
            longest = round(self.batch.longest / self.times)
            train_step(microbatches[:count], self.parallel, self.optimizer, longest=longest)
        self._name_what_stays()

    def _look_ahead(self, microbatches: list[Any]) -> list[Any]:
        """Allocate the next step's micro-batches, as `train/loader.py` does; return this step's."""
        following = [map_tensors(batch, torch.empty_like) for batch in microbatches]
        for batch in following:
            self._record_batch(batch)
        # The batch of the step before goes only now: a loop's variable holds it until it has the next.
        is_first = not self.ahead or self.mode is None  # where tensors have values, the same batch comes each time
        self.current, self.ahead = microbatches if is_first else self.ahead, following
        return self.current

    def _as_placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without values, on the step's device."""
        assert self.mode is not None
        return self.mode.from_tensor(tensor).to(self.device, non_blocking=True)

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that this rank maps for the ranks of its host; 0 for other transports."""
        if self.asked_device != "cpu" or self.transport not in ("auto", "shared_memory"):
            return 0
        ranks = self.comms.gradients.size
        # Two inboxes for each reducer, filled in turn, each as long as its outbox; every rank maps those of all ranks.
        bytes_of_rank: int = sum(2 * reducer.outbox.nbytes for reducer in self._reducers())
        if ranks == 1 or ranks > MAX_RANKS or bytes_of_rank > MAX_BYTES:
            return 0
        return bytes_of_rank * ranks

    def _join_servers(self, samples: int) -> list[dict[str, int]]:
        """Open a connection that nobody answers; return what each server would hold, nothing without servers."""
        # A GPU's worker keeps the connection's memory on its host.
        recorder = self.recorder if self.asked_device == "cpu" else None
        with contextlib.nullcontext() if self.mode is None else self.mode:
            return join_absent_servers(self.parallel, self.optimizer, samples, recorder)

    def _reducers(self) -> list[Reducer]:
        return [*reducers_of(self.parallel.replicates), *self.parallel.stats.reducers]

    def _record_batch(self, batch: Any) -> None:
        self.recorder.record_all((("batch", tensor) for tensor in tensors_in(batch)), INPUTS)

    def _make_programs(self, placed: Any) -> None:
        """Capture what a split model runs, while the batch has values."""
        split = getattr(placed, "split", None)
        if split is None:
            return
        split.watch = with_places(self.recorder)
        for batch in self.batch.microbatches:
            program = split.program("loss", self.workload.loss, batch)
            self.recorder.record_all(program.captured.constants.items(), BUFFERS)

    def _name_what_stays(self) -> None:
        """Name what is there between steps: parameters, buffers, and the memory of reducers."""
        self.recorder.record_all(self.parallel.placed.updated().items(), PARAMETERS)
        name_what_stays(self.recorder, self.parallel.model, self._reducers())
        if self.host is not None:
            self.host.record(self.parallel.placed.updated().values())
            self.host.record(state for _, state in states_of(self.parallel.placed.updated(), self.optimizer))


def simulate(
    workload: Workload,
    plan: Plan,
    rank: int = 0,
    device: str = "cpu",
    is_brief: bool = False,
    capacity: int | None = None,
) -> Profile:
    """Simulate a step and return what `rank` allocates, computes and sends in it.

    Args:
        workload: the workload that is trained.
        plan: the mesh and options under which it is trained.
        rank: the rank of the plan's world.
        device: "cpu" or "cuda", which need not be there.
        is_brief: True to simulate two micro-batches of many: memory is the same, operations are multiplied.
        capacity: the bytes of the device; None: any number.

    Raises:
        PlanError: the plan has what can't be tried out beforehand.
        WorkloadError: the model's path depends on values, and the plan has more than one rank; or more bytes than the
            capacity live at once.
    """
    check_can_try(plan)
    if plan.checkpointing == "offload":
        check_can_offload(device)
    state = torch.get_rng_state()  # the simulation seeds; a second try must begin as the first did
    try:
        return _simulate(workload, plan, rank, Simulation(device, is_brief=is_brief, capacity=capacity))
    except _NEEDS_VALUES as error:
        if plan.world_size > 1:
            raise WorkloadError(
                f"can't simulate a step of rank {rank} under {plan.line()} on fake tensors",
                f"the model asks for values ({error})",
                "profile it in one process: paceline profile, where a real step can be measured",
            ) from None
        torch.set_rng_state(state)
        profile = _simulate(workload, plan, rank, Simulation(device, True, is_brief, capacity=capacity))
        profile.notices.append(f"a real step was measured on the CPU: the model asks for values ({error})")
        return profile


def _simulate(workload: Workload, plan: Plan, rank: int, simulation: Simulation) -> Profile:
    """Take the steps in a world that has no other ranks, and return the last one's profile."""
    with _world(plan, rank):
        simulated = SimulatedStep(workload, plan, rank, simulation)
        for _ in range(STEPS):  # cleared each time: the ledger and the work are the last step's
            simulated.ledger.calls.clear()
            simulated.ledger.payload_bytes.clear()
            if simulated.host is not None:
                simulated.host.copied_bytes = 0
            simulated.step()
        recorder = simulated.recorder
        recorder.check_fits()  # somebody may have caught the error
        recorder.has_ended = True
        notices = list(simulated.notices)
        for path in recorder.asked:
            asking = path or "the loss"
            notices.append(f"{asking} asks for a tensor's values: each was taken for 1, and its path is a guess")
        recording = recorder.recording
        host_bytes = 0
        copied_bytes = 0
        if simulated.host is not None:
            recording, host_bytes = simulated.host.apart()
            copied_bytes = round(simulated.host.copied_bytes * simulated.times)
        micro_batches = max(len(simulated.batch.microbatches), 1) * simulated.mesh.data_size
        samples = -(-len(simulated.batch.positions) // micro_batches)  # of one micro-batch, rounded up
        return Profile(
            plan.line(),
            rank,
            simulation.device,
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
            copied_bytes,
        )


def step_traffic(workload: Workload, plan: Plan, rank: int = 0) -> Rows:
    """Simulate the first step of `rank` and return what it enters in the ledger, as `Ledger.rows` has it.

    Raises:
        PlanError, WorkloadError: the workload can't be trained under the plan, or what it sends depends on the data; or
            the step needs values, for which this host has too little memory.
    """
    # What is compiled, or kept in the host's memory, changes no message, and needs a GPU or can't be simulated.
    checkpointing = "none" if plan.checkpointing == "offload" else plan.checkpointing
    plan = replace(plan, compile="off", offload="off", checkpointing=checkpointing)
    check_can_try(plan)
    state = torch.get_rng_state()
    try:
        return _first_rows(workload, plan, rank, Simulation(measures_scratch=False))
    except PacelineError:
        raise
    except Exception as error:
        # Fake tensors have no values, and not all that real ones can. What the user's own code raises it raises again.
        _check_fits_with_values(workload, error)
        torch.set_rng_state(state)
        return _first_rows(workload, plan, rank, Simulation(is_real=True))


def _check_fits_with_values(workload: Workload, error: Exception) -> None:
    """Raise WorkloadError if this host has too little memory for a step whose tensors have values."""
    parameters = made_without_values(workload).parameters()
    needed = _COPIES * sum(parameter.numel() * parameter.dtype.itemsize for parameter in parameters)
    available = psutil.virtual_memory().available
    if needed > available:
        raise WorkloadError(
            "can't predict what a step sends on tensors without values",
            f"it raised {type(error).__name__}: {error}; with values it takes about {needed / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free",
            "predict a shallower model of the same config: every layer sends as much",
        ) from error


def made_without_values(workload: Workload) -> torch.nn.Module:
    """Make the model on the meta device; with its values if its factory reads them (transformers' from_pretrained)."""
    try:
        with torch.device("meta"):
            return workload.model()  # type: ignore[no-any-return]
    except RuntimeError:  # a meta tensor has no values to read
        return workload.model()  # type: ignore[no-any-return]


def _first_rows(workload: Workload, plan: Plan, rank: int, simulation: Simulation) -> Rows:
    with _world(plan, rank):
        simulated = SimulatedStep(workload, plan, rank, simulation)
        simulated.ledger.calls.clear()
        simulated.ledger.payload_bytes.clear()
        simulated.step()
        return simulated.ledger.rows()


def _world(plan: Plan, rank: int) -> contextlib.AbstractContextManager[None]:
    """Return a world in which other ranks are not there; a worker of servers is the only rank of its own."""
    mesh, comm_rank = strategy_of(plan).comm_mesh(Mesh.parse(plan.mesh), rank)
    return fake_world(comm_rank, mesh.world_size)


def check_dense(placed: Any, replicas: int) -> None:
    """Raise WorkloadError for sparse gradients that ranks would exchange."""
    if replicas > 1 and placed.sparse():
        raise WorkloadError(
            "can't predict a step without training",
            f"ranks exchange the rows of {min(placed.sparse())} that their samples use: how many depends on the data",
            "make the embedding with sparse=False, or predict a plan of one process",
        )


def check_can_try(plan: Plan) -> None:
    """Raise PlanError for what can't be simulated."""
    asked = "can't predict a step without training"
    if plan.is_compiled:
        fix = "leave compile out: what it fuses is not known beforehand"
        raise PlanError(asked, f"the plan has compile={plan.compile}, which can't be predicted", fix)
    if plan.compression == "topk":
        fix = "leave it out: what it sends depends on the values"
        raise PlanError(asked, "the plan has compression=topk, which can't be predicted", fix)
