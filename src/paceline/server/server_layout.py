"""Lay out parameters on the servers: pieces of parameters in segments, segments in ranges.

Parameters are laid out in the order of the optimizer's groups. A segment holds parameters of one group and dtype, up to
1 MiB of them: the unit in which gradients are sent, counted, summed and applied. A parameter is cut at multiples of
4096 elements, so that its norm is added up in the same rows as in one process, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec

from paceline.nouns.errors import PlanError, ReadError, WorkloadError
from paceline.nouns.reading import LARGEST, as_type, is_shape, parse_json, shown

SEGMENT_BYTES = 2**20
ALIGNMENT = 64  # bytes: what torch's vector instructions like
# The row of comm/squared_norm.py. A cut elsewhere would change the order in which the norm is added up.
_ROW = 4096  # elements
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_MOST_BYTES = 2**40  # of all parameters
AVERAGE = -1  # the group of buffers: not trained, but the mean of what the workers have


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter or buffer: its name, shape, dtype and the optimizer's group."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class KeyRange:
    """`count` elements of an entry from `start` on; in its segment they begin at byte `offset`."""

    entry: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The pieces that are sent, counted and applied together; `begin` is its first byte among all segments."""

    group: int
    dtype: str
    pieces: tuple[KeyRange, ...]
    nbytes: int
    begin: int


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """The tensors that the workers train, in order, and their optimizer.

    Args:
        entries: in order of groups, buffers last.
        optimizer: the class's name, as torch.optim has it.
        groups: of each parameter group its settings, as JSON has them.
        samples: how long the data set is.
    """

    entries: tuple[Entry, ...]
    optimizer: str
    groups: tuple[dict[str, Any], ...]
    samples: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]

    def to_json(self) -> str:
        """Return it as text, which `of_json` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_json(cls, text: str) -> ServerLayout:
        """Read a layout that came over a wire.

        Raises:
            ReadError: it is none. That is a ValueError, too.
        """
        value = parse_json(text, "a layout")
        try:
            layout = as_type(value, cls, "layout")
        except ValueError as error:
            raise _bad(str(error)) from None
        for entry in layout.entries:
            if entry.dtype not in BYTES or not is_shape(list(entry.shape), BYTES[entry.dtype]):
                raise _bad(f"a parameter of it is {shown(entry.dtype)} of shape {shown(entry.shape)}")
            if not AVERAGE <= entry.group < len(layout.groups):
                raise _bad("a parameter of it is in a group that is not there")
        # A bound, as one segment is made for each MiB.
        if sum(entry.numel * BYTES[entry.dtype] for entry in layout.entries) > _MOST_BYTES:
            raise _bad(f"its parameters have more than {_MOST_BYTES >> 40} TiB")
        return layout

    @property
    def digest(self) -> str:
        """A short name of the layout: equal where everything is."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def segments(self) -> list[Segment]:
        """Return the entries in segments."""
        segments: list[Segment] = []
        begin = 0
        for pieces, nbytes in _pieces_of_segments(self.entries):
            first = self.entries[pieces[0].entry]
            segments.append(Segment(first.group, first.dtype, tuple(pieces), nbytes, begin))
            begin += nbytes
        return segments

    def ranges(self, servers: int) -> list[list[Segment]]:
        """Cut the segments into as many ranges as there are servers, of about as many bytes.

        A small model has a range for each segment, and fewer than there are servers.

        Raises:
            PlanError: there is nothing to keep.
        """
        segments = self.segments()
        servers = min(servers, len(segments))
        if not servers:
            raise PlanError("servers need parameters", "the model has none", "leave server out of the plan")
        total = sum(segment.nbytes for segment in segments)
        ranges: list[list[Segment]] = [[] for _ in range(servers)]
        current = 0
        for number, segment in enumerate(segments):
            segments_left = len(segments) - number
            ranges_left = servers - current - 1
            # Full if more than half of this segment lies beyond the range's share of the bytes.
            is_full = segment.begin + segment.nbytes / 2 > total * (current + 1) / servers
            must_leave = segments_left <= ranges_left  # each range that follows needs a segment
            if ranges[current] and ranges_left and (is_full or must_leave):
                current += 1
            ranges[current].append(segment)
        return ranges

    def check_same(self, other_layout: ServerLayout, own_name: str, other_name: str) -> None:
        """Raise WorkloadError, naming the first difference, unless both are equal.

        Args:
            other_layout: the layout to compare with.
            own_name, other_name: the names of the owners of this and the other layout, for the error.
        """
        if self.samples != other_layout.samples:
            raise WorkloadError(
                "all workers should make the same data set",
                f"that of {own_name} has {self.samples} samples, that of {other_name} {other_layout.samples}",
                "make it without looking at the rank, the host or the time",
            )
        for own_line, other_line in itertools.zip_longest(self._lines(), other_layout._lines(), fillvalue="nothing"):
            if own_line != other_line:
                raise WorkloadError(
                    "all workers should train the same model with the same optimizer",
                    f"{own_name} has {own_line} where {other_name} has {other_line}",
                    "make both without looking at the rank, the host or the time",
                )

    def _lines(self) -> list[str]:
        """Return the lines that are compared between workers, as users read them."""
        return [*map(_shown, self.entries), self.optimizer, *map(str, self.groups)]


def most_state_bytes(segments: Sequence[Segment]) -> int:
    """Return a bound on the bytes of a range: its parameters, seven times as much of optimizer state, and names."""
    return 8 * sum(segment.nbytes for segment in segments) + 2**24


def _bad(found: str) -> ReadError:
    return ReadError("can't read a layout", found, "use one version everywhere")


def _shown(entry: Entry) -> str:
    return f"{entry.name} {entry.shape} {entry.dtype} of group {entry.group}"


def _pieces_of_segments(entries: Sequence[Entry]) -> list[tuple[list[KeyRange], int]]:
    """Fill segments with the entries in order; return each segment's pieces and bytes."""
    segments: list[tuple[list[KeyRange], int]] = []
    kind: tuple[int, str] | None = None  # group and dtype of the last segment
    for number, entry in enumerate(entries):
        size = BYTES[entry.dtype]
        start = 0
        while start < entry.numel:
            fits_kind = kind == (entry.group, entry.dtype)
            used = segments[-1][1] if segments and fits_kind else SEGMENT_BYTES
            room = (SEGMENT_BYTES - used) // size
            count = entry.numel - start
            if count > room:
                # What does not fit is cut at a row. Where not even one row fits, a new segment begins.
                count = room // _ROW * _ROW
            if count == 0:
                segments.append(([], 0))
                kind = (entry.group, entry.dtype)
                continue
            pieces, offset = segments[-1]
            pieces.append(KeyRange(number, start, count, offset))
            # Rounded up, so the next piece begins aligned; the gap is sent as zeros.
            aligned_bytes = -(-count * size // ALIGNMENT) * ALIGNMENT
            segments[-1] = (pieces, offset + aligned_bytes)
            start += count
    return segments
