"""The data order: one integer, the position, says where training is.

The position counts samples taken since the start. Epoch e is a permutation of the data set that
depends on (seed, e) alone, so ranks, loader workers and resizes can't change which sample comes when.
The permutation is a keyed Feistel network with cycle walking (Black and Rogaway 2002, Ciphers with
arbitrary finite domains): any place of it is computed on its own, nothing of the data set's length is
held in memory, and no random generator's version can change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
        epoch, place = divmod(position, self.samples)
        if not self.shuffle:
            return place
        return _permuted(place, self.samples, mix(self.seed, epoch))

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
        rest = self.steps_between(position, end_of_epoch)
        if steps < rest:
            return position + steps * self.batch_size
        epochs, steps = divmod(steps - rest, self.steps_between(0, self.samples))
        return end_of_epoch + epochs * self.samples + min(steps * self.batch_size, self.samples)

    def steps_between(self, position: int, end: int) -> int:
        """Return how many batches there are from a position up to the end of an epoch."""
        if position >= end:
            return 0
        rest = self.samples - position % self.samples
        epochs = (end - position - rest) // self.samples
        # Rounded up: the last batch of an epoch may be short.
        return -(-rest // self.batch_size) + epochs * -(-self.samples // self.batch_size)


def share(batch: range, part: int, parts: int) -> range:
    """Return the contiguous piece of `batch` that belongs to `part` of `parts`; the first pieces take the rest."""
    # Sizes differ by 1 at most: `rest` parts have small + 1 samples, and stand first.
    small, rest = divmod(len(batch), parts)
    start = batch.start + part * small + min(part, rest)
    return range(start, start + small + (part < rest))


def cut(piece: range, size: int) -> list[range]:
    """Cut `piece` into consecutive micro-batches of at most `size`."""
    return [range(start, min(start + size, piece.stop)) for start in range(piece.start, piece.stop, size)]


def _permuted(place: int, domain: int, key: int) -> int:
    """Return where a keyed permutation of 0 to `domain` - 1 puts `place`."""
    # Both halves have as many bits, so the network permutes at most 4 times as many numbers as the domain has: on
    # average it takes at most 4 passes to end inside.
    half_bits = max(1, ((domain - 1).bit_length() + 1) // 2)
    while True:
        place = _feistel(place, half_bits, key)
        if place < domain:  # cycle walking: outside values are sent through again
            return place


def _feistel(value: int, half_bits: int, key: int) -> int:
    """Permute the numbers of twice `half_bits` bits: whatever the round function is, each round can be undone."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (mix(key, number, right) & mask)
    return left << half_bits | right
