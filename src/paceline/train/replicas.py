"""Find ranks whose copies of the same tensors have come apart, and say which tensors and which ranks.

Ranks that hold the same tensors make the same updates of them, so nobody sends parameters. If one rank changes
something by itself, nothing else shows it: the losses go on, and a checkpoint, of which each rank writes a part, would
be a mixture. So a number that depends on every bit is compared between the ranks that hold the same. Only where it
differs do the ranks tell each other the number of each tensor.

What is compared: parameters, persistent buffers, the optimizer's state, and the numbers in its groups. When: after the
first steps, every `COMPARED_EVERY` steps, and before a checkpoint is written.

Traffic: at a comparison two all_gathers of a few numbers between the hosts, and nothing in other steps.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.host_copy import HostCopy
from paceline.nouns.errors import CollectiveError

FIRST_STEPS = 3  # code that makes ranks differ does so from the beginning, mostly
COMPARED_EVERY = 100  # steps: reading every bit once takes a part of one step, so here under a hundredth
_SEED = 0x5EED
_MOST = 2**63 - 1
_AT_ONCE_ON_HOST = 2**13  # numbers of 64 bits: 64 KiB, no more than a step's own peak has over its end
_AT_ONCE = 2**17  # on a GPU: fewer kernels
_SMALL_BYTES = 2**16  # tensors up to it are read together: each by itself would take longer than its bytes
_NAMED = 3  # tensors that an error names


class Shared(NamedTuple):
    """A tensor that several ranks hold alike.

    Attributes:
        name: the name that an error gives it; the same on all of them.
        value: the tensor on this rank.
        holders: the ranks that hold it.
    """

    name: str
    value: torch.Tensor
    holders: tuple[int, ...]


class Replicas:
    """Compares what the ranks of a job hold alike.

    Args:
        comm: the communicator of all ranks.
        shared: a function that returns this rank's tensors.
    """

    def __init__(self, comm: AxisComm, shared: Callable[[], Iterable[Shared]]) -> None:
        self.comm = comm
        self.shared = shared
        self.pending: Callable[[], list[list[int]]] | None = None  # reads what a device is computing

    def is_due(self, step: int, steps_done: int) -> bool:
        """Return whether the ranks compare something after this step; equal on all of them.

        Args:
            step: the number of the step.
            steps_done: the number of steps since the job began or loaded a checkpoint.
        """
        if self.comm.size == 1:
            return False
        return self.pending is not None or steps_done <= FIRST_STEPS or step % COMPARED_EVERY == 0

    def after_step(self, step: int, steps_done: int) -> None:
        """Compare if it is due. What is on a GPU is compared after the next step, so that no host waits. Collective.

        Raises:
            CollectiveError: ranks have come apart.
        """
        if not self.is_due(step, steps_done):
            return
        if self.pending is not None:
            self._compare(self.pending(), step)
            self.pending = None
            if steps_done > FIRST_STEPS:
                return
        rows, is_on_host = self._begin()
        if is_on_host:
            self._compare(rows(), step)
        else:
            self.pending = rows

    def compare(self, step: int) -> None:
        """Compare now. Collective.

        Raises:
            CollectiveError: ranks have come apart.
        """
        self.pending = None
        if self.comm.size > 1:
            rows, _ = self._begin()
            self._compare(rows(), step)

    def _begin(self) -> tuple[Callable[[], list[list[int]]], bool]:
        """Add up the digests of the tensors that the same ranks hold.

        Returns:
            A function that returns the sums, each behind a number for its ranks, and True if it waits for no device.
        """
        small: dict[tuple[torch.device, tuple[int, ...]], list[torch.Tensor]] = {}
        sums: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
        for name, value, holders in self.shared():
            key = (value.device, holders)
            if value.nbytes <= _SMALL_BYTES:
                small.setdefault(key, []).append(value)
            else:
                sums[key] = sums.get(key, 0) + digest_of(value) * _number_of(name)
        for key, values in small.items():
            sums[key] = sums.get(key, 0) + digest_of(*values)
        reads = {}
        for device in dict.fromkeys(device for device, _ in sums):
            reads[device] = _reader([value for (of, _), value in sums.items() if of == device])
        groups = [(device, _number_of(f"{device.type} {holders}")) for device, holders in sums]
        _weights.cache_clear()  # memory that training has no use for

        def rows() -> list[list[int]]:
            numbers = {device: iter(read()) for device, read in reads.items()}
            return [[group, next(numbers[device])] for device, group in groups]

        return rows, all(_is_host(device) for device in reads)

    def _compare(self, own_rows: Sequence[Sequence[int]], step: int) -> None:
        # The first row: a rank that shares nothing sends something too.
        rows = self.comm.all_gather(torch.tensor([[0, 0], *own_rows], dtype=torch.int64))
        found: dict[int, set[int]] = {}
        for of_rank in rows:
            for group, number in of_rank.tolist():
                found.setdefault(group, set()).add(number)
        if any(len(numbers) > 1 for numbers in found.values()):
            self._name(step)

    def _name(self, step: int) -> None:
        """Exchange the digest of each tensor, and raise CollectiveError for those that differ. Collective."""
        own_digests = []
        for name, value, holders in self.shared():
            own_digests.append([name, holders, int(digest_of(_alike_where_nan(value)))])
        texts = self.comm.all_gather_text(json.dumps(own_digests))
        found: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
        for rank, text in zip(self.comm.peers, texts, strict=True):
            for name, holders, number in json.loads(text):
                found.setdefault((name, tuple(holders)), {})[rank] = number
        apart = []
        for (name, _), numbers in found.items():
            if len(set(numbers.values())) > 1:
                apart.append(f"{name} differs between {_ranks_apart(numbers)}")
        if apart:
            more = f", and {len(apart) - _NAMED} more" if len(apart) > _NAMED else ""
            raise CollectiveError(
                "ranks that hold the same tensors should have the same values in them",
                f"after step {step} {', '.join(apart[:_NAMED])}{more}",
                "change parameters, buffers, the optimizer's state and its learning rate on every rank alike: not "
                "under `if job.rank == 0`, and with noise from a generator that has the same seed on all of them; "
                "nothing of this step is saved, and earlier checkpoints are as they were",
            )


def numbers_of_groups(groups: Sequence[Mapping[str, Any]], holders: tuple[int, ...]) -> Iterator[Shared]:
    """Yield the numbers that an optimizer's groups hold, such as the learning rate."""
    for number, group in enumerate(groups):
        for key, value in group.items():
            name = f"{key} of the optimizer's group {number}"
            if isinstance(value, torch.Tensor):
                yield Shared(name, value, holders)
            elif isinstance(value, float):
                yield Shared(name, torch.tensor(value, dtype=torch.float64), holders)


