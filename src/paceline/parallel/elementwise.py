"""Find the parameters that an optimizer must update as a whole, by trying it, whatever its class.

An optimizer that updates each element by that element's own history (SGD, Adam and their kin) gives the
same on a part as on the whole. One that looks at the whole matrix (a norm in LAMB and LARS, factors in
Adafactor, an orthogonalization in Muon) gives something else, without a word. So it is tried on a small
tensor of as many dimensions, once whole and once in two halves, before the first step; what it can't update in
halves is updated whole (`whole_update.py`). One that looks at several parameters at once (a norm over all of them) is
refused: no rank has all of them.

What a trial can't show (the optimizer can't be made from its defaults, or looks at the whole only after many steps)
its author can declare: `needs_whole_parameters = True` on the class.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.nouns.errors import PlanError
from paceline.nouns.own_errors import note_own_error
from paceline.parallel.low_precision_states import CutOf, is_low_precision, updated_whole
from paceline.parallel.optimizer_list import alone
from paceline.parallel.optimizer_parts import DECLARATION, groups_of
from paceline.parallel.shard.local_optimizer_step import stand_ins

SIZES = (6, 4, 3, 2)  # of the dimensions of the tensors that are tried
STEPS = 2
TOLERANCE = 1e-12  # relative, in float64; what depends on other elements is off by percents
LEARNING_RATE = 0.1  # a schedule may begin at 0, where every optimizer agrees with every other
# Want a CUDA device, or compute the same by another kernel.
_OFF = ("capturable", "fused", "foreach")

Kind = tuple[dict[str, Any], int]  # a parameter's group, and its number of dimensions


def find_whole_parameters(
    optimizer: torch.optim.Optimizer, axes: Sequence[str], cut_of: CutOf | None = None
) -> set[torch.nn.Parameter]:
    """Return the parameters that the optimizer, with the settings of their groups, can't update in parts.

    Args:
        optimizer: the user's optimizer; of several, each is tried.
        axes: the axes that cut parameters: `shard` cuts their first dimension, `tensor` any.
        cut_of: a function that returns the cut of each parameter: with states in few bits, parts that are whole blocks
            can be updated. None where cuts are not known.

    Raises:
        PlanError: it can't be tried, or it updates a parameter from others.
    """
    whole_parameters: set[torch.nn.Parameter] = set()
    for single in alone(optimizer):
        if is_low_precision(single):  # known, and a trial would compile
            whole_parameters |= updated_whole(single, cut_of)
        else:
            whole_parameters |= _find_whole_parameters(single, axes)
    return whole_parameters


def _find_whole_parameters(optimizer: torch.optim.Optimizer, axes: Sequence[str]) -> set[torch.nn.Parameter]:
    kinds = _kinds(optimizer)
    is_declared = getattr(optimizer, DECLARATION, False)
    whole_parameters: set[torch.nn.Parameter] = set()
    whole_kinds: list[Kind] = []
    try:
        with _aside():
            for kind, members in kinds.values():
                if is_declared or not _works_on_parts(optimizer, kind, "tensor" in axes):
                    whole_parameters.update(members)
                    whole_kinds.append(kind)
            distance = _distance_together(optimizer, [kind for kind, _ in kinds.values()]) if whole_parameters else 0.0
            follows = all(_follows_groups(optimizer, kind) for kind in whole_kinds)
    except Exception as error:  # whatever a user's class may raise
        if is_declared:
            return whole_parameters
        # A call that lacks an argument fails in our line: a constructor or a step that wants more.
        if not isinstance(error, TypeError) and note_own_error(error):
            raise
        raise PlanError(
            f"the axis {axes[0]} gives each rank a part of each parameter, and before the first step it is found out "
            f"whether {type(optimizer).__name__} can work on parts",
            f"it can't be tried on a small tensor ({type(error).__name__}: {error})",
            f"make it constructible from its defaults, or write {DECLARATION} = True in its class if it updates each "
            f"parameter by itself, or write replicate in place of {axes[0]}",
        ) from error
    if distance:
        raise _coupled(optimizer, axes[0], distance)
    if not follows:
        raise PlanError(
            f"the axis {axes[0]} gives each rank a part of each parameter, and whole ones stand in the optimizer's "
            "groups during its step",
            f"{type(optimizer).__name__} updates none that its groups have been given since it was made",
            f"have its step() go through self.param_groups, or write replicate in place of {axes[0]}",
        )
    return whole_parameters


def check_updates_apart(optimizer: torch.optim.Optimizer, axis: str) -> None:
    """Raise unless the optimizer updates each parameter by itself; one that can't be tried passes.

    Args:
        optimizer: the user's optimizer.
        axis: the axis along which each rank has some of the parameters, whole.

    Raises:
        PlanError: it updates a parameter from others.
    """
    for single in alone(optimizer):
        if is_low_precision(single):
            continue
        distance = 0.0
        # Its class may want more than its defaults: only where parameters are cut it has to be tried.
        with contextlib.suppress(Exception), _aside():
            distance = _distance_together(single, [kind for kind, _ in _kinds(single).values()])
        if distance:
            raise _coupled(single, axis, distance)


def steps_tried(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[torch.optim.Optimizer, torch.nn.Parameter, list[torch.nn.Parameter]]]:
    """Return optimizers of the same class that have taken a few steps: what they keep then, the user's will keep.

    Args:
        optimizer: the user's optimizer, one only.

    Returns:
        For each kind of parameter an optimizer, its one small parameter, and the user's parameters of that kind.
        Nothing where it can't be tried.
    """
    tried: list[tuple[torch.optim.Optimizer, torch.nn.Parameter, list[torch.nn.Parameter]]] = []
    with contextlib.suppress(Exception), _aside():
        for (group, dims), members in _kinds(optimizer).values():
            start, gradients = _values(_shape(dims), 0)
            small = torch.nn.Parameter(start)
            twin = _twin(optimizer, [(group, [small])])
            for gradient in gradients:
                small.grad = gradient.clone()
                twin.step()
            tried.append((twin, small, members))
    return tried


class LaterParameters:
    """Checks that parameters which are first trained after the start are not updated in parts by mistake.

    They were given to the optimizer then, or were frozen before.

    Args:
        optimizer: the user's optimizer.
        axes: the axes that cut parameters.
        updated_whole: the names of the parameters that the optimizer updates whole, by parameter.
        cut_of: the argument of this name of `find_whole_parameters`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        axes: Sequence[str],
        updated_whole: Mapping[torch.nn.Parameter, str],
        cut_of: CutOf | None = None,
    ) -> None:
        self.cut_of = cut_of
        self.optimizer = optimizer
        self.axes = axes
        self.updated_whole = updated_whole
        self.trained = self._trained()

    def check(self, names: Callable[[], Mapping[torch.nn.Parameter, str]]) -> None:
        """Try the optimizer again if it trains other parameters than before.

        Args:
            names: a function that returns the name of every parameter.

        Raises:
            PlanError: it can't update a new parameter in parts.
        """
        trained = self._trained()
        if trained == self.trained:
            return
        found = find_whole_parameters(self.optimizer, self.axes, self.cut_of)
        later = [parameter for parameter in found if parameter.requires_grad and parameter not in self.updated_whole]
        if later:
            name_of = names()
            first, *remaining = sorted(name_of[parameter] for parameter in later)
            more = f" and {len(remaining)} more" if remaining else ""
            raise PlanError(
                f"the axis {self.axes[0]} gives each rank a part of each parameter, and which of them are updated as "
                "a whole is decided before the first step",
                f"{type(self.optimizer).__name__} was given {first}{more} after the start, or it was frozen then, and "
                "can't be updated in parts",
                "have the workload's optimizer=... give it all parameters and freeze them after the start, or write "
                f"replicate in place of {self.axes[0]}",
            )
        self.trained = trained

    def _trained(self) -> list[list[int]]:
        """Return the ids of the trained parameters of each group."""
        trained = []
        for group in groups_of(self.optimizer):
            parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
            trained.append([id(parameter) for parameter in parameters])
        return trained


