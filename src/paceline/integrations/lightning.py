"""Train a LightningModule by Lightning's own Trainer on Paceline's engine: a Strategy of Lightning's.

    from lightning import Trainer
    from paceline.integrations.lightning import Strategy

    trainer = Trainer(strategy=Strategy(plan="shard=2"), max_epochs=3)
    trainer.fit(module, loader)

Loops, callbacks, loggers and checkpoints are Lightning's. The strategy makes a job of the module and its optimizers, as
`paceline.prepare` does, and runs backward passes, clipping and collectives by it. As with Lightning's DDP, each rank
draws batches of its own, and the gradient is the mean of the ranks' gradients.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.checkpoint.reshard import LocalTensor, copy_common
from paceline.comm import api
from paceline.comm.process_group import find_rank_info
from paceline.nouns.errors import PacelineError, PlanError, UsageError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.mesh import Mesh
from paceline.nouns.parts import shown
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import ShardSpec
from paceline.parallel.engine.engine import open_comms
from paceline.rendezvous.launcher_env import LauncherPosition, variables_of
from paceline.train import prepare, snapshot
from paceline.train.loop_job import LoopJob
from paceline.train.loop_objects import sort_objects
from paceline.train.open_jobs import check_is_first
from paceline.train.whole_state import put_together, whole_state

_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
_AVERAGES = {"StochasticWeightAveraging", "WeightAveraging"}  # by name: Lightning 2.5 has only the first
_HOOKS = ("on_after_backward", "on_before_optimizer_step")


class LaunchedRanks(ClusterEnvironment):
    """The ranks of `paceline run`, torchrun, MPI or Slurm, as Paceline finds them in the environment."""

    def __init__(self) -> None:
        self.info = find_rank_info(os.environ)

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: the launcher has started every rank."""
        return True

    @property
    def main_address(self) -> str:
        """Return the host of rank 0's store; on one host the ranks meet on the loopback interface."""
        return self.info.master[0] if self.info.master else "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Return the port of rank 0's store; 0 where the ranks meet at a file."""
        return self.info.master[1] if self.info.master else 0

    @staticmethod
    def detect() -> bool:
        """Return whether a launcher has started this process as one rank of a job."""
        if "PACELINE_RUN_DIR" in os.environ:
            return True
        # Lightning's launcher sets these two and no RANK. For a second Strategy there are also Paceline's variables.
        if {"NODE_RANK", "LOCAL_RANK"} <= os.environ.keys() and "RANK" not in os.environ:
            return False
        return find_rank_info(os.environ).size > 1

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.info.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has set the number of ranks."""

    def global_rank(self) -> int:
        """Return the number of this rank."""
        return self.info.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set the rank."""

    def local_rank(self) -> int:
        """Return the number of this rank among those of its host."""
        return self.info.local_rank

    def node_rank(self) -> int:
        """Return the number of this host."""
        return self.info.cross_rank


