"""Experts in a loop of the user's own code: modules that a module calls for the rows that chose them.

Which rows go where is decided in Python, so no operation shows it (`own_modules.py`). That the module adds up what its
experts make is tried out instead, on made-up values in float64: what each group of experts adds to the result, all
others giving zeros, must add up to what all of them add. Then each rank of `expert` runs the module's code with its own
experts, and the ranks' results are summed; what no expert has a part in (a shared expert) is the first rank's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.graph.own_code import own_code_running
from paceline.graph.own_modules import Attributes, OwnModule, copy_of, fractions, random_state_kept
from paceline.nouns.shard_spec import chunk_range
from paceline.torch_private.operations import disable_current_modes
from paceline.torch_private.tensors import tree_leaves, tree_map

_TRIALS = 6  # draws of made-up values
_NEAR = 1e-6  # of the largest element: the code may round to float32


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """The experts of a module that runs by its own code.

    Attributes:
        count: the number of experts.
        paths: for each expert, the paths of its modules in the module; one, unless the module has several lists.
        states: for each expert, the names of its parameters in the module.
        draws: whether they draw random numbers.
        are_sums: which of the tensors that the module returns are sums of what they make; others don't depend on them.
        has_rest: whether there is something else in these sums.
    """

    count: int
    paths: tuple[tuple[str, ...], ...]
    states: tuple[tuple[str, ...], ...]
    draws: bool = False
    are_sums: tuple[bool, ...] = ()
    has_rest: bool = False


def own_experts(call: OwnModule, num_ranks: int) -> OwnExperts | str:
    """Return the experts of a module that can be spread over so many ranks, or why there are none."""
    lists = _lists_of(call.part.copy, num_ranks)
    if not lists:
        return f"it has no list of {num_ranks} or more modules that are alike"
    count = len(lists[0])
    paths = tuple(tuple(paths_of_list[number] for paths_of_list in lists) for number in range(count))
    states = tuple(
        tuple(name for name in call.names if name.startswith(tuple(f"{path}." for path in of_one))) for of_one in paths
    )
    return _Trial(call, OwnExperts(count, paths, states), num_ranks).run()


def with_experts(call: OwnModule, experts: OwnExperts, rank: int, num_ranks: int) -> OwnModule:
    """Return the call as a rank makes it, which has some of the experts; the results of all ranks add up."""
    first, last = chunk_range(experts.count, rank, num_ranks)
    return _CallWithExperts(call, experts, range(first, last), rank)


def names_elsewhere(experts: OwnExperts, rank: int, num_ranks: int) -> set[str]:
    """Return the names, in the module, of the parameters of other ranks' experts."""
    own_numbers = range(*chunk_range(experts.count, rank, num_ranks))
    names: set[str] = set()
    for number, names_of_expert in enumerate(experts.states):
        if number not in own_numbers:
            names.update(names_of_expert)
    return names


def _lists_of(module: torch.nn.Module, least: int) -> list[list[str]]:
    """Return the lists of the longest sets of modules that are alike, as paths of their members."""
    found: list[list[str]] = []
    for path, part in module.named_modules():
        groups: dict[object, list[str]] = {}
        for key, child in part.named_children():
            shapes = tuple((name, tuple(parameter.shape)) for name, parameter in child.named_parameters())
            if shapes and not any(True for _ in child.buffers()):
                groups.setdefault((type(child), shapes), []).append(f"{path}.{key}" if path else key)
        found += [members for members in groups.values() if len(members) >= max(2, least)]
    longest = max(map(len, found), default=0)
    of_longest = [members for members in found if len(members) == longest]
    # What is within another list's member is that one's.
    return [
        members
        for members in of_longest
        if not any(members[0].startswith(f"{longest[0]}.") for longest in of_longest if longest is not members)
    ]


