"""Random numbers that are the same for every sample, so that a batch and its parts can be compared; and float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
# A value in the middle of each distribution, from the parameters of the operation.
_CONSTANTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "bernoulli": lambda given: 1.0,
    "cauchy": lambda given: given.get("median", 0.0),
    "exponential": lambda given: 1 / given.get("lambd", 1.0),
    "geometric": lambda given: 1.0,
    "log_normal": lambda given: math.exp(given.get("mean", 1.0)),
    "normal": lambda given: given.get("mean", 0.0) + 0.5,
    "rand": lambda given: 0.5,
    "randint": lambda given: (given.get("low", 0) + given["high"]) // 2,
    "randn": lambda given: 0.5,
    "random": lambda given: (given.get("from", 0) + (given.get("to") or 2)) // 2,
    "uniform": lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2,
}


_UNTAGGED = ("_sample_dirichlet", "binomial")  # they draw, and torch does not say so


class SameDraws(TorchDispatchMode):
    """While entered, every operation that draws gives one and the same number for all elements.

    Dropout keeps every element. `randperm` reverses: what pairs samples at random still pairs them.

    Args:
        is_wide: compute in float64 whatever the code asks for: `logits.float()` in a loss keeps its digits, and
            tensors that are narrower than others beside them (a teacher's weights) are widened.
    """

    def __init__(self, is_wide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_wide = is_wide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if self.is_wide:
            args, kwargs = _widened(func, args, kwargs)
        return _drawn_alike(func, args, kwargs)


def _drawn_alike(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dropout_p" in given:  # attention, forwards and backwards
        return _run(func, {**given, "dropout_p": 0.0})
    if torch.Tag.nondeterministic_seeded not in func.tags and not name.startswith("random") and name not in _UNTAGGED:
        return func(*args, **kwargs)
    if name == "native_dropout":
        return args[0] / max(1 - args[1], 1e-6), torch.ones_like(args[0], dtype=torch.bool)
    if name == "multinomial":
        return _most_likely(args[0], args[1])
    if name in ("rrelu_with_noise", "rrelu_with_noise_"):
        return _mean_slope(args[0], given, is_in_place=name.endswith("_"))
    return _constant(name, given, func(*args, **kwargs))


def _constant(name: str, given: dict[str, Any], result: Any) -> Any:
    """What an operation drew, all of it set to one value."""
    if name == "randperm":
        return result.copy_(torch.arange(len(result) - 1, -1, -1))
    if isinstance(given.get("mean"), torch.Tensor):
        return result.copy_(given["mean"])
    if name in ("poisson", "_standard_gamma"):
        return result.copy_(given["self"])
    if name == "_sample_dirichlet":
        return result.copy_(given["self"] / given["self"].sum(-1, keepdim=True))
    if name == "binomial":
        return result.copy_((given["count"] * given["prob"]).round())
    constant = _CONSTANTS.get(name.rstrip("_").removesuffix("_like"))
    if constant is not None:
        result.fill_(constant({part: value for part, value in given.items() if value is not None}))
    return result


def _widened(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with narrower floats as float64; where a tensor is written into, as that one has them."""
    if kwargs.get("dtype") in _NARROW:
        kwargs = {**kwargs, "dtype": torch.float64}
    dtypes = {one.dtype for one in _tensors(args) if one.is_floating_point()}
    if len(dtypes) < 2 or torch.float64 not in dtypes or func is torch.ops.aten.copy_.default:
        return args, kwargs
    target = args[0].dtype if func._schema.is_mutable and isinstance(args[0], torch.Tensor) else torch.float64
    if not target.is_floating_point:
        return args, kwargs
    return tuple(_cast(one, target) for one in args), kwargs


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    flat = [part for one in args for part in (one if isinstance(one, list | tuple) else [one])]
    return [one for one in flat if isinstance(one, torch.Tensor)]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(one, dtype) for one in value)
    is_other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_other else value


def _run(func: Any, values: dict[str, Any]) -> Any:
    """`func` with arguments by name; those that must come by position do so."""
    arguments = [argument for argument in func._schema.arguments if argument.name in values]
    by_place = [values[argument.name] for argument in arguments if not argument.kwarg_only]
    return func(*by_place, **{argument.name: values[argument.name] for argument in arguments if argument.kwarg_only})


def _mean_slope(values: torch.Tensor, given: dict[str, Any], is_in_place: bool) -> torch.Tensor:
    """A rectifier of random slope with the slope in the middle; `noise` is what its backward pass multiplies by."""
    slope = (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2
    given["noise"].copy_(torch.where(values > 0, 1.0, slope))
    return values.mul_(given["noise"]) if is_in_place else values * given["noise"]


def _most_likely(weights: torch.Tensor, draws: int) -> torch.Tensor:
    """The indices of the largest weights, as often again as are wanted."""
    order = torch.argsort(weights, dim=-1, descending=True)
    times = -(-draws // order.shape[-1])
    return torch.cat([order] * times, -1)[..., :draws]
