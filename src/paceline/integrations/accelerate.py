"""`Accelerator`: a script for `accelerate.Accelerator` trains on Paceline's engine, under its plans.

    from paceline.integrations.accelerate import Accelerator  # from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Accelerate keeps its loaders, schedulers, trackers, autocast and accumulation. `prepare` hands the models and optimizers
to `paceline.prepare`, which holds them as the plan says, sums gradients, and saves what ranks have parts of. As with
Accelerate each data rank takes its own batches, its loss is the mean over them, and gradients are means over the data
ranks.

Needs: every rank makes the same calls of models, `backward` and `step`.
Promises: on N data ranks the parameters of `accelerate.Accelerator` on N processes, up to rounding.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DynamoBackend, InitProcessGroupKwargs

import paceline
from paceline.comm.batch_norm import SharedForward
from paceline.comm.dtensor_parts import local
from paceline.comm.process_group import find_rank_info
from paceline.integrations.saving import prefix_of
from paceline.nouns.errors import CheckpointError, PlanError, UsageError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.parallel.norm import scale_gradients
from paceline.parallel.optimizer_parts import groups_of
from paceline.train.loop_job import LoopJob
from paceline.train.prepare import read_plan, run_dir
from paceline.train.seed import random_state, restore_random_state
from paceline.train.whole_state import whole_state

STATE = "paceline"  # the folder of a checkpoint that has what ranks have parts of
_IN_COMMAND = "write the plan in the command, such as paceline run --plan shard=4 FILE, or Accelerator(plan='shard=4')"
_NO_COMPILER = "leave it out; models run by their own code"
_REFUSED = {
    "deepspeed_plugin": _IN_COMMAND,
    "deepspeed_plugins": _IN_COMMAND,
    "fsdp_plugin": _IN_COMMAND,
    "torch_tp_plugin": _IN_COMMAND,
    "megatron_lm_plugin": _IN_COMMAND,
    "parallelism_config": _IN_COMMAND,
    "dynamo_backend": _NO_COMPILER,
    "dynamo_plugin": _NO_COMPILER,
}
_REFUSED_VARIABLES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
# Of DistributedDataParallel: parameters without a gradient need no flag, and gradients have no copies.
_WITHOUT_EFFECT = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "check_reduction"}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` whose models are held, and whose gradients are summed, by Paceline.

    It takes the arguments of Accelerate's and has its methods. docs/accelerate.md says what differs.

    Args:
        arguments: those of `accelerate.Accelerator`.
        plan: the plan, such as "shard=2,zero=2"; that of `paceline run` where None, or plain replication.
        named: those of `accelerate.Accelerator`, by name.

    Raises:
        UsageError: an argument, or a variable of `accelerate launch`, asks for another engine.
        PlanError: the plan contradicts that of the command, the number of ranks, or what a loop can have.
        PeerLostError: not all ranks came.

    Attributes:
        plan (Plan): the parallelism and its options.
        job (LoopJob | None): the job of the models that are trained; None until `prepare` has them and the optimizers.

    Examples:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from paceline.integrations.accelerate import Accelerator
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = DataLoader(TensorDataset(x, y), batch_size=16)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(inputs), targets)
        ...     accelerator.backward(loss)
        ...     optimizer.step()
        >>> accelerator.num_processes
        1
    """

    def __init__(self, *arguments: Any, plan: str | None = None, **named: Any) -> None:
        bound = inspect.signature(accelerate.Accelerator.__init__).bind(self, *arguments, **named).arguments
        _check_arguments(bound)
        self.plan = join_ranks(plan, bool(bound.get("cpu")))
        self.mesh = Mesh.parse(self.plan.mesh)
        super().__init__(*arguments, **named)
        self.job: LoopJob | None = None
        self.register_load_state_pre_hook(self._load_parts)

    @property
    def data_rank(self) -> int:
        """The number of this rank's part of the samples."""
        return int(self.process_index % self.num_processes)

    @property
    def is_cut(self) -> bool:
        """Whether ranks have parts of parameters, or of the state of optimizers."""
        return self.mesh.size("shard") * self.mesh.places > 1

    # What is prepared.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does; open the job once the models of all prepared optimizers are there."""
        prepared = super().prepare(*args, device_placement=device_placement)
        self._open_job()
        return prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Place a model on the device, in the precision of the accelerator; the job holds it if it is trained."""
        # In its evaluation mode Accelerate wraps the model in no DistributedDataParallel.
        return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[no-any-return]

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of this data rank's batches; ranks of `tensor` get the same ones."""
        if getattr(data_loader, "_is_accelerate_prepared", False) or self.mesh.places == 1:
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise UsageError(
                "ranks of tensor should get the same batches",
                "dispatch_batches=True, which sends each process its own",
                "leave dispatch_batches out of the DataLoaderConfiguration",
            )
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.data_rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def _open_job(self) -> None:
        """Hand the prepared models and optimizers to `paceline.prepare`, if the optimizers' parameters are all there.

        Raises:
            UsageError: others are prepared when a job is open.
        """
        optimizers = [wrapper.optimizer for wrapper in self._optimizers]
        models = self._trained_models(optimizers)
        if not models:
            return
        if self.job is not None:
            known = self.job.objects
            if _are_in(models, known.models) and _are_in(optimizers, known.optimizers):
                return
            if self.job.closed_step is None and _share(optimizers, known.optimizers):
                raise UsageError(
                    "accelerator.prepare should be handed all models and optimizers that are trained in one call",
                    f"a {type(models[-1]).__name__} or its optimizer came after the job of the first call was open",
                    "write a, b, optimizer_a, optimizer_b = accelerator.prepare(a, b, optimizer_a, optimizer_b)",
                )
            self.job.close(save=False)
        others = [wrapper.scheduler for wrapper in self._schedulers if wrapper.scheduler.optimizer in optimizers]
        if self.scaler is not None:
            others.append(self.scaler)
        state = random_state(self.device)  # Accelerate's prepare draws nothing, and sets no seed
        self.job, *_ = paceline.prepare(*models, *optimizers, *others)
        restore_random_state(state, self.device)
        for model in models:
            _take_own_statistics(model)
        if len(optimizers) == 1:
            # An evaluation may follow, which wants equal buffers.
            optimizers[0].register_step_post_hook(self._end_step)

    def _trained_models(self, optimizers: list[torch.optim.Optimizer]) -> list[torch.nn.Module]:
        """Return the models that optimizers train; none as long as some of their parameters are in no model."""
        missing: set[int] = set()
        for optimizer in optimizers:
            for group in groups_of(optimizer):
                missing |= {id(parameter) for parameter in group["params"]}
        held = set(missing)
        models = []
        for model in self._models:
            numbers = {id(parameter) for parameter in model.parameters()}
            if numbers & held:
                models.append(model)
                missing -= numbers
        return [] if missing else models

    def _end_step(self, optimizer: object, arguments: object, named: object) -> None:
        assert self.job is not None
        self.job.end_step(goes_on=True)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of what was prepared; of the job too, if the caller lets go of objects."""
        if objects and self.job is not None:
            self.job.close(save=False)
            self.job = None
        return super().free_memory(*objects)

    # The step.

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradient of the mean of the ranks' losses, divided by the accumulation steps."""
        if self.job is None:
            super().backward(loss, **kwargs)
            return
        retain_graph = kwargs.pop("retain_graph", False)
        if kwargs:
            raise UsageError(
                "accelerator.backward takes retain_graph beside the loss",
                f"it was handed {', '.join(kwargs)}",
                "leave it out",
            )
        share = 1 / self.gradient_accumulation_steps
        if share != 1:
            loss = loss * share
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self.job.backward(loss, weight=1.0, retain_graph=bool(retain_graph), share=share)

    @contextmanager
    def no_sync(self, model: object) -> Iterator[None]:
        """Leave the gradients of backward passes inside to this rank, until one outside."""
        if self.job is None:
            yield
        else:
            with self.job.accumulate():
                yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """As Accelerate's in one process; refused on several ranks, which take every step together."""
        if self.num_processes > 1:
            raise UsageError(
                "ranks should have as many batches as each other",
                "join_uneven_inputs was called, for ranks that have fewer",
                "leave it out: with even_batches, the default, Accelerate's loaders give each rank as many",
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def _summed(self, parameters: Any) -> dict[torch.nn.Parameter, str]:
        """Sum the gradients over the ranks, and return these parameters that have one, by name."""
        assert self.job is not None
        self.unscale_gradients()
        self.job.sum_gradients(0)
        # A generator of model.parameters() goes on here, where the model has this rank's parts again.
        wanted = {id(each) for each in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        found = self.job.parallel.gradients_of(0)
        return {parameter: name for parameter, name in found.items() if id(parameter) in wanted}

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients as torch's function does, by the norm over all ranks' parts."""
        if self.job is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        found = self._summed(parameters)
        if norm_type != 2:
            if self.is_cut:
                raise UsageError(
                    "where ranks have parts of gradients, the norm should be that of their squares",
                    f"norm_type={norm_type}",
                    "leave norm_type out, or write replicate in the plan",
                )
            return torch.nn.utils.clip_grad_norm_(list(found), max_norm, norm_type)
        norm = self.job.parallel.models.norm_of(found)
        if max_norm < float("inf"):
            scale_gradients(found, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp gradients as torch's function does."""
        if self.job is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        for parameter in self._summed(parameters):
            assert parameter.grad is not None
            local(parameter.grad).clamp_(-clip_value, clip_value)

    # What ranks tell each other.

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all data ranks, one after another."""
        if self.mesh.places == 1:
            return super().gather(tensor)
        with self._among_all_ranks():
            gathered = super().gather(tensor)
        return _apply(lambda each: _one_of_each(each, self.mesh.places, self.num_processes), gathered)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size that a rank has."""
        with self._among_all_ranks():
            return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    @contextmanager
    def _among_all_ranks(self) -> Iterator[None]:
        """Have Accelerate's functions count all ranks of the process group, also those with the same samples."""
        state = PartialState()
        data_size, state.num_processes = state.num_processes, paceline.size()
        try:
            yield
        finally:
            state.num_processes = data_size

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As Accelerate's; objects, which it gathers pickled, are refused under `tensor`."""
        if self.mesh.places > 1 and (use_gather_object or not _has_only_tensors(input_data)):
            raise UsageError(
                "under tensor values should be gathered as tensors",
                "gather_for_metrics was handed other objects",
                "make tensors of them",
            )
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over the data ranks."""
        if self.mesh.places > 1 and reduction != "none" and self.process_index >= self.num_processes:
            tensor = _apply(torch.zeros_like, tensor)  # each sample counts once
        return super().reduce(tensor, reduction, scale)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this data rank's part of inputs."""
        state = PartialState()
        index = state.process_index
        state.process_index = self.data_rank
        try:
            with state.split_between_processes(inputs, apply_padding) as part:
                state.process_index = index
                yield part
        finally:
            state.process_index = index

    def end_training(self) -> None:
        """Finish the trackers; the process group stays until the end of the process, for the job's last checkpoint."""
        for tracker in self.trackers:
            tracker.finish()

    # State.

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's tensors; of parts of the ranks, whole on the CPU of rank 0 and none elsewhere."""
        if self.job is None or not self.is_cut or not _are_in([model], self.job.objects.models):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return whole_state(self.job, prefix_of(self.job, model, "get_state_dict"), lambda name: True)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Write what Accelerate writes; where ranks have parts, optimizers in a checkpoint of Paceline's."""
        if self.job is None or not self.is_cut:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        with self._without_optimizers():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        self.job.save(Path(folder, STATE))
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Read what `save_state` wrote, under this plan or another."""
        if self.job is None or not self.is_cut:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        with self._without_optimizers():
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        optimizers: list[Any] = self._optimizers
        self._optimizers: list[Any] = []
        try:
            yield
        finally:
            self._optimizers = optimizers

    def _load_parts(self, models: list[torch.nn.Module], folder: str) -> None:
        """Load what ranks have parts of, before Accelerate loads the rest."""
        if self.job is None or not self.is_cut:
            if Path(folder, STATE).exists():
                raise other_plan(Path(folder), "replicate")
            return
        load_parts(self.job, Path(folder))
        models.clear()


def load_parts(job: LoopJob, folder: Path, weights_only: bool = False) -> None:
    """Load models and optimizers from the checkpoint of Paceline's in a folder.

    Args:
        job: the job whose models and optimizers are in parts.
        folder: the folder that `save_state`, or a Trainer, wrote.
        weights_only: True to leave the optimizers as they are.

    Raises:
        CheckpointError: there is no such checkpoint in it, or it can't be used.
    """
    if not Path(folder, STATE).exists():
        raise other_plan(folder, job.plan.mesh)
    job.load(Path(folder, STATE), weights_only)


def other_plan(folder: Path, mesh: str) -> CheckpointError:
    """Return the error of a checkpoint that was saved under a plan of the other kind."""
    return CheckpointError(
        f"the checkpoint {folder} should be of a plan that keeps state as {mesh} does",
        "plans with parts of parameters or states keep them in a folder of their own, and plain replication does not",
        "resume under the plan that saved it; of one with parts, any plan with shard or tensor may resume",
    )


def join_ranks(plan_line: str | None, cpu: bool) -> Plan:
    """Meet the other ranks, and have Accelerate's process state say who this one is; return the plan.

    Args:
        plan_line: the plan that the script asks for; None for that of the command.
        cpu: whether the script asks for CPUs.

    Raises:
        UsageError: a variable asks for another engine, or the script asks for a
            CPU where ranks have GPUs.
        PlanError: the plan contradicts the command, or can't be that of a loop.
    """
    for name in _REFUSED_VARIABLES:
        if os.environ.get(name, "false").lower() == "true":
            raise UsageError("the engine should be Paceline's", f"{name}={os.environ[name]}", f"unset {name}")
    paceline.init()
    plan = _plan_of(plan_line)
    check_plan_of_loop(plan)
    # Where a launcher has started the ranks again, the script's own loop says where it goes on, and loads that.
    os.environ.pop("PACELINE_RESUME", None)
    if paceline.size() > 1:
        _tell_state(Mesh.parse(plan.mesh), cpu)
    return plan


def _plan_of(line: str | None) -> Plan:
    """Return the plan; write that of the script where `paceline.prepare` reads it."""
    is_given = "PACELINE_PLAN" in os.environ or run_dir(os.environ) is not None
    plan = read_plan(os.environ, paceline.size())
    if line is None:
        return plan
    own = Plan.parse(line)
    if is_given and own.mesh != plan.mesh:
        raise PlanError(
            "the script and the command should ask for the same plan",
            f"the script has plan={line!r}, the command {plan.mesh}",
            "leave plan= out of the script, and write the plan in the command",
        )
    if own.world_size != paceline.size():
        raise PlanError(
            f"plan={line!r} is of {own.world_size} ranks",
            f"the launcher started {paceline.size()}",
            f"start {own.world_size}, or write another plan",
        )
    os.environ["PACELINE_PLAN"] = json.dumps(dataclasses.asdict(own))
    return own


def _tell_state(mesh: Mesh, cpu: bool) -> None:
    """Have PartialState and AcceleratorState say how many data ranks there are, and which one this is."""
    has_gpus = find_rank_info(os.environ).device.type == "cuda"
    if cpu and has_gpus:
        raise UsageError(
            "the ranks' device should be the one that the script asks for",
            "cpu=True, and each rank has a GPU",
            "leave it out, or hide the GPUs by CUDA_VISIBLE_DEVICES=",
        )
    data_rank, place = divmod(paceline.rank(), mesh.places)
    # Of ranks with the same samples the first ones come first, so that process 0 is one, and every number is another's.
    index = data_rank + mesh.data_size * place
    known: dict[str, Any] = PartialState._shared_state
    if known and (known["num_processes"], known["process_index"]) == (mesh.data_size, index) and known["backend"]:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    variables = {
        "RANK": paceline.rank(),
        "WORLD_SIZE": paceline.size(),
        "LOCAL_RANK": paceline.local_rank(),
        "LOCAL_WORLD_SIZE": paceline.local_size(),
        "OMP_NUM_THREADS": torch.get_num_threads(),  # or it chooses a number, and warns
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        state = PartialState(cpu=not has_gpus)  # the process group is open, and is used as it is
    finally:
        os.environ.clear()
        os.environ.update(before)
    state.num_processes, state.process_index = mesh.data_size, index
    # Accelerate calls what is for the main process on every rank where there is one data rank.
    PartialState.use_distributed = property(_use_distributed)


def _use_distributed(state: PartialState) -> bool:
    """Return True if there are other ranks, also those with the same samples."""
    return bool(state.num_processes > 1 or (paceline.is_initialized() and paceline.size() > 1))


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Raise UsageError where an argument of Accelerate's asks for another engine."""
    for name, fix in _REFUSED.items():
        value = arguments.get(name)
        if getattr(value, "backend", value) not in (None, DynamoBackend.NO, "no"):
            raise UsageError(f"Accelerator does not take {name}", f"it is a {type(value).__name__}", fix)
    if str(arguments.get("mixed_precision")) == "fp8":
        raise UsageError("Accelerator does not take mixed_precision='fp8'", "it was asked for", "write 'bf16'")
    for handler in arguments.get("kwargs_handlers") or ():
        others = set(handler.to_kwargs())
        if isinstance(handler, DistributedDataParallelKwargs):
            others -= _WITHOUT_EFFECT
        elif not isinstance(handler, InitProcessGroupKwargs):
            others = set()
        if others:
            raise UsageError(
                f"Accelerator does not take {', '.join(sorted(others))} of {type(handler).__name__}",
                "there is no DistributedDataParallel, and Paceline opens the process group",
                "leave it out; docs/plan-options.md has the options of buckets and compression",
            )


def _are_in(objects: Iterable[Any], known: Iterable[Any]) -> bool:
    numbers = {id(each) for each in known}
    return all(id(each) in numbers for each in objects)


def _share(objects: Iterable[Any], known: Iterable[Any]) -> bool:
    numbers = {id(each) for each in known}
    return any(id(each) in numbers for each in objects)


def _take_own_statistics(model: torch.nn.Module) -> None:
    """Have batch norms take the statistics of this rank's batch, as under DistributedDataParallel."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), SharedForward):
            del module.forward


def _apply(function: Any, values: Any) -> Any:
    """Return nested lists, tuples and dicts with `function` of each tensor."""
    return accelerate.utils.recursively_apply(function, values)


def _one_of_each(gathered: torch.Tensor, places: int, data_size: int) -> torch.Tensor:
    """Leave the first of ranks with the same samples in what all ranks have gathered."""
    by_rank = gathered.chunk(data_size * places)
    return torch.cat([by_rank[number * places] for number in range(data_size)])


def _has_only_tensors(values: Any) -> bool:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return all(map(_has_only_tensors, values))
    return isinstance(values, torch.Tensor)
