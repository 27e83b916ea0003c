"""Compare a job's first step, and the first after a resume, with that of one process on the job's own batch.

Rank 0 forks a process before the step. That takes the step by itself, on the whole batch, with the values and random
numbers that the job has, while the ranks train on. What the ranks have made is handed to it after their step. It
compares, and rank 0 says the result as soon as it is there: at the end of a later step, at the first checkpoint, or at
the job's end. A difference ends the job before anything is saved.

Traffic, in that step: where ranks have parts of the model, three sums of it over all ranks (values before and after,
gradients); twice the states of the ranks' generators.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from paceline.checkpoint.manifest import MODEL
from paceline.checkpoint.reshard import LocalTensor
from paceline.comm import api
from paceline.comm.batch_norm import without_sync
from paceline.comm.collectives import AxisComm
from paceline.comm.dtypes import widen
from paceline.comm.ledger import Ledger
from paceline.comm.process_group import RankInfo
from paceline.comm.shared_memory import Slot
from paceline.nouns.control_group import available_bytes
from paceline.nouns.data_order import share
from paceline.nouns.errors import WorkloadError
from paceline.nouns.patching import patched
from paceline.nouns.shard_spec import LocalShard, ShardSpec
from paceline.parallel.effects import ALONE, OWNERS, REPLICAS, SERVERS, SHARDS
from paceline.parallel.micro_batches import checked_loss
from paceline.parallel.observer import StepObserver
from paceline.parallel.optimizer_list import as_one
from paceline.parallel.optimizer_parts import groups_of, parts_of
from paceline.parallel.replicate.bucket import local_gradient
from paceline.train import snapshot
from paceline.train.bystanders import ModuleState
from paceline.train.data import Batch, RankLoader
from paceline.train.event_log import TAKES_OVER
from paceline.train.forked_process import ForkedProcess, wait_for
from paceline.train.loader import moved
from paceline.train.loop_alone import END, UPDATE, LoopAlone
from paceline.train.loop_objects import updated_by
from paceline.train.one_process import (
    TOLERANCES,
    Forms,
    Found,
    Limits,
    RanksStep,
    answer_of,
    first_gradient_difference,
    first_value_difference,
    gradients_of,
    is_rounding,
    load_whole_state,
    other_generators,
    own_batch_norms,
    set_gradients,
)
from paceline.train.plain_step import change_gradients, clip_gradients, micro_batch
from paceline.train.precision import autocast
from paceline.train.rank_draws import RankDraws, dims_of_samples
from paceline.train.seed import seed_everything
from paceline.train.whole_state import put_together

if TYPE_CHECKING:
    from paceline.train.base_job import BaseJob
    from paceline.train.job import Job
    from paceline.train.loop_job import LoopJob

LEAST_S = 2.0  # that the process may compute
_SHARE = 0.02  # of the job's predicted time, that it may
_STUCK_S = 5.0  # without computing: it waits for something that it does not have
_MOST_BYTES = 2**31  # of the model: more takes long to compute
_MOST_BYTES_OF_PARTS = 2**27  # of a model of which ranks have parts: rank 0 puts it together, by three sums of it
_COPIES = 8  # of the model: values, gradients, an optimizer's state and the memory that both processes see
_OWN_BATCHES = "the loop makes its own batches, of which each rank has only its part"
_NO_MEMORY = "one process can't hold or compute the whole model beside the ranks; {} checks a smaller one"
_SERVER_TOLERANCE = 5e-2  # of an update that is made of this process's own gradients


class FirstStep:
    """The comparison of a job: due, under way, or done.

    Attributes:
        is_active: True while the comparison is due or under way.
        is_due: True if the next step is to be compared.
        has_differed: True if the step was not that of one process: nothing may be saved.
        process: the process that takes the step too; None where there is none.
    """

    def __init__(self) -> None:
        self.is_active = True
        self.is_due = True
        self.has_differed = False
        self.process: ForkedProcess | None = None
        self.ranks: RanksStep | None = None
        self.forms: Forms = {}
        self.recorder: _Gradients | None = None
        self.updates: set[int] = set()  # the loop's optimizers that have updated in this step
        self.began_at = 0
        self.began_s = 0.0

    def begin(self, job: Job, batch: Batch) -> None:
        """Before the step: fork the process that takes it too, if it is to be compared. Collective then."""
        if not self._may_begin(job, lambda: why_not(job, batch)):
            return
        values = _full_tensors(job, self.forms, _model_parts(job))
        states = _states(job)
        if job.parallel.has_gradients:
            self.recorder = _Gradients()
            job.parallel.add_observer(self.recorder)
        if job.rank == 0:
            self.ranks = RanksStep(self.forms, states)
            self.process = ForkedProcess(partial(_compare_workload, job, batch, values, states, self.ranks))
            _keep(self, job)

    def begin_loop(self, job: LoopJob) -> LoopAlone | None:
        """As a loop gets its first batch: fork the process that runs on with whole batches. Collective then.

        Returns:
            In that process, the loop's stand-in for the ranks; None on the rank.
        """
        if not self._may_begin(job, lambda: why_not_loop(job)):
            return None
        states = _states(job)
        if job.rank == 0:
            self.ranks = RanksStep(self.forms, states)
            self.process = ForkedProcess()
            if self.process.is_here:
                be_alone()
                _end_with_the_loop(self.process)
                return LoopAlone(job, self.process, self.ranks, states)
            _keep(self, job)
        return None

    def _may_begin(self, job: BaseJob, reason_not_to: Callable[[], str]) -> bool:
        """Return whether this step is to be compared, and say why it is not. Collective where it may be."""
        is_due, self.is_due = self.is_due, False
        if not is_due or job.plan.check == "off" or job.size == 1:
            return False
        reason = reason_not_to()
        forms = {} if reason else _forms(job)
        if not reason and not _agree(job, _has_memory(job, forms)):
            reason = _NO_MEMORY.format(_verify(job))
        if reason:
            job.notice(f"first step not checked: {reason}")
            return False
        self.forms = forms
        self.began_at, self.began_s = job.step_number, job.clock.now_s()
        return True

    def update_of_loop(self, job: LoopJob, number: int) -> None:
        """Before an update of a loop's first step: hand the gradients to the process."""
        self._may_begin(job, lambda: _OWN_BATCHES)
        if self.process is None or self.ranks is None or not self.forms:
            return
        if number in self.updates:
            self.end()
            job.notice("first step not checked: an optimizer updates twice in a step")
            return
        self.updates.add(number)
        updated = updated_by(job.objects.optimizers[number - 1], dict(job.model.named_parameters()))
        self.ranks.give_gradients({name: parameter.grad for name, parameter in updated.items()})
        self.process.go(UPDATE)

    def end_of_loop_step(self, job: LoopJob) -> None:
        """At the end of a loop's step: hand over all else. Collective if it is compared."""
        if self.forms:
            self._give_values(job, END)

    def step_taken(self, job: BaseJob) -> None:
        """After the step: hand what the ranks made to the process. Collective if it is compared."""
        if not self.forms:
            return
        gradients: dict[str, LocalTensor] = {}
        if self.recorder is not None:
            job.parallel.remove_observer(self.recorder)
            gradients = self.recorder.parts(job)
            self.recorder = None
        flags = torch.tensor([int(name in gradients) for name in self.forms])
        if not _are_whole(job):
            job.world.aside().all_reduce(flags)
        present = {name: form for (name, form), flag in zip(self.forms.items(), flags.tolist(), strict=True) if flag}
        full_gradients = _full_tensors(job, present, gradients)
        if self.ranks is not None:
            self.ranks.give_gradients(full_gradients)
        self._give_values(job, "g")

    def _give_values(self, job: BaseJob, letter: str) -> None:
        forms, self.forms = self.forms, {}
        values, states = _full_tensors(job, forms, _model_parts(job)), _states(job)
        if self.process is not None and self.ranks is not None:
            self.ranks.give_values(values, states)
            self.process.go(letter)

    def poll(self, job: BaseJob, waits: bool = False) -> None:
        """Report the result if it is there.

        Args:
            job: the job of the comparison.
            waits: True to wait until the result is there, or takes longer than it may.

        Raises:
            WorkloadError: the step is not that of one process.
        """
        if self.process is None:
            self.is_active = self.is_due or bool(self.forms)
            return
        if waits and self.forms:  # the ranks will make no more of the step
            self.forms = {}
            self.end()
            job.notice("first step not checked: the process ends before the step has ended")
            return
        limit_s = self._limit_s(job)
        answer = wait_for(self.process, limit_s, _STUCK_S) if waits else self.process.answer()
        if answer is None:
            if not waits and self.process.cpu_s() <= limit_s:
                return
            answer = {"reason": f"one process takes longer than {limit_s:.0f} s for it; {_verify(job)} checks it"}
        self.end()
        try:
            _report(job, answer, self.began_at + 1)
        except WorkloadError:
            self.has_differed = True
            raise

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.end()
            _pending.pop(self, None)
        self.process = self.ranks = None

    def _limit_s(self, job: BaseJob) -> float:
        """Return the seconds that the process may compute."""
        steps = job.step_number - self.began_at
        if not steps or not job.total_steps:
            return LEAST_S
        step_s = (job.clock.now_s() - self.began_s) / steps
        return max(LEAST_S, _SHARE * step_s * job.total_steps)


