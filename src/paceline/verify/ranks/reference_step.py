"""The single-process step, written down once more and plainly: whole batch, loss, backward, clip, update.

This is what every plan is held against, so it shares nothing with `parallel/`, `comm/` or `train/step.py`: of
Paceline it uses the workload, the data order and the seeds, which are promises by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from paceline.nouns.errors import LossError, WorkloadError
from paceline.nouns.order import DataOrder
from paceline.nouns.workload import Workload
from paceline.train.seed import kept_random_state, seed_everything, seed_sample
from paceline.verify.ranks.control_flow_trace import Branches
from paceline.verify.ranks.randomness import controlled, watched

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class ReferenceStep:
    """What some steps led to. Keys of `tensors` are STEP/KIND/NAME: gradient, parameter, buffer or state (optimizer).

    Gradients are of the batch's mean loss, after clipping.
    """

    tensors: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # in the order in which they begin
    branches: list[tuple[str, bool]] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)  # of every group, after each step
    updated: list[str] = field(default_factory=list)  # parameters that the optimizer has
    epsilon: float = 0.0  # one rounding in the narrowest parameter


@dataclass(frozen=True, slots=True)
class Variation:
    """Another way to take the same steps: what comes out differently is what rounding may do."""

    is_reversed: bool = False  # the batch's samples in the opposite order
    noise_seed: int | None = None  # every module's result is moved by one rounding, up or down
    # By parameter, how far its gradients are moved before every update, up or down as `is_mirrored` says. An optimizer
    # that looks at a gradient's sign may make a whole step of that, and no less.
    nudges: Mapping[str, float] = field(default_factory=dict)
    is_mirrored: bool = False


def take_steps(workload: Workload, precision: str, steps: int, variation: Variation | None = None) -> ReferenceStep:
    """Train for some steps in this process.

    Args:
        workload: the person's.
        precision: "float64", or the workload's own.
        steps: optimizer steps.
        variation: None for the reference itself.

    Raises:
        WorkloadError: the model's random numbers can't be controlled.
        LossError: the loss has the wrong form.
    """
    changed = variation or Variation()
    workload = dataclasses.replace(workload, precision=precision)
    seed_everything(workload.seed)
    model = workload.model()
    model = (model.double() if precision == "float64" else model).train()
    optimizer = workload.optimizer(model)
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    floats = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    taken = ReferenceStep(
        updated=[names[parameter] for parameter in own if parameter in names],
        epsilon=max(torch.finfo(dtype).eps for dtype in floats),
    )
    note(taken.tensors, 0, model, None)
    with ExitStack() as stack:
        stack.enter_context(controlled(is_off=precision != "float64"))
        if changed.noise_seed is not None:
            stack.enter_context(one_rounding_off(model, _epsilon(precision), changed.noise_seed))
        elif variation is None:
            stack.enter_context(execution_order(model, taken.modules))
        batches = _batches(workload, precision == "float64", changed.is_reversed)
        for step in range(1, steps + 1):
            watch = watched if variation is None and step == 1 else _unwatched
            _gradients(workload, model, optimizer, next(batches), taken, watch)
            with nudged(model, changed, step):
                optimizer.step()
            if step in (1, steps):
                note(taken.tensors, step, model, optimizer)
            if scheduler is not None:
                scheduler.step()
            taken.rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return taken


def _gradients(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: list[Any],
    taken: ReferenceStep,
    watch: Callable[[torch.nn.Module], Any],
) -> None:
    model.zero_grad(set_to_none=True)
    total, weight = 0.0, 0.0
    for number, batch in enumerate(microbatches):
        with Branches() as branches, torch.autocast("cpu", torch.bfloat16, enabled=workload.precision == "bf16"):
            with watch(model) if number == 0 else _unwatched(model):
                result = workload.loss(model, batch)
            loss_sum, its_weight = checked(result)
        taken.branches += branches.taken
        loss_sum.backward()  # type: ignore[no-untyped-call]
        total, weight = total + float(loss_sum.detach()), weight + float(its_weight)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient in gradients:
        gradient /= weight
    if workload.clip_norm is not None:
        # In float64: torch's own float32 norm of a large tensor is off by 8e-5.
        norm = sum(float(gradient.to_dense().double().square().sum()) for gradient in gradients) ** 0.5
        for gradient in gradients:  # also those of an optimizer inside the optimizer
            gradient *= min(1.0, workload.clip_norm / (norm + 1e-6))
        taken.norms.append(norm)
    taken.losses.append(total / weight)
    taken.weights.append(weight)


def checked(result: Any) -> tuple[torch.Tensor, Any]:
    """The loss's sum and weight.

    Raises:
        LossError: it is no such pair.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
        raise LossError(
            "the loss should return (sum, weight)",
            f"it returned a {type(result).__name__}",
            "return the losses added up and their number: cross_entropy(..., reduction='sum'), labels.numel()",
        )
    return result[0].reshape(()), result[1]


