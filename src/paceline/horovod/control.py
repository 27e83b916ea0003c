"""Carry small messages between each rank and the coordinator, a thread of rank 0.

On one host through a Unix socket without a file (on macOS the loopback interface); over several through TCP at the
address of rank 0 that the others reach. Both ends prove by HMAC that they know a key, which rank 0 sends to the others
through the job's process group. Messages are bytes: nothing is unpickled.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, Pipe, answer_challenge, deliver_challenge
from queue import Queue

from paceline.comm.process_group import RankInfo
from paceline.rendezvous.interfaces import address_of, address_towards

MOST_BYTES = 2**26  # of one message: the sizes of a call of all_to_all on thousands of ranks fit
_BACKLOG = 4096


def connect(
    rank_info: RankInfo, all_gather_text: Callable[[str], Sequence[str]]
) -> tuple[Connection, list[Connection]]:
    """Return this rank's connection to the coordinator, and on rank 0 the coordinator's, by rank.

    Collective.

    Args:
        rank_info: the place of this rank.
        all_gather_text: a function that returns the texts of all ranks, in rank order.
    """
    if rank_info.rank > 0:
        family, address, key = all_gather_text("")[0].split("\n")
        host, _, port = address.rpartition(":")
        endpoint = f"\0{address}" if family == "AF_UNIX" else (host, int(port))
        connection = Client(endpoint, family, authkey=bytes.fromhex(key))
        connection.send_bytes(rank_info.rank.to_bytes(4, "little"))
        return connection, []
    coordinator_end, own_end = Pipe()
    ends = {0: coordinator_end}
    if rank_info.size > 1:
        ends.update(_accept(rank_info, all_gather_text))
    return own_end, [ends[rank] for rank in range(rank_info.size)]


def _accept(rank_info: RankInfo, all_gather_text: Callable[[str], Sequence[str]]) -> dict[int, Connection]:
    key = secrets.token_bytes(32)
    is_unix = rank_info.size == rank_info.local_size and sys.platform.startswith("linux")
    if is_unix:
        # An abstract name: no file is left behind, and the length of TMPDIR does not matter.
        name = f"paceline-horovod-{secrets.token_hex(16)}"
        listener = Listener(f"\0{name}", "AF_UNIX", _BACKLOG)
        text = f"AF_UNIX\n{name}"
    else:
        host = "127.0.0.1" if rank_info.size == rank_info.local_size else _own_address(rank_info)
        listener = Listener((host, 0), "AF_INET", _BACKLOG)
        host, port = listener.address
        text = f"AF_INET\n{host}:{port}"
    with listener:
        proved: Queue[tuple[int, Connection]] = Queue()
        done = threading.Event()
        acceptor = threading.Thread(target=_prove_all, args=(listener, key, proved, done), daemon=True)
        acceptor.start()
        all_gather_text(f"{text}\n{key.hex()}")
        ends: dict[int, Connection] = {}
        while len(ends) < rank_info.size - 1:
            rank, end = proved.get()
            ends[rank] = end
        done.set()
        Client(listener.address).close()  # wakes the thread, which closing the socket does not
        acceptor.join()
    return ends


def _prove_all(listener: Listener, key: bytes, proved: Queue[tuple[int, Connection]], done: threading.Event) -> None:
    """Accept connections, each in a thread of its own: one who says nothing holds up nobody."""
    while True:
        end = listener.accept()
        if done.is_set():
            end.close()
            return
        threading.Thread(target=_prove, args=(end, key, proved), daemon=True).start()


def _prove(end: Connection, key: bytes, proved: Queue[tuple[int, Connection]]) -> None:
    """Put a connection into the queue if the other end knows the key, and close it if not."""
    try:
        deliver_challenge(end, key)
        answer_challenge(end, key)
        rank = int.from_bytes(end.recv_bytes(4), "little")
    except (AuthenticationError, EOFError, OSError):
        end.close()
    else:
        proved.put((rank, end))


def _own_address(rank_info: RankInfo) -> str:
    if rank_info.interface:
        return address_of(rank_info.interface)
    if rank_info.master is not None:
        return address_towards(rank_info.master[0])
    return socket.gethostbyname(socket.gethostname())
