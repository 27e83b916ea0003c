"""Real ranks for tests: fresh processes on this host, one function, one answer each."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 120

# The fork server imports torch once; a rank forked from it starts in about 0.1 s instead of seconds.
_context = mp.get_context("forkserver")
PRELOADED = [
    "torch",
    "torch.utils.data",
    "paceline.train.job",
    "paceline.demo.bert",
    "paceline.parallel.shard.fsdp_adapter",
    "paceline.parallel.graph_adapter",
    "paceline.parallel.graph_model",
    "transformers.models.bert.modeling_bert",
    "hypothesis",
    "pytest",
]
_context.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Have the fork server import more; before the first ranks start, so while tests are collected."""
    PRELOADED.extend(modules)
    _context.set_forkserver_preload(PRELOADED)


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run `function(rank, *arguments)` on `world_size` fresh ranks; the results in rank order.

    The ranks find themselves as `paceline run` would have started them, without a run directory.

    Raises:
        AssertionError: a rank raised; the message has the first one's traceback.
        TimeoutError: some ranks gave no answer within `timeout_s`; the message names them.
    """
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as folder:
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            pipes[ours] = rank
            meeting = (rank, world_size, str(Path(folder, "rendezvous")))
            processes.append(_context.Process(target=_rank_main, args=(theirs, meeting, function, arguments)))
            processes[-1].start()
            theirs.close()
        try:
            _collect(pipes, results, world_size, function, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [results[rank] for rank in range(world_size)]


def _collect(
    pipes: dict[Connection, int],
    results: dict[int, Any],
    world_size: int,
    function: Callable[..., Any],
    timeout_s: float,
):
    deadline = time.monotonic() + timeout_s
    failures = {}
    while pipes:
        ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            raise TimeoutError(f"{function.__name__}: no answer from ranks {sorted(pipes.values())} in {timeout_s} s")
        for pipe in ready:
            rank = pipes.pop(pipe)
            results[rank], failure = _receive(pipe)
            if failure:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + 3)
    if failures:
        rank, failure = min(failures.items(), key=lambda item: ("PeerLost" in item[1], item[0]))
        raise AssertionError(f"rank {rank} of {world_size} in {function.__name__}:\n{failure}")


def _receive(pipe: Connection) -> tuple[Any, str | None]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "the process died without a word (killed, or crashed in native code)"


def _rank_main(
    pipe: Connection, meeting: tuple[int, int, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    gc.freeze()  # or every full collection goes through, and so copies, all that the fork server has imported
    rank, size, rendezvous = meeting
    os.environ.update(
        PACELINE_RANK=str(rank),
        PACELINE_WORLD_SIZE=str(size),
        PACELINE_LOCAL_RANK=str(rank),
        PACELINE_LOCAL_SIZE=str(size),
        PACELINE_RENDEZVOUS=rendezvous,
    )
    torch.set_num_threads(1)
    try:
        answer = function(rank, *arguments), None
    except BaseException:
        answer = None, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))  # by value: the rank is gone before a shared tensor could be read
    sys.stdout.flush()
    os._exit(0)