def _coupled(optimizer: torch.optim.Optimizer, axis: str, distance: float) -> PlanError:
    return PlanError(
        f"the axis {axis} gives each rank some parameters to update",
        f"{type(optimizer).__name__} updates a parameter from the others: some that it updates together end "
        f"{distance:.1g} away from where each ends alone",
        "take an optimizer that updates each parameter by itself, such as AdamW or Muon, or write replicate in "
        f"place of {axis}; to clip by the norm of all gradients, set clip_norm in the workload",
    )


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Leave the random numbers as they were, and let optimizers step."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        yield


def _kinds(optimizer: torch.optim.Optimizer) -> dict[Any, tuple[Kind, list[torch.nn.Parameter]]]:
    """Return the parameters that can be cut, by the settings of their group and their number of dimensions."""
    kinds: dict[Any, tuple[Kind, list[torch.nn.Parameter]]] = {}
    for group in groups_of(optimizer):
        # Groups that differ only in the sizes of numbers take the same path through the optimizer's code.
        settings = repr(_settings(group))
        for parameter in group["params"]:
            dims = parameter.dim()
            if dims:
                kinds.setdefault((settings, dims), ((group, dims), []))[1].append(parameter)
    return kinds


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings, where two numbers differ only if one of them is 0."""
    settings = {}
    for key, value in group.items():
        if key in ("params", "lr", "initial_lr"):
            continue
        is_number = isinstance(value, float | torch.Tensor) and not _is_long(value)
        settings[key] = value != 0 if is_number else value
    return settings


def _is_long(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() != 1


def _works_on_parts(optimizer: torch.optim.Optimizer, kind: Kind, by_any_dim: bool) -> bool:
    """True if two halves, each updated by an optimizer of its own, end where the whole does."""
    _, dims = kind
    shape = _shape(dims)
    start, gradients = _values(shape, 0)
    (uncut,) = _try(optimizer, [kind], [(start, gradients)])
    for dim in range(dims if by_any_dim else 1):
        halves = []
        for first, length in _halves(shape[dim]):
            part = (start.narrow(dim, first, length), gradients.narrow(dim + 1, first, length))
            halves += _try(optimizer, [kind], [part])
        if _distance(uncut, torch.cat(halves, dim)):
            return False
    return True


def _follows_groups(optimizer: torch.optim.Optimizer, kind: Kind) -> bool:
    """True if a parameter that is in its group only during the steps ends where one does that is always there."""
    _, dims = kind
    start, gradients = _values(_shape(dims), 0)
    (expected,) = _try(optimizer, [kind], [(start, gradients)])
    original = torch.nn.Parameter(start.clone())
    stand_in = torch.nn.Parameter(start.clone())
    twin = _twin(optimizer, [(kind[0], [original])])
    for gradient in gradients:
        original.grad, stand_in.grad = gradient.clone(), gradient.clone()
        with stand_ins(twin, {original: stand_in}):
            twin.step()
    return not _distance(expected, stand_in.detach())


def _distance_together(optimizer: torch.optim.Optimizer, kinds: Sequence[Kind]) -> float:
    """Return the distance between parameters of all kinds updated together and each by itself; at best 0."""
    doubled: list[Kind] = []
    for kind in kinds:
        doubled += [kind, kind]  # two of each kind: they may meet only within a group
    values = [_values(_shape(dims), number) for number, (_, dims) in enumerate(doubled)]
    together = _try(optimizer, doubled, values)
    distance = 0.0
    for kind, value, end in zip(doubled, values, together, strict=True):
        (separate,) = _try(optimizer, [kind], [value])
        distance = max(distance, _distance(separate, end))
    return distance


def _shape(dims: int) -> tuple[int, ...]:
    return (*SIZES[:dims], *[2] * (dims - len(SIZES)))


def _halves(size: int) -> Iterator[tuple[int, int]]:
    """Yield the first index and the length of each half."""
    middle = size - size // 2
    yield 0, middle
    yield middle, size - middle


def _values(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a fixed random tensor and a gradient of it for every step."""
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=random, dtype=torch.float64)
    gradients = torch.randn((STEPS, *shape), generator=random, dtype=torch.float64)
    return start * (seed + 1), gradients * (seed + 1)  # of other sizes: what compares parameters must show


