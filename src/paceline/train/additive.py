"""Before the first step: does the loss add up over samples, so that a batch can be split?

A copy of the model computes a few samples together and in two parts, forwards and backwards. Loss, weight and the
gradient of every parameter must be the sum of the parts'. What the trial does so that little goes unnoticed:

- It runs in float64, whatever the code asks for, and without autocast: rounding is far below the smallest term that
  matters.
- It runs in training mode, because auxiliary terms are often added only there. Every random number is the same for
  all samples (dropout keeps everything), and batch norm uses fixed statistics: `comm/batch_norm.py` shares those of a
  batch.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.comm.batch_norm import SharedForward
from paceline.comm.collectives import AxisComm
from paceline.comm.dtypes import as_real, has_fractions
from paceline.nouns.errors import LossError, PacelineError
from paceline.nouns.own_errors import own_line
from paceline.nouns.workload import Workload
from paceline.parallel.micro_batches import checked_loss
from paceline.parallel.model_adapter import EagerAdapter, ModelAdapter
from paceline.torch_private.modules import BatchNorm, check_images, forget_compiled
from paceline.torch_private.operations import disable_current_modes
from paceline.train.bystanders import Bystanders, ModuleState, ReachedError
from paceline.train.compiler_import import defer_compiler_import
from paceline.train.control_flow_trace import Branches
from paceline.train.data import RankLoader, Trial
from paceline.train.loader import moved
from paceline.train.precision import grouped_products_in_float64
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
_SPREADS = 8  # what a nudge of the parameters changes, so many times over, rounding may change
_OTHER_MEAN, _OTHER_VARIANCE = 0.1, 1.2  # of batch norm in training: far enough from the running statistics
_NUDGED = 16  # how often: sums of large terms change in few places, and 4 moves have missed all of them
_FLOOR = 1e-3  # of the whole gradient: below this times the tolerance a tensor's own gradient is rounding
_WIDTH = 1021  # of a row when a gradient is projected
_SEED = 2
_OTHER_SEEDS = (3, 4, 5)


@dataclass(frozen=True, slots=True)
class _TrialMode:
    """The precision of a trial, and its tolerances.

    Attributes:
        dtype: the dtype of the copy's parameters.
        step: the distance by which the copy's parameters are moved, relative to their size.
        value_tolerance: the tolerance of loss and weight, relative to the sizes of the parts' losses and weights.
        gradient_tolerance: the tolerance of each parameter's gradient, relative to its norm.
        nudge: the distance by which parameters are moved to measure rounding, in units of their rounding. In float64 it
            is far below the tolerances, and enough to change the sum of terms that are a hundred thousand times as
            large.
    """

    dtype: torch.dtype
    step: float
    value_tolerance: float
    gradient_tolerance: float
    nudge: float

    @property
    def is_float64(self) -> bool:
        return self.dtype == torch.float64


# In the order in which they are tried. The second is for a loss that fails or is not finite where the parameters are
# moved, the third for kernels without float64. Its tolerances are float32's rounding in a deep model.
_MODES = (
    _TrialMode(torch.float64, _STEP, value_tolerance=1e-8, gradient_tolerance=1e-6, nudge=1024),
    _TrialMode(torch.float64, 0.0, value_tolerance=1e-8, gradient_tolerance=1e-6, nudge=1024),
    _TrialMode(torch.float32, 0.0, value_tolerance=5e-5, gradient_tolerance=1e-3, nudge=8),
)
_VALUE_TOLERANCES = {torch.float64: 1e-8, torch.float32: 5e-4}  # where the model itself is tried, not a copy
_NARROW_TOLERANCE = 0.02  # bf16 and the like


@dataclass(slots=True)
class _Evaluation:
    """The result of one forward and backward pass.

    Attributes:
        total, weight: the sum and the weight that the loss returned.
        rounding: the relative rounding of the sum and of the weight, above 0 where the code computed it in a dtype
            narrower than float64.
        projections: a projection of each parameter's gradient. It is linear: those of parts add up.
        norms: the norm of each parameter's gradient.
        looks: the counts of each outcome at each line that looked at a tensor's value.
    """

    total: float
    weight: float
    rounding: tuple[float, float] = (0.0, 0.0)
    projections: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    looks: Counter[tuple[str, bool | None]] = field(default_factory=Counter)

    @property
    def is_finite(self) -> bool:
        numbers = (self.total, self.weight, *self.projections.values())
        return all(map(math.isfinite, numbers))


_NO_SLACK = _Evaluation(0.0, 0.0)


class _UndecidableError(Exception):
    """The loss of a batch depends on more than the batch and the model, so that parts can't be compared with it."""


