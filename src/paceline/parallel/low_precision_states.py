"""Adam's moments in 8 bits, 4 bits or float8, by torchao's optimizers: `optimizer_states=` of a plan.

torchao cuts a parameter's elements, in their order, into blocks (of 256; of 128 for 4 bits), and keeps a number of few
bits for each element and a float32 for each block. A parameter of less than 4096 elements, or that is no whole number
of blocks, has its moments in full. So what a step does depends on where blocks begin: a rank can update rows of a
parameter only where these are blocks of the whole one. All other parameters are updated whole (`whole_update.py`), so
that each block, on any number of ranks, is that of one process.

Needs: torchao; torch's Adam or AdamW, and parameters whose updates may be computed in float32.
Promises: the update is that of whole parameters. Checkpoints have the blocks as they are, in a form that no plan
changes.
Traffic: none, besides that of whole updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from paceline.comm.dtensor_parts import local
from paceline.nouns.errors import PlanError
from paceline.nouns.options import check_torchao
from paceline.nouns.patching import patched
from paceline.nouns.shard_spec import Cut, ShardSpec
from paceline.parallel.optimizer_list import OptimizerList
from paceline.parallel.torchao_import import import_torchao
from paceline.torch_private.optim import mark_as_wrapped, note_step

CutOf = Callable[[torch.nn.Parameter], ShardSpec | None]  # how ranks cut a parameter; None: they don't

# By the value of `optimizer_states`, how torchao ends the names of its classes.
_ENDINGS = {"8bit": "8bit", "4bit": "4bit", "float8": "Fp8"}
_CODES = "codes"  # an element's bits
_SCALE = "scale"  # a block's number
_PIECES = (_CODES, _SCALE)
_SIGNED = "exp_avg"  # the one moment that may be below 0
# Settings of torch's Adam without a counterpart, that change no result.
_DROPPED = ("foreach", "fused", "decoupled_weight_decay")
# And those that do, or that a GPU's graphs need. torchao has amsgrad, which fails in its first step (0.18).
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Bytes an element that a compiled step holds meanwhile (torch 2.13, CPU: the buffers in inductor's code): both moments
# in float32; for 4 bits also the codes of both in int64, and unpacked in uint8.
_SCRATCH = {"8bit": 8, "Fp8": 8, "4bit": 26}


def with_low_precision(optimizer: torch.optim.Optimizer, states: str) -> torch.optim.Optimizer:
    """Return torchao's optimizer with the groups of one of torch's; of a list, a list of them.

    Args:
        optimizer: the workload's optimizer.
        states: the plan's `optimizer_states`; "full" returns the optimizer as it is.

    Raises:
        PlanError: torchao is not installed, or has no such optimizer.
    """
    if states == "full":
        return optimizer
    check_torchao("optimizer_states", states)
    if isinstance(optimizer, OptimizerList):
        return OptimizerList([_converted(single, states) for single in optimizer])
    return _converted(optimizer, states)


def lower_in_place(optimizer: torch.optim.Optimizer, states: str) -> None:
    """Make one of torch's optimizers torchao's, the same object: a loop, its schedulers and its hooks have it.

    Args:
        optimizer: the loop's optimizer.
        states: the plan's `optimizer_states`; "full" leaves it as it is.

    Raises:
        PlanError: torchao is not installed, or has no such optimizer.
    """
    if states == "full":
        return
    check_torchao("optimizer_states", states)
    converted = _converted(optimizer, states)
    optimizer.__class__ = type(converted)
    for name, value in vars(converted).items():
        if name not in vars(optimizer):
            setattr(optimizer, name, value)
    optimizer.defaults = converted.defaults
    for group, settings in zip(optimizer.param_groups, converted.param_groups, strict=True):
        for name in group.keys() - settings.keys():
            del group[name]
        group.update(settings)
    if "step" in vars(optimizer):
        _count_steps(optimizer)


def _count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Have a scheduler of torch's, which has put a function in the place of `step`, see torchao's steps."""
    reference = weakref.ref(optimizer)
    update = type(optimizer).step

    @functools.wraps(update)
    def step(*arguments: Any, **named: Any) -> Any:
        current: Any = reference()
        note_step(current)
        return update(current, *arguments, **named)

    mark_as_wrapped(step)
    optimizer.step = step  # type: ignore[method-assign]


