"""The data order: one integer, the position, says where training is.

The position counts samples taken since the start. Epoch e is a permutation of the data set that
depends only on (seed, e), so ranks, loader workers and resizes can't change which sample comes when.
The permutation is a keyed Feistel network with cycle walking (Black and Rogaway 2002, Ciphers with
arbitrary finite domains): any place of it is computed on its own, nothing of the data set's length is
held in memory, and no random generator's version can change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# What is computed here decides which samples a resumed job sees: a change breaks the order of every checkpoint.
_MASK = (1 << 64) - 1  # Python's numbers have any length; splitmix64 has 64 bits
_ROUNDS = 6


def mix(*numbers: int) -> int:
    """Hash whole numbers to 64 bits; near inputs give unrelated outputs.

    Source: the finalizer of splitmix64 (Steele, Lea and Flood 2014), chained over the numbers.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class DataOrder:
    """The order in which `samples` samples are visited, epoch after epoch, in batches of `batch_size`.

    The last batch of an epoch is short where the sizes don't divide; no batch crosses an epoch's end.
    """

    seed: int
    samples: int
    batch_size: int
    shuffle: bool = True

    def index(self, position: int) -> int:
        """Return the data set's index of the sample at `position`."""
        return self.indices(range(position, position + 1))[0]

    def indices(self, positions: range) -> list[int]:
        """Return the data set's indices of the samples at these positions, which are all of one epoch."""
        epoch, first = divmod(positions.start, self.samples)
        places = range(first, first + len(positions))
        if not self.shuffle:
            return list(places)
        return _permuted(places, self.samples, _round_keys(mix(self.seed, epoch)))

    def batch_at(self, position: int) -> range:
        """Return the positions of the global batch that starts at `position`."""
        end_of_epoch = (position // self.samples + 1) * self.samples
        return range(position, min(position + self.batch_size, end_of_epoch))

    def batches(self, position: int, end: int) -> Iterator[range]:
        """Yield the global batches from `position` up to `end`, in order."""
        while position < end:
            batch = self.batch_at(position)
            yield batch
            position = batch.stop

    def position_after(self, steps: int, position: int = 0) -> int:
        """Return the position after `steps` more batches from a position on."""
        end_of_epoch = (position // self.samples + 1) * self.samples
        steps_left = self.steps_between(position, end_of_epoch)
        if steps < steps_left:
            return position + steps * self.batch_size
        epochs, steps = divmod(steps - steps_left, self.steps_between(0, self.samples))
        return end_of_epoch + epochs * self.samples + min(steps * self.batch_size, self.samples)

    def steps_between(self, position: int, end: int) -> int:
        """Return the number of batches from a position up to the end of an epoch."""
        if position >= end:
            return 0
        samples_left = self.samples - position % self.samples
        epochs = (end - position - samples_left) // self.samples
        # Rounded up: the last batch of an epoch may be short.
        return -(-samples_left // self.batch_size) + epochs * -(-self.samples // self.batch_size)


def share(batch: range, part: int, parts: int) -> range:
    """Return the contiguous range of `batch` that belongs to `part` of `parts`; sizes differ by 1 at most."""
    # `remainder` parts have small + 1 samples, and come first.
    small, remainder = divmod(len(batch), parts)
    start = batch.start + part * small + min(part, remainder)
    return range(start, start + small + (part < remainder))


def cut(positions: range, size: int) -> list[range]:
    """Cut a range of positions into consecutive micro-batches of at most `size`."""
    return [range(start, min(start + size, positions.stop)) for start in range(positions.start, positions.stop, size)]


@lru_cache(maxsize=16)
def _round_keys(key: int) -> list[int]:
    """Return the terms of the rounds' hashes that all places of an epoch have in common."""
    return [mix(key, number) for number in range(_ROUNDS)]


def _permuted(places: range, domain: int, round_keys: list[int]) -> list[int]:
    """Return the value of a keyed permutation of 0 to `domain` - 1 at each place."""
    # Both halves have as many bits, so the network permutes at most 4 times as many numbers as the domain has: on
    # average it takes at most 4 passes to end inside.
    half_bits = max(1, ((domain - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    found = []
    for place in places:
        value = place
        while True:
            # A Feistel network: whatever the hash of a round is, the round can be undone.
            high_half, low_half = value >> half_bits, value & mask
            for key in round_keys:
                # `mix(epoch's key, number of the round, right)`, written out: a call would take longer than the hash.
                state = ((key ^ low_half) + 0x9E3779B97F4A7C15) & _MASK
                state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
                state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
                high_half, low_half = low_half, high_half ^ ((state ^ (state >> 31)) & mask)
            value = high_half << half_bits | low_half
            if value < domain:  # cycle walking: a value outside is sent through again
                break
        found.append(value)
    return found