class Strategy(ParallelStrategy):
    """Train by Lightning's Trainer under a plan of Paceline's.

    Started by `paceline run`, torchrun or another launcher it joins the launcher's ranks. Otherwise Lightning starts
    the ranks of the plan on this host, as it does for DDP.

    Args:
        plan: the plan, such as "replicate=2", "shard=2,zero=1" or "tensor=2"; the launcher's plan where None.
        checkpoint_io: Lightning's plugin that reads and writes checkpoint files; Lightning's own where None.
        precision_plugin: Lightning's precision plugin; the one of `Trainer(precision=...)` where None.

    Attributes:
        job (LoopJob | None): the job of the module; None before `fit`.

    Raises:
        PlanError: the plan can't be read, or can't train a loop of one's own.
        UsageError: the launcher's plan, or its number of ranks, is another one.

    Examples:
        >>> import lightning
        >>> from paceline.integrations.lightning import Strategy
        >>> class Line(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, index):
        ...         inputs, targets = batch
        ...         return torch.nn.functional.mse_loss(self.layer(inputs), targets)
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> few = {"max_epochs": 2, "enable_checkpointing": False}
        >>> trainer = lightning.Trainer(strategy=Strategy(), accelerator="cpu", **few, **quiet)
        >>> trainer.fit(Line(), loader)
        >>> trainer.global_step
        8
    """

    strategy_name = "paceline"

    def __init__(
        self,
        plan: str | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if plan is not None and not isinstance(plan, str):
            raise UsageError("Strategy needs the plan as a text", f"it is {shown(plan)}", 'write plan="shard=2"')
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.job: LoopJob | None = None
        self.num_nodes = 1
        self._plan = None if plan is None else Plan.parse(plan)
        self._comms: Any = None
        self._fitted: LightningModule | None = None
        if LaunchedRanks.detect():
            self.cluster_environment = LaunchedRanks()
            self._plan = self._launched_plan(self.cluster_environment.world_size())
        if self._plan is not None:
            check_plan_of_loop(self._plan)

    def _launched_plan(self, size: int) -> Plan:
        """Return the plan of a job whose ranks a launcher has started."""
        has_plan = prepare.run_dir(os.environ) is not None or "PACELINE_PLAN" in os.environ
        launched = prepare.read_plan(os.environ, size)
        plan = launched if self._plan is None else self._plan
        is_other = has_plan and replace(plan, checkpoint_every=launched.checkpoint_every) != launched
        if plan.world_size != size or is_other:
            found = f"the launcher has started {size} ranks"
            found += f" with the plan {launched.line()}" if has_plan else ""
            raise UsageError(
                f"Strategy asks for the plan {plan.mesh}",
                found,
                "leave plan out of Strategy, or give the command the same plan: paceline run --plan PLAN",
            )
        if os.environ.get("PACELINE_RESUME"):
            raise UsageError(
                "Lightning's Trainer resumes from its own checkpoints",
                "the command has --resume, which loads Paceline's",
                'leave --resume out, and write trainer.fit(module, ckpt_path="last")',
            )
        if plan.checkpoint_every not in (0, Plan(mesh="replicate=1").checkpoint_every):
            raise UsageError(
                "Lightning's Trainer writes its own checkpoints",
                f"the plan has checkpoint_every={plan.checkpoint_every}",
                "leave --checkpoint-every out, and write ModelCheckpoint(every_n_train_steps=...) among the callbacks",
            )
        return plan

    @property
    def plan(self) -> Plan:
        """Return the plan of the job."""
        assert self._plan is not None
        return self._plan

    @property
    def is_distributed(self) -> bool:
        """Return True: Lightning gives each part of the ranks its samples by a DistributedSampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        """Return the device on which this rank computes."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return this rank's part of the samples: ranks of `tensor` have the same part."""
        return {"num_replicas": self.mesh.data_size, "rank": self.mesh.data_part(self.global_rank)}

    def _configure_launcher(self) -> None:
        """Check the Trainer's settings, and have Lightning start the ranks where no launcher has.

        Raises:
            UsageError: `devices`, `num_nodes`, `precision`, `sync_batchnorm` or a plugin contradicts the plan.
        """
        devices = list(self.parallel_devices or [])
        launched = isinstance(self.cluster_environment, LaunchedRanks)
        if self._plan is None:
            self._plan = Plan(mesh=f"replicate={max(len(devices), 1) * self.num_nodes}")
        size = self.plan.world_size
        if api.is_initialized() and api.size() != size:
            raise UsageError(
                f"Strategy's plan {self.plan.mesh} should have the number of ranks that this process has joined",
                f"the plan has {size}, and it has joined {api.size()}",
                "give all Strategies of a file plans of as many ranks",
            )
        local = self.cluster_environment.info.local_size if launched else size // self.num_nodes  # type: ignore[union-attr]
        hosts = size // local if local else 0
        if hosts * local != size or (self.num_nodes != 1 and self.num_nodes != hosts):
            raise UsageError(
                f"Trainer's num_nodes should fit the plan {self.plan.mesh}",
                f"it is {self.num_nodes}, and there are {size} ranks, {local} of them on this host",
                "leave num_nodes out, or write a plan with as many ranks",
            )
        if len(devices) == 1 and devices[0].type == "cpu":  # what devices="auto" is on a CPU
            devices *= local
        if len(devices) != local:
            raise UsageError(
                f"Trainer's devices should be the {local} ranks of the plan {self.plan.mesh} on this host",
                f"there are {len(devices)}",
                f"write devices={local}, or another plan",
            )
        self.parallel_devices = devices
        if type(self.precision_plugin) not in _PRECISIONS:
            raise UsageError(
                "Strategy trains with the precisions 32-true, 64-true, bf16-true, 16-true, bf16-mixed and 16-mixed",
                f"the precision plugin is a {type(self.precision_plugin).__name__}",
                "write one of them in Trainer(precision=...)",
            )
        if launched:
            return
        if not isinstance(self.cluster_environment, LightningEnvironment):
            raise UsageError(
                "Strategy finds its ranks by itself",
                f"the plugins have a {type(self.cluster_environment).__name__}",
                "leave it out of plugins, or start the script with `paceline run`",
            )
        self.cluster_environment.set_world_size(size)
        if size > 1:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, local, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Number the ranks that Lightning has started on this host after those of the hosts before it."""
        environment = self.cluster_environment
        if self._plan is not None and isinstance(environment, LightningEnvironment):
            environment.set_world_size(self.plan.world_size)
            local = self.plan.world_size // self.num_nodes
            environment.set_global_rank(self.node_rank * local + self.local_rank)

    def setup_environment(self) -> None:
        """Join the other ranks. Collective."""
        self.set_world_ranks()
        environment = self.cluster_environment
        if self.world_size > 1 and isinstance(environment, LightningEnvironment):
            numbers = (self.global_rank, self.world_size, self.local_rank, self.world_size // self.num_nodes)
            master = (environment.main_address, environment.main_port)
            # Paceline's own variables: by torchrun's, rank 0's store would listen on all interfaces.
            place = LauncherPosition(*numbers, self.node_rank, self.num_nodes, master=master)
            os.environ.update(variables_of(place))
        api.init()
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Make a job of the module and its optimizers for `fit`; for other calls have the module as it is.

        Raises:
            UsageError: the module has a hook that is never called, or this Strategy has trained another module.
            WorkloadError, PlanError: the plan can't train the module or its optimizers.
        """
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        if module is not self._fitted:
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_module(trainer, module)
            self.setup_optimizers(trainer)
            self._make_job(module)
        self.setup_precision_plugin()

    def _check_module(self, trainer: Any, module: LightningModule) -> None:
        if self._fitted is not None:
            raise UsageError("a Strategy fits once", "its Trainer has fitted before", "make another Trainer")
        if is_overridden("backward", module, LightningModule):
            raise UsageError(
                "the job runs the backward passes",
                f"{type(module).__name__} overrides backward",
                "write automatic_optimization = False, and call self.manual_backward",
            )
        for callback in trainer.callbacks if self._has_parts() else ():
            if not _AVERAGES.isdisjoint(base.__name__ for base in type(callback).__mro__):
                raise UsageError(
                    f"{type(callback).__name__} averages whole parameters",
                    f"under the plan {self.plan.mesh} each rank has a part of them",
                    "write replicate=N, or shard=N,zero=1",
                )
        watching = [module, *trainer.callbacks] if self.mesh.places > 1 else []
        for each in watching:
            for name in _HOOKS:
                base = LightningModule if each is module else Callback
                if getattr(getattr(each, name), "__func__", None) is not getattr(base, name):
                    raise PlanError(
                        f"{name} of {type(each).__name__} finds whole gradients",
                        f"under the plan {self.plan.mesh} each rank has pieces of them",
                        "clip by Trainer(gradient_clip_val=1.0), or write replicate or shard",
                    )

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the plan."""
        return Mesh.parse(self.plan.mesh)

    def _has_parts(self) -> bool:
        """Return True if the plan gives each rank parts of parameters."""
        return self.mesh.places > 1 or (self.mesh.size("shard") > 1 and self.plan.zero > 1)

    def _make_job(self, module: LightningModule) -> None:
        check_is_first(prepare.run_dir(os.environ), "fit one module by one Trainer")
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        scaler = getattr(self.precision_plugin, "scaler", None)
        objects = (module, *self.optimizers, *schedulers, *([] if scaler is None else [scaler]))
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        try:
            plan = replace(self.plan, checkpoint_every=0)  # Lightning writes the checkpoints
            self.job = LoopJob(sort_objects(objects, by_part=[module]), plan, seed)
        except PacelineError as error:
            raise error.at(rank=self.global_rank) from error.__cause__
        self._fitted = module

    def setup_precision_plugin(self) -> None:
        """Have the precision plugin clip by the norm of the whole gradient, also where ranks have parts of it."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self.job is not None
        self.job.clip(float(clip_val), _plain(optimizer))

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        self._sum(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-clip_val, clip_val)

    def _sum(self, optimizer: Any) -> None:
        """Make the gradients of an optimizer's parameters sums over the ranks. Collective."""
        assert self.job is not None
        self.job.sum_gradients(self.job.updates.target_of(_plain(optimizer)))

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the gradient of the ranks' mean loss to the parameters' gradients. Collective.

        Raises:
            UsageError: there is an argument besides `retain_graph`.
            LossError: the loss is not finite on some rank.
        """
        assert self.job is not None
        assert self.lightning_module is not None
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if args or kwargs:
            raise UsageError(
                "self.manual_backward takes the loss and retain_graph",
                f"it has {shown(next(iter([*kwargs, *args])))} too",
                "leave it out",
            )
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.job.backward(loss, weight=1.0, retain_graph=retain_graph)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure with its backward pass, sum the gradients over the ranks, and update. Collective."""

        def summed() -> Any:
            result = closure()
            self._sum(optimizer)
            return result

        module: Any = model or self.lightning_module
        if getattr(self.precision_plugin, "scaler", None) is not None:
            return self.precision_plugin.optimizer_step(optimizer, model=module, closure=closure, **kwargs)
        # The job's optimizers take no closure: the gradients are sums before the update begins.
        result = self.precision_plugin._wrap_closure(module, optimizer, summed)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Leave gradients to this rank in the passes of an accumulation but the last."""
        assert self.job is not None
        with self.job.accumulate():
            yield

    def _settle(self) -> None:
        """End the step that is under way, so that buffers are equal on all ranks. Collective."""
        if self.job is not None:
            self.job.settle()

    def on_validation_start(self) -> None:
        """Make buffers equal on all ranks."""
        self._settle()

    def on_train_end(self) -> None:
        """End the last step."""
        self._settle()

    @property
    def _data(self) -> Any:
        """Return the communicator of the ranks with other samples. Collective when it is first asked for."""
        if self.job is not None:
            return self.job.comms.data
        if self._comms is None:
            self._comms = open_comms(self.mesh, self.global_rank, api.world().comm.ledger)
        return self._comms.data

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over the ranks with other samples; anything else as it is. Collective."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op if isinstance(reduce_op, str) else getattr(reduce_op, "name", reduce_op))
        name = name.rpartition(".")[2].lower().replace("avg", "mean")
        if name == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return api.reduce_over(self._data, tensor, name, False)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decide so. Collective."""
        vote = torch.tensor([int(bool(decision))], device=self.root_device)
        return bool(int(api.reduce_over(api.world().comm, vote, "min" if all else "max", False)))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of the ranks with other samples, (ranks, ...); a tensor as it is for one. Collective."""
        if self.mesh.data_size == 1:
            return tensor
        return api.gather_over(self._data, tensor[None], sync_grads)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if api.is_initialized():
            api.world().comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return a tensor or a plain value of one rank. Collective.

        Raises:
            UsageError: it is something else, which would have to be pickled.
        """
        if not api.is_initialized() or self.world_size == 1:
            return obj
        text, fault = "", None
        if isinstance(obj, torch.Tensor):
            return api.broadcast(obj, src)
        try:
            text = json.dumps(os.fspath(obj) if isinstance(obj, os.PathLike) else obj)
        except (TypeError, ValueError):
            fault = UsageError(
                "a strategy sends tensors and plain values",
                f"it is {shown(obj)}",
                "send numbers, strings, lists and dicts of them, or read it on every rank",
            )
        texts = api.world().comm.all_gather_text(text)
        if fault is not None:
            raise fault
        return json.loads(texts[src])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, whole; on rank 0 only where ranks have parts. Collective."""
        self._settle()
        if self.job is None or not self._has_parts():
            return super().lightning_module_state_dict()
        return dict(whole_state(self.job, "", lambda name: True))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, whole, in torch's form; on rank 0 only where ranks have parts. Collective."""
        optimizer = _plain(optimizer)
        job = self.job
        if job is None or self.mesh.data_size == self.mesh.size("replicate") == job.size:
            return super().optimizer_state(optimizer)
        shards = job.parallel.local_shards()
        parts, description = snapshot.optimizer_state(job.model, optimizer, shards, job.size)
        numbers: dict[str, int] = {}
        for group in description["groups"]:
            for name in group["parameters"]:
                numbers.setdefault(name, len(numbers))
        state: dict[int, dict[str, Any]] = {}
        for name, (shape, dtype) in _described(parts, job).items():
            full = torch.zeros(shape, dtype=dtype, device=job.device)
            part = parts.get(name)
            local = None if part is None else LocalTensor(part.tensor.to(job.device), part.shard)
            put_together(full, local, job.world)
            key, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
            state.setdefault(numbers[parameter], {})[key] = full.cpu()
        groups = optimizer.state_dict()["param_groups"]
        return {"state": state, "param_groups": groups} if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Put back the optimizers' states, of which each rank takes its part."""
        job = self.job
        if job is None or self.mesh.data_size == self.mesh.size("replicate") == job.size:
            super().load_optimizer_state_dict(checkpoint)
            return
        shards = job.parallel.local_shards()
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            _, description = snapshot.optimizer_state(job.model, optimizer, shards, job.size)
            names = [name for group in description["groups"] for name in group["parameters"]]
            groups = []
            for group, settings in zip(description["groups"], saved["param_groups"], strict=True):
                others = {key: snapshot.as_json(key, value) for key, value in settings.items() if key != "params"}
                groups.append({"parameters": group["parameters"], **others})
            parameters = job.named()
            tensors: dict[str, torch.Tensor] = {}
            for number, values in saved["state"].items():
                name = names[int(number)]
                spec = snapshot.shard_of_its_state(name, parameters[name], shards, job.size).shard_spec
                for key, value in values.items():
                    tensors[f"{OPTIMIZER}{key}/{name}"] = _local(torch.as_tensor(value), spec)
            description |= {"groups": groups, "numbers": {}}
            snapshot.restore_optimizer(job.model, optimizer, tensors, description, shards)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of Lightning's without unpickling objects, unless `weights_only` is False."""
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only is not False)

    def teardown(self) -> None:
        """End the step, and leave a module in parts where it is: `test` after `fit` uses it."""
        if self.job is None or not self._has_parts():
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that configure_optimizers returned, in place of Lightning's wrapper."""
    found: torch.optim.Optimizer = vars(optimizer).get("_optimizer", optimizer)
    return found


def _described(parts: Mapping[str, LocalTensor], job: LoopJob) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return the shape and dtype of every tensor of which some rank has a part, the same on all ranks. Collective."""
    own = {name: (part.shard.shard_spec.shape, str(part.tensor.dtype)) for name, part in parts.items()}
    found: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for text in job.world.all_gather_text(json.dumps(own)):
        for name, (shape, dtype) in json.loads(text).items():
            found.setdefault(name, (shape, getattr(torch, dtype.removeprefix("torch."))))
    return dict(sorted(found.items()))


def _local(full: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return this rank's part of a state tensor; one that is not of its parameter's shape is whole on every rank."""
    if tuple(full.shape) != spec.shape or not spec.cuts:
        return full
    local = torch.empty(spec.local_shape, dtype=full.dtype)
    copy_common(local, spec, full, ShardSpec(spec.shape))
    return local
