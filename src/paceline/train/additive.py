"""Before the first step: does the loss add up over samples, so that a batch can be split?

A copy of the model computes a few samples together and in two parts, forwards and backwards. Loss, weight and the
gradient of every parameter must be the sum of the parts'. What the trial does so that little goes unnoticed:

- It runs in float64, whatever the code asks for, and without autocast: rounding is far below the smallest term that
  matters.
- It runs in training mode, because auxiliary terms are often added there alone. Every random number is the same for
  all samples (dropout keeps everything), and batch norm uses its running statistics: `comm/batch_norm.py` shares
  those of a batch.
- The copy's parameters are moved a little: a router that starts at zero sends all samples the same way.
- Gradients are compared too: an autograd function can add a term to them that the value does not show.

Where no copy can be made or run, the model itself is tried as it is, and only its value is compared.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.comm.batch_norm import SharedForward
from paceline.nouns.errors import LossError, PacelineError
from paceline.nouns.workload import Workload
from paceline.parallel.micro_batches import checked_loss
from paceline.parallel.model_adapter import EagerAdapter, ModelAdapter
from paceline.train.bystanders import Bystanders, ModuleState, ReachedError
from paceline.train.compiler_import import defer_compiler_import
from paceline.train.data import RankLoader, Trial, moved
from paceline.train.same_draws import SameDraws
from paceline.train.seed import kept_random_state, seed_sample

Loss = Callable[[Any, Any], Any]
Notice = Callable[[str], None]
_PADDING = (
    "the loss of a sample changes with the padding of its batch. Ranks pad their own parts, so N ranks do not compute "
    "exactly what one does: give padding no weight, or pad all samples to one length"
)
_COPIED_BYTES = 4 * 2**30  # of a float64 copy of a model that this rank holds whole
_MADE_BYTES = 2**27  # of one whose model is split over ranks: these ranks are not to hold a whole one
_STEP = 0.05  # how far the copy's parameters are moved, of their size
_LEAST_STEP = 0.2  # of that step: how far where all are zero
_ROUNDINGS = 100  # of a sum of many numbers
_NUDGES = 8  # units of rounding: what a change of the parameters by so much changes, rounding may change
_NUDGED = 4  # how often: sums of large terms change in few places
_FLOOR = 1e-3  # of the whole gradient: below this times the tolerance a tensor's own gradient is rounding
_WIDTH = 1021  # of a row when a gradient is projected
_SEED = 2
_OTHER_SEEDS = (3, 4, 5)


@dataclass(frozen=True, slots=True)
class _Way:
    """How the copy computes, and how far from the sum its results may be, relative to the parts' sizes."""

    dtype: torch.dtype
    step: float
    value: float
    gradient: float


# float32: its rounding in a deep model.
_WAYS = (
    _Way(torch.float64, _STEP, 1e-8, 1e-6),
    _Way(torch.float64, 0.0, 1e-8, 1e-6),
    _Way(torch.float32, 0.0, 5e-5, 1e-3),
)
_AS_IT_IS = {torch.float64: 1e-8, torch.float32: 5e-4}
_NARROW = 0.02  # bf16 and the like


@dataclass(slots=True)
class _Found:
    """What one evaluation gave.

    Attributes:
        total, weight: what the loss returned.
        slopes: of every parameter a projection of its gradient. It is linear: those of parts add up.
        digits: the relative rounding of both, where the code computed one of them in narrower numbers.
        sizes: of every parameter its gradient's norm.
    """

    total: float
    weight: float
    digits: tuple[float, float] = (0.0, 0.0)
    slopes: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.total, self.weight, *self.slopes.values())))


_NOTHING = _Found(0.0, 0.0)


class _UndecidableError(Exception):
    """The loss of a batch depends on more than the batch and the model, so that parts can't be compared with it."""