_pending: dict[FirstStep, BaseJob] = {}  # held, as nothing else may hold a job whose loop has ended


def _keep(comparison: FirstStep, job: BaseJob) -> None:
    """Report the result at the latest when the process ends: a job without a run directory may never be closed."""
    if not _pending:
        atexit.unregister(_finish_at_exit)
        atexit.register(_finish_at_exit)
    _pending[comparison] = job


_alone: list[ForkedProcess] = []  # this process, where it is one that runs on with a loop


def _end_with_the_loop(process: ForkedProcess) -> None:
    """End this process where the loop, or an error, leaves the user's code: what follows is the rank's to do."""
    _alone.append(process)
    sys.excepthook = lambda kind, error, trace: end_alone(error)
    atexit.register(end_alone)


def end_alone(error: BaseException | None = None) -> None:
    """In a process that is forked from a rank, reply why it has not taken the step, and end; elsewhere do nothing."""
    if _alone:
        found = "the loop ends before its first update" if error is None else _not_taken(error)
        _alone[0].reply({"reason": found})


def _not_taken(error: BaseException) -> str:
    first, *_ = [*str(error).splitlines(), ""]
    return f"one process can't take it ({type(error).__name__}: {first:.200})"


def leave_out_unended() -> None:
    """Compare no first step that has not ended: an error, which says more, has ended the loop in it."""
    for comparison in list(_pending):
        if comparison.forms:
            comparison.end()


