"""The parts of a step in one process, written down once more and plainly: batches, clipping, optimizers, schedulers.

What ranks are compared with is made of these: the first step of a job (`first_step.py`), and every step that `paceline
verify` compares. They share nothing with `parallel/`, `comm/` or `step.py`: of Paceline they use the workload, the data
order and the seeds, which are promises by themselves.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from paceline.comm.dtypes import wide_dtype
from paceline.comm.pytree import map_tensors
from paceline.nouns.data_order import DataOrder
from paceline.nouns.errors import LossError, WorkloadError
from paceline.nouns.parts import is_stream
from paceline.nouns.workload import Workload
from paceline.train.seed import kept_random_state, seed_everything, seed_sample
from paceline.train.stream import COLLATE, Numbered, Stream, empty


def checked(returned: Any) -> tuple[torch.Tensor, Any]:
    """Return the sum and the weight that a loss returned, the sum without dimensions.

    Raises:
        LossError: it returned no such pair.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], torch.Tensor)):
        raise LossError(
            "the loss should return (sum, weight)",
            f"it returned a {type(returned).__name__}",
            "return the losses added up and their number: cross_entropy(..., reduction='sum'), labels.numel()",
        )
    return returned[0].reshape(()), returned[1]


def batches_of(workload: Workload, is_double: bool, is_reversed: bool) -> Iterator[list[Any]]:
    """Yield the global batches, each as a list of micro-batches: one, or as many as the workload's own size gives."""
    data = data_of(workload)
    order = data if isinstance(data, StreamedSamples) else DataOrder(workload.seed, len(data), workload.batch_size)
    position = 0
    while True:
        batch = order.batch_at(position)
        positions = list(batch)
        if is_reversed:
            positions.reverse()
        size = workload.micro_batch_size or len(positions)
        micro_batches = []
        for start in range(0, len(positions), size):
            micro_batches.append(micro_batch(workload, data, positions[start : start + size], is_double))
        yield micro_batches
        position = batch.stop


def micro_batch(workload: Workload, data: Any, positions: Sequence[int], is_double: bool) -> Any:
    """Load the samples at some positions of the data order and collate them."""
    collate = workload.collate or default_collate
    if isinstance(data, StreamedSamples):
        samples = [data[position] for position in positions]
        with kept_random_state():
            data.seed_collate(min(positions))
            batch = collate(samples)
        return doubled(batch) if is_double else batch
    order = DataOrder(workload.seed, len(data), workload.batch_size)

    def sample(position: int) -> Any:
        seed_sample(workload.seed, position)
        return data[order.index(position)]

    with kept_random_state():
        batch = collate([sample(position) for position in positions])
    return doubled(batch) if is_double else batch


def data_of(workload: Workload) -> Any:
    """Return the data set, or a stream's samples; call the workload's function if it is made by one."""
    data = workload.data
    if data is None:
        raise WorkloadError(
            "verify needs batches", "the workload's data is None", "hand in data=... with samples like your batches'"
        )
    is_data = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, type)
    if is_stream(data):
        return StreamedSamples(workload, Stream(data))
    if is_data:
        return data
    returned_data = data()
    if hasattr(returned_data, "__next__"):
        return StreamedSamples(workload, Stream(None, data))
    return StreamedSamples(workload, Stream(returned_data)) if is_stream(returned_data) else returned_data


def doubled(batch: Any) -> Any:
    """Return a batch with its floating tensors in float64, whatever containers it is made of."""
    return map_tensors(batch, lambda tensor: tensor.to(wide_dtype(tensor.dtype)))


