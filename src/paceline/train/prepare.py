"""Make and check what a job needs before its first step: plan, model, optimizer, scheduler, folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from paceline.checkpoint import owner as owners
from paceline.checkpoint.manifest import CHECKPOINTS, MANIFEST, OPTIMIZER, remove_partial_in, try_writing
from paceline.checkpoint.owner import TOKEN
from paceline.comm.batch_norm import takes_batch, without_sync
from paceline.comm.collectives import AxisComm
from paceline.comm.dtypes import wide_dtype, widen
from paceline.nouns.errors import CheckpointError, PlanError, WorkloadError, how_to_write
from paceline.nouns.mesh import CUTTING_AXES, GRAPH_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import ShardSpec
from paceline.nouns.workload import Workload
from paceline.parallel.engine.declared import strategy_of
from paceline.parallel.engine.engine import Comms
from paceline.parallel.model_adapter import EagerAdapter, ModelAdapter
from paceline.parallel.optimizer_list import OptimizerList, as_one, check_shared_out
from paceline.parallel.optimizer_parts import parts_of
from paceline.train.additive import check_loss_adds_up, check_loss_is_no_mean
from paceline.train.agree import check_same_model_everywhere
from paceline.train.compiler_import import defer_compiler_import
from paceline.train.composite_optimizer import check_parts
from paceline.train.data import RankLoader, open_data
from paceline.train.snapshot import parameter_names

if TYPE_CHECKING:
    from paceline.parallel.elementwise import LaterParameters
    from paceline.parallel.low_precision_states import CutOf

DATA_PARTS = "PACELINE_DATA_PARTS"  # of the process of `verify` that stands for several ranks
_STATES = 3  # a parameter and Adam's two moments: what a checkpoint holds at most of usual optimizers


def run_dir(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of this run; None if `paceline run` did not start it."""
    text = environment.get("PACELINE_RUN_DIR")
    return Path(text) if text else None


def stop_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file whose existence asks the job to stop; None where the launcher sends a signal instead."""
    # The supervisor makes the file (run/supervise/command_backend.py): mpirun kills a second after a signal, Hydra at
    # once.
    text = environment.get("PACELINE_STOP_FILE")
    return Path(text) if text else None


_tokens: dict[Path, str] = {}  # by run directory


def learn_owner(environment: Mapping[str, str]) -> None:
    """Read the token of the job that has the run directory.

    Call it once the ranks have met: by then rank 0 has taken the folder.
    """
    folder = run_dir(environment)
    if folder is not None:
        owner = owners.read_owner(folder)
        _tokens[folder] = environment.get(TOKEN, "" if owner is None else owner.token)


def check_owner(environment: Mapping[str, str]) -> None:
    """Raise RunTakenError if the run directory is another job's, or the job has gone on without this rank."""
    folder = run_dir(environment)
    if folder is not None:
        owners.check_owner(folder, _tokens.get(folder, environment.get(TOKEN, "")))


def read_plan(environment: Mapping[str, str], size: int) -> Plan:
    """Return the launcher's plan, from the run directory or, under torchrun, the environment; else plain replication.

    Raises:
        PlanError: it can't be read, or has what a plan does not have.
    """
    if "PACELINE_PLAN" in environment:
        return Plan.of_variable(environment["PACELINE_PLAN"])
    folder = run_dir(environment)
    if folder:
        return Plan.read(folder / "plan.json")
    return Plan(mesh=f"replicate={size}")


def data_parts(environment: Mapping[str, str], size: int) -> int:
    """Return the number of parts into which the ranks cut a batch.

    Args:
        environment: the environment of the process. In the one process with which `verify` compares ranks, DATA_PARTS
            has the ranks' number, so that its batches are as large.
        size: the number of ranks.
    """
    if DATA_PARTS in environment:
        return int(environment[DATA_PARTS])
    return Mesh.parse(read_plan(environment, size).mesh).data_size


