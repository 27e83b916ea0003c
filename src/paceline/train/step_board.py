"""Find ranks that are not at the same step, by memory in which every rank of this host counts its steps.

A rank that ends its loop, or saves by itself, waits for the others in a collective, and they wait for it in their next
step. The board shows that at once, so that the job ends with an error instead of a hang.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path

from paceline.comm.process_group import RankInfo
from paceline.nouns.errors import CollectiveError

CLOSE = "job.close, or the end of the file"
FAILED = "the end of its file, by an error"
CALLS = (
    CLOSE,
    FAILED,
    "job.save",
    "job.load",
    "job.evaluate",
    "job.save_best",
    "job.generate",
    "job.whole_model",
    "job.log",
)
_ENDS = (CLOSE, FAILED)
WAIT_S = 5.0  # then the collective itself waits: a rank may be late, or gone
_POLL_S = 0.002
# Steps begun; collectives begun within them by a loop of one's own; 16 times the number of the call, plus its index in
# CALLS.
_SLOT = struct.Struct("=qqq")
_CALLS_PER_SLOT = 16
_boards = 0  # made by this process; every rank makes the same ones in the same order


class StepBoard:
    """The board of one job. Where ranks are on several hosts, or meet without a file, it does nothing.

    Args:
        place: the place of this process among the ranks.
    """

    def __init__(self, place: RankInfo) -> None:
        global _boards
        _boards += 1
        self.rank = place.rank
        self.size = place.size
        self.begun = 0  # steps
        self.collectives = 0  # that a loop of one's own has begun in its steps
        self.calls = 0  # of `meet`
        self.call = 0  # the index in CALLS of the last one
        self.has_met = False  # at a call of the file's, before the end
        self.memory: mmap.mmap | None = None
        if place.size > 1 and place.rendezvous is not None and place.size == place.local_size:
            self.path = Path(f"{place.rendezvous}.steps-{_boards}")
            with contextlib.suppress(OSError):  # a disk that is full or read-only: then a hang is a hang
                self.memory = _shared_memory(self.path, place.size * _SLOT.size)

    def begin_step(self) -> None:
        """Count a step that this rank begins."""
        self.begun += 1
        self._write()

    def begin_collective(self) -> None:
        """Count a collective that this rank begins in a step: a rank that waits at a call sees that it went on."""
        self.collectives += 1
        self._write()

    def meet(self, call: str, step: int) -> None:
        """Wait until all ranks are at the same call, for a few seconds at most.

        Args:
            call: one of CALLS, which all ranks must make together.
            step: this rank's step, for the error.

        Raises:
            CollectiveError: another rank is in a later step, or in another call.
        """
        self.has_met |= call != CLOSE
        if self.memory is None:
            return
        self.calls += 1
        self.call = CALLS.index(call)
        self._write()
        deadline_s = time.monotonic() + WAIT_S
        waits_for = [rank for rank in range(self.size) if rank != self.rank]
        while waits_for and time.monotonic() < deadline_s:
            waits_for = [rank for rank in waits_for if not self._is_here(rank, call, step)]
            time.sleep(_POLL_S if waits_for else 0)

    def meet_after_failure(self) -> set[str] | None:
        """Wait for all ranks to be at their end, by an error as this one or without, for a few seconds at most.

        Returns:
            The calls at which the other ranks are: CLOSE, FAILED or both. None: not all are at their end, or nobody
            knows, as where ranks are on several hosts.
        """
        if self.size == 1:
            return set()
        if self.memory is None:
            return None
        self.calls += 1
        self.call = CALLS.index(FAILED)
        self._write()
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            rows_of_others = [self._read(rank) for rank in range(self.size) if rank != self.rank]
            if any(begun > self.begun for begun, *_ in rows_of_others):
                return None  # in the next step, which waits for this rank
            if all(begun == self.begun and calls and call in _ENDS for begun, _, calls, call in rows_of_others):
                return {call for *_, call in rows_of_others}
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """Let go of the memory."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _write(self) -> None:
        if self.memory is not None:
            number = self.calls * _CALLS_PER_SLOT + self.call
            _SLOT.pack_into(self.memory, self.rank * _SLOT.size, self.begun, self.collectives, number)

    def _read(self, rank: int) -> tuple[int, int, int, str]:
        """Return the numbers of steps, collectives and calls that a rank has begun, and its last call."""
        assert self.memory is not None
        begun, collectives, number = _SLOT.unpack_from(self.memory, rank * _SLOT.size)
        calls, index = divmod(number, _CALLS_PER_SLOT)
        return begun, collectives, calls, CALLS[index]

    def _is_here(self, rank: int, call: str, step: int) -> bool:
        begun, collectives, calls, last_call = self._read(rank)
        if call == CLOSE and last_call == FAILED and begun == self.begun:
            return True  # it saves the last step with this one, and fails then
        # It made this call less often and is steps ahead: it will never come here.
        if calls < self.calls and begun > self.begun:
            raise self._apart(call, rank, f"is in step {step + begun - self.begun}", step)
        if calls < self.calls and collectives > self.collectives:
            raise self._apart(call, rank, f"has gone on with step {step} or the next", step)
        if calls == self.calls and last_call != call:
            raise self._apart(call, rank, f"is at {last_call}", step)
        return bool(calls >= self.calls)

    def _apart(self, call: str, rank: int, found: str, step: int) -> CollectiveError:
        error = CollectiveError(
            f"{call} should be reached by all ranks after the same step",
            f"rank {self.rank} is there after step {step}, and rank {rank} {found}",
            "give every rank as many batches, and make such calls on all ranks, never under `if rank == 0`; where "
            "ranks may run out of batches, let them agree before each step: "
            "more = paceline.all_reduce(torch.tensor(int(more)), 'min')",
        )
        error.at(rank=self.rank)
        return error


def _shared_memory(path: Path, size: int) -> mmap.mmap:
    """Map a file of `size` bytes, zero at first, that all ranks map."""
    # Whichever rank comes first makes it; nobody opens a link in its place (O_NOFOLLOW).
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            # On a full disk this fails; a write to the memory would be a SIGBUS. macOS has no such call.
            reserve = getattr(os, "posix_fallocate", None)
            if reserve is not None:
                reserve(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