def check_loss_adds_up(
    placed: ModelAdapter, workload: Workload, loader: RankLoader, notice: Notice, comm: AxisComm | None = None
) -> None:
    """Raise LossError if the loss of some samples is not the sum of their losses: then no batch can be split.

    Collective with `comm`, and where the model is split and too large for a copy.

    Args:
        placed: the model as this rank holds it.
        workload: the workload with the loss and, where the model is split, the factory of the copy.
        loader: the loader of the samples.
        notice: a function that is told where the loss could not be tried.
        comm: the communicator of ranks that all check the same, which may share the trials.
    """
    if workload.data is None:
        notice("it was not checked that the loss is a sum over samples: the workload has no data to check it with")
        return
    trials = loader.trials()
    defer_compiler_import()  # a dispatch mode asks for it, and it takes longer than the trial
    if _add_up_on_all(placed, workload, loader, trials, comm):
        return
    if trials == []:
        return  # a batch of one sample is never split
    if trials is None:
        notice(
            "it was not checked that the loss is a sum over samples: the first samples have no common shape, or "
            "can't be cut"
        )
        return
    try:
        with kept_random_state():
            is_tried = _is_tried(placed, workload, loader, trials, notice)
    except _UndecidableError as error:
        notice(f"it could not be checked that the loss is a sum over samples: {error}")
        return
    if not is_tried:
        notice("it could not be checked that the loss is a sum over samples: the trial failed, or was not finite")


def check_loss_is_no_mean(placed: EagerAdapter, workload: Workload, loader: RankLoader) -> None:
    """Raise LossError if a loss is certainly a mean, with the number of samples as its weight.

    For a job whose batches nothing splits: there samples may meet in the loss, and whatever else it is stays unsaid.
    A mean does not change where each sample comes twice, and its weight doubles: it would be divided by it twice.

    Args:
        placed: the model, whole on this rank.
        workload: the workload with the loss.
        loader: the loader of the samples.
    """
    model = _model_to_copy(placed, workload, loader.device)
    if not loader.samples or model is None:  # a stream would have to be read twice
        return
    try:
        with kept_random_state(), Bystanders(placed.model) as bystanders:
            trial = loader.doubled()
            if trial is None:
                return
            defer_compiler_import()
            make = _CopyFactory(model, getattr(placed, "shared", None), bystanders)
            twice, once = _evaluate_all(make, workload.loss, _moved_all(trial.batches[:2], loader.device, make.mode))
    except Exception:  # the first step shows what does not run
        return
    if not once.total or not once.is_finite or _is_apart_from(once.weight, twice.weight / 2, twice.rounding[1]):
        return
    if _is_apart_from(once.total, twice.total, max(once.rounding[0], twice.rounding[0])):
        return
    if _differing_gradient([once, twice], make.mode, _NO_SLACK) is None:
        count = trial.sizes[0]
        raise LossError(
            "the loss should return the sum over its samples, and their number",
            f"it returns a mean: {once.total:.7g} with the weight {once.weight:.7g} for {count} samples, and "
            f"{twice.total:.7g} with {twice.weight:.7g} where each comes twice. Gradients would be divided twice",
            "multiply the mean by the weight that you return: `return mean * len(labels), len(labels)`",
        )


def _is_apart_from(joint: float, doubled: float, rounding: float) -> bool:
    return _are_apart(joint, [doubled], max(_MODES[0].value_tolerance, rounding))


