"""Check that state that was read fits the optimizer or scheduler that takes it, and give it the types it has there.

JSON keeps neither tuples nor keys that are numbers, and a file can hold any values. What an optimizer or a scheduler of
torch is handed here has the types that its own state has, or is refused before anything is changed.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.nouns.errors import CheckpointError
from paceline.nouns.reading import parse_whole, shown
from paceline.torch_private.optim import INNER, STATE_OF_ALL, inner_of

_FIX = "make it as it was when the checkpoint was saved, or start without the checkpoint"
_LEAST = -(2**63)  # of an int64
_NO_LONGER = {"verbose"}  # torch 2.6 and older have it in a scheduler's state
_RATES = {"lr", "initial_lr"}  # of every optimizer's groups
_USERS_OWN = {"lr_lambdas"}  # of torch's schedulers: attributes of the callables that they were handed


def check_groups(
    saved: Sequence[Mapping[str, object]], groups: Sequence[Mapping[str, object]], may_grow: bool = False
) -> None:
    """Raise CheckpointError unless every setting of the saved groups can be one of the optimizer's groups on this rank.

    A setting that the optimizer does not have is left to it.

    Args:
        saved: the groups as they were read.
        groups: the groups of the optimizer on this rank.
        may_grow: True if it is of a user's own class, whose groups may have values that grow.
    """
    for number, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
        for key in (saved_group.keys() & group.keys()) - {"params", "parameters"}:
            if not is_like(saved_group[key], group[key], may_grow and key not in _RATES):
                raise CheckpointError(
                    f"the checkpoint's optimizer should have settings as the workload's, in group {number}",
                    f"its {shown(key)} is {shown(saved_group[key])}, here it is {shown(group[key])}",
                    _FIX,
                )


class StateCheck:
    """Compares the saved state of parameters with the state that an optimizer of torch makes.

    Args:
        optimizer: the optimizer of the workload; of one that is not torch's, nothing is checked.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.expected: dict[tuple[int, int], dict[str, bool]] = {}  # by group and dimensions

    def check(
        self, group: int, settings: Mapping[str, object], name: str, local: torch.Tensor, state: Mapping[str, Any]
    ) -> None:
        """Raise CheckpointError unless the optimizer can go on with a parameter's saved state.

        Args:
            group: the number of the parameter's group.
            settings: the saved settings of that group.
            name: the name of the parameter.
            local: the part of the parameter on this rank.
            state: the state that was read, by key.
        """
        kind = (group, local.dim())
        if kind not in self.expected:
            self.expected[kind] = _expected_state(self.optimizer, settings, local.dim())
        for key, has_its_shape in self.expected[kind].items():
            if key not in state:
                raise _other_state(name, f"it lacks {key}")
            numel = state[key].numel() if isinstance(state[key], torch.Tensor) else 1
            expected_numel = local.numel() if has_its_shape else 1
            if numel != expected_numel:
                raise _other_state(name, f"its {key} has {numel} elements for the parameter's {local.numel()}")


def _expected_state(optimizer: torch.optim.Optimizer, settings: Mapping[str, object], dims: int) -> dict[str, bool]:
    """Return the keys of a parameter's state, and if their values have its shape (True) or are one number (False).

    A step on a small parameter shows it. State of other shapes, as Adafactor's rows and columns, is left out; where no
    step can be taken, so is everything.
    """
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return {}
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in settings.items() if key in accepted and key != "params"}
    small = torch.nn.Parameter(torch.zeros((2,) * dims))
    small.grad = torch.zeros_like(small)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = kind([small], **arguments)
            sample.step()
    except Exception:  # such as of settings that only a GPU can have
        return {}
    expected = {}
    for key, value in sample.state[small].items():
        if isinstance(value, torch.Tensor) and value.numel() in (1, small.numel()):
            expected[key] = value.numel() > 1
    return expected