def check_loss_adds_up(placed: ModelAdapter, workload: Workload, loader: RankLoader, notice: Notice) -> None:
    """Raise LossError where the loss of some samples is not the sum of their losses: then no batch can be split.

    Collective where the model is split and too large for a copy.

    Args:
        placed: the model as this rank holds it.
        workload: loss and, where the model is split, the factory of the copy.
        loader: has the samples.
        notice: told where the loss could not be tried.
    """
    if workload.data is None:
        notice("it was not checked that the loss is a sum over samples: the workload has no data to check it with")
        return
    trials = loader.trials()
    if trials == []:
        return  # a batch of one sample is never split
    if trials is None:
        notice(
            "it was not checked that the loss is a sum over samples: the first samples have no common shape, or "
            "can't be cut"
        )
        return
    defer_compiler_import()  # a dispatch mode asks for it, and it takes longer than the trial
    try:
        with kept_random_state():
            is_tried = _is_tried(placed, workload, loader, trials, notice)
    except _UndecidableError as error:
        notice(f"it could not be checked that the loss is a sum over samples: {error}")
        return
    if not is_tried:
        notice("it could not be checked that the loss is a sum over samples: the trial failed, or was not finite")


def _is_tried(
    placed: ModelAdapter, workload: Workload, loader: RankLoader, trials: Sequence[Trial], notice: Notice
) -> bool:
    """Raise LossError where the loss does not add up; False where nothing could tell."""
    model, given = _model_to_copy(placed, workload, loader.device), (trials, loader.device, notice)
    answer = None
    if model is not None:
        with Bystanders(placed.model, *([] if model is placed.model else [model])) as bystanders:
            answer = _try_copies(_Maker(model, getattr(placed, "shared", None), bystanders), workload.loss, given)
    if answer or (placed.is_captured and _is_proven(placed)):
        return True
    if answer is None and (model is None or isinstance(placed, EagerAdapter)):
        return _try_as_it_is(placed, workload, loader, trials)
    return False  # trying the split model is collective, and a copy may have failed on this rank alone


def _is_proven(placed: ModelAdapter) -> bool:
    """The graph's operations show it; batch norm's statistics are shared."""
    return not placed.couples_samples or "batch_norm" in placed.couples_samples


def _try_copies(maker: _Maker, loss: Loss, given: tuple[Sequence[Trial], torch.device, Notice]) -> bool | None:
    """Try the loss on copies of the model, one way after another; whether one gave an answer, None if none ran."""
    trials, device, notice = given
    has_run = None
    for way in _WAYS:
        make = dataclasses.replace(maker, way=way)
        try:
            if not all([_is_answered(make, loss, trial.batches, trial.sizes, device) for trial in trials]):
                has_run = False
                continue
            if any(_feels_padding(make, loss, trial, device) for trial in trials if trial.unpadded):
                notice(_PADDING)
            return True
        except ReachedError:
            return None  # the copies took no part in what was computed
        except (PacelineError, _UndecidableError):
            raise
        except Exception:  # the next way may do; the first step shows what does not run at all
            continue
    return has_run


def _feels_padding(make: _Maker, loss: Loss, trial: Trial, device: torch.device) -> bool:
    batches = [moved(batch, device, make.way.dtype == torch.float64) for batch in [trial.batches[0], *trial.unpadded]]
    found = _evaluate_all(make, loss, batches)
    if not _difference(found, make.way, trial.sizes):
        return False
    try:
        _check_draws(make, loss, (batches, found, trial.sizes), _NOTHING)
    except _UndecidableError:
        return False
    return True


def _is_answered(make: _Maker, loss: Loss, given: Sequence[Any], sizes: tuple[int, int], device: torch.device) -> bool:
    """Raise LossError where the loss does not add up; False where it is not finite."""
    batches = [moved(batch, device, make.way.dtype == torch.float64) for batch in given]
    found = _evaluate_all(make, loss, batches)
    if not all(one.is_finite for one in found):
        return False
    if _difference(found, make.way, sizes):
        # Code that counts its calls gives other values each time: on fresh copies it does not.
        found = [_evaluate_all(make, loss, [batch])[0] for batch in [*batches, batches[0]]]
        _check_repeats(found[0], found.pop(), make.way)
        slack = _rounding(make, loss, batches[0])
        if difference := _difference(found, make.way, sizes, slack):
            _check_draws(make, loss, (batches, found, sizes), slack)
            raise _does_not_add_up(difference)
        return make.way.dtype == torch.float64  # in float32 a term may be hidden in the rounding
    return True