def _is_tried(
    placed: ModelAdapter, workload: Workload, loader: RankLoader, trials: Sequence[Trial], notice: Notice
) -> bool:
    """Raise LossError if the loss does not add up; return False if nothing could tell."""
    # Three ways, the strictest first: copies of the model; the operations of its graph; its own value.
    model = _model_to_copy(placed, workload, loader.device)
    answer = None
    if model is not None:
        models = [placed.model]
        if model is not placed.model:
            models.append(model)
        with Bystanders(*models) as bystanders:
            factory = _CopyFactory(model, getattr(placed, "shared", None), bystanders)
            answer = _try_copies(factory, workload.loss, trials, loader.device, notice)
    if answer:
        return True
    if placed.is_captured and _is_proven(placed):
        return True
    if answer is None and (model is None or isinstance(placed, EagerAdapter)):
        return _try_without_copy(placed, workload, loader, trials)
    return False  # trying the split model is collective, and a copy may have failed only on this rank


def _add_up_on_all(
    placed: ModelAdapter, workload: Workload, loader: RankLoader, trials: Sequence[Trial] | None, comm: AxisComm | None
) -> bool:
    """Make some of the trials on each rank; True if the loss adds up in all of them, the usual case. Collective.

    After any other answer every rank makes all trials by itself, and says what is wrong.
    """
    if comm is None or comm.size == 1 or not isinstance(placed, EagerAdapter):
        return False
    add_up = False
    with contextlib.suppress(Exception), kept_random_state():
        add_up = _add_up(placed, workload, loader, _share(trials or [], comm.rank, comm.size))
    rows = comm.aside().all_gather(torch.tensor([int(add_up)]))
    return all(int(row) for row in rows)


def _share(trials: Sequence[Trial], rank: int, ranks: int) -> list[Trial]:
    """Return this rank's trials: as many on each rank, so that code which counts its calls counts alike everywhere.

    Empty where there are none, or where something has to be reported about the padding.
    """
    if any(trial.unpadded for trial in trials):
        return []
    count = math.ceil(len(trials) / ranks)
    return [trials[(rank + ranks * turn) % len(trials)] for turn in range(count)]


def _add_up(placed: ModelAdapter, workload: Workload, loader: RankLoader, trials: Sequence[Trial]) -> bool:
    model = _model_to_copy(placed, workload, loader.device)
    if model is None or not trials:
        return False
    with Bystanders(placed.model) as bystanders:
        replica = _Replica(_CopyFactory(model, getattr(placed, "shared", None), bystanders))
        for trial in trials:
            results = replica.evaluate(workload.loss, _moved_all(trial.batches, loader.device, replica.make.mode))
            if not all(result.is_finite for result in results) or _difference(results, replica.make.mode, trial.sizes):
                return False
    return True


def _is_proven(placed: ModelAdapter) -> bool:
    """True if the graph's operations show that the loss adds up; batch norm's statistics are shared."""
    return not placed.couples_samples or "batch_norm" in placed.couples_samples


def _try_copies(
    factory: _CopyFactory, loss: Loss, trials: Sequence[Trial], device: torch.device, notice: Notice
) -> bool | None:
    """Try the loss on copies of the model, in one mode after another.

    Returns:
        True if a mode gave an answer, False if copies ran and none did, None if none ran.
    """
    has_run = None
    for mode in _MODES:
        make = dataclasses.replace(factory, mode=mode)
        try:
            if not _are_answered(make, loss, trials, device):
                has_run = False
                continue
            if _is_padding_counted(make, loss, trials, device):
                notice(_PADDING)
            return True
        except ReachedError:
            return None  # the copies took no part in what was computed
        except (PacelineError, _UndecidableError):
            raise
        except Exception as error:  # the next mode may do; the first step shows what does not run at all
            if line := own_line(error):
                notice(f"Paceline's trial of the loss failed at {line}, by a bug of Paceline: {error!r:.200}")
    return has_run


def _are_answered(make: _CopyFactory, loss: Loss, trials: Sequence[Trial], device: torch.device) -> bool:
    """Raise LossError if the loss does not add up in a trial; return False if one of them gave no answer."""
    are_answered = True
    replica = _Replica(make)
    for trial in trials:  # every one, also after one without an answer: a later one may show that the loss is wrong
        batches = _moved_all(trial.batches, device, make.mode)
        results = replica.evaluate(loss, batches)
        if not all(result.is_finite for result in results):
            are_answered = False
        elif _difference(results, make.mode, trial.sizes):
            replica.drop()  # others are made to find out why
            if not _is_explained(make, loss, batches, trial.sizes):
                are_answered = False
    return are_answered