def _try(
    optimizer: torch.optim.Optimizer, kinds: Sequence[Kind], values: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """Return tensors after a few steps of one optimizer that has all of them."""
    parameters = [torch.nn.Parameter(start.clone()) for start, _ in values]
    groups: dict[int, tuple[dict[str, Any], list[torch.nn.Parameter]]] = {}
    for (group, _), parameter in zip(kinds, parameters, strict=True):
        groups.setdefault(id(group), (group, []))[1].append(parameter)
    twin = _twin(optimizer, list(groups.values()))
    for step in range(STEPS):
        for parameter, (_, gradients) in zip(parameters, values, strict=True):
            parameter.grad = gradients[step].clone()
        twin.step()
    return [parameter.detach() for parameter in parameters]


def _twin(
    optimizer: torch.optim.Optimizer, groups: Sequence[tuple[dict[str, Any], list[torch.nn.Parameter]]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings for small parameters."""
    make: Any = type(optimizer)
    arguments = inspect.signature(make).parameters
    defaults = optimizer.defaults
    # A class may keep more defaults than its constructor takes.
    if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        defaults = {key: value for key, value in defaults.items() if key in arguments}
    small_groups = []
    for group, parameters in groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        small_groups.append({"params": parameters, **_plain(settings)})
    twin: torch.optim.Optimizer = make(small_groups, **_plain(defaults))
    return twin


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for a small tensor on the CPU, with a learning rate that moves it."""
    plain = {}
    for key, value in settings.items():
        plain[key] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    for key in _OFF:
        if plain.get(key):
            plain[key] = False
    if plain.get("lr") is not None:
        plain["lr"] = LEARNING_RATE
    return plain


def _distance(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the distance of two results, relative to the largest value; 0 if they differ by rounding."""
    scale = float(expected.abs().max())
    if torch.allclose(expected, actual, rtol=TOLERANCE, atol=TOLERANCE * scale):
        return 0.0
    return float((expected - actual).abs().max()) / (scale or 1.0)
