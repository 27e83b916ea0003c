"""Sum tensors between ranks of one host, through memory that they share.

Every rank writes its numbers straight into its own shared region, tells the others by a token in a pipe,
waits for theirs, and adds all regions up in rank order: the result has the same bits on every rank and
nothing is copied through a socket. Each region has two halves used in turn, so one wait per sum is
enough: a rank fills a half again only after a later sum has shown that everybody has read it.

The memory has no name (memfd) and the pipes belong to the two processes, so nothing is left behind
however a rank ends, and a rank that dies is noticed at once: its pipe closes. Another user can't open
either: /proc/PID/fd is open to the same user only. benchmarks/ has it measured against Gloo.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import struct
import sys
from dataclasses import dataclass, field

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.process_group import TIMEOUT_S
from paceline.nouns.errors import CollectiveError, PeerLostError

MAX_RANKS = 8  # every rank reads all regions; beyond this Gloo's ring reads less
MAX_BYTES = 2**30  # of one region; the regions and the result are held beside the gradients
_CHUNK = 2**16  # numbers; two inputs and a result in float32 are 768 KiB, which a second-level cache holds
_TOKEN = struct.Struct("<II")  # slot, turn
_NONCE = struct.Struct("<q")
_GREETING_S = 10


@dataclass(slots=True)
class SharedMemory:
    """The pipes between the ranks of one axis on one host, and the slots opened over them."""

    comm: AxisComm
    pids: list[int]
    to_peer: dict[int, int] = field(default_factory=dict)  # index on the axis: a pipe's writing end
    from_peer: dict[int, int] = field(default_factory=dict)
    slots: int = 0

    def close(self) -> None:
        """Close the pipes. Regions go with the tensors that show them."""
        for end in (*self.to_peer.values(), *self.from_peer.values()):
            os.close(end)
        self.to_peer.clear()
        self.from_peer.clear()

    def tell(self, token: bytes) -> None:
        """Write `token` to every peer.

        Raises:
            PeerLostError: one has gone.
        """
        for peer, end in self.to_peer.items():
            try:
                # 8 bytes: a pipe takes up to PIPE_BUF, 4096, in one piece (pipe(7)). Python ignores SIGPIPE, so a
                # closed pipe raises.
                os.write(end, token)
            except BrokenPipeError:
                raise _lost(self.comm, peer) from None

    def hear(self, size: int) -> dict[int, bytes]:
        """Return the next `size` bytes of every peer, by its index on the axis.

        Raises:
            PeerLostError: one has gone, or has sent nothing for TIMEOUT_S.
        """
        tokens = {}
        for peer, end in self.from_peer.items():
            # Peers are read one after the other: all tokens are needed, so the order costs nothing.
            tokens[peer] = _read(end, size, TIMEOUT_S)
            if len(tokens[peer]) < size:
                raise _lost(self.comm, peer)
        return tokens


def open_shared_memory(comm: AxisComm) -> SharedMemory | None:
    """Join the ranks of `comm` by pipes; None on every rank where any of them can't.

    Collective. Needs Linux, one host and one user; ranks in containers of their own fall back.
    """
    is_supported = hasattr(os, "memfd_create") and sys.byteorder == "little"
    if comm.size == 1 or comm.size > MAX_RANKS or not is_supported:
        return None
    # It is sent in a tensor of int64, which is signed.
    nonce = secrets.randbits(62)
    # A pipe to each peer. It opens the reading end by its path in /proc, so every rank sends its process's number, the
    # nonce, and the reading end for each index on the axis.
    pipes = {peer: os.pipe() for peer in range(comm.size) if peer != comm.rank}
    reading_ends = [-1] * comm.size
    for peer, (reading_end, _) in pipes.items():
        reading_ends[peer] = reading_end
    rows = comm.all_gather(torch.tensor([[os.getpid(), nonce, *reading_ends]]))
    introductions = [row.flatten().tolist() for row in rows]
    shared = SharedMemory(comm, [pid for pid, *_ in introductions])
    shared.to_peer = {peer: writing_end for peer, (_, writing_end) in pipes.items()}
    is_connected = True
    for peer in pipes:
        pid, _, *peer_ends = introductions[peer]
        try:
            # O_NONBLOCK: opening a pipe for reading waits for a writer otherwise (fifo(7)). Reads wait in poll.
            shared.from_peer[peer] = os.open(f"/proc/{pid}/fd/{peer_ends[comm.rank]}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            is_connected = False
    # Whoever can't open a pipe closes its end of it: the others must know before they write into it.
    is_connected = _on_all_ranks(is_connected, comm)
    # Only the peer holds the reading end from here on. If it dies, writing fails with EPIPE instead of filling the
    # pipe.
    for reading_end, _ in pipes.values():
        os.close(reading_end)
    if is_connected:
        shared.tell(_NONCE.pack(nonce))
        # A process of another container could have the same number: it would not know the nonce.
        for peer, end in shared.from_peer.items():
            _, peer_nonce, *_ = introductions[peer]
            is_connected &= _read(end, _NONCE.size, _GREETING_S) == _NONCE.pack(peer_nonce)
        is_connected = _on_all_ranks(is_connected, comm)
    if not is_connected:
        shared.close()
        return None
    return shared


def _on_all_ranks(condition: bool, comm: AxisComm) -> bool:
    """Return True if the condition holds on every rank. Collective."""
    flag = torch.tensor([int(condition)])
    comm.all_reduce(flag, "min")
    return bool(int(flag))


@dataclass(slots=True)
class Slot:
    """The memory of one sum that is taken again and again: two halves of input per rank, in turn."""

    shared: SharedMemory
    number: int
    halves: list[list[torch.Tensor]]  # by half, then by rank: (numel,)
    turn: int = 0

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """This rank's two halves; fill half `turn % 2`, then call `begin`."""
        return [half[self.shared.comm.rank] for half in self.halves]

    def begin(self) -> None:
        """Tell the others that this rank's half is filled."""
        self.shared.tell(_TOKEN.pack(self.number, self.turn))

    def wait(self) -> list[torch.Tensor]:
        """Wait for every rank's half, and return these, in rank order; they may be read until the next `begin`.

        Raises:
            PeerLostError: a rank has gone.
            CollectiveError: a rank is at another sum.
        """
        for peer, token in self.shared.hear(_TOKEN.size).items():
            if token != _TOKEN.pack(self.number, self.turn):
                number, turn = _TOKEN.unpack(token)
                raise CollectiveError(
                    f"sum {self.number} of turn {self.turn} through shared memory",
                    f"index {peer} on the axis {self.shared.comm.axis} is at sum {number} of turn {turn}",
                    "let every rank take the same steps: does the model or the loop depend on the rank?",
                )
        halves = self.halves[self.turn % 2]
        # The other half is next. A peer may still be reading this one; it has finished once its token of the next turn
        # is here.
        self.turn += 1
        return halves

    def finish(self, out: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Wait for every rank's half and write their sum, in rank order, to `out`; times `scale` if there is one.

        Raises:
            PeerLostError: a rank has gone.
            CollectiveError: a rank is at another sum.
        """
        # Chunk by chunk, so that a chunk's sum and scaling stay in the cache; all regions at once would be read from
        # memory.
        parts = [half.split(_CHUNK) for half in self.wait()]
        for result, first, second, *remaining in zip(out.split(_CHUNK), *parts, strict=True):
            # Rank order is the same everywhere: so are the bits of the sum.
            torch.add(first, second, out=result)
            for part in remaining:
                result += part
            if scale is not None:
                result *= scale  # while the chunk is still in the core's cache


def open_slot(shared: SharedMemory, numel: int, dtype: torch.dtype) -> Slot:
    """Make a slot of `numel` numbers. Collective; slots begin and finish in the same order everywhere."""
    bytes_ = max(numel, 1) * dtype.itemsize
    descriptor = os.memfd_create("paceline")
    # The kernel fills it with zeros, and takes memory only for pages that are touched.
    os.ftruncate(descriptor, 2 * bytes_)
    descriptors = shared.comm.all_gather(torch.tensor([descriptor]))
    halves: list[list[torch.Tensor]] = [[], []]
    for pid, peer_descriptor in zip(shared.pids, descriptors, strict=True):
        opened = os.open(f"/proc/{pid}/fd/{int(peer_descriptor)}", os.O_RDWR)
        region = mmap.mmap(opened, 2 * bytes_)
        os.close(opened)  # the mapping keeps the memory
        for half in range(2):
            halves[half].append(torch.frombuffer(region, dtype=dtype, count=numel, offset=half * bytes_))
    shared.comm.barrier()  # the others open it by this process's descriptor
    os.close(descriptor)
    shared.slots += 1
    return Slot(shared, shared.slots, halves)


def _read(end: int, size: int, timeout_s: float) -> bytes:
    """Read `size` bytes, or fewer when the writer has gone or is silent for `timeout_s`."""
    content = b""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while len(content) < size and poll.poll(timeout_s * 1000):
        chunk = os.read(end, size - len(content))
        if not chunk:  # the writer has closed its end
            break
        content += chunk
    return content


def _lost(comm: AxisComm, peer: int) -> PeerLostError:
    return PeerLostError(
        f"a sum on the axis {comm.axis} waits for rank {comm.peers[peer]}",
        "that process has gone, or was silent too long",
        "look for the rank that failed first; start again with --resume",
    )