class StreamedSamples:
    """The samples of all epochs of a stream, one after another, read as far as they are asked for.

    Args:
        workload: the workload, for its seed and batch size.
        stream: the stream of samples, as the workload or the loop yields them.
    """

    def __init__(self, workload: Workload, stream: Stream) -> None:
        self.workload = workload
        self.stream = stream
        self.samples: list[Any] = []
        self.numbers: list[tuple[int, int]] = []  # of each the epoch, and its number there
        self.ends: list[int] = []  # the position after each epoch that has ended
        self.reader = self._read()

    def __getitem__(self, position: int) -> Any:
        while len(self.samples) <= position:
            next(self.reader)
        return self.samples[position]

    def batch_at(self, position: int) -> range:
        """Return the positions of the batch that begins at `position`: it ends where its epoch does."""
        stop = position + self.workload.batch_size
        while len(self.samples) < stop and not any(position < end for end in self.ends):
            next(self.reader)
        after = [end for end in self.ends if position < end < stop]
        return range(position, min([stop, *after]))

    def seed_collate(self, position: int) -> None:
        """Seed what collate draws for samples of which the first is at `position`."""
        seed_sample(self.workload.seed, *self.numbers[position], COLLATE)

    def _read(self) -> Iterator[None]:
        """Read a sample, or find the end of an epoch, at each step."""
        epoch = 0
        while True:
            self.stream.begin_epoch(epoch)
            before = len(self.samples)
            numbered = iter(Numbered(self.stream, self.workload.seed, epoch))
            while True:
                with kept_random_state():
                    number, sample = next(numbered, (-1, None))
                if number < 0:
                    break
                self.samples.append(sample)
                self.numbers.append((epoch, number))
                yield
            if len(self.samples) == before:
                raise empty()
            self.ends.append(len(self.samples))
            yield
            epoch += 1


def clip_gradients(gradients: Iterable[torch.Tensor], max_norm: float) -> float:
    """Clip gradients, sparse ones too, by the norm of all of them; return the norm."""
    clipped = list(gradients)
    # In float64: torch's own float32 norm of a large tensor is off by 8e-5.
    norm = math.sqrt(sum(norm_of(gradient) ** 2 for gradient in clipped))
    for gradient in clipped:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    return norm


def norm_of(tensor: torch.Tensor) -> float:
    """Return a tensor's norm, computed in float64."""
    return float(torch.linalg.vector_norm(wide(tensor.detach())))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or complex128, and dense."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


class Several(torch.optim.Optimizer):
    """Optimizers that step one after another; a scheduler sees the groups of all, or takes one by its index."""

    members: list[torch.optim.Optimizer]

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        # Not by torch's constructor, which wants parameters. The groups are the members' own.
        groups = list(itertools.chain.from_iterable(member.param_groups for member in members))
        self.__setstate__({"members": members, "param_groups": groups, "state": {}, "defaults": {}})

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> torch.optim.Optimizer:
        return self.members[index]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.members)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each."""
        for member in self.members:
            member.step()


def as_optimizer(returned: Any) -> Any:
    """Return the optimizer that a workload's `optimizer` returned; a list as one."""
    return Several(list(returned)) if isinstance(returned, list | tuple) else returned


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter in the optimizer, or in that of several which has the parameter."""
    members = optimizer.members if isinstance(optimizer, Several) else [optimizer]
    state: dict[str, Any] = {}
    for member in members:
        state.update(member.state.get(parameter, {}))
    return state


def step_schedulers(returned: Any) -> None:
    """Step the schedulers that a workload returned, but for those that want a metric: nothing is evaluated here."""
    if returned is None:
        return
    for scheduler in returned if isinstance(returned, list | tuple) else [returned]:
        parameters = inspect.signature(scheduler.step).parameters.values()
        if all(
            parameter.default is not parameter.empty
            or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in parameters
        ):
            scheduler.step()


def change_gradients(workload: Workload, parameters: Mapping[str, torch.Tensor], steps: int) -> None:
    """Let the workload's before_update, if it has one, change gradients, with the random numbers that it has on ranks.

    Args:
        workload: the user's workload.
        parameters: the parameters of the model, by name, with gradients.
        steps: the number of steps done before.
    """
    if workload.before_update is None:
        return
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    with kept_random_state(), torch.no_grad():
        seed_everything(workload.seed, 0x0BDA7E, steps)
        workload.before_update(gradients)
