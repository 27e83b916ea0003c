"""Sort the objects that a training loop has, and make of them what a job is made of."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.nouns.errors import LossError, WorkloadError
from paceline.nouns.parts import shown
from paceline.nouns.sink import MakeSink
from paceline.nouns.workload import Workload
from paceline.parallel.optimizer_parts import groups_of
from paceline.train.loop_loader import check_loader
from paceline.train.schedulers import check_optimizer

_EVALUATED = 64  # samples of a batch, where no loader says how many
_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_CALL = "paceline.prepare takes modules, optimizers, at most one DataLoader, schedulers and a GradScaler"


class SeveralOptimizers(torch.optim.Optimizer):
    """The optimizers of a loop as one, for checkpoints: their state is kept with their own groups."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        # Not by `super().__init__`, which wants parameters: all groups are those of the parts.
        self.optimizers = optimizers
        self.param_groups = []
        self.state = defaultdict(dict)
        self.defaults = {}


class SeveralSchedulers:
    """The schedulers of a loop as one, for checkpoints."""

    def __init__(self, schedulers: list[Any]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the schedulers' numbers."""
        return {str(number): scheduler.state_dict() for number, scheduler in enumerate(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the states back.

        Raises:
            KeyError: there is none for one of them.
        """
        for number, scheduler in enumerate(self.schedulers):
            scheduler.load_state_dict(state[str(number)])


@dataclass(frozen=True, slots=True)
class LoopObjects:
    """The objects of a training loop, by their kind."""

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    loader: DataLoader[Any] | None
    schedulers: list[Any]
    whole_models: list[torch.nn.Module]  # models that stay whole on every rank
    scalers: list[torch.amp.GradScaler]
    by_part: list[torch.nn.Module]  # models of which the loop calls the parts
    sinks: tuple[MakeSink, ...] = ()

    @property
    def model(self) -> torch.nn.Module:
        """Return the model, or all of them in one."""
        return self.models[0] if len(self.models) == 1 else torch.nn.ModuleList(self.models)

    def cut_by_tensor(self) -> dict[str, torch.nn.Module]:
        """Return the models of which ranks of `tensor` are to have shards, by the prefix of their names in `model`.

        Raises:
            WorkloadError: there is none that is trained.
        """
        self.trained()
        found = {}
        for prefix, model in self.prefixed().items():
            if any(True for _ in model.parameters()) and not self._stays_whole(model):
                found[prefix] = model
        return found

    def frozen(self) -> dict[str, torch.nn.Module]:
        """Return the models without a trained parameter that are to be in parts, by their names' prefix in `model`.

        Raises:
            WorkloadError: there is none.
        """
        found = {}
        for prefix, model in self.prefixed().items():
            if not _is_trained(model) and not self._stays_whole(model):
                found[prefix] = model
        if not found:
            raise WorkloadError(
                "shard_frozen keeps parts of models without a trained parameter",
                "every model has one, or stays whole",
                "call requires_grad_(False) on the frozen model before paceline.prepare, or leave shard_frozen out",
            )
        return found

    def trained(self) -> dict[str, torch.nn.Module]:
        """Return the models with a trained parameter that are to be cut, by the prefix of their names in `model`.

        Raises:
            WorkloadError: there is none.
        """
        found = {}
        for prefix, model in self.prefixed().items():
            if _is_trained(model) and not self._stays_whole(model):
                found[prefix] = model
        if self.whole_models and not found:
            raise WorkloadError(
                "the plan gives each rank a part of the models that are trained",
                "whole has all of these",
                "leave one out of whole, or write replicate in the plan",
            )
        if self.by_part and not found:
            raise WorkloadError(
                "the plan gives each rank a part of the modules that a model is made of",
                f"the {type(self.by_part[0]).__name__} has its trained parameters itself, and no module that has some",
                "make them parameters of a module that the model calls, or write replicate in the plan",
            )
        return found

    def _stays_whole(self, model: torch.nn.Module) -> bool:
        return any(model is whole_model for whole_model in self.whole_models)

    def prefixed(self) -> dict[str, torch.nn.Module]:
        """Return the modules that the loop calls, models or their parts, by the prefix of their names in `model`."""
        found: dict[str, torch.nn.Module] = {}
        for number, model in enumerate(self.models):
            prefix = "" if len(self.models) == 1 else f"{number}."
            if any(model is parted for parted in self.by_part):
                found |= _parts_with_parameters(prefix, model)
            else:
                found[prefix] = model
        return found

    @property
    def scheduler(self) -> Any:
        """Return the schedulers and the scalers as one object for checkpoints; None without any."""
        found = [*self.schedulers, *self.scalers]
        if not found:
            return None
        return found[0] if len(found) == 1 else SeveralSchedulers(found)

    def number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the number of this optimizer, from 1; None if it is none of the job's."""
        for number, own_optimizer in enumerate(self.optimizers, 1):
            if own_optimizer is optimizer:
                return number
        return None

    def workload(self, seed: int) -> Workload:
        """Return the workload of a job of these objects: its loop has the loss."""
        model = self.model
        optimizer = self.optimizers[0]
        if len(self.optimizers) > 1:
            optimizer = SeveralOptimizers(self.optimizers)
        # Only for evaluation: the loop makes its own batches.
        batch_size = _EVALUATED if self.loader is None else self.loader.batch_size or _EVALUATED
        collate = None if self.loader is None else self.loader.collate_fn
        return Workload(
            model=lambda: model,
            loss=_no_loss,
            optimizer=lambda model: optimizer,
            data=None,
            batch_size=batch_size,
            collate=collate,
            seed=seed,
            sinks=self.sinks,
        )


def _parts_with_parameters(prefix: str, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the children of a model by the prefix of their names; of lists and dicts of modules, those in them."""
    found: dict[str, torch.nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            found |= _parts_with_parameters(f"{prefix}{name}.", child)
        elif next(child.parameters(), None) is not None:
            found[f"{prefix}{name}."] = child
    return found


def _is_trained(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _no_loss(model: object, batch: object) -> Any:
    raise LossError(
        "the loss should be that of the loop",
        "it was asked for outside of it",
        "declare a paceline.Workload for what needs the loss as a function",
    )


def sort_objects(
    objects: tuple[object, ...], whole_models: Iterable[torch.nn.Module] = (), by_part: Iterable[torch.nn.Module] = ()
) -> LoopObjects:
    """Return the objects by their kind.

    Args:
        objects: the objects that `paceline.prepare` was handed.
        whole_models: the models that stay whole on every rank.
        by_part: the models of which the loop calls the parts.

    Raises:
        WorkloadError: one is of no known kind, there are too many or too few of a kind, or `whole` or `by_part` has
            another object.
    """
    models: list[torch.nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    loaders: list[DataLoader[Any]] = []
    schedulers: list[Any] = []
    scalers: list[torch.amp.GradScaler] = []
    for number, item in enumerate(objects, 1):
        kind = _kind_of(number, item)
        of_kind: dict[str, list[Any]] = {"model": models, "optimizer": optimizers, "loader": loaders, "scaler": scalers}
        of_kind.get(kind, schedulers).append(item)
    for name, found in (("model", models), ("optimizer", optimizers)):
        if not found:
            raise WorkloadError(
                f"paceline.prepare needs a model and an optimizer, and has no {name}",
                f"it was handed {_listed(objects)}",
                "write job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)",
            )
    if len(loaders) > 1:
        raise WorkloadError(
            "paceline.prepare takes the DataLoader of training, which says where in the data the job is",
            f"it was handed {len(loaders)}",
            "leave out the others: iterate over them as they are, where every rank sees all of their samples, or call "
            "job.evaluate(data_set, score), which splits them",
        )
    for training_loader in loaders:
        check_loader(training_loader)
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta:
                raise WorkloadError(
                    "the models that paceline.prepare is handed should have values",
                    f"{name} is on the meta device, without values",
                    "make the model on the CPU, or write model.to_empty(device='cpu') and load or reset its values",
                )
    for scheduler in schedulers:
        fix = "make the scheduler of the optimizer that is handed in, after it"
        check_optimizer(scheduler, optimizers, "schedulers", "optimizers that paceline.prepare was handed", fix)
    all_parameters = itertools.chain.from_iterable(model.parameters() for model in models)
    check_parameters(all_parameters, optimizers)
    loader = loaders[0] if loaders else None
    known_whole = _known_models("whole", whole_models, models)
    parted = _known_models("by_part", by_part, models)
    return LoopObjects(models, optimizers, loader, schedulers, known_whole, scalers, parted)


def _known_models(name: str, value: Any, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the models that an argument lists."""
    is_list = isinstance(value, Iterable) and not isinstance(value, torch.nn.Module)  # a Sequential is both
    found = list(value) if is_list else [value]
    for item in found:
        if not is_list or not any(item is model for model in models):
            raise WorkloadError(
                f"{name} is a list of models that paceline.prepare is handed too",
                f"it is {shown(item)}" if not is_list else f"it has {shown(item)}, which is none of them",
                f"write paceline.prepare(student, critic, optimizer, {name}=[critic])",
            )
    return found


def _kind_of(number: int, value: object) -> str:
    kinds = ((torch.nn.Module, "model"), (torch.optim.Optimizer, "optimizer"), (DataLoader, "loader"))
    for kind, name in kinds:
        if isinstance(value, kind):
            if isinstance(value, torch.optim.LBFGS):
                raise WorkloadError(
                    "an optimizer should update once per call of step()",
                    "LBFGS evaluates the loss several times in a step",
                    "use a first-order optimizer such as AdamW",
                )
            if isinstance(value, _WRAPPERS):
                raise WorkloadError(
                    _CALL,
                    f"object {number} is a {type(value).__name__}, which splits batches or sums gradients itself",
                    f"leave {type(value).__name__} and torch.distributed.init_process_group out, and hand in the model",
                )
            return name
    is_object = not inspect.isclass(value)
    if isinstance(value, torch.amp.GradScaler):
        return "scaler"
    if is_object and callable(getattr(value, "step", None)) and callable(getattr(value, "state_dict", None)):
        return "scheduler"
    raise WorkloadError(_CALL, f"object {number} is {shown(value)}", _advice(value))


def _advice(value: object) -> str:
    if inspect.isclass(value):
        return f"hand in an object, such as {value.__name__}(...), in place of the class"
    if inspect.isgenerator(value):
        return "hand in the model itself, in place of model.parameters()"
    is_list = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | bytes | dict)
    if isinstance(value, torch.utils.data.Dataset) or is_list:
        return "hand in a loader: torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)"
    if callable(getattr(value, "parameters", None)):
        return "hand in the objects themselves: paceline.prepare(model, optimizer, loader)"
    if callable(value):
        return "hand in objects and no functions, and call the loss in the loop"
    return "leave it out: job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)"


def _listed(objects: tuple[object, ...]) -> str:
    return ", ".join(type(item).__name__ for item in objects) or "nothing"


def check_parameters(parameters: Iterable[torch.nn.Parameter], optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise WorkloadError unless the models have what the optimizers update."""
    known = set(parameters)
    for optimizer in optimizers:
        for number, group in enumerate(groups_of(optimizer)):
            for parameter in group["params"]:
                if parameter not in known:
                    raise WorkloadError(
                        "the optimizers should update parameters of the models that paceline.prepare was handed",
                        f"group {number} of {type(optimizer).__name__} has one of shape {tuple(parameter.shape)} that "
                        "is in none of them",
                        "hand in its model too; and make the optimizer after the model is moved or wrapped",
                    )


def updated_by(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """Return those of the named parameters that an optimizer updates."""
    own_parameters: set[torch.nn.Parameter] = set()
    for group in groups_of(optimizer):
        own_parameters.update(group["params"])
    return {name: parameter for name, parameter in named.items() if parameter in own_parameters}