class _CallWithExperts(OwnModule):
    """A call of a module in a copy of its own, in which other ranks' experts return zeros."""

    def __init__(self, call: OwnModule, experts: OwnExperts, own_numbers: Sequence[int], rank: int) -> None:
        elsewhere: set[str] = set()
        for number, names_of_expert in enumerate(experts.states):
            if number not in own_numbers:
                elsewhere.update(names_of_expert)
        names = [name for name in call.names if name not in elsewhere]
        super().__init__(
            call.part.with_copy(copy_of(call.part.copy, call.part.path)),
            names,
            call.constants,
            call.is_tensor,
            call.form,
        )
        self.__name__ = self.__qualname__ = f"{call.__name__} with experts {list(own_numbers)}"
        self._modes = list(call._modes)
        self.experts = experts
        self.rank = rank
        self.reaches_all = True  # rows may have chosen only other ranks' experts
        self.without_experts: _CallWithExperts | None = None  # without any expert: what later ranks leave out
        if rank and experts.has_rest and own_numbers:
            self.without_experts = _CallWithExperts(call, experts, (), rank)
        for number in range(experts.count):
            if number not in own_numbers:
                for path in experts.paths[number]:
                    _return_zeros(self.part.copy.get_submodule(path))

    def _show_attributes(self, before: Attributes) -> None:
        """Do nothing: the call that it was made of has done so."""

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.experts.draws:
            return self._added(tensors)
        # Ranks of the axis share a stream of random numbers, and each draws only for its experts.
        seed = int(torch.randint(1 << 40, ()))
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(seed + self.rank)
            return self._added(tensors)

    def _added(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's part of the results, which the ranks add up."""
        results = OwnModule._run(self, tensors)
        if self.without_experts is None:
            return results
        states = dict(zip(self.names, tensors, strict=False))
        handed = [*(states[name] for name in self.without_experts.names), *tensors[len(self.names) :]]
        common = OwnModule._run(self.without_experts, handed)
        sums = self.experts.are_sums
        added = []
        for result, shared, is_sum in zip(results, common, sums, strict=True):
            added.append(result - shared if is_sum else result)
        return added


def _return_zeros(module: torch.nn.Module) -> None:
    """Let a module return zeros of the shapes that it would return."""
    forward = module.forward

    def zeros(*arguments: Any, **named: Any) -> Any:
        device = next(leaf.device for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor))

        def moved(leaf: Any, to: Any) -> Any:
            return leaf.detach().to(to) if isinstance(leaf, torch.Tensor) else leaf

        with disable_current_modes(), torch.no_grad():
            on_meta = tree_map(lambda leaf: moved(leaf, "meta"), (arguments, named))
            results = forward(*on_meta[0], **on_meta[1])
            return tree_map(
                lambda leaf: torch.zeros_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf, results
            )

    module.__dict__["forward"] = zeros