def _is_padding_counted(make: _CopyFactory, loss: Loss, trials: Sequence[Trial], device: torch.device) -> bool:
    """True if the loss does not add up once each part of a batch is padded to its own longest sample."""
    for trial in trials:
        if not trial.unpadded:
            continue
        batches = _moved_all([trial.batches[0], *trial.unpadded], device, make.mode)
        results = _evaluate_all(make, loss, batches)
        if not _difference(results, make.mode, trial.sizes):
            continue
        try:
            _check_draws(make, loss, batches, results, trial.sizes, _NO_SLACK)
        except _UndecidableError:
            continue
        return True
    return False


def _is_explained(make: _CopyFactory, loss: Loss, batches: Sequence[object], sizes: tuple[int, int]) -> bool:
    """Look for another reason than the loss where parts do not add up; return False if that gives no answer.

    Raises:
        LossError: there is none.
    """
    # Code that counts its calls gives other values each time: on fresh copies it does not.
    results = _evaluate_on_fresh_copies(make, loss, batches)
    (again,) = _evaluate_all(make, loss, [batches[0]])
    _check_repeats(results[0], again, make.mode)
    # Large terms that cancel leave more rounding than the tolerance, which is relative to their sum.
    slack = _rounding_slack(make, loss, batches[0])
    if difference := _difference(results, make.mode, sizes, slack):
        _check_draws(make, loss, batches, results, sizes, slack)
        raise _does_not_add_up(difference, _other_path(results))
    return make.mode.is_float64  # in float32 a term may be hidden in the rounding


def _moved_all(batches: Sequence[object], device: torch.device, mode: _TrialMode) -> list[Any]:
    return [moved(batch, device, mode.is_float64) for batch in batches]


def _evaluate_on_fresh_copies(make: _CopyFactory, loss: Loss, batches: Sequence[object]) -> list[_Evaluation]:
    """Evaluate the loss of each batch on a copy of its own."""
    results = []
    for batch in batches:
        results += _evaluate_all(make, loss, [batch])
    return results


def _rounding_slack(make: _CopyFactory, loss: Loss, batch: object) -> _Evaluation:
    """Estimate how far rounding may change each number.

    It is as much as the numbers differ between copies whose parameters are a little more than rounding apart.
    """
    results = []
    for nudge in range(1, 1 + _NUDGED):
        nudged = dataclasses.replace(make, nudge=nudge)
        results += _evaluate_all(nudged, loss, [batch])
    projections = {}
    for name in results[0].projections:
        projections[name] = _spread([result.projections.get(name, 0.0) for result in results])
    total = _spread([result.total for result in results])
    return _Evaluation(total, 0.0, projections=projections)


def _check_draws(
    make: _CopyFactory,
    loss: Loss,
    batches: Sequence[object],
    results: Sequence[_Evaluation],
    sizes: tuple[int, int],
    slack: _Evaluation,
) -> None:
    """Raise _UndecidableError if what does not add up depends on draws that are not the same for all samples.

    `SameDraws` sees torch's; numpy's and Python's are others for a part than for the same samples in the whole.

    Args:
        make, loss: the factory of the copies, and the loss.
        batches: the batch and its parts.
        results: the result for each batch.
        sizes: the number of samples of each part.
        slack: the differences that rounding may make.
    """
    together = results[0]
    part_weights = [part.weight for part in results[1:]]
    weight_tolerance = max(make.mode.value_tolerance, together.rounding[1])
    is_weight = _are_apart(together.weight, part_weights, weight_tolerance)
    # What changes with the seed, for the same batch, is drawn: then a difference between parts says nothing.
    for seed in _OTHER_SEEDS:
        for batch, before in zip(batches, results, strict=True):
            (now,) = _evaluate_all(make, loss, [batch], seed)
            if is_weight:
                tolerance = max(make.mode.value_tolerance, before.rounding[1])
                is_other = _are_apart(before.weight, [now.weight], tolerance)
            else:
                is_other = bool(_difference([before, now], make.mode, sizes, slack))
            if is_other:
                raise _UndecidableError("it draws random numbers that the trial can't hold fixed")


