"""The single-process step, written down once more and plainly: whole batch, loss, backward, clip, update.

This is what every plan is held against, so it shares nothing with `parallel/`, `comm/` or `train/step.py`: of
Paceline it uses the workload, the data order and the seeds, which are promises by themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.comm.dtypes import has_fractions, widen
from paceline.nouns.errors import WorkloadError
from paceline.nouns.workload import Workload
from paceline.torch_private.modules import BatchNorm
from paceline.torch_private.tensors import tree_map
from paceline.train.control_flow_trace import Branches
from paceline.train.plain_step import (
    as_optimizer,
    batches_of,
    change_gradients,
    checked,
    clip_gradients,
    state_of,
    step_schedulers,
)
from paceline.train.precision import autocast
from paceline.train.seed import kept_random_state, seed_everything
from paceline.verify.judge.compare import Array
from paceline.verify.ranks.placed_draws import call_of_the_loss
from paceline.verify.ranks.randomness import controlled, watched

Tensors = dict[str, torch.Tensor]
_SCALE_OF_A_MEAN = 2.0**8


@dataclass(slots=True)
class ReferenceStep:
    """The results of some steps in one process.

    Keys of `tensors` are STEP/KIND/NAME, where KIND is gradient, parameter or buffer, and STEP/state/STATE/NAME for
    the optimizer's states. Gradients are of the batch's mean loss, after clipping.
    """

    tensors: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # in the order in which they begin
    branches: list[list[tuple[str, bool | None]]] = field(default_factory=list)  # of every call of the loss
    rates: list[list[float]] = field(default_factory=list)  # of every group, after each step
    updated: list[str] = field(default_factory=list)  # parameters that the optimizer has
    epsilon: float = 0.0  # one rounding in the narrowest parameter

    def arrays(self) -> dict[str, Array]:
        """Return the tensors as the judge has them."""
        return {key: values.numpy() for key, values in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Variation:
    """A way to take the same steps that differs only by rounding: what it changes, rounding may change."""

    is_reversed: bool = False  # the batch's samples in the opposite order
    noise_seed: int | None = None  # every module's result is moved by one rounding, up or down
    # By parameter, how far its gradients are moved before every update, up or down as `is_mirrored` says. An optimizer
    # that looks at a gradient's sign may make a whole step of that, and no less.
    nudges: Mapping[str, float] = field(default_factory=dict)
    is_mirrored: bool = False


def take_steps(workload: Workload, precision: str, steps: int, variation: Variation | None = None) -> ReferenceStep:
    """Train for some steps in this process.

    Args:
        workload: the user's workload.
        precision: "float64", or the workload's own.
        steps: the number of optimizer steps.
        variation: the variation of the steps; None for the reference itself.

    Raises:
        WorkloadError: the model's random numbers can't be controlled.
        LossError: the loss has the wrong form.
    """
    is_reference = variation is None
    variation = variation or Variation()
    is_double = precision == "float64"
    workload = dataclasses.replace(workload, precision=precision)
    # Seeded as ranks are, and before the factory, so that both sides begin with the same parameters.
    seed_everything(workload.seed)
    model = workload.model()
    if is_double:
        model = widen(model)
    model = model.train()
    optimizer = as_optimizer(workload.optimizer(model))
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    dtypes = {parameter.dtype for parameter in model.parameters() if has_fractions(parameter)}
    result = ReferenceStep(
        updated=_updated_names(model, optimizer),
        epsilon=max(torch.finfo(dtype).eps for dtype in dtypes),
    )
    record(result.tensors, 0, model, None)  # what training begins with
    with ExitStack() as stack:
        stack.enter_context(controlled(is_off=not is_double))
        if variation.noise_seed is not None:
            stack.enter_context(one_rounding_off(model, _epsilon(precision), variation.noise_seed))
        elif is_reference:
            stack.enter_context(execution_order(model, result.modules))
        batches = batches_of(workload, is_double, variation.is_reversed)
        for step in range(1, steps + 1):
            watch = watched if is_reference and step == 1 else _unwatched
            _gradients(workload, model, optimizer, next(batches), result, watch)
            with nudged(model, variation, step):
                optimizer.step()
            # Tensors are compared after these two steps; losses, weights, norms and rates after each.
            if step in (1, steps):
                record(result.tensors, step, model, optimizer)
            step_schedulers(scheduler)
            result.rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return result


def scale_of(workload: Workload) -> float:
    """Return the factor of the summed loss in backward passes: under fp16 one at which few models overflow, else 1.

    It is lower than that of training, which would leave out the first steps of many models.
    """
    if workload.precision != "fp16":
        return 1.0
    return _SCALE_OF_A_MEAN / 2.0 ** round(math.log2(workload.batch_size))


def _updated_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the model's parameters that the optimizer has, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    updated = []
    for group in optimizer.param_groups:
        updated += [names[parameter] for parameter in group["params"] if parameter in names]
    return updated


def _gradients(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: list[Any],
    result: ReferenceStep,
    watch: Callable[[torch.nn.Module], Any],
) -> None:
    """Leave the clipped gradients of the batch's mean loss in `.grad`; add its loss, weight and norm to `result`."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    weight = _weight_of(workload, model, microbatches)
    scale = _SCALE_OF_A_MEAN if workload.precision == "fp16" else 1.0
    for number, batch in enumerate(microbatches):
        with Branches() as branches, autocast(workload.precision, "cpu"):
            with watch(model) if number == 0 else _unwatched(model), call_of_the_loss(model):
                returned = workload.loss(model, batch)
            loss_sum, loss_weight = checked(returned)
        result.branches.append(branches.outcomes)
        if weight is None:
            weight = float(loss_weight)
        # The plain form: hooks and the model's own backward code see the gradient of the whole batch's mean.
        mean = (loss_sum.float() if scale != 1.0 else loss_sum) / weight * scale
        mean.backward()
        total += float(loss_sum.detach())
    assert weight is not None
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient in gradients:
        gradient /= scale
    change_gradients(workload, dict(model.named_parameters()), len(result.losses))
    if workload.clip_norm is not None:  # also gradients of an optimizer inside the optimizer
        result.norms.append(clip_gradients(gradients, workload.clip_norm))
    result.losses.append(total / weight)
    result.weights.append(weight)