def be_deterministic() -> None:
    """Ask torch for deterministic algorithms on every device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses cuBLAS in this mode
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def make_model(workload: Workload, device: torch.device, comm: AxisComm) -> torch.nn.Module:
    """Make the model on its device and in its precision, the same on every rank.

    Raises:
        WorkloadError: the factory returns no module, one without parameters, or not the same everywhere.
    """
    model = workload.model()
    check_model(model)
    without_sync(model)
    check_same_model_everywhere(model, comm)
    model = model.to(device)
    if workload.precision == "float64":
        widen(model)
    return model.train()  # type: ignore[no-any-return]


def make_model_without_values(workload: Workload) -> torch.nn.Module:
    """Make the model where tensors are fake (FakeTensorMode), in the workload's precision.

    Raises:
        WorkloadError: the factory returns no module, or one without parameters.
    """
    model = workload.model()
    check_model(model)
    without_sync(model)
    if workload.precision == "float64":
        _widen_fakes(model)
    return model.train()  # type: ignore[no-any-return]


def _widen_fakes(model: Any) -> None:
    """Do what `widen` does, which can't put another tensor in a fake one's place."""
    wide = {id(tensor): _widened(tensor) for tensor in [*model.parameters(), *model.buffers()]}  # tied tensors: once
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = wide[id(tensor)]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().to(wide_dtype(tensor.dtype))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, tensor.requires_grad)
    return value


def check_model(model: Any) -> None:
    """Raise WorkloadError unless `model` is a module with something to train and without lazy parameters."""
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            "the workload's model should make a torch.nn.Module",
            f"it made a {type(model).__name__}",
            "return the module",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(
            "the model should have something to train",
            "no parameter of it has requires_grad",
            "set requires_grad on some",
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, UninitializedTensorMixin):
            raise WorkloadError(
                "the model's parameters should be made",
                f"{name} has no shape before the first batch (a lazy module)",
                "give the module its sizes, or run it on one sample where it is made",
            )


def make_optimizer(workload: Workload, model: torch.nn.Module, states: str = "full") -> torch.optim.Optimizer:
    """Make the optimizer, over parameters of the model only.

    Args:
        workload: the workload, which makes the optimizer.
        model: the model as this rank has it.
        states: the precision of its states: the plan's `optimizer_states`.

    Raises:
        PlanError: the optimizer has no such states.
        WorkloadError: it is none, is one that needs a closure, or holds other parameters; of several, one parameter is
            in two of them or in none.
    """
    defer_compiler_import()
    optimizer = as_one(workload.optimizer(model))
    if not isinstance(optimizer, torch.optim.Optimizer):
        fix = "return e.g. torch.optim.AdamW(model.parameters())"
        if isinstance(optimizer, dict):
            fix = "return several as a list: [torch.optim.Muon(matrices), torch.optim.AdamW(others)]"
        raise WorkloadError(
            "the workload's optimizer should make a torch.optim.Optimizer, or a list of them",
            f"it made a {type(optimizer).__name__}",
            fix,
        )
    # Its `step` calls a closure, which would have to run the whole distributed step.
    if any(isinstance(part, torch.optim.LBFGS) for part in parts_of(optimizer)):
        raise WorkloadError(
            "the optimizer should update once per step",
            "LBFGS evaluates the loss several times in a step",
            "use a first-order optimizer such as AdamW",
        )
    # Raises where the optimizer has parameters that are not the model's: no strategy would sum their gradients.
    parameter_names(model, optimizer)
    if isinstance(optimizer, OptimizerList):
        check_shared_out(optimizer, model)
    if states == "full":
        return optimizer
    from paceline.parallel.low_precision_states import with_low_precision

    return with_low_precision(optimizer, states)


def keep_own(optimizer: torch.optim.Optimizer, mesh: Mesh, placed: ModelAdapter) -> LaterParameters | None:
    """Remove from the optimizer the parameters of other pipeline stages, which have no values here.

    What it can't update in parts is updated whole from now on.

    Returns:
        An object that checks parameters that the optimizer is given later; None where no axis cuts parameters.

    Raises:
        PlanError: it updates parameters from each other, or can't be tried.
        WorkloadError: it is made of others, and a checkpoint would not find their state.
    """
    check_parts(optimizer, mesh)
    whole_parameters: dict[torch.nn.Parameter, str] = {}
    cutting_axes = mesh.used(CUTTING_AXES)[::-1]
    if cutting_axes:
        from paceline.parallel.elementwise import LaterParameters, find_whole_parameters

        names = parameter_names(placed.model, optimizer)
        cut_of = None if mesh.used(GRAPH_AXES) else _cut_of(names, placed)
        found = find_whole_parameters(optimizer, cutting_axes, cut_of)
        whole_parameters |= {parameter: names[parameter] for parameter in found if parameter.requires_grad}
        _check_no_state(optimizer, whole_parameters)
        placed.update_whole(set(whole_parameters.values()), optimizer)
    elif mesh.size("pipeline") > 1:
        from paceline.parallel.elementwise import check_updates_apart

        check_updates_apart(optimizer, "pipeline")
    # Parameters of other stages are on the meta device. Some optimizers (Adagrad) have state of them from the start.
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
    for part in parts_of(optimizer):
        for parameter in list(part.state):
            if isinstance(parameter, torch.Tensor) and parameter.is_meta:
                del part.state[parameter]
    return LaterParameters(optimizer, cutting_axes, whole_parameters, cut_of) if cutting_axes else None


def _cut_of(names: Mapping[torch.nn.Parameter, str], placed: ModelAdapter) -> CutOf:
    """Return a function that returns the shard spec of this rank's part of a parameter, as its optimizer updates it."""
    shards = placed.local_shards()

    def cut_of(parameter: torch.nn.Parameter) -> ShardSpec | None:
        name = names[parameter]
        shard = shards.get(OPTIMIZER + name) or shards.get(name)
        return None if shard is None else shard.shard_spec

    return cut_of