def _seed_own_generators(model: nn.Module, seed: int) -> None:
    """Seed the random generators of Python and numpy that modules hold."""
    numpy: Any = sys.modules.get("numpy")  # where nothing has imported it, no module holds a generator of it
    for module in model.modules():
        for value in list(vars(module).values()):
            if isinstance(value, random.Random) or (numpy and isinstance(value, numpy.random.RandomState)):
                value.seed(seed)
            elif numpy and isinstance(value, numpy.random.Generator):
                value.bit_generator.state = type(value.bit_generator)(seed).state


def _spread(values: Sequence[float]) -> float:
    return _SPREADS * (max(values) - min(values))


def _model_to_copy(placed: ModelAdapter, workload: Workload, device: torch.device) -> nn.Module | None:
    """Return the model to copy; None where the copy would be too large, or a second model can't be made."""
    if isinstance(placed, EagerAdapter):
        return placed.model if _float64_bytes(placed.model) <= _COPIED_BYTES else None
    form = placed.split.form if placed.is_captured else placed.model  # type: ignore[attr-defined]
    if _float64_bytes(form) > _MADE_BYTES:
        return None
    seed_sample(workload.seed)
    try:
        model: nn.Module = workload.model()
    except Exception:  # it was made once
        return None
    if any(parameter.is_meta or hasattr(parameter, "to_local") for parameter in model.parameters()):
        return None  # the function returns one and the same model, which is split by now
    return model.to(device).train()


def _float64_bytes(model: nn.Module) -> int:
    return 8 * sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True, slots=True)
class _CopyFactory:
    """Makes copies of a model, all alike.

    Attributes:
        model: the model that is copied, and left unchanged.
        shared: the statistics that its batch norms share, which are not copied.
        bystanders: the guard of modules that the code reaches besides a copy.
        mode: the dtype of the copy, and the distance by which its parameters are moved.
        nudge: above 0, the number of a further move that is little more than rounding.
    """

    model: nn.Module
    shared: object
    bystanders: Bystanders
    mode: _TrialMode = _MODES[0]
    nudge: int = 0

    def __call__(self) -> nn.Module:
        """Make a copy that draws nothing and whose batch norms look at no batch."""
        # deepcopy takes from the memo what is in it: so parameters and buffers get the trial's dtype.
        memo: dict[int, Any] = {id(self.shared): self.shared}
        noise = torch.Generator().manual_seed(1)  # a new one for each copy: all are moved alike
        nudges = torch.Generator().manual_seed(self.nudge)
        for parameter in self.model.parameters():
            memo[id(parameter)] = nn.Parameter(self._moved(parameter, noise, nudges), parameter.requires_grad)
        for module in self.model.modules():
            for value in [*module._buffers.values(), *vars(module).values()]:
                if isinstance(value, torch.Tensor):  # also what a hook computes before each forward pass
                    memo.setdefault(id(value), self._value(value))
        replica = copy.deepcopy(self.model, memo)
        for module in replica.modules():
            _make_still(module, next(replica.parameters()))
        return replica

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if not has_fractions(tensor):
            return tensor.detach().clone()
        dtype = torch.promote_types(self.mode.dtype, torch.complex64) if tensor.is_complex() else self.mode.dtype
        return tensor.detach().to(dtype, copy=True)

    def _moved(self, tensor: torch.Tensor, steps: torch.Generator, nudges: torch.Generator) -> torch.Tensor:
        value = self._value(tensor)
        if not has_fractions(value):
            return value
        if self.mode.step:
            # Drawn in few bits, which takes a quarter of the time: these numbers need only be the same in each copy.
            dtype = torch.complex64 if value.is_complex() else torch.float32
            noise = torch.randn(value.shape, dtype=dtype, generator=steps).to(value.device)
            value += noise * self.mode.step * (value.abs().square().mean().sqrt() + _LEAST_STEP)
        if self.nudge:
            noise = torch.randn(value.shape, dtype=value.dtype, generator=nudges).to(value.device)
            value *= 1 + noise * self.mode.nudge * torch.finfo(value.dtype).eps
        return value


