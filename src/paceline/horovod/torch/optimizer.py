"""An optimizer whose gradients, or whose changes of parameters, are reduced over the ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.grad_compression import Compression, Compressor
from paceline.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)

_SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class that reduces gradients over the ranks before its update.

    Gradients are reduced while the backward pass computes the next ones. The new optimizer has the parameter groups of
    `optimizer`, and not its state.

    Args:
        optimizer: the optimizer whose gradients are reduced.
        named_parameters: the names by which ranks match gradients; None: parameters are numbered.
        compression: how gradients are sent.
        backward_passes_per_step: the passes whose gradients are added up before they are reduced.
        op: Average, Sum, or Adasum, which combines the changes of the parameters.
        gradient_predivide_factor: with Average, the factor by which gradients are divided before the sum; the rest of
            the division follows it.
        num_groups: the number of groups; it is deprecated, so write `groups`.
        groups: the number of groups, or lists of parameters, that are reduced together.
        sparse_as_dense: make sparse gradients dense before they are sent.
        process_set: the process set whose ranks take part.

    Raises:
        ValueError: names are missing or doubled, or an argument does not fit.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError("DistributedOptimizer takes op=hvd.Average, hvd.Sum or hvd.Adasum")
    if num_groups:
        warnings.warn("num_groups is deprecated, write groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if op == Adasum and groups is not None:
        raise ValueError("groups are not supported with op=hvd.Adasum")
    base = _AdasumOptimizer if op == Adasum else _AveragingOptimizer
    # An instance of the optimizer's own class, as schedulers and scalers ask for.
    subclass: Any = type(type(optimizer).__name__, (base, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    result = subclass.__new__(subclass)  # __init__ needs arguments that nobody kept
    result.enter(
        optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, process_set
    )
    result.enter_groups(groups, sparse_as_dense)
    return result


class _Distributed:
    """What both kinds share: names of parameters, hooks after each gradient, handles of what is under way."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def enter(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        compression: type[Compressor],
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        process_set: ProcessSet,
    ) -> None:
        """Take the optimizer's parameter groups, and register the hooks."""
        self.plain_class: Any = type(optimizer)
        # torch's own __init__ and no more: that of the class needs arguments which nobody kept.
        torch.optim.Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)  # type: ignore[arg-type]
        for name, value in vars(optimizer).items():
            if name not in vars(self):
                vars(self)[name] = value
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op, self.process_set = op, process_set
        self.predivide = float(gradient_predivide_factor)
        self._parameter_names = _names(self.param_groups, named_parameters)
        self._passes_left: dict[torch.nn.Parameter, int] = {}
        self._handles: dict[torch.nn.Parameter, Any] = {}
        self._is_synchronized = False
        self._is_to_synchronize = True
        self._hooks = []
        for parameter in self._trained():
            self._passes_left[parameter] = backward_passes_per_step
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._count_pass))

    def _trained(self) -> list[torch.nn.Parameter]:
        parameters: list[torch.nn.Parameter] = []
        for group in self.param_groups:
            parameters += group["params"]
        return [parameter for parameter in parameters if parameter.requires_grad]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the passes whose gradients are added up before they are reduced."""
        self.backward_passes_per_step = passes
        for parameter in self._passes_left:
            self._passes_left[parameter] = passes

    def _count_pass(self, parameter: torch.nn.Parameter) -> None:
        if parameter in self._handles and self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._begin(parameter)

    def _begin(self, parameter: torch.nn.Parameter) -> None:
        raise NotImplementedError

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Set the gradients to zero, or to None.

        Raises:
            AssertionError: gradients are being reduced, by a backward pass without an update.
        """
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self.plain_class.zero_grad(self, *arguments, **options)


