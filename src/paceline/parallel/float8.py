"""Matrix products of linear layers in float8, by torchao (the plan's float8).

Weights, gradients and optimizer state keep their dtypes. What goes into a product is scaled and rounded to float8
before it, by one of torchao's recipes: "rowwise" has a scale for each row (a token, or an output), and
"rowwise_with_gw_hp" leaves the product of a weight's gradient as it is. A third, "tensorwise", has one scale for a
whole tensor: a sample's loss would depend on the others of its rank's batch, and so on how a batch is split.

On a CPU the products are computed wide, from numbers that were rounded alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.parallel.torchao_import import import_torchao

_MULTIPLE = 16  # of both sizes of a weight: torch._scaled_mm multiplies no others
_FIRST_CAPABILITY = (8, 9)  # of NVIDIA's GPUs: Ada, then Hopper
_AMD = ("gfx94", "gfx95", "gfx120")  # AMD's: MI300 and later, RDNA 4; those on which torch tests its float8 products
_WIDE_ENOUGH = (torch.float32, torch.bfloat16)


def use_float8(model: nn.Module, plan: Plan, device: torch.device, is_real: bool) -> list[str]:
    """Have the model's linear layers multiply in float8, under the plan's recipe.

    Args:
        model: the model, changed in place; names and dtypes of its parameters stay.
        plan: the job's plan, with float8.
        device: the device where the model computes.
        is_real: whether the model computes; False while a step is predicted, for which no GPU is needed.

    Returns:
        Notices for the user.

    Raises:
        PlanError: torchao is not installed, the GPU has no float8, or weights are of another dtype.
        WorkloadError: the model has no linear layer for it.
    """
    if plan.float8 == "off":
        return []
    asked = f"the plan's float8={plan.float8}"
    if is_real:
        _check_device(asked, device)
    float8 = _import_float8(asked)
    fitting, skipped = _linear_layers(model)
    if not fitting:
        raise WorkloadError(
            asked,
            f"the model has no nn.Linear whose sizes are multiples of {_MULTIPLE}{_other_kinds(model)}",
            "leave float8 out",
        )
    for name, layer in fitting.items():
        if layer.weight.dtype not in _WIDE_ENOUGH:
            raise PlanError(
                asked,
                f"{name}.weight is of {str(layer.weight.dtype).removeprefix('torch.')}",
                "write precision='bf16' or 'float32' in the workload, or leave float8 out",
            )
    config = float8.Float8LinearConfig.from_recipe_name(plan.float8)
    config = dataclasses.replace(config, emulate=device.type == "cpu")
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in fitting)
    if config.emulate:
        for name in fitting:
            model.get_submodule(name).register_forward_pre_hook(_cast_as_autocast)
    notices = _left_out(plan, fitting, skipped)
    return [*notices, *_slow(plan, device)] if is_real else notices


def multiply_as_gpu(model: nn.Module) -> None:
    """Have layers that were changed for a CPU call a GPU's products: for steps on tensors without values."""
    for module in model.modules():
        config = getattr(module, "linear_mm_config", None)
        if config is not None:
            module.linear_mm_config = type(config)(*(layer_config._replace(emulate=False) for layer_config in config))


def _cast_as_autocast(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round a layer's inputs as autocast does: torchao's layers ask only for a GPU whether it is on."""
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    return tuple(tensor.to(torch.get_autocast_dtype("cpu")) for tensor in inputs)


def _import_float8(asked: str) -> Any:
    try:
        return import_torchao("float8")
    except ImportError as error:
        raise PlanError(
            asked, f"it needs torchao ({error})", "pip install 'paceline[lowbits]', or leave float8 out"
        ) from None


def _check_device(asked: str, device: torch.device) -> None:
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName)
        if not architecture.startswith(_AMD):
            raise PlanError(
                asked,
                f"{torch.cuda.get_device_name(device)} has no float8: it is {architecture.partition(':')[0]}",
                "leave float8 out; precision='bf16' is what this GPU has",
            )
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        found, first = (".".join(map(str, version)) for version in (capability, _FIRST_CAPABILITY))
        raise PlanError(
            asked,
            f"{torch.cuda.get_device_name(device)} has no float8: its compute capability is {found}, below {first}",
            "leave float8 out; precision='bf16' is what this GPU has",
        )


def _linear_layers(model: nn.Module) -> tuple[dict[str, nn.Linear], list[str]]:
    """Return the linear layers that can multiply in float8, by name, and the names of the other layers."""
    fitting, skipped = {}, []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        fits = module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
        if fits and name:  # the model itself can't be put in its own place
            fitting[name] = module
        else:
            skipped.append(name)
    return fitting, skipped


def _other_kinds(model: nn.Module) -> str:
    """Return the error's remark on linear layers of other classes than torch's."""
    kinds = {type(module).__name__ for module in model.modules()}
    return "; transformers' Conv1D, as in its GPT-2, is none" if "Conv1D" in kinds else ""


def _left_out(plan: Plan, fitting: dict[str, nn.Linear], skipped: list[str]) -> list[str]:
    if not skipped:
        return []
    count = f"{len(skipped)} of {len(fitting) + len(skipped)} linear layers"
    shown = f"{skipped[0] or 'the model'}{' and others' * (len(skipped) > 1)}"
    return [f"float8={plan.float8} leaves {count} as they are, {shown}: sizes are no multiples of {_MULTIPLE}"]


def _slow(plan: Plan, device: torch.device) -> list[str]:
    if device.type == "cpu":
        return [f"float8={plan.float8} is only emulated on a CPU: the same rounding, and more time"]
    if plan.compile == "off":
        return [f"float8={plan.float8} without compile=on: each rounding is a pass over memory by itself"]
    return []