def _make_still(module: nn.Module, like: torch.Tensor) -> None:
    """Leave nothing random in `module`, and nothing that looks at a whole batch and is shared when it trains."""
    forget_compiled(module)
    forward = module.__dict__.get("forward")
    inner = getattr(forward, "__wrapped__", None)
    if isinstance(forward, SharedForward) or getattr(inner, "__func__", None) is type(module).forward:
        del module.__dict__["forward"]  # Paceline's: shared statistics, recomputing
    if isinstance(module, nn.RNNBase):
        module.dropout = 0.0
    if isinstance(module, BatchNorm):
        # Without running statistics it would use those of the batch in evaluation too.
        if module.running_mean is None:
            module.running_mean = like.new_zeros(module.num_features)
            module.running_var = like.new_ones(module.num_features)
        # In both modes: a loss may switch between them, as for pseudo labels.
        module.__dict__["forward"] = functools.partial(_norm_by_fixed_statistics, module)


def _norm_by_fixed_statistics(module: BatchNorm, images: torch.Tensor) -> torch.Tensor:
    """Norm by running statistics; in training by others, so that the two modes do not give the same by chance."""
    check_images(module, images)
    mean, variance = module.running_mean, module.running_var
    assert mean is not None
    assert variance is not None
    if module.training:
        mean, variance = mean + _OTHER_MEAN * (variance + module.eps).sqrt(), _OTHER_VARIANCE * variance
    return nn.functional.batch_norm(images, mean, variance, module.weight, module.bias, False, 0.0, module.eps)


def _evaluate_all(make: _CopyFactory, loss: Loss, batches: Sequence[object], seed: int = _SEED) -> list[_Evaluation]:
    """Evaluate the loss of each batch on one copy, whose buffers and attributes are set back each time."""
    return _Replica(make, seed).evaluate(loss, batches)


class _Replica:
    """A copy of the model, made when it is first needed, on which losses are evaluated.

    Args:
        make: the factory of the copy.
        seed: the seed of the random numbers of each batch, and of the generators that modules hold where it is not the
            usual.
    """

    def __init__(self, make: _CopyFactory, seed: int = _SEED) -> None:
        self.make = make
        self.seed = seed
        self.copied: tuple[nn.Module, ModuleState] | None = None

    def evaluate(self, loss: Loss, batches: Sequence[Any]) -> list[_Evaluation]:
        """Evaluate the loss of each batch; buffers and attributes are set back each time."""
        model, state = self.copied or self._copy()
        mode = self.make.mode
        results = []
        with _default_dtype(mode.dtype), grouped_products_in_float64():
            for batch in batches:
                state.put_back()  # each batch begins with the same buffers and the same random numbers
                seed_sample(self.seed)
                with self.make.bystanders.watching(model), torch.enable_grad(), SameDraws(mode.is_float64):
                    results.append(_evaluate(model, loss, batch))
        return results

    def _copy(self) -> tuple[nn.Module, ModuleState]:
        model = self.make()
        if self.seed != _SEED:
            _seed_own_generators(model, self.seed)
        self.copied = model, ModuleState(model)
        return self.copied

    def drop(self) -> None:
        """Free the copy's memory; the next evaluation makes another copy."""
        self.copied = None


def _evaluate(model: nn.Module, loss: Loss, batch: object) -> _Evaluation:
    """Run a forward and a backward pass, and project each gradient as soon as it is complete."""
    projections: dict[str, float] = {}
    norms: dict[str, float] = {}

    def project(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with disable_current_modes():  # they are of the loss; an operation under one takes ten times as long
            projection, norm = _projected(parameter.grad)
        projections[name] = projections.get(name, 0.0) + projection
        norms[name] = norms.get(name, 0.0) + norm
        parameter.grad = None  # never more than one is held

    hooks = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(project, name)))
    try:
        with Branches() as branches:
            total, weight = checked_loss(loss(model, batch))
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    rounding = (_relative_rounding(total), _relative_rounding(weight))
    looks = Counter(branches.outcomes)
    return _Evaluation(float(total.detach()), float(weight), rounding, projections, norms, looks)


