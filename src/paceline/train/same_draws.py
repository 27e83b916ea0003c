"""Make random draws the same for every sample and compute in float64, so that a batch and its parts can be compared."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from paceline.comm.dtypes import has_fractions, wide_dtype
from paceline.torch_private.operations import TorchDispatchMode, schema_of
from paceline.train.rank_draws import is_drawing

_NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
_WIDE = (torch.float64, torch.complex128)
# A possible value of each distribution, often its middle, from the parameters of the operation.
_CONSTANTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "bernoulli": lambda arguments: 1.0,
    "cauchy": lambda arguments: arguments.get("median", 0.0),
    "exponential": lambda arguments: 1 / arguments.get("lambd", 1.0),
    "geometric": lambda arguments: 1.0,
    "log_normal": lambda arguments: math.exp(arguments.get("mean", 1.0)),
    "normal": lambda arguments: arguments.get("mean", 0.0) + 0.5,
    "rand": lambda arguments: 0.5,
    "randint": lambda arguments: (arguments.get("low", 0) + arguments["high"]) // 2,
    "randn": lambda arguments: 0.5,
    "random": lambda arguments: (arguments.get("from", 0) + (arguments.get("to") or 2)) // 2,
    "uniform": lambda arguments: (arguments.get("from", 0.0) + arguments.get("to", 1.0)) / 2,
}


class SameDraws(TorchDispatchMode):
    """A dispatch mode in which every operation that draws gives one and the same number for all elements.

    Dropout keeps every element. `randperm` reverses: what pairs samples at random still pairs them.

    Args:
        is_wide: True to compute in float64 whatever the code asks for: `logits.float()` in a loss keeps its digits, and
            tensors that are narrower than others beside them (a teacher's weights) are widened.
    """

    def __init__(self, is_wide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_wide = is_wide

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if self.is_wide:
            args, kwargs = _widened(func, args, kwargs)
        return _run_without_draws(func, args, kwargs)


@functools.cache
def _may_draw(func: Any) -> bool:
    """True for an operation that draws, or has a probability of dropout among its arguments."""
    return is_drawing(func) or any(argument.name == "dropout_p" for argument in schema_of(func).arguments)


def _run_without_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _may_draw(func):  # thousands in a pass
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    names = [argument.name for argument in schema_of(func).arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dropout_p" in arguments:  # attention, forwards and backwards
        return _run(func, {**arguments, "dropout_p": 0.0})
    if name == "native_dropout":
        kept_share = max(1 - args[1], 1e-6)  # with p = 1 it would be a division by zero
        return args[0] / kept_share, torch.ones_like(args[0], dtype=torch.bool)
    if name == "multinomial":
        return _most_likely(args[0], args[1])
    if name in ("rrelu_with_noise", "rrelu_with_noise_"):
        return _mean_slope(args[0], arguments, is_in_place=name.endswith("_"))
    return _constant(name, arguments, func(*args, **kwargs))


def _constant(name: str, arguments: dict[str, Any], result: Any) -> Any:
    """Set all that an operation drew to one value."""
    if name == "randperm":
        return result.copy_(torch.arange(len(result) - 1, -1, -1))
    if isinstance(arguments.get("mean"), torch.Tensor):
        return result.copy_(arguments["mean"])
    if name in ("poisson", "_standard_gamma"):
        return result.copy_(arguments["self"])
    if name == "_sample_dirichlet":
        return result.copy_(arguments["self"] / arguments["self"].sum(-1, keepdim=True))
    if name == "binomial":
        return result.copy_((arguments["count"] * arguments["prob"]).round())
    constant = _CONSTANTS.get(name.rstrip("_").removesuffix("_like"))
    if constant is not None:
        parameters = {parameter: value for parameter, value in arguments.items() if value is not None}
        result.fill_(constant(parameters))
    return result


def _widened(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with narrower numbers as wide ones; where a tensor is written into, in its dtype."""
    if kwargs.get("dtype") in _NARROW:
        kwargs = {**kwargs, "dtype": wide_dtype(kwargs["dtype"])}
    # One number of digits needs nothing; for two, many operations raise.
    dtypes = _dtypes(args)
    if len(dtypes) < 2 or func is torch.ops.aten.copy_.default:
        return args, kwargs
    wide = [dtype for dtype in dtypes if dtype in _WIDE]
    if not wide or not any(dtype not in _WIDE and _of_fractions(dtype) for dtype in dtypes):
        return args, kwargs
    target = torch.float64
    if schema_of(func).is_mutable and isinstance(args[0], torch.Tensor):
        if not has_fractions(args[0]):
            return args, kwargs
        target = args[0].dtype.to_real()
    return tuple(_cast(argument, target) for argument in args), kwargs


def _dtypes(args: tuple[object, ...]) -> set[torch.dtype]:
    """Return the dtypes of all tensors among an operation's arguments, and in lists of these."""
    dtypes = set()
    for argument in args:
        if isinstance(argument, torch.Tensor):
            dtypes.add(argument.dtype)
        elif isinstance(argument, list | tuple):
            dtypes |= {value.dtype for value in argument if isinstance(value, torch.Tensor)}
    return dtypes


def _of_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, torch.Tensor) and has_fractions(value):
        return value.to(torch.promote_types(dtype, torch.complex64) if value.is_complex() else dtype)
    return value


def _run(func: Any, values: dict[str, Any]) -> object:
    """Call `func` with arguments by name; those that must come by position do so."""
    positional = []
    keywords = {}
    for argument in schema_of(func).arguments:
        if argument.name not in values:
            continue
        if argument.kwarg_only:
            keywords[argument.name] = values[argument.name]
        else:
            positional.append(values[argument.name])
    return func(*positional, **keywords)


def _mean_slope(values: torch.Tensor, arguments: dict[str, Any], is_in_place: bool) -> torch.Tensor:
    """Compute a rectifier of random slope with the slope in the middle; its backward pass multiplies by `noise`."""
    slope = (arguments.get("lower", 1 / 8) + arguments.get("upper", 1 / 3)) / 2
    arguments["noise"].copy_(torch.where(values > 0, 1.0, slope))
    return values.mul_(arguments["noise"]) if is_in_place else values * arguments["noise"]


def _most_likely(weights: torch.Tensor, draws: int) -> torch.Tensor:
    """Return the indices of the largest weights, as often again as are wanted."""
    order = torch.argsort(weights, dim=-1, descending=True)
    times = -(-draws // order.shape[-1])
    return torch.cat([order] * times, -1)[..., :draws]