def _converted(optimizer: torch.optim.Optimizer, states: str) -> torch.optim.Optimizer:
    optim = import_torchao("optim")
    _check(optimizer, states)
    decoupled = [bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups]
    is_adamw = isinstance(optimizer, torch.optim.AdamW) or all(decoupled)
    if not is_adamw and any(decoupled):
        raise _refused(states, "some of its groups have decoupled_weight_decay and others not", "make it AdamW")
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in (*_DROPPED, *_REFUSED)}
        settings["lr"] = float(settings["lr"])  # torchao makes a tensor of its own of it
        settings["betas"] = tuple(float(beta) for beta in settings["betas"])
        groups.append(settings)
    make = getattr(optim, f"Adam{'W' if is_adamw else ''}{_ENDINGS[states]}")
    converted: torch.optim.Optimizer = make(groups)
    return converted


def _check(optimizer: torch.optim.Optimizer, states: str) -> None:
    """Raise PlanError unless torchao has an optimizer that updates as this one does."""
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise _refused(
            states,
            f"the optimizer is a {kind.__name__}, and only torch.optim's Adam and AdamW have such states",
            "leave optimizer_states out, or return torch.optim.AdamW(...) itself",
        )
    if any(optimizer.state.values()):
        raise _refused(
            states, f"the {kind.__name__} has state already, in full", "return an optimizer that has taken no step"
        )
    for group in optimizer.param_groups:
        for name in _REFUSED:
            if group.get(name):
                raise _refused(
                    states,
                    f"the {kind.__name__} has {name}=True, with which torchao's optimizers can't step",
                    f"leave {name} out, or optimizer_states",
                )
        for parameter in group["params"]:
            if parameter.dtype not in _DTYPES:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise _refused(
                    states,
                    f"a parameter of shape {tuple(parameter.shape)} is {dtype}, and torchao's optimizers compute in "
                    "float32",
                    "leave optimizer_states out, or make the model's parameters float32 or bfloat16",
                )


def _refused(states: str, found: str, fix: str) -> PlanError:
    return PlanError(f"the plan's optimizer_states={states}", found, fix)


# The names of torchao's classes, with the plan's value for each.
KINDS = {f"Adam{ending}": states for states, ending in _ENDINGS.items()}
KINDS |= {f"AdamW{ending}": states for states, ending in _ENDINGS.items()}