def _rounding(make: _Maker, loss: Loss, batch: Any) -> _Found:
    """How far rounding may change each number: as much as parameters do that are a little more than rounding apart."""
    makers = [dataclasses.replace(make, nudge=nudge) for nudge in range(1, 1 + _NUDGED)]
    found = [_evaluate_all(nudged, loss, [batch])[0] for nudged in makers]
    slopes = {name: _spread([one.slopes.get(name, 0.0) for one in found]) for name in found[0].slopes}
    return _Found(_spread([one.total for one in found]), 0.0, slopes=slopes)


def _check_draws(
    make: _Maker, loss: Loss, given: tuple[Sequence[Any], Sequence[_Found], tuple[int, int]], slack: _Found
) -> None:
    """Raise _UndecidableError where what does not add up depends on draws that are not the same for all samples.

    `SameDraws` sees torch's; numpy's and Python's are others for a part than for the same samples in the whole.

    Args:
        make, loss: what is tried.
        given: the whole and its parts, what was found for each, and the parts' sizes.
        slack: what rounding may do.
    """
    batches, found, sizes = given
    wholes, parts = found[0], [part.weight for part in found[1:]]
    is_weight = _are_apart(wholes.weight, parts, max(make.way.value, wholes.digits[1]))
    for seed in _OTHER_SEEDS:
        for batch, before in zip(batches, found, strict=True):
            (now,) = _evaluate_all(make, loss, [batch], seed)
            if is_weight:
                is_other = _are_apart(before.weight, [now.weight], max(make.way.value, before.digits[1]))
            else:
                is_other = bool(_difference([before, now], make.way, sizes, slack))
            if is_other:
                raise _UndecidableError("it draws random numbers that the trial can't hold fixed")