def digest_of(*tensors: torch.Tensor) -> torch.Tensor:
    """Return one int64, on the tensors' device, that differs where a bit does, or stands elsewhere, but for chance."""
    flat = [_bytes_of(tensor) for tensor in tensors]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat)
    end = joined.numel() // 8 * 8
    total = _weighted(joined[end:].to(torch.int64))
    for number, words in enumerate(joined[:end].view(torch.int64).split(_at_once(joined.device))):
        # Sums are taken modulo 2**64, so a word's highest bits count little in the first one.
        total = total + (_weighted(words) + _weighted(words >> 32) * 3) * (2 * number + 1)
    return total


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as bytes that begin where a number of 64 bits may."""
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return bits.clone() if bits.storage_offset() % 8 else bits


def _weighted(words: torch.Tensor) -> torch.Tensor:
    """Return the sum of numbers times weights that depend on their places, modulo 2**64."""
    weights = _weights(words.device, words.numel())
    # On a CPU without memory for the products; torch has no such sum of integers on GPUs.
    return torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()


def _at_once(device: torch.device) -> int:
    return _AT_ONCE_ON_HOST if _is_host(device) else _AT_ONCE


@cache
def _weights(device: torch.device, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(-_MOST, _MOST, (size,), dtype=torch.int64, generator=generator).to(device) | 1


@cache
def _number_of(text: str) -> int:
    """Return an odd number that stands for a text, and fits an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") | 1


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _reader(values: Sequence[torch.Tensor]) -> Callable[[], list[Any]]:
    """Return a function that reads these numbers; from a device without waiting for work that is queued after them."""
    numbers = torch.stack(list(values))
    if _is_host(numbers.device):
        return numbers.tolist
    copy = HostCopy(numbers.numel(), numbers.dtype, numbers.device)
    copy.begin(lambda: numbers)
    return copy.read


def _alike_where_nan(value: torch.Tensor) -> torch.Tensor:
    """Return the value with one and the same NaN wherever it has one."""
    value = value.detach()
    if not value.is_floating_point() or value.element_size() == 1:
        return value
    return torch.where(value.isnan(), torch.nan, value)


def _ranks_apart(numbers: Mapping[int, int]) -> str:
    """Return the ranks with the most frequent digest, and the others."""
    usual, _ = Counter(numbers.values()).most_common(1)[0]
    first = [rank for rank, number in numbers.items() if number == usual]
    other_ranks = [rank for rank, number in numbers.items() if number != usual]
    return f"{_shown(first)} and {_shown(other_ranks)}"


def _shown(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