def is_low_precision(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer is one of torchao's with states in few bits, whoever made it."""
    return any(kind.__name__ in KINDS and is_torchaos(kind) for kind in type(optimizer).__mro__)


def is_torchaos(kind: type) -> bool:
    """True for a class of `torchao.optim`: an optimizer, or the moments that it keeps."""
    return kind.__module__.startswith("torchao.optim")


def states_of_kind(kind: str) -> str:
    """Return the value of `optimizer_states` for a kind that `kind_of` has returned."""
    found = [KINDS[name] for name in kind.removeprefix("list of ").split(", ") if name in KINDS]
    return found[0] if found else "full"


def updated_whole(optimizer: torch.optim.Optimizer, cut_of: CutOf | None) -> set[torch.nn.Parameter]:
    """Return the parameters whose parts are not blocks of the whole.

    Args:
        optimizer: an optimizer of torchao.
        cut_of: a function that returns the cut of each parameter; None: cuts are not known, and all are updated whole.
    """
    found = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if cut_of is None or not _keeps_blocks(optimizer, cut_of(parameter)):
                found.add(parameter)
    return found


def _keeps_blocks(optimizer: Any, spec: ShardSpec | None) -> bool:
    """True if each rank's part has its moments as the whole parameter would have that part's."""
    if spec is None or not spec.cuts:
        return True
    if len(spec.cuts) > 1:
        return False
    cut = spec.cuts[0]
    is_packed = keeps_packed(optimizer, spec.numel)
    if is_packed and (cut.dim != 0 or len(cut.blocks) > 1):
        return False  # a part is not consecutive
    for part in range(cut.parts):
        part_spec = ShardSpec(spec.shape, (dataclasses.replace(cut, part=part),))
        if keeps_packed(optimizer, math.prod(part_spec.local_shape)) != is_packed:
            return False
    return True


def keeps_packed(optimizer: Any, numel: int) -> bool:
    """True if torchao keeps the moments of so many elements in few bits; it is asked, on a tensor without memory."""
    return numel > 0 and is_packed(optimizer._new_buffer(torch.empty(numel, device="meta"), True))


def is_packed(value: Any) -> bool:
    """True for a moment in few bits: a class of tensors that has codes and the blocks' scales."""
    return isinstance(value, torch.Tensor) and all(hasattr(value, piece) for piece in _PIECES)


def memory_of(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that have a value's memory: of a moment in few bits codes, scales and table, else itself."""
    value = local(value)
    if not is_packed(value):
        return [value]
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(value, name) for name in names]


# --- in checkpoints


def pieces_of(key: str, value: Any) -> dict[str, torch.Tensor]:
    """Return a moment in few bits as plain tensors, by the keys that checkpoints have them under.

    They have one row for each run of elements that is both whole rows of the parameter and whole blocks. So they can be
    cut where the parameter can.

    Args:
        key: the moment's key.
        value: the moment, or this rank's part of it.
    """
    row = math.prod(value.shape[1:])
    runs = value.numel() // math.lcm(row, value.block_size)
    return {f"{key}.{piece}": getattr(value, piece).detach().reshape(runs, -1) for piece in _PIECES}


def is_piece(key: str) -> bool:
    """True for a key of `pieces_of`."""
    return key.rpartition(".")[2] in _PIECES


def spec_of_piece(spec: ShardSpec, shape: tuple[int, ...]) -> ShardSpec:
    """Return the shard spec of a piece.

    Args:
        spec: the parameter's shard spec; where it is updated in parts, each is whole blocks.
        shape: the shape of the whole piece.
    """
    cuts = tuple(Cut(0, (shape[0],), cut.part, cut.parts) for cut in spec.cuts)
    return ShardSpec(shape, cuts)


def shape_of_piece(spec: ShardSpec, part: torch.Tensor, value: Any) -> tuple[int, ...]:
    """Return the shape of the whole of a piece.

    Args:
        spec: the parameter's shard spec.
        part: this rank's part of the piece.
        value: the moment to which the piece belongs.
    """
    row = math.prod(spec.shape[1:])
    return spec.numel // math.lcm(row, value.block_size), part.shape[1]


def put_together(
    optimizer: Any, parameter: torch.Tensor, key: str, pieces: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return a moment in few bits, made of its pieces in a checkpoint; None if they do not fit.

    Args:
        optimizer: the optimizer of torchao that gets the moment.
        parameter: this rank's part of the parameter that the state is of, or all of it.
        key: the moment's key.
        pieces: the pieces, by the keys of `pieces_of`.
    """
    value = optimizer._new_buffer(parameter, key == _SIGNED)
    if not is_packed(value):
        return None
    for piece in _PIECES:
        target = getattr(value, piece)
        read = pieces.get(f"{key}.{piece}")
        if read is None or read.numel() != target.numel() or read.dtype != target.dtype:
            return None
        target.copy_(read.view(target.shape))
    return value  # type: ignore[no-any-return]


# --- without values


@contextlib.contextmanager
def not_compiled(states: str = "full") -> Iterator[None]:
    """Have torchao's optimizers make their states in a step, hold what they need meanwhile, and compute nothing.

    Args:
        states: the plan's `optimizer_states`: all values but "full" need torchao.

    Raises:
        PlanError: torchao is not installed.
    """
    if states != "full":
        check_torchao("optimizer_states", states)
        import_torchao("optim")
    adam = sys.modules.get("torchao.optim.adam")
    if adam is None:
        yield
        return
    with patched(adam, single_param_adam=_hold_scratch), patched(torch, compile=lambda function, **_: function):
        yield


def _hold_scratch(
    parameter: torch.Tensor, gradient: torch.Tensor, step: Any, first: Any, second: Any, *settings: Any
) -> None:
    """Hold what the compiled update of a parameter holds; it has the same arguments."""
    if is_packed(first):
        ending = type(first).__name__.removeprefix("OptimState")
        scales = [torch.empty_like(moment.scale) for moment in (first, second)]
        scratch = torch.empty(_SCRATCH[ending] * first.numel(), dtype=torch.uint8, device=parameter.device)
        del scratch, scales