def _seed_own_generators(model: nn.Module, seed: int) -> None:
    """Seed the random generators of Python and numpy that modules hold."""
    numpy: Any = sys.modules.get("numpy")
    for value in [value for module in model.modules() for value in vars(module).values()]:
        if isinstance(value, random.Random) or (numpy and isinstance(value, numpy.random.RandomState)):
            value.seed(seed)
        elif numpy and isinstance(value, numpy.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state


def _spread(values: Sequence[float]) -> float:
    return _NUDGES * (max(values) - min(values))


def _model_to_copy(placed: ModelAdapter, workload: Workload, device: torch.device) -> nn.Module | None:
    """The model to copy; None where the copy would be too large, or a second model can't be made."""
    if isinstance(placed, EagerAdapter):
        numel = sum(parameter.numel() for parameter in placed.model.parameters())
        return placed.model if numel * 8 <= _COPIED_BYTES else None
    form = placed.split.form if placed.is_captured else placed.model  # type: ignore[attr-defined]
    if sum(parameter.numel() for parameter in form.parameters()) * 8 > _MADE_BYTES:
        return None
    seed_sample(workload.seed)
    try:
        model: nn.Module = workload.model()
    except Exception:  # it was made once
        return None
    if any(parameter.is_meta or hasattr(parameter, "to_local") for parameter in model.parameters()):
        return None  # the function returns one and the same model, which is split by now
    return model.to(device).train()


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes copies of a model, all alike.

    Attributes:
        model: what is copied; it is left as it is.
        shared: what its batch norms share, which is not copied.
        bystanders: keeps what the code reaches besides a copy.
        way: the copy's dtype, and how far its parameters are moved.
        nudge: above 0, the number of a further move that is little more than rounding.
    """

    model: nn.Module
    shared: Any
    bystanders: Bystanders
    way: _Way = _WAYS[0]
    nudge: int = 0

    def __call__(self) -> nn.Module:
        """A copy to be tried: one that draws nothing and whose batch norms look at no batch."""
        memo: dict[int, Any] = {id(self.shared): self.shared}
        noise = torch.Generator().manual_seed(1)
        nudges = torch.Generator().manual_seed(self.nudge)
        for parameter in self.model.parameters():
            memo[id(parameter)] = nn.Parameter(self._moved(parameter, noise, nudges), parameter.requires_grad)
        for module in self.model.modules():
            for value in [*module._buffers.values(), *vars(module).values()]:
                if isinstance(value, torch.Tensor):  # also what a hook computes before each forward pass
                    memo.setdefault(id(value), self._value(value))
        made = copy.deepcopy(self.model, memo)
        for module in made.modules():
            _make_still(module, next(made.parameters()))
        return made

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        return tensor.detach().to(self.way.dtype, copy=True)

    def _moved(self, tensor: torch.Tensor, steps: torch.Generator, nudges: torch.Generator) -> torch.Tensor:
        value = self._value(tensor)
        if self.way.step and value.is_floating_point():
            noise = torch.randn(value.shape, dtype=value.dtype, generator=steps).to(value.device)
            value += noise * self.way.step * (value.square().mean().sqrt() + _LEAST_STEP)
        if self.nudge and value.is_floating_point():
            noise = torch.randn(value.shape, dtype=value.dtype, generator=nudges).to(value.device)
            value *= 1 + noise * _NUDGES * torch.finfo(value.dtype).eps
        return value


def _make_still(module: nn.Module, like: torch.Tensor) -> None:
    """Leave nothing random in `module`, and nothing that looks at a whole batch and is shared when it trains."""
    module._compiled_call_impl = None
    forward = module.__dict__.get("forward")
    inner = getattr(forward, "__wrapped__", None)
    if isinstance(forward, SharedForward) or getattr(inner, "__func__", None) is type(module).forward:
        del module.__dict__["forward"]  # Paceline's: shared statistics, recomputing
    if isinstance(module, nn.RNNBase):
        module.dropout = 0.0
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.eval()
        if module.running_mean is None:
            module.running_mean = like.new_zeros(module.num_features)
            module.running_var = like.new_ones(module.num_features)


def _evaluate_all(make: _Maker, loss: Loss, batches: Sequence[Any], seed: int = _SEED) -> list[_Found]:
    """The loss of each batch on one copy, whose buffers and attributes are set back each time."""
    model = make()
    if seed != _SEED:
        _seed_own_generators(model, seed)
    kept = ModuleState(model)
    found = []
    with _default_dtype(make.way.dtype):
        for batch in batches:
            kept.put_back()
            seed_sample(seed)
            with make.bystanders.watching(model), torch.enable_grad(), SameDraws(make.way.dtype == torch.float64):
                found.append(_evaluate(model, loss, batch))
    return found


def _evaluate(model: nn.Module, loss: Loss, batch: Any) -> _Found:
    slopes: dict[str, float] = {}
    sizes: dict[str, float] = {}

    def note(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        slope, size = _projected(parameter.grad)
        slopes[name] = slopes.get(name, 0.0) + slope
        sizes[name] = sizes.get(name, 0.0) + size
        parameter.grad = None  # never more than one is held

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: note(name, parameter))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        total, weight = checked_loss(loss(model, batch))
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return _Found(float(total.detach()), float(weight), (_digits(total), _digits(weight)), slopes, sizes)


def _digits(value: Any) -> float:
    is_narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return _ROUNDINGS * torch.finfo(value.dtype).eps if is_narrow else 0.0


def _projected(gradient: torch.Tensor) -> tuple[float, float]:
    """The gradient's product with a fixed tensor, and its norm."""
    wide = gradient.to_dense() if gradient.is_sparse else gradient
    flat = wide.detach().double().reshape(-1)
    rows, rest = divmod(len(flat), _WIDTH)
    places = torch.arange(max(rows, _WIDTH), device=flat.device, dtype=torch.float64)
    across, along = torch.cos(1.3 * places[:_WIDTH] + 0.4), torch.cos(0.7 * places[:rows] + 0.1)
    product = flat[len(flat) - rest :] @ across[:rest]
    if rows:
        product = product + along @ (flat[: rows * _WIDTH].view(rows, _WIDTH) @ across)
    return float(product), float(flat.norm())


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What the code makes of plain numbers is as wide as the copy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _difference(found: Sequence[_Found], way: _Way, sizes: tuple[int, int], slack: _Found = _NOTHING) -> str:
    """What of the first is not the sum of the others, in words; "" where all of it is.

    Args:
        found: of the whole and of its parts.
        way: its tolerances.
        sizes: of the parts.
        slack: what rounding may do beyond that.
    """
    whole, parts = found[0], found[1:]
    together = f"for {sum(sizes)} samples together"
    apart = f"for {' and '.join(map(str, sizes))} of them"
    weights, totals = [part.weight for part in parts], [part.total for part in parts]
    if _are_apart(whole.weight, weights, max(way.value, whole.digits[1])):
        return f"{together} its weight is {whole.weight:.7g}, {apart} {_sum(weights)}"
    if _are_apart(whole.total, totals, max(way.value, whole.digits[0]), slack.total):
        return f"{together} it is {whole.total:.7g}, {apart} {_sum(totals)}"
    size_of_all = math.hypot(*(one.sizes.get(name, 0.0) for one in found for name in one.sizes))
    for name in whole.sizes | {name: 0.0 for part in parts for name in part.sizes}:
        rest = abs(whole.slopes.get(name, 0.0) - sum(part.slopes.get(name, 0.0) for part in parts))
        size = sum(one.sizes.get(name, 0.0) for one in found)
        if rest > way.gradient * (size + _FLOOR * size_of_all) + slack.slopes.get(name, 0.0):
            return f"its gradient with respect to {name} {together} is not the sum of those {apart}"
    return ""


def _are_apart(whole: float, parts: Sequence[float], share: float, slack: float = 0.0) -> bool:
    """Whether the sum of `parts` is further from `whole` than a share of their sizes, and `slack`."""
    size = max(sum(map(abs, parts)), abs(whole), 1e-12)
    return abs(whole - sum(parts)) > share * size + slack


def _sum(values: Sequence[float]) -> str:
    return " + ".join(f"{value:.7g}" for value in values)


def _check_repeats(first: _Found, again: _Found, way: _Way) -> None:
    """Raise _UndecidableError unless the same batch gave the same twice."""
    scale = max(abs(first.total), abs(again.total), 1e-12)
    values = max(way.value, first.digits[0]), max(way.value, first.digits[1])
    if abs(first.total - again.total) > values[0] * scale or abs(first.weight - again.weight) > values[1] * scale:
        raise _UndecidableError("two runs of one batch gave different losses")


def _does_not_add_up(found: str) -> LossError:
    return LossError(
        "the loss of a batch should be the sum of its samples' losses, so that the batch can be split",
        found,
        "multiply a mean, or a penalty on the weights, by the weight that you return; a term that compares samples (a "
        "contrastive loss, a router's load balance, your own batch norm) trains on one rank without micro_batch_size",
    )


def _try_as_it_is(placed: ModelAdapter, workload: Workload, loader: RankLoader, trials: Sequence[Trial]) -> bool:
    """Try the value alone, on the model that will train, in evaluation mode; whether that gave an answer.

    Collective where the model is split.
    """
    dtype = next(iter(placed.updated().values())).dtype
    is_narrow = workload.precision == "bf16" and placed.is_captured  # such a graph has its casts in it
    way = _Way(dtype, 0.0, _NARROW if is_narrow else _AS_IT_IS.get(dtype, _NARROW), math.inf)
    was_training = placed.model.training
    placed.model.eval()
    is_wide = workload.precision == "float64"
    try:
        with Bystanders() as bystanders:
            evaluate = functools.partial(_value_as_it_is, placed, workload, (ModuleState(placed.model), bystanders))
            for trial in trials:
                batches = [moved(batch, loader.device, is_wide) for batch in trial.batches]
                found = [evaluate(batch) for batch in batches]
                if not all(one.is_finite for one in found):
                    return False
                if difference := _difference(found, way, trial.sizes):
                    _check_repeats(found[0], evaluate(batches[0]), way)
                    raise _does_not_add_up(difference)
    except (PacelineError, _UndecidableError):
        raise
    except Exception:  # the first step fails the same way, on a batch of the person's
        return False
    finally:
        placed.model.train(was_training)
    return True


def _value_as_it_is(
    placed: ModelAdapter, workload: Workload, kept: tuple[ModuleState, Bystanders], batch: Any
) -> _Found:
    state, bystanders = kept
    try:
        with bystanders.watching(placed.model), torch.enable_grad():
            total, weight = checked_loss(placed.evaluate("loss", workload.loss, batch))
    finally:
        placed.begin_step()  # no backward pass follows, also where the code raised
        state.put_back()  # what forward writes counts neither in the next trial nor in training
    return _Found(float(total.detach()), float(weight))