def _other_state(name: str, found: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's optimizer state of {name} should be whole", found, "use an earlier one")


def scheduler_state(scheduler: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state as `scheduler.load_state_dict` takes it.

    The state of one of torch's classes has a fixed form. What a user's own class adds to it may grow while it runs.

    Raises:
        CheckpointError: it is the state of another scheduler.
    """
    current = scheduler.state_dict()
    if not isinstance(current, dict):
        return dict(saved)  # a user's own class, which judges for itself
    is_torchs = type(scheduler).__module__.startswith("torch.")
    if is_torchs:
        # Private attributes differ between versions of torch.
        public = {key for key in {*current, *saved} - _NO_LONGER if not key.startswith("_")}
        unmatched = sorted(public - (current.keys() & saved.keys()))
        if unmatched:
            which = "the checkpoint's" if unmatched[0] in saved else "the workload's"
            raise _other_scheduler(scheduler, f"only {which} has {shown(unmatched[0])}")
    for key in current.keys() & saved.keys():
        if not _is_part_like(scheduler, key, saved[key], current[key]):
            raise _other_scheduler(
                scheduler, f"its {shown(key)} is {shown(saved[key])}, here it is {shown(current[key])}"
            )
    state = {key: in_types_of(value, current.get(key)) for key, value in saved.items()}
    if is_torchs and INNER in current.keys() & saved.keys():
        inner_pairs = zip(inner_of(scheduler), saved[INNER], strict=True)
        state[INNER] = [scheduler_state(inner, inner_state) for inner, inner_state in inner_pairs]
    return state


def _is_part_like(scheduler: object, key: str, saved: Any, current: Any) -> bool:
    """True if what is saved under `key` can be a part of the scheduler's state."""
    if type(scheduler).__module__.startswith("torch."):
        if key == INNER:  # each is looked at by itself
            if not isinstance(saved, list) or len(saved) != len(current):
                return False
            return all(isinstance(state, dict) for state in saved)
        return is_like(saved, current, may_grow=key in _USERS_OWN)
    is_base = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and key in STATE_OF_ALL
    return is_like(saved, current, may_grow=not is_base)


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Hand the scheduler its state.

    Raises:
        CheckpointError: it does not take it.
    """
    try:
        scheduler.load_state_dict(state)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise _other_scheduler(scheduler, f"it does not take it ({type(error).__name__}: {error})") from error


def is_like(saved: Any, current: Any, may_grow: bool = False) -> bool:
    """True if decoded JSON has the form of the value that it would replace.

    Args:
        saved: the saved value, as decoded JSON.
        current: the value that it would replace: of Python's own types or a tensor of one number. A value of any other
            type is like everything.
        may_grow: True if lists may have another length, and None stands for a value that is not known yet.
    """
    if may_grow and saved is None:
        return True
    if isinstance(current, torch.Tensor):
        current = current.item() if current.numel() == 1 else None
    if current is None:  # something that is set later
        return True
    if isinstance(current, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(current, int | float):
        is_number = isinstance(saved, int | float) and not isinstance(saved, bool)
        return is_number and (not math.isnan(saved) or math.isnan(current))
    if isinstance(current, str):
        return isinstance(saved, str)
    if isinstance(current, list | tuple):
        return isinstance(saved, list) and _are_like(saved, current, may_grow)
    if isinstance(current, dict):
        return isinstance(saved, dict) and _are_entries_like(saved, current, may_grow)
    return True


def _are_like(saved: list[Any], current: Sequence[object], may_grow: bool) -> bool:
    if not current:
        return True  # something that is filled later
    if not may_grow and len(saved) != len(current):
        return False
    return all(is_like(saved_item, item, may_grow) for saved_item, item in zip(saved, current, strict=False))


def _are_entries_like(saved: dict[str, Any], current: Mapping[object, object], may_grow: bool) -> bool:
    if _has_numbers_as_keys(current):
        return all(parse_whole(key, _LEAST) is not None for key in saved)
    return all(is_like(saved[key], current[key], may_grow) for key in saved.keys() & current.keys())


def _has_numbers_as_keys(value: Mapping[object, object]) -> bool:
    return bool(value) and all(type(key) is int for key in value)


def in_types_of(saved: object, current: object) -> Any:
    """Return decoded JSON in the types of the value that it replaces: tuples, integer keys, tensors of one number.

    Args:
        saved: the value as `as_json` made it.
        current: the workload's present value in its place; any value where it has none.
    """
    if isinstance(current, torch.Tensor) and current.numel() == 1 and isinstance(saved, int | float):
        return torch.full_like(current, saved)
    if isinstance(current, list | tuple) and isinstance(saved, list):
        last = current[-1] if current else None
        items = []
        for index, saved_item in enumerate(saved):
            item = current[index] if index < len(current) else last  # a list that has grown has more of the same
            items.append(in_types_of(saved_item, item))
        return tuple(items) if isinstance(current, tuple) else items
    if isinstance(current, dict) and isinstance(saved, dict):
        has_numbers = _has_numbers_as_keys(current)
        content = {}
        for text, value in saved.items():
            key = parse_whole(text, _LEAST) if has_numbers else text
            content[key] = in_types_of(value, current.get(key))
        return Counter(content) if isinstance(current, Counter) else content
    return saved


def _other_scheduler(scheduler: object, found: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's scheduler should be a {type(scheduler).__name__}", found, _FIX)