def finish_pending() -> None:
    """Wait for the results that were not reported, and report them.

    Raises:
        WorkloadError: a job's first step is not that of one process.
    """
    end_alone()
    for comparison, job in list(_pending.items()):
        comparison.poll(job, waits=True)


def _finish_at_exit() -> None:
    try:
        with redirect_stdout(sys.stderr):  # the last line of a program's output may be its result
            finish_pending()
    except WorkloadError as error:  # raised here it would not change the exit code
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


class _Gradients(StepObserver):
    """Keeps copies of this rank's gradients, before they are clipped."""

    def __init__(self) -> None:
        self.copies: dict[str, torch.Tensor] = {}

    def gradients_reduced(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Copy them."""
        for name, parameter in parameters.items():
            gradient = local_gradient(parameter)
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self.copies[name] = dense.detach().clone()

    def parts(self, job: BaseJob) -> dict[str, LocalTensor]:
        """Return the copies as parts of whole gradients."""
        shards = job.parallel.local_shards()
        found = {}
        for name, copy in self.copies.items():
            everywhere = LocalShard(ShardSpec(tuple(copy.shape)), tuple(range(job.size)))
            found[name] = LocalTensor(copy, shards.get(name, everywhere))
        return found


def why_not(job: BaseJob, batch: Batch) -> str:
    """Return the reason why a workload's step can't be compared; "" where it can. The same on every rank."""
    if not len(batch.positions):
        return _OWN_BATCHES
    if not job.has_same_data:
        return "the ranks' data sets begin with different samples"
    if type(job.loader) is not RankLoader:
        return "the data is a stream, which one process can't read a second time"
    return _why_not(job)


def _why_not(job: BaseJob) -> str:
    plan = job.plan
    for option, plain in (("compression", "none"), ("float8", "off"), ("optimizer_states", "full")):
        if getattr(plan, option) != plain:
            return f"{option}={getattr(plan, option)} rounds more than one process by design"
    if os.environ.get(TAKES_OVER):
        return "a worker that takes a lost one's place does not have what the servers' optimizer has"
    if plan.strategy == "servers" and plan.mode != "sync":
        return f"under mode={plan.mode} the servers update by other gradients than one process"
    if job.workload.precision == "fp16":
        return "under fp16 the first steps may be left out"
    if job.device.type != "cpu":
        return f"the ranks compute on GPUs, and one process would need as much memory; {_verify(job)} checks it on CPUs"
    if not sys.platform.startswith("linux"):
        return f"it needs Linux; {_verify(job)} checks it"
    return ""


def why_not_loop(job: LoopJob) -> str:
    """Return the reason why a loop's step can't be compared; "" where it can. The same on every rank."""
    if job.parallel.placement not in (REPLICAS, OWNERS) or job.shard_frozen:
        return f"ranks have parts of the loop's models; {_verify(job)} checks it"
    if job.updates.scalers:
        return "with a GradScaler the first steps may be left out"
    return _why_not(job)


def _verify(job: BaseJob) -> str:
    file = Path(sys.argv[0]).name if sys.argv else ""  # __main__ is the fork server's once the file has ended
    return f"`paceline verify --plan {job.plan.line()} {file if file.endswith('.py') else 'FILE'}`"


def _are_whole(job: BaseJob) -> bool:
    """Return whether rank 0 has all of the model."""
    return job.parallel.placement in (ALONE, REPLICAS, OWNERS, SERVERS)


def _forms(job: BaseJob) -> Forms:
    """Return shape and dtype of parameters and persistent buffers, whole, by the first name of each."""
    placed: Any = job.parallel.placed
    model: torch.nn.Module = placed.split.form if placed.is_captured else job.model
    forms = {}
    ids: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in ids:
            ids.add(id(value))
            forms[name] = tuple(value.shape), value.dtype
    return forms


def _has_memory(job: BaseJob, forms: Forms) -> bool:
    nbytes = sum(int(torch.Size(shape).numel()) * dtype.itemsize for shape, dtype in forms.values())
    most = _MOST_BYTES if _are_whole(job) else _MOST_BYTES_OF_PARTS
    return nbytes <= most and _COPIES * nbytes <= available_bytes()


def _agree(job: BaseJob, is_possible: bool) -> bool:
    """Return rank 0's answer on every rank. Collective, but for workers of servers."""
    flag = torch.tensor([int(is_possible)])
    if job.parallel.placement != SERVERS:
        job.world.aside().broadcast(flag)
    return bool(flag)


def _model_parts(job: BaseJob) -> dict[str, LocalTensor]:
    parts = snapshot.model_parts(job.model, job.parallel.local_shards(), job.size)
    return {name.removeprefix(MODEL): part for name, part in parts.items()}


def _full_tensors(job: BaseJob, forms: Forms, parts: Mapping[str, LocalTensor]) -> dict[str, torch.Tensor]:
    """Return copies of the full tensors on rank 0. Collective where ranks have parts."""
    found = {}
    for name, (shape, dtype) in forms.items():
        part = parts.get(name)
        if _are_whole(job):
            if job.rank == 0 and part is not None:
                found[name] = part.tensor.clone()
            continue
        full = torch.empty(shape, dtype=dtype)
        put_together(full, part, job.world.aside())
        if job.rank == 0:
            found[name] = full
    return found


def _states(job: BaseJob) -> list[torch.Tensor]:
    """Return the states of torch's generators, of one rank for each part of the batch. Collective."""
    state_here = torch.get_rng_state()
    if job.parallel.placement == SERVERS:  # there is nothing between workers
        return [state_here] * job.mesh.data_size
    by_part: dict[int, torch.Tensor] = {}
    for rank, state in zip(job.world.peers, job.world.aside().all_gather(state_here), strict=True):
        by_part.setdefault(job.mesh.data_part(rank), state)
    return [by_part[part] for part in sorted(by_part)]


def be_alone() -> None:
    """Make the world of this process, which is forked from a rank, one of one rank."""
    _pending.clear()
    info = RankInfo()
    api._world[:] = [api.World(info, AxisComm("world", 0, (0,), None, Ledger()))]
    # A message of this process would be taken for the rank's.
    for owner, names in ((AxisComm, ("_enter",)), (Slot, ("begin", "finish"))):
        for name in names:
            setattr(owner, name, _refuse_message)


def _refuse_message(*arguments: object, **named: object) -> NoReturn:
    raise RuntimeError("a message to other ranks")


def _compare_workload(
    job: BaseJob,
    batch: Batch,
    values: Mapping[str, torch.Tensor],
    states: list[torch.Tensor],
    ranks: RanksStep,
    wait: Callable[[], str],
) -> dict[str, Any]:
    """Take the step of a workload in this process, and compare; return what was found, as JSON."""
    be_alone()
    try:
        step = _WorkloadStep(job, batch, values, states)
        step.take()
        wait()
        return step.compare(ranks)
    except Exception as error:  # of the user's code, or a place where one process differs from a rank
        return {"reason": _not_taken(error)}


class _WorkloadStep:
    """The first step of a workload in one process."""

    def __init__(
        self, job: BaseJob, batch: Batch, values: Mapping[str, torch.Tensor], states: list[torch.Tensor]
    ) -> None:
        self.job = job
        self.workload = job.workload
        self.values = values
        self.parts = [share(batch.positions, part, job.mesh.data_size) for part in range(job.mesh.data_size)]
        self.first_states = states
        self.batches = self._load(batch)
        # The rank's own model and optimizer where they are whole: with what the loop has changed since they were made.
        self.is_own = _are_whole(job) and not job.plan.is_compiled
        self.model = self._own_model() if self.is_own else self._model(is_wide=False)
        self.parameters = dict(self.model.named_parameters())
        self.others_draw = False
        self.dims: list[int | None] | None = None

    def _own_model(self) -> torch.nn.Module:
        own_batch_norms(self.job.model)
        self.job.parallel.gradient_hooks.give_back()
        return self.job.model

    def _model(self, is_wide: bool) -> torch.nn.Module:
        """Make the model with the job's values."""
        seed_everything(self.workload.seed)
        model = self.workload.model()
        without_sync(model)
        if is_wide or self.workload.precision == "float64":
            widen(model)
        model.train()
        tensors = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in self.values.items():
                tensors[name].detach().copy_(value)
        # The loop may have frozen or released parameters since the job was made.
        is_trained = {name: parameter.requires_grad for name, parameter in self.job.model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained.get(name, parameter.requires_grad))
        return model  # type: ignore[no-any-return]

    def _load(self, batch: Batch) -> list[tuple[Any, list[int]]]:
        """Load the whole batch, with the samples in it of each rank; as the micro-batches that the workload cuts."""
        if self.workload.micro_batch_size is None:
            return [(self._collated(batch.positions), [len(part) for part in self.parts])]
        loader: Any = self.job.loader
        loaded = []
        for part in range(len(self.parts)):
            for positions in loader.micro_batches_of(batch.positions, part):
                samples = [0] * len(self.parts)
                samples[part] = len(positions)
                loaded.append((self._collated(positions), samples))
        return loaded

    def _collated(self, positions: range) -> Any:
        loader: Any = self.job.loader
        return micro_batch(self.workload, loader.data, positions, self.workload.precision == "float64")

    def take(self) -> None:
        """Compute the gradients."""
        before = other_generators()
        state = ModuleState(self.model)
        self.draws = RankDraws(self.first_states)
        self.gradients = gradients_of(self.parameters, partial(self._backward, self.model, self.batches, self.draws))
        if self.draws.has_drawn and not self.draws.is_certain:
            state.put_back()
            self._find_dims()
            state.put_back()
            self.draws = RankDraws(self.first_states, self.dims)
            run = partial(self._backward, self.model, self.batches, self.draws)
            self.gradients = gradients_of(self.parameters, run)
        self.others_draw = before != other_generators()

    def _find_dims(self) -> None:
        """Find the samples' dimension of each draw, from a forward pass with the samples of the first rank."""
        part = next(part for part in self.parts if part)
        draws = RankDraws(self.first_states[:1])
        draws.samples = [len(part)]
        with draws, torch.no_grad(), autocast(self.workload.precision, "cpu"):
            self.workload.loss(self.model, self._collated(part))
        self.dims = dims_of_samples(self.draws.shapes, draws.shapes)

    def _backward(self, model: torch.nn.Module, batches: list[tuple[Any, list[int]]], draws: RankDraws) -> None:
        losses = []
        weight = 0.0
        with draws:
            for batch, samples in batches:
                draws.samples = samples
                # Code may ask whether it is compiled, and compute otherwise then.
                asked = (
                    patched(torch.compiler, is_compiling=lambda: True) if self.job.plan.is_compiled else nullcontext()
                )
                with autocast(self.workload.precision, "cpu"), asked:
                    total, batch_weight = checked_loss(self.workload.loss(model, batch))
                losses.append((total, samples))
                weight += float(batch_weight)
            for total, samples in losses:
                draws.samples = samples
                (total / weight).backward()  # type: ignore[no-untyped-call]

    def compare(self, ranks: RanksStep) -> dict[str, Any]:
        """Return the first difference from what the ranks made; or why there can be no comparison."""
        if self.others_draw:
            return {"reason": "the model draws by numpy or Python, on each rank other numbers"}
        if self.draws.has_drawn and not self.job.parallel.has_gradients:
            return {"reason": "the model draws random numbers, and workers of servers know their own only"}
        if self.draws.has_drawn and self.job.mesh.size("pipeline") > 1:
            return {
                "reason": f"under pipeline each stage draws from a generator of its own; {_verify(self.job)} checks it"
            }
        if not ranks.drew_as(self.draws.states):
            if self._are_draws_known():
                return {"kind": "draws", "name": "the ranks", "distance": 1.0}
            return {"reason": "the model draws random numbers that do not belong to samples, on each rank others"}
        return answer_of(self._difference(ranks), self.draws)

    def _are_draws_known(self) -> bool:
        """Return whether the ranks must have drawn as this process did: each for its samples, by the model's code."""
        if self.job.parallel.placement not in (REPLICAS, SHARDS) or self.job.plan.is_compiled:
            return False
        return self.draws.has_drawn and self.draws.is_certain and all(self.parts)

    def _difference(self, ranks: RanksStep) -> Found | None:
        tolerance = TOLERANCES[self._precision()]
        # Where ranks cut their parts into micro-batches they do not share statistics.
        are_shared = self.workload.micro_batch_size is None or len(self.parts) == 1
        limits = Limits(tolerance, are_statistics_shared=are_shared)
        if self.job.parallel.has_gradients:
            gradients = ranks.gradients()
            found = first_gradient_difference(self.gradients, gradients, tolerance)
            if found is not None and not self._is_rounding(found):
                return found
            set_gradients(self.parameters, gradients)
        else:
            limits = Limits(tolerance, max(tolerance, _SERVER_TOLERANCE), 1e-2, are_shared)
        self._update()
        return first_value_difference(self.model, self.values, ranks.values(), limits)

    def _precision(self) -> str:
        if self.workload.precision != "float32":
            return self.workload.precision
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        if dtypes & {torch.bfloat16, torch.float16}:
            return "bf16"
        return "float64" if dtypes <= {torch.float64, torch.complex128} else "float32"

    def _is_rounding(self, found: Found) -> bool:
        """Return whether rounding makes as large differences in this model; it is taken again in float64."""
        if self._precision() == "float64":
            return False
        try:
            model = self._model(is_wide=True)
            batches = [(moved(batch, self.job.device, True), samples) for batch, samples in self.batches]
            parameters = dict(model.named_parameters())
            again = RankDraws(self.first_states, self.dims)
            wide = gradients_of(parameters, partial(self._backward, model, batches, again))
        except Exception:  # an operation without float64
            return found.distance <= 10 * TOLERANCES[self._precision()]
        return is_rounding(found, self.gradients, wide)

    def _update(self) -> None:
        """Run the optimizer on this process's parameters, whose gradients are set."""
        is_resumed = (
            self.job.checkpoints.loaded_folder is not None
        )  # then the ranks' optimizer is compared with the checkpoint
        optimizer = self.job.optimizer if self.is_own and not is_resumed else self._optimizer()
        change_gradients(self.workload, self.parameters, self.job.step_number)
        if self.workload.clip_norm is not None:
            gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            clip_gradients(gradients, self.workload.clip_norm)
        optimizer.step()

    def _optimizer(self) -> Any:
        """Make the optimizer, with the state and the settings that the ranks' has."""
        optimizer = as_one(self.workload.optimizer(self.model))
        if self.job.checkpoints.loaded_folder is not None:
            load_whole_state(self.job.checkpoints.loaded_folder, self.model, optimizer)
        for group, group_of_ranks in zip(groups_of(optimizer), groups_of(self.job.optimizer), strict=True):
            group.update({key: value for key, value in group_of_ranks.items() if key != "params"})
        for part, part_of_ranks in zip(parts_of(optimizer), parts_of(self.job.optimizer), strict=True):
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                vars(part)[hooks] = vars(part_of_ranks).get(hooks, {})  # the loop may have registered more since
        return optimizer


def _report(job: BaseJob, answer: Mapping[str, object], step: int) -> None:
    """Report the result of the comparison.

    Raises:
        WorkloadError: a difference.
    """
    if "reason" in answer:
        job.notice(f"first step not checked: {answer['reason']}")
        return
    if not answer:
        job.notice("first step checked: equal to one process")
        return
    if answer["kind"] == "buffer":
        job.notice(
            f"first step checked: equal to one process but for the buffer {answer['name']}, which the ranks make equal "
            f"by their own values ({answer['distance']:.1e} off)"
        )
        return
    raise _difference_error(job, answer).at(rank=job.rank, step=step)


_CAUSES = {
    "gradient": "the loss or the model treats a part of a batch otherwise than the whole, or a rank has other samples "
    "or values",
    "update": "the optimizer, or a hook on it, looks at more than this rank's part of the parameters",
    "statistics": "a batch norm takes the statistics of a part of the batch",
    "draws": "a rank drew for other samples than its own",
}
_SUBJECTS = {
    "gradient": "the gradient of",
    "update": "the update of",
    "statistics": "the batch norm's statistic",
    "draws": "what was drawn at random by",
}


def _difference_error(job: BaseJob, answer: Mapping[str, Any]) -> WorkloadError:
    return WorkloadError(
        f"the ranks' first step should be that of one process ({job.plan.line()})",
        f"{_SUBJECTS[answer['kind']]} {answer['name']} differs by {answer['distance']:.1e} of its norm; likely cause: "
        f"{_CAUSES[answer['kind']]}; nothing was saved",
        f"see {_verify(job)} for the first module that differs, or train by replicate; --no-check trains on",
    )