def _relative_rounding(value: object) -> float:
    """Return the relative rounding of a sum in the dtype of `value`; 0 for float64 and plain numbers."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0.0
    if value.dtype == torch.float64:
        return 0.0
    return _ROUNDINGS * torch.finfo(value.dtype).eps


def _projected(gradient: torch.Tensor) -> tuple[float, float]:
    """Return the gradient's product with a fixed tensor, and its norm."""
    wide = gradient.to_dense() if gradient.is_sparse else gradient
    flat = as_real(wide.detach()).double().reshape(-1)
    # The fixed tensor is the outer product of `along` and `across`, so that it never has to be held whole.
    rows, remaining = divmod(len(flat), _WIDTH)
    across = _waves(_WIDTH, flat.device, 1.3, 0.4)
    along = _waves(rows, flat.device, 0.7, 0.1)
    # One number per gradient is kept, so parts can be compared although no two gradients are held at once.
    product = flat[len(flat) - remaining :] @ across[:remaining]
    if rows:
        product = product + along @ (flat[: rows * _WIDTH].view(rows, _WIDTH) @ across)
    return float(product), float(flat.norm())


@functools.lru_cache(maxsize=8)  # a model has few sizes; of a tensor a thousandth of its memory is kept
def _waves(count: int, device: torch.device, step: float, start: float) -> torch.Tensor:
    """Return so many fixed numbers."""
    return torch.cos(step * torch.arange(count, device=device, dtype=torch.float64) + start)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of tensors that the code makes of plain numbers: that of the copy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _difference(
    results: Sequence[_Evaluation], mode: _TrialMode, sizes: tuple[int, int], slack: _Evaluation = _NO_SLACK
) -> str:
    """Describe what of the first result is not the sum of the others; return "" if all of it is.

    Args:
        results: the results of the batch and of its parts.
        mode: the mode of the trial, with its tolerances.
        sizes: the number of samples of each part.
        slack: the differences that rounding may make beyond the tolerances.
    """
    joint, parts = results[0], results[1:]
    together = f"for {sum(sizes)} samples together"
    apart = f"for {' and '.join(map(str, sizes))} of them"
    weights = [part.weight for part in parts]
    if _are_apart(joint.weight, weights, max(mode.value_tolerance, joint.rounding[1])):
        return f"{together} its weight is {joint.weight:.7g}, {apart} {_sum(weights)}"
    totals = [part.total for part in parts]
    if _are_apart(joint.total, totals, max(mode.value_tolerance, joint.rounding[0]), slack.total):
        return f"{together} it is {joint.total:.7g}, {apart} {_sum(totals)}"
    if name := _differing_gradient(results, mode, slack):
        return f"its gradient with respect to {name} {together} is not the sum of those {apart}"
    return ""


def _differing_gradient(results: Sequence[_Evaluation], mode: _TrialMode, slack: _Evaluation) -> str | None:
    """Return the first parameter whose gradient is not the sum of the parts'; None if there is none."""
    joint, parts = results[0], results[1:]
    all_norms: list[float] = []
    names: dict[str, float] = {}  # a dict keeps the order, so that the message is the same each time
    for result in results:
        all_norms += result.norms.values()
        names.update(result.norms)
    norm_of_all = math.hypot(*all_norms)
    for name in names:
        part_sum = sum(part.projections.get(name, 0.0) for part in parts)
        remainder = abs(joint.projections.get(name, 0.0) - part_sum)
        norm = sum(result.norms.get(name, 0.0) for result in results)
        # Relative to the tensor's own gradient; one that is tiny beside the others is rounding of theirs.
        tolerance = mode.gradient_tolerance * (norm + _FLOOR * norm_of_all)
        if remainder > tolerance + slack.projections.get(name, 0.0):
            return name
    return None


def _are_apart(joint: float, parts: Sequence[float], tolerance: float, slack: float = 0.0) -> bool:
    """True if the sum of `parts` is further from `joint` than `slack` and `tolerance`, which is of their sizes."""
    size = max(sum(map(abs, parts)), abs(joint), 1e-12)
    return abs(joint - sum(parts)) > tolerance * size + slack


def _sum(values: Sequence[float]) -> str:
    return " + ".join(f"{value:.7g}" for value in values)