def _check_no_state(optimizer: torch.optim.Optimizer, whole_parameters: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise PlanError if the optimizer has state of parts already, of parameters that it is to update whole."""
    for part in parts_of(optimizer):
        for parameter, name in whole_parameters.items():
            for key, value in part.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise PlanError(
                        f"the optimizer's state of {name} should be of the whole parameter",
                        f"{type(part).__name__} makes {key} in its constructor, where a part is all that there is",
                        "make the state in the first step, or write replicate in place of shard and tensor",
                    )


def check_may_cut(
    placed: ModelAdapter,
    workload: Workload,
    loader: RankLoader,
    comms: Comms,
    mesh: Mesh,
    notice: Callable[[str], None],
) -> None:
    """Check that batches may be cut as the plan wants it. Collective.

    Raises:
        PlanError: the plan has the pipeline cut batches, and the model writes into its buffers once per micro-batch, or
            its batch norms take the statistics of one.
        LossError: batches are to be cut and the loss is no sum over samples, batch norm apart; or nothing cuts them
            and it is a mean, with the number of samples as its weight.
    """
    if loader.micro_batches_wanted > 1:
        _check_may_cut_batches(placed, workload, loader.micro_batches_wanted)
    # Where no batch is split, the loss may be anything.
    if mesh.data_size > 1 or workload.micro_batch_size is not None or loader.micro_batches_wanted > 1:
        check_loss_adds_up(placed, workload, loader, notice, comms.step)
    elif mesh.world_size == 1 and isinstance(placed, EagerAdapter):
        check_loss_is_no_mean(placed, workload, loader)


def _check_may_cut_batches(placed: ModelAdapter, workload: Workload, micro_batches: int) -> None:
    """Raise PlanError if a model does with a micro-batch what one process does with all of it."""
    found = None
    if placed.written_buffers:
        found = f"the model writes into {placed.written_buffers[0]} in every forward pass: once per micro-batch, where "
        found += "one process writes once per batch"
    norm = takes_batch(placed.model) if workload.micro_batch_size is None else None
    if norm is not None:
        found = (
            f"the model has a {type(norm).__name__}, which would take the statistics of each micro-batch, where one "
        )
        found += "process takes those of the batch"
    if found:
        raise PlanError(
            f"the pipeline should cut every batch into {micro_batches} micro-batches",
            found,
            "leave micro_batches out, or set Workload(micro_batch_size=...), which cuts the batch in one process too",
        )


def check_can_score(placed: ModelAdapter, metrics: Any) -> None:
    """Raise WorkloadError when `metrics` can't be updated: a captured score function has no side effects."""
    if metrics is not None and placed.is_captured:
        raise WorkloadError(
            "the score function should return its sums, and not update an object",
            "tensor and pipeline run the score function as a graph, which leaves no trace outside",
            "return counts as (sum, weight) pairs, or evaluate under replicate or shard",
        )


def evaluation_data(workload: Workload, data: Any) -> Any:
    """Return the data set to evaluate on: `data`, or the workload's if it is None.

    Raises:
        WorkloadError: neither the call nor the workload names one.
    """
    if data is None and workload.evaluation is None:
        raise WorkloadError(
            "job.evaluate needs a data set",
            "the workload has no evaluation and the call named none",
            "write evaluation=... in the Workload, or job.evaluate(data)",
        )
    if not workload.batch_size:
        raise WorkloadError(
            "job.evaluate needs batches", "the workload has no batch_size", "write batch_size=... in the Workload"
        )
    return open_data("evaluation", workload.evaluation if data is None else data)


def check_plan_without_data(workload: Workload, plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError when the plan has to see samples before the first step, or to know their order.

    Args:
        workload: the workload, whose data may be None.
        plan: the plan of the job.
        mesh: the mesh of the plan.
    """
    if workload.data is not None:
        return
    needs = {}
    for axis in mesh.used(GRAPH_AXES):
        needs[axis] = "splits the model by what the loss does to a batch"
    strategy_of(plan).check_own_batches(workload, plan)
    if needs:
        name, reason = next(iter(needs.items()))
        raise PlanError(
            f"a plan with {name}, which {reason}",
            "the workload's data is None",
            "write replicate or shard, or hand in data=... with samples like those of your batches",
        )


def check_own_batch(workload: Workload, plan: Plan, step_number: int) -> None:
    """Raise WorkloadError when a batch that the training loop made itself is at odds with the workload or the plan.

    Args:
        workload: the workload, whose micro_batch_size cuts only batches of its data.
        plan: the plan, whose micro_batches do so too.
        step_number: the number of steps done.
    """
    # One micro-batch is the batch itself: nothing is cut.
    cuts = {"micro_batch_size": workload.micro_batch_size, "micro_batches": max(plan.micro_batches - 1, 0)}
    for name, value in cuts.items():
        if value:
            raise WorkloadError(
                "job.step got a batch that does not come from job.batches()",
                f"{name} cuts the batches of the workload's data alone, and this one would go through the model whole",
                f"leave {name} out, and hand in batches that fit",
            )
    if workload.steps is not None and step_number >= workload.steps:
        raise WorkloadError(
            f"can't take step {step_number + 1} of a loop with its own batches",
            f"the workload has steps={workload.steps}, which are done",
            "write more steps, or let the loop begin where the job is, also after --resume: "
            "for step in range(job.step_number, job.total_steps)",
        )


def check_space(folder: Path, model: torch.nn.Module) -> None:
    """Raise CheckpointError unless a checkpoint can be written and has space; clear what a killed job left.

    Args:
        folder: the run directory.
        model: the model as this rank holds it.
    """
    folder = folder / CHECKPOINTS
    rank = os.environ.get("PACELINE_RANK", "0")
    try:
        # Every rank tries, because hosts may see different disks; each its own file.
        try_writing(folder, f"rank-{rank}")
        if rank != "0":
            return
        remove_partial_in(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(
            f"can't write checkpoints in {folder}", f"it can't be written ({error.strerror})", how_to_write(error)
        ) from None
    needed = _STATES * sum(parameter.nbytes for parameter in model.parameters())
    if free < needed:
        raise CheckpointError(
            f"can't write a checkpoint of about {needed / 2**20:.0f} MiB in {folder}",
            f"{free / 2**20:.0f} MiB are free there",
            "free space, or name another place with --runs",
        )


def check_may_write(folder: Path) -> None:
    """Raise CheckpointError when `folder` holds something that is no checkpoint."""
    is_other = folder.is_file()
    if folder.is_dir():
        is_other = any(folder.iterdir()) and not (folder / MANIFEST).exists()
    if is_other:
        raise CheckpointError(
            f"can't write a checkpoint to {folder}", "there is something else", "name a new folder; nothing was written"
        )


def check_same_job(folder: Path, manifest: dict[str, Any], workload: Workload, samples: int, end: int) -> None:
    """Raise CheckpointError when the checkpoint's data order is not this workload's.

    Args:
        folder: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        workload: the workload of this job.
        samples: the length of its data set; 0: there is none.
        end: the position after the job's last step.
    """
    for name, current in (("seed", workload.seed), ("samples", samples)):
        if manifest.get(name, current) != current:
            found = f"it was saved with {name}={manifest[name]}, the workload has {name}={current}"
            if name == "samples" and not current:
                found = f"it is of a workload whose data has {manifest[name]} samples, and here the loop has its own"
            error = CheckpointError(
                f"the checkpoint {folder} should go on in the same data order",
                found,
                "resume with the file, the seed and the data it was trained on, or start a new job",
            )
            error.exit_code = 2
            raise error
    step, position = manifest["step"], manifest["position"]
    # A batch ends with its pass; a loop that leaves batches out still takes none after its end.
    if samples and manifest.get("loop") is None and position > max(step * samples, end):
        raise CheckpointError(
            f"the checkpoint {folder} should be of a step that a job can have taken",
            f"its step {step} is after {position} samples, and a step takes at most the {samples} of the data set",
            "use an earlier checkpoint",
        )