def note(tensors: Tensors, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy everything that a step makes, under STEP/KIND/NAME."""
    for name, parameter in model.named_parameters():
        tensors[f"{step}/parameter/{name}"] = kept(parameter)
        if optimizer is not None and parameter.grad is not None:
            tensors[f"{step}/gradient/{name}"] = kept(parameter.grad)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                tensors[f"{step}/state/{key}/{name}"] = kept(value)
    for name, buffer in model.named_buffers():
        tensors[f"{step}/buffer/{name}"] = kept(buffer)


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy; narrow floats widened, which loses nothing."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if dense.dtype in (torch.bfloat16, torch.float16):
        return dense.float()
    return dense.clone(memory_format=torch.contiguous_format)


def _batches(workload: Workload, is_double: bool, is_reversed: bool) -> Iterator[list[Any]]:
    """The global batches, each whole, or cut by the workload's own micro_batch_size."""
    data = data_of(workload)
    order = DataOrder(workload.seed, len(data), workload.batch_size)
    position = 0
    while True:
        batch = order.batch_at(position)
        positions = list(batch)[::-1] if is_reversed else list(batch)
        size = workload.micro_batch_size or len(positions)
        cut = [positions[at : at + size] for at in range(0, len(positions), size)]
        yield [micro_batch(workload, data, part, is_double) for part in cut]
        position = batch.stop


def micro_batch(workload: Workload, data: Any, positions: Sequence[int], is_double: bool) -> Any:
    """The samples at some positions of the data order, collated."""
    order = DataOrder(workload.seed, len(data), workload.batch_size)

    def sample(position: int) -> Any:
        seed_sample(workload.seed, position)
        return data[order.index(position)]

    with kept_random_state():
        made = (workload.collate or default_collate)([sample(position) for position in positions])
    return doubled(made) if is_double else made


def data_of(workload: Workload) -> Any:
    """The data set, made if it is a function."""
    data = workload.data
    if data is None:
        raise WorkloadError(
            "batches to verify with", "the workload's data is None", "hand in data=... with samples like your batches'"
        )
    is_data = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, type)
    return data if is_data else data()


def doubled(value: Any) -> Any:
    """A batch with its floating tensors in float64, whatever it is made of."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        made = {key: doubled(one) for key, one in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(doubled(one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(doubled(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: doubled(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _epsilon(precision: str) -> float:
    dtype = {"float64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
    return torch.finfo(dtype).eps


@contextmanager
def one_rounding_off(model: torch.nn.Module, epsilon: float, seed: int) -> Iterator[None]:
    """Move every result of a module by one rounding up or down: how far rounding carries in this model.

    The gradients that flow back through it are moved alike (stochastic arithmetic, Vignes 1993).
    """
    random = torch.Generator().manual_seed(seed)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=random, dtype=torch.int8) * 2 - 1
        step = max(epsilon, torch.finfo(value.dtype).eps)
        return value + value.detach().abs() * (signs * step).to(value.dtype)

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, gradient.shape, generator=random, dtype=torch.int8) * 2 - 1
        return gradient * (1 + signs * max(epsilon, torch.finfo(gradient.dtype).eps)).to(gradient.dtype)

    def hook(module: torch.nn.Module, arguments: Any, result: Any) -> Any:
        return tree_map(moved, result)

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    handles: list[Any] = [module.register_forward_hook(hook) for module in leaves]
    handles += [p.register_hook(scaled) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def nudged(model: torch.nn.Module, variation: Variation, step: int) -> Iterator[None]:
    """Move gradients by `variation.nudges` for an update, and put them back after it."""
    kept = []
    random = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters() if variation.nudges else ():
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            continue
        signs = torch.randint(0, 2, gradient.shape, generator=random, dtype=torch.int8) * 2 - 1
        kept.append((gradient, gradient.clone()))
        gradient.add_(signs, alpha=variation.nudges[name] * (-1 if variation.is_mirrored else 1))
    yield
    for gradient, before in kept:
        gradient.copy_(before)


@contextmanager
def execution_order(model: torch.nn.Module, found: list[str]) -> Iterator[None]:
    """Note the names of modules in the order in which they begin, each once."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: torch.nn.Module, arguments: Any) -> None:
        name = names.get(module)
        if name is not None and name not in seen:
            seen.add(name)
            found.append(name)

    seen: set[str] = set()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _unwatched(model: torch.nn.Module) -> Iterator[None]:
    yield


def check_can_verify(workload: Workload) -> None:
    """Raise WorkloadError for what is not the same under every plan by its own definition."""
    model, again = workload.model(), workload.model()
    if {id(p) for p in model.parameters()} & {id(p) for p in again.parameters()}:
        raise WorkloadError(
            "a factory that makes the model",
            "two calls of it return the same parameters, so one run would go on where another ended",
            "make the model inside the function: model=lambda: Net(...)",
        )
    strange = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if strange is not None:
        raise WorkloadError(
            "parameters that can be taken to float64",
            f"{strange} is complex",
            "hold its real and imaginary parts (torch.view_as_real) for verifying",
        )
    norms = [n for n, m in model.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if norms and workload.micro_batch_size is not None:
        raise WorkloadError(
            "one step that is the same under every plan",
            f"{norms[0]} takes the statistics of each micro-batch (micro_batch_size={workload.micro_batch_size}), "
            "so the result depends on how the batch is cut, by definition",
            "leave micro_batch_size out for verifying: batch norm then counts the whole batch",
        )