def _check_repeats(first: _Evaluation, again: _Evaluation, mode: _TrialMode) -> None:
    """Raise _UndecidableError unless the same batch gave the same twice."""
    scale = max(abs(first.total), abs(again.total), 1e-12)
    total_tolerance = max(mode.value_tolerance, first.rounding[0]) * scale
    weight_tolerance = max(mode.value_tolerance, first.rounding[1]) * scale
    if abs(first.total - again.total) > total_tolerance or abs(first.weight - again.weight) > weight_tolerance:
        raise _UndecidableError("two runs of one batch gave different losses")


def _other_path(results: Sequence[_Evaluation]) -> str:
    """Return the line at which a part of the batch went another way than the batch; "" if there is none."""
    joint, parts = results[0], results[1:]
    together: Counter[tuple[str, bool | None]] = Counter()
    for part in parts:
        together.update(part.looks)
    for (line, outcome), count in joint.looks.items():
        # A loop over samples looks at each: then the parts' counts add up.
        if together[line, outcome] != count and any(part.looks[line, outcome] != count for part in parts):
            return line
    return ""


def _does_not_add_up(difference: str, line: str = "", is_captured: bool = False) -> LossError:
    found, fix = difference, ""
    if is_captured:  # not the user's own code has computed it
        found += ", as the split model computes it; verify a smaller model to see whether Paceline splits it wrong"
    if line:
        found += f"; the path at {line} depends on the values of the batch: a part of it goes another way"
        fix = "choose by torch.where, or by a mask, for each sample, or take a fixed number of rounds; "
    return LossError(
        "the loss of a batch should be the sum of its samples' losses, so that the batch can be split",
        found,
        f"{fix}multiply a mean, or a penalty on the weights, by the weight that you return; a term that compares "
        "samples (a contrastive loss, a router's load balance, your own batch norm) trains under tensor=N or "
        "pipeline=N, whose ranks share a batch (a router's also under expert=N), and on one rank, without "
        "micro_batch_size and micro_batches; or gather what it compares in a loop of your own: "
        "job.all_gather(embeddings, grad=True), as docs/collectives.md shows",
    )


def _try_without_copy(placed: ModelAdapter, workload: Workload, loader: RankLoader, trials: Sequence[Trial]) -> bool:
    """Try only the value, on the model that will train, in evaluation mode; return True if that gave an answer.

    Collective where the model is split.
    """
    dtype = next(iter(placed.updated().values())).dtype
    tolerance = _VALUE_TOLERANCES.get(dtype, _NARROW_TOLERANCE)
    if workload.precision in ("bf16", "fp16") and placed.is_captured:  # such a graph has its casts in it
        tolerance = _NARROW_TOLERANCE
    mode = _TrialMode(dtype, 0.0, tolerance, gradient_tolerance=math.inf, nudge=0.0)
    to_float64 = workload.precision == "float64"
    # In evaluation mode: dropout would drop other elements in the parts.
    was_training = placed.model.training
    placed.model.eval()
    try:
        with Bystanders() as bystanders:
            evaluate = functools.partial(_evaluate_value, placed, workload, ModuleState(placed.model), bystanders)
            for trial in trials:
                batches = [moved(batch, loader.device, to_float64) for batch in trial.batches]
                results = [evaluate(batch) for batch in batches]
                if not all(result.is_finite for result in results):
                    return False
                if difference := _difference(results, mode, trial.sizes):
                    _check_repeats(results[0], evaluate(batches[0]), mode)
                    raise _does_not_add_up(difference, is_captured=placed.is_captured)
    except (PacelineError, _UndecidableError):
        raise
    except Exception:  # the first step fails the same way, on a batch of the user's
        return False
    finally:
        placed.model.train(was_training)
    return True


def _evaluate_value(
    placed: ModelAdapter, workload: Workload, state: ModuleState, bystanders: Bystanders, batch: object
) -> _Evaluation:
    """Compute loss and weight of a batch on the model that will train, and leave the model as it was."""
    try:
        with bystanders.watching(placed.model), torch.enable_grad():
            total, weight = checked_loss(placed.evaluate("loss", workload.loss, batch))
    finally:
        placed.begin_step()  # no backward pass follows, also where the code raised
        state.put_back()  # what forward writes counts neither in the next trial nor in training
    return _Evaluation(float(total.detach()), float(weight))
