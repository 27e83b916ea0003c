"""Data parallelism by parameter servers: workers push gradients, servers average and update, workers pull.

One step of a worker:

    forward, backward     on its own micro-batches, gradients of the loss sum
    reduce_gradients      the gradient is pushed, segment by segment; the servers add the workers' up, divide by the
                          weight, clip and update; then the next parameters are pulled
    update                they are copied into the model

Needs: the loss as (sum, weight); an optimizer that the servers know.
Promises: under `sync` and `deterministic`, parameters equal bit for bit those of one process that takes the same
micro-batches one after another with as many threads; in the other modes what `server/protocol/admission.py`
says. A push counts once; a lost server or worker is replaced without a step being lost.
Traffic per step and worker: the parameters' bytes to the servers, and as many back; each segment of 1 MiB once more
from each replica to the next.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.comm.batch_norm import takes_batch
from paceline.comm.process_group import COORDINATOR
from paceline.comm.step_times import COMMUNICATION, Timed
from paceline.nouns.errors import LossError, PlanError, UsageError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.effects import SERVERS
from paceline.parallel.engine.declared import DeclaredEngine
from paceline.parallel.engine.engine import Comms, RankPlace
from paceline.parallel.micro_batches import Divisor, StepHooks
from paceline.parallel.model_adapter import ModelAdapter
from paceline.parallel.norm import scale_gradients
from paceline.parallel.observer import FORWARD
from paceline.parallel.optimizer_list import check_servers_can_run
from paceline.parallel.parameter_writes import ParameterWrites
from paceline.parallel.replicate.bucket import local_gradient
from paceline.parallel.step_stats import StepStats
from paceline.server.handle import Handle
from paceline.server.range_tensors import MEAN, STOPPING
from paceline.server.server_layout import AVERAGE
from paceline.server.settings import JobSettings
from paceline.server.transport.address import Credentials

CREDENTIALS = "PACELINE_CREDENTIALS"


class ServerEngine(DeclaredEngine):
    """The step of a worker, where servers update the parameters.

    Args:
        placed: the adapter of the whole model.
        workload: the user's workload, with loss, clipping and precision.
        comms: the communicators of axes of one rank: workers don't communicate with each other.
        plan: the job's plan, with the servers' options.
        place: this worker's number and device.
    """

    has_gradients: ClassVar[bool] = False
    takes_metrics: ClassVar[bool] = False

    @staticmethod
    def check_own_batches(workload: Workload, plan: Plan) -> None:
        """Raise PlanError where a worker that takes a lost one's place has to make that one's batch again.

        Also where nobody says how many steps there are.
        """
        if JobSettings.of(plan).admission().is_by_rounds:
            raise PlanError(
                f"servers that update by all workers' gradients (mode={plan.mode})",
                "the workload's data is None: a worker that takes a lost one's place has to push the same gradient, "
                "and nobody knows what the training loop made it of",
                "write mode=async or mode=stale, where each gradient is an update of its own; or replicate or shard; "
                "or hand in data=... with samples like those of your batches",
            )
        if workload.steps is None:
            raise PlanError(
                "servers, which end when every worker has taken its steps",
                "the workload's data is None, and so is its steps",
                "write steps=... in the Workload: those of each worker",
            )

    @staticmethod
    def comm_mesh(mesh: Mesh, rank: int) -> tuple[Mesh, int]:
        """Return a mesh of only this worker: workers exchange gradients with the servers, not with each other."""
        return Mesh.parse("replicate=1"), 0

    def __init__(self, placed: ModelAdapter, workload: Workload, comms: Comms, plan: Plan, place: RankPlace) -> None:
        super().__init__(placed, workload, comms, plan, place)
        self._check_batch_norm()
        self.buffers.is_compared = True  # the axes have one rank, but the servers average
        self.writes = ParameterWrites(SERVERS, not plan.is_compiled)
        self.handle: Handle | None = None
        self.base = 0  # the step of the checkpoint that the servers began with
        self.was_stopping = False

    def _check_batch_norm(self) -> None:
        """Raise PlanError if a batch norm would take the statistics of one worker's samples, not of the batch."""
        workers = Mesh.parse(self.plan.mesh).data_size
        if workers == 1 or not self.is_by_rounds or self.workload.micro_batch_size is not None:
            return
        norm = takes_batch(self.model)
        if norm is not None:
            share = max((self.workload.batch_size or 0) // workers, 1)
            raise PlanError(
                "batch norm takes the statistics of the whole batch",
                f"the model has a {type(norm).__name__}, and {workers} workers of parameter servers send each other "
                "nothing",
                "write replicate or shard in place of server; or declare the statistics of a worker's samples, with "
                f"any number of ranks: Workload(micro_batch_size={share})",
            )

    @staticmethod
    def check_data(data: Any) -> None:
        """Raise PlanError if it is a stream."""
        if not hasattr(data, "__len__"):
            raise PlanError(
                "workers of parameter servers go to a place in the data by its number",
                "the workload's data is a stream: a worker that takes a lost one's place, or has fallen behind, could "
                "not know which samples the others have come to",
                "hand in a data set with len() and [], or write replicate, shard, tensor or pipeline for server",
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanError if it is several: a class that the servers don't know is refused when this worker joins."""
        check_servers_can_run(optimizer)

    def join(self, optimizer: torch.optim.Optimizer, samples: int, steps: int, base: int) -> None:
        """Join the servers' job, and take over its parameters.

        Args:
            optimizer: the optimizer whose settings, and state from a checkpoint, go to the servers.
            samples: the number of samples in the data set.
            steps: the number of steps of the whole training.
            base: the step of the checkpoint that was loaded, 0 without.

        Raises:
            PlanError: the servers can't run the optimizer.
            UsageError: there is no coordinator.
            PacelineError: the servers refuse this worker, or have gone.
        """
        address = os.environ.get(COORDINATOR)
        if address is None:
            raise UsageError(
                f"the plan {self.plan.line()}", "no servers are running", "start the file with `paceline run`"
            )
        folder = os.environ.get(CREDENTIALS)
        self.base = base
        self.handle = Handle(self.model, optimizer, samples)
        options = {
            "clip_norm": self.workload.clip_norm if self.is_by_rounds else None,
            "is_deterministic": self.workload.deterministic,
        }
        credentials = Credentials(Path(folder)) if folder else None
        self.handle.join(address, self.rank, steps - base, options, credentials)

    @property
    def clip_norm(self) -> float | None:
        """Return None: the servers clip, they have the gradients."""
        return None

    @property
    def is_by_rounds(self) -> bool:
        """True if several workers' gradients make one update."""
        return JobSettings.of(self.plan).admission().is_by_rounds

    @property
    def step_number(self) -> int:
        """Return the steps that are done: more than one further where others went on without this worker."""
        return self.base + self._joined().clock

    def forward_backward(self, microbatches: Sequence[Any], is_stopping: bool, longest: int = 1) -> None:
        """Make the gradients of this worker's loss sum; of its mean where it is the only one with one micro-batch."""
        self.stats.clear()
        self.buffers.begin_step()
        self.observers.phase_begins(FORWARD)
        self.was_stopping = is_stopping
        self.is_mean = self.plan.world_size == 1 and len(microbatches) == 1
        self.divisor = Divisor(before=self.stats.own_weight if self.is_mean else None)
        self.follow_hooks()
        hooks = StepHooks(self.stats.add, self.placed.before_backward, lambda: None, self.divisor)
        self.placed.forward_backward(self._watched_loss, microbatches, hooks, longest)

    def _watched_loss(self, model: Any, batch: Any) -> Any:
        with self.writes.watching():
            self.writes.add(dict(model.named_parameters()))
            return self.workload.loss(model, batch)

    def reduce_gradients(self) -> StepStats:
        """Push this worker's gradient, and pull the parameters of the next step.

        Raises:
            LossError: this worker's loss is not finite, and nothing was pushed; or the whole gradient is not.
            PeerLostError: the servers have gone.
        """
        handle = self._joined()
        # Over an axis of one rank: nothing is sent. The servers add up the workers' numbers.
        self.stats.begin(self.was_stopping, self.buffers.find_changed())
        self.stats.finish()
        local = self.peer_values.step_stats(self.stats, self.buffers.changed)
        if local.bad_ranks:
            return StepStats(local.loss, local.weight, local.is_stopping, [self.rank], local.changed)
        # Where each push is an update of its own, the servers can't clip by a norm over all workers.
        if not self.is_by_rounds and self.workload.clip_norm is not None:
            self._clip_local(local.weight)
        clock_before = handle.clock
        flags = STOPPING * local.is_stopping | MEAN * self.is_mean
        with Timed(f"{COMMUNICATION} server", "push and pull"):
            answer = handle.step(self._sent(), local.loss, local.weight, flags)
        self._count_traffic()
        is_stopping = local.is_stopping
        for note in answer.notes:
            if note and note["flags"] & STOPPING:
                is_stopping = True
        stats = None
        if self.is_by_rounds and answer.clock != clock_before:  # an update of all workers together
            stats = self.stats_of_answer(is_stopping, local.changed)
        if stats is None:
            # A worker without samples of a short batch pushes nothing that counts.
            return StepStats(local.loss, local.weight or 1.0, is_stopping, [], local.changed)
        if self.norm == float("inf"):
            raise LossError(
                "the gradient's norm should be a finite number",
                "it is not, although the loss is finite; the parameters were left as they were",
                "lower the learning rate, use precision float32, or look for samples at which the loss has no gradient",
            )
        return stats

    def stats_of_answer(self, is_stopping: bool = False, changed: list[int] | None = None) -> StepStats | None:
        """Return the numbers of the update before the servers' last answer; None before the first.

        By rounds they are of all workers together, in the other modes of one.
        """
        note = next((note for note in self._joined().answer.notes if note), None)
        if note is None:
            return None
        self.norm = note.get("norm")
        return StepStats(note["loss"], note["weight"], is_stopping, [], changed or [])

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the parameters that the servers have updated."""
        self._joined().take()

    def take_optimizer_state(self) -> None:
        """Put what the servers keep into the worker's optimizer, for a checkpoint."""
        if self.handle is not None:
            self.handle.take_optimizer_state()

    def close(self) -> None:
        """Leave the servers."""
        if self.handle is not None:
            self.handle.close()
        super().close()

    def _joined(self) -> Handle:
        assert self.handle is not None
        return self.handle

    def _sent(self) -> list[torch.Tensor | None]:
        """Return the tensors that are pushed: gradients, and buffers that the forward passes changed."""
        number = {name: index for index, name in enumerate(self.buffers.names)}
        handle = self._joined()
        sent: list[torch.Tensor | None] = []
        for entry, tensor in zip(handle.layout.entries, handle.tensors, strict=True):
            if entry.group == AVERAGE:
                is_changed = self.buffers.put_back(number[entry.name], tensor)
                sent.append(tensor if is_changed else None)
                continue
            gradient = local_gradient(tensor)  # type: ignore[arg-type]
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            sent.append(gradient)
        return sent

    def _clip_local(self, weight: float) -> None:
        """Clip this worker's gradient, which is an update of its own, by its own norm."""
        norm = self.norm_of()
        if weight and not self.is_mean:
            norm = norm / weight
        self.norm = float(norm)
        factor = (float(self.workload.clip_norm or 0) / (norm + 1e-6)).clamp(max=1.0)
        scale_gradients(self.placed.updated().values(), factor)

    def _count_traffic(self) -> None:
        link = self._joined().link
        if link is None:
            return
        ledger = self.comms.data.ledger
        for flat in link.values:
            for segment in flat.segments:
                ledger.add("push", "server", segment.nbytes)
            ledger.add("pull", "server", flat.memory.numel())