def _weight_of(workload: Workload, model: torch.nn.Module, microbatches: list[Any]) -> float | None:
    """Return the weight of a batch in micro-batches before the first of them counts; None of a single one."""
    if len(microbatches) == 1:
        return None
    weight = 0.0
    with kept_random_state():
        # On another model: what forward writes, and counts, is not to happen twice.
        second_model = workload.model().train()
        if next(model.parameters()).dtype == torch.float64:
            second_model = second_model.double()
        second_model.load_state_dict(model.state_dict())
        for batch in microbatches:
            with autocast(workload.precision, "cpu"), call_of_the_loss(second_model):
                weight += float(checked(workload.loss(second_model, batch))[1])
    return weight


def record(tensors: Tensors, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy everything that a step makes into `tensors`; without an optimizer, only parameters and buffers."""
    for name, parameter in model.named_parameters():
        tensors[f"{step}/parameter/{name}"] = dense_copy(parameter)
        if optimizer is None:
            continue
        if parameter.grad is not None:
            tensors[f"{step}/gradient/{name}"] = dense_copy(parameter.grad)
        for state, value in state_of(optimizer, parameter).items():
            # A count of steps has another shape than the parameter, and no shards.
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                tensors[f"{step}/state/{state}/{name}"] = dense_copy(value)
    for name, buffer in model.named_buffers():
        tensors[f"{step}/buffer/{name}"] = dense_copy(buffer)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors to a file that `compare.read_arrays` reads: safetensors has no complex128, but pairs."""
    pairs = [key for key, tensor in tensors.items() if tensor.dtype == torch.complex128]
    stored = {**tensors, **{key: torch.view_as_real(tensors[key]) for key in pairs}}
    save_file(stored, path, {"complex128": json.dumps(pairs)})


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy; bfloat16 and float16 become float32, which loses nothing."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if dense.dtype in (torch.bfloat16, torch.float16):
        return dense.float()
    return dense.clone(memory_format=torch.contiguous_format)


def _epsilon(precision: str) -> float:
    dtype = {"float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    return torch.finfo(dtype).eps


@contextmanager
def one_rounding_off(model: torch.nn.Module, epsilon: float, seed: int) -> Iterator[None]:
    """Move every result of a module by one rounding up or down: how far rounding carries in this model.

    The gradients that flow back through it are moved alike (stochastic arithmetic, Vignes 1993).
    """
    random = torch.Generator().manual_seed(seed)  # of its own: the model's random numbers must stay as they are

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_nested or not has_fractions(value):
            return value
        signs = _random_signs(value.shape, random)
        step = max(epsilon, torch.finfo(value.dtype).eps)
        return value + value.detach().abs() * (signs * step).to(value.dtype)

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        signs = _random_signs(gradient.shape, random)
        step = max(epsilon, torch.finfo(gradient.dtype).eps)
        return gradient * (1 + signs * step).to(gradient.dtype)

    def hook(module: torch.nn.Module, arguments: Any, result: Any) -> Any:
        return tree_map(moved, result)

    handles: list[Any] = []
    for module in model.modules():
        # A container often returns what its last module returned, which would then be moved twice.
        is_leaf = next(module.children(), None) is None
        if is_leaf:
            handles.append(module.register_forward_hook(hook))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_hook(scaled))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _random_signs(shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    """Return a tensor of -1 and 1."""
    return torch.randint(0, 2, shape, generator=random, dtype=torch.int8) * 2 - 1


@contextmanager
def nudged(model: torch.nn.Module, variation: Variation, step: int) -> Iterator[None]:
    """Move gradients by `variation.nudges` for an update, and put them back after it."""
    if not variation.nudges:
        yield
        return
    originals = []  # gradients and copies of their values
    random = torch.Generator().manual_seed(step)  # the same signs in both runs: they mirror each other
    direction = -1 if variation.is_mirrored else 1
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            continue
        signs = _random_signs(gradient.shape, random)
        originals.append((gradient, gradient.clone()))
        gradient.add_(signs, alpha=variation.nudges[name] * direction)
    yield
    for gradient, values in originals:
        gradient.copy_(values)


@contextmanager
def execution_order(model: torch.nn.Module, order: list[str]) -> Iterator[None]:
    """Append the names of modules to `order` as they begin, each once."""
    names = {module: name for name, module in model.named_modules()}
    begun: set[str] = set()

    def enter(module: torch.nn.Module, arguments: Any) -> None:
        name = names.get(module)
        if name is not None and name not in begun:
            begun.add(name)
            order.append(name)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _unwatched(model: torch.nn.Module) -> Iterator[None]:
    """Do nothing, in the place of `watched`."""
    yield


def check_can_verify(workload: Workload) -> None:
    """Raise WorkloadError for what is not the same under every plan by its own definition."""
    model = workload.model()
    second_model = workload.model()
    first_ids = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in first_ids for parameter in second_model.parameters()):
        raise WorkloadError(
            "the workload's model should be a factory",
            "two calls of it return the same parameters, so one run would go on where another ended",
            "make the model inside the function: model=lambda: Net(...)",
        )
    if workload.micro_batch_size is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            raise WorkloadError(
                "a step can't be the same under every plan",
                f"{name} takes the statistics of each micro-batch (micro_batch_size={workload.micro_batch_size}), "
                "so the result depends on how the batch is cut, by definition",
                "leave micro_batch_size out for verifying: batch norm then counts the whole batch",
            )