class _Trial:
    """Tries on made-up values whether a module adds up what its experts make."""

    def __init__(self, call: OwnModule, experts: OwnExperts, num_ranks: int) -> None:
        self.call = call
        self.experts = experts
        self.num_ranks = num_ranks
        self.generator = torch.Generator().manual_seed(0)
        self.called: set[int] = set()

    def run(self) -> OwnExperts | str:
        """Return the experts, or why they can't be spread."""
        module = self.call.part.copy
        if self.call.written:
            return "it writes into its buffers"
        everyone = list(range(self.experts.count))
        ranges = [range(*chunk_range(len(everyone), rank, self.num_ranks)) for rank in range(self.num_ranks)]
        groups = [everyone, [], everyone[::2], everyone[1::2], *ranges]
        draws = has_rest = False
        are_sums: list[bool] = []
        failed = ""
        for number in range(_TRIALS):
            tensors = self._values(number)
            try:
                results = [self._result(module, tensors, group, is_training=False)[0] for group in groups]
                drawn = [self._result(module, tensors, group, is_training=True)[1] for group in ([], everyone)]
            except Exception as error:  # an index that is none, a number out of range: other values may do
                failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.100}"
                continue
            if drawn[0]:
                return "it draws random numbers outside of its experts"
            draws |= drawn[1]
            are_sums = are_sums or [False] * len(results[0])
            for place, of_groups in enumerate(zip(*results, strict=True)):
                if all(torch.equal(result, of_groups[0]) for result in of_groups):
                    continue
                if not _are_added(of_groups):
                    return "its result is not the sum of what its experts make"
                are_sums[place] = True
                has_rest |= bool(of_groups[1].count_nonzero())
        if len(self.called) < 2 or not any(are_sums):
            return f"no made-up rows went to two of its experts{f' ({failed})' if failed else ''}"
        return dataclasses.replace(self.experts, draws=draws, are_sums=tuple(are_sums), has_rest=has_rest)

    def _values(self, number: int) -> list[torch.Tensor]:
        """Return made-up values in float64: whole numbers are 0 or 1, or up to the number of experts."""
        limit = 2 if number % 2 else self.experts.count
        values = []
        for shape, dtype in self.call.kinds:
            if dtype == torch.bool:
                value = torch.rand(shape, generator=self.generator) < 0.5
            elif dtype.is_floating_point:
                value = (fractions(shape, self.generator, torch.float64) - 0.3).expand(shape)
            else:
                value = torch.randint(limit, shape, generator=self.generator, dtype=dtype)
            values.append(value)
        return values

    def _result(
        self, module: torch.nn.Module, tensors: list[torch.Tensor], group: Sequence[int], is_training: bool
    ) -> tuple[list[torch.Tensor], bool]:
        """Return the tensors that the module returns with some of its experts, and whether it drew random numbers."""
        module_copy = copy.deepcopy(module)
        count = len(self.call.names)
        for name, value in zip(self.call.names, tensors, strict=False):
            path, _, key = name.rpartition(".")
            owner = module_copy.get_submodule(path)
            if key in owner._parameters:
                owner._parameters[key] = torch.nn.Parameter(value)
            else:
                owner._buffers[key] = value
        module_copy.train(is_training)
        for number in range(self.experts.count):
            for path in self.experts.paths[number]:
                part = module_copy.get_submodule(path)
                if number in group:
                    part.register_forward_hook(self._noting(number))
                else:
                    _return_zeros(part.to("meta"))
        arguments, named = self.call.arguments_of(tensors[count:])
        with _apart() as drew:
            results = module_copy.forward(*arguments, **named)
            drew.end()
        return [leaf.detach() for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)], drew.answer

    def _noting(self, number: int) -> Callable[..., None]:
        def note(module: Any, arguments: Any, result: Any) -> None:
            if any(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                self.called.add(number)

        return note


def _are_added(of_groups: Sequence[torch.Tensor]) -> bool:
    """True if what groups of experts add to a result adds up to what all of them add.

    Args:
        of_groups: the results with all experts, with none, with every other one, with the others, and of each rank.
    """
    complete, nothing, even, odd, *by_rank = of_groups
    if not complete.is_floating_point():
        return False
    near = _NEAR * max(1.0, float(complete.abs().max()))
    for group in ([even, odd], by_rank):
        total = sum(result - nothing for result in group)
        if not torch.allclose(total, complete - nothing, rtol=0, atol=near):  # type: ignore[arg-type]
            return False
    return True


class _Drew:
    """Whether random numbers were drawn since it was made."""

    def __init__(self) -> None:
        self.before = torch.default_generator.get_state()
        self.answer = False

    def end(self) -> None:
        """Look."""
        self.answer = not torch.equal(self.before, torch.default_generator.get_state())


@contextmanager
def _apart() -> Iterator[_Drew]:
    """Run the user's code on made-up values: outside of any trace, with the random numbers put back."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(random_state_kept())
        stack.enter_context(own_code_running())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield _Drew()