class _AveragingOptimizer(_Distributed):
    """Reduces gradients."""

    def enter_groups(self, groups: int | Sequence[Sequence[torch.nn.Parameter]] | None, sparse_as_dense: bool) -> None:
        """Note which parameters are reduced together."""
        self.sparse_as_dense = sparse_as_dense
        self._group_of: dict[torch.nn.Parameter, int] = {}
        self._groups: list[list[torch.nn.Parameter]] = []
        if groups is None:
            return
        parameters = self._trained()
        if isinstance(groups, int):
            if groups < 0:
                raise ValueError("groups should be a number that is not negative, or a list of lists of parameters")
            count = min(groups, len(parameters))
            # In the order of parameters: what is computed together is sent together.
            bounds = [round(index * len(parameters) / count) for index in range(count + 1)] if count else []
            self._groups = [parameters[a:b] for a, b in itertools.pairwise(bounds)]
        else:
            self._groups = _checked_groups(groups, parameters)
        for index, group in enumerate(self._groups):
            for parameter in group:
                self._group_of[parameter] = index

    def _begin(self, parameter: torch.nn.Parameter) -> None:
        index = self._group_of.get(parameter)
        if index is None:
            self._handles[parameter] = self._reduce(parameter)
            return
        self._handles[parameter] = None
        group = self._groups[index]
        if all(member in self._handles for member in group):
            self._begin_group(index)

    def _begin_group(self, index: int) -> None:
        group = self._groups[index]
        compressed = [self._compression.compress(_gradient(parameter)) for parameter in group]
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in compressed], name=f"gradients.{index}", op=self.op, **self._factors()
        )
        outcome = _GroupOutcome(handle, [context for _, context in compressed])
        for place, parameter in enumerate(group):
            self._handles[parameter] = (outcome, place)

    def _factors(self) -> dict[str, Any]:
        return {
            "prescale_factor": 1.0 / self.predivide,
            "postscale_factor": self.predivide,
            "process_set": self.process_set,
        }

    def _reduce(self, parameter: torch.nn.Parameter) -> Any:
        name = self._parameter_names[parameter]
        if parameter.grad is not None and parameter.grad.is_sparse:
            if not self.sparse_as_dense:
                return sparse_allreduce_async(parameter.grad, name, self.op, self.process_set), None
            parameter.grad = parameter.grad.to_dense()
        tensor, context = self._compression.compress(_gradient(parameter))
        return allreduce_async_(tensor, name=name, op=self.op, **self._factors()), context

    def synchronize(self) -> None:
        """Wait until the gradients are reduced; those that this rank has not computed count as zeros.

        Raises:
            HorovodInternalError: ranks disagree, or one has gone.
        """
        # In the order of parameters: what a pass did not reach may differ between ranks, names match it.
        for parameter in self._passes_left:
            if parameter not in self._handles:
                self._begin(parameter)
        for parameter, handle in self._handles.items():
            self._finish(parameter, handle)
            self._passes_left[parameter] = self.backward_passes_per_step
        self._handles.clear()
        self._is_synchronized = True

    def _finish(self, parameter: torch.nn.Parameter, handle: Any) -> None:
        first, second = handle
        if isinstance(first, _GroupOutcome):
            output, context = first.tensor(second), first.contexts[second]
        else:
            output, context = synchronize(first), second
        if output.is_sparse:
            parameter.grad = output
            return
        result = self._compression.decompress(output, context)
        gradient = _gradient(parameter)
        if result.data_ptr() != gradient.data_ptr():
            with torch.no_grad():
                gradient.copy_(result)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` update without waiting: `synchronize` was called by the loop, to clip for example."""
        self._is_to_synchronize = False
        try:
            yield
        finally:
            self._is_to_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until the gradients are reduced, and update."""
        if self._is_to_synchronize:
            if self._is_synchronized:
                warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
            self.synchronize()
        self._is_synchronized = False
        return self.plain_class.step(self, closure)


class _GroupOutcome:
    """The results of a group, waited for once.

    Args:
        handle: of the group.
        contexts: what decompresses each.
    """

    def __init__(self, handle: int, contexts: list[Any]) -> None:
        self.handle, self.contexts = handle, contexts
        self.tensors: tuple[torch.Tensor, ...] | None = None

    def tensor(self, place: int) -> torch.Tensor:
        """Return the result at a place of the group."""
        if self.tensors is None:
            self.tensors = synchronize(self.handle)
        return self.tensors[place]


class _AdasumOptimizer(_Distributed):
    """Combines the ranks' changes of parameters by Adasum."""

    def enter_groups(self, groups: object, sparse_as_dense: bool) -> None:
        """Refuse options that do not apply."""
        if sparse_as_dense:
            raise ValueError("sparse_as_dense is not supported with op=hvd.Adasum")

    def _begin(self, parameter: torch.nn.Parameter) -> None:
        self._handles[parameter] = None  # the change is sent by `step`

    def synchronize(self) -> None:
        """Do nothing: changes are combined by `step`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refuse.

        Raises:
            AssertionError: always: changes are combined by `step`.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update by this rank's gradients, and replace each parameter's change by the ranks' combined one."""
        for parameter in self._passes_left:
            _gradient(parameter)  # zeros where the pass did not reach it
        before = {parameter: parameter.detach().clone() for parameter in self._passes_left}
        self._handles.clear()
        loss = self.plain_class.step(self, closure)
        begun = []
        with torch.no_grad():
            for parameter, start in before.items():
                change, context = self._compression.compress(parameter - start)
                name = self._parameter_names[parameter]
                handle = allreduce_async_(change, name=name, op=Adasum, process_set=self.process_set)
                begun.append((parameter, start, handle, context))
            for parameter, start, handle, context in begun:
                parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
                self._passes_left[parameter] = self.backward_passes_per_step
        return loss


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient; zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


def _names(
    param_groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Return a name for each parameter.

    Raises:
        ValueError: names are missing or doubled, or are no pairs.
    """
    numbered: dict[torch.nn.Parameter, str] = {}
    for group_number, group in enumerate(param_groups):
        for number, parameter in enumerate(group["params"]):
            numbered[parameter] = f"allreduce.noname.{group_number}.{number}"
    if named_parameters is None:
        return numbered
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    seen: set[str] = set()
    doubled = {name for name, _ in pairs if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    if doubled:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(sorted(doubled))}"
        )
    names = {parameter: name for name, parameter in pairs}
    unnamed = [name for parameter, name in numbered.items() if parameter not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {len(unnamed)} of "
            f"{len(numbered)}. Python object ids: {', '.join(str(id(p)) for p in numbered if p not in names)}"
        )
    return {parameter: names[parameter] for parameter in numbered}


def _checked_groups(
    groups: Sequence[Sequence[torch.nn.Parameter]], parameters: list[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    if not isinstance(groups, (list, tuple)) or any(not isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a number that is not negative, or a list of lists of parameters")
    known = set(parameters)
    seen: set[torch.nn.Parameter] = set()
    for parameter in itertools.chain(*groups):
        if parameter in seen:
            raise ValueError("a parameter can only appear once in groups")
        if parameter not in known:
            raise ValueError("groups has a parameter that the optimizer does not train")
        seen.add(parameter)
    return [list(group) for group in groups]
