"""Processes that are forked after `init`: they join anew or are refused, and none takes itself for another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

START = """
import json, os, sys
import torch, torch.multiprocessing as mp
import paceline
from paceline.nouns.errors import PacelineError

def place():
    return [paceline.rank(), paceline.size()]

def tried(function):
    try:
        return function()
    except PacelineError as error:
        return str(error)

def forked(function):
    into, out = os.pipe()
    child = os.fork()
    if not child:
        os.write(out, json.dumps(tried(function)).encode())
        os._exit(0)
    os.close(out)
    with os.fdopen(into) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text)

def say(*values):
    print(json.dumps(values), flush=True)
"""

NEW_RANKS = """
paceline.init()
before = place()
def become(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
def train(rank, queue):
    become(rank)
    stale = tried(place)
    was_initialized = paceline.is_initialized()
    paceline.init()
    queue.put([stale, was_initialized, place(), float(paceline.all_reduce(torch.tensor(float(rank + 1))))])
    paceline.barrier()
context = mp.get_context("fork")
queue = context.Queue()
processes = [context.Process(target=train, args=(rank, queue)) for rank in range(2)]
[process.start() for process in processes]
found = sorted([queue.get() for _ in processes], key=lambda one: one[2])
[process.join() for process in processes]
say(before, found, place())
"""

SAME_PLACE = """
paceline.init()
def look():
    paceline.init()
    return [place(), paceline.is_initialized(), float(paceline.all_reduce(torch.ones(())))]
def leave():
    paceline.shutdown()
    return paceline.is_initialized()
say(forked(look), forked(leave), place())
"""

OF_SEVERAL = """
paceline.init()
workload = paceline.Workload(model=lambda: torch.nn.Linear(2, 1), data=list(torch.ones(8, 2)), batch_size=4,
    loss=lambda model, batch: (model(batch).sum(), len(batch)),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
job = paceline.distribute(workload)
batch = next(job.batches())
def reduce():
    return float(paceline.all_reduce(torch.ones(())))
def move():
    os.environ["RANK"] = os.environ["WORLD_SIZE"] = ""
    os.environ.update({name: "0" if name.endswith("RANK") else "1" for name in os.environ
                       if name.startswith("PACELINE_") and name.endswith(("RANK", "SIZE"))})
    paceline.init()
    return place()
def again():
    return paceline.distribute(workload).rank
found = [forked(place), forked(reduce), forked(lambda: job.step(batch)), forked(again), forked(move)]
paceline.barrier()
say(found, place(), float(paceline.all_reduce(torch.ones(()))), job.step(batch))
"""


def run(code, *arguments, environment=None):
    names = [name for name in os.environ if name.startswith("PACELINE_")]
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-c", START + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**clean, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


def said(code, *arguments):
    ended = run(code, *arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_forked_processes_with_places_of_their_own_join_anew():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    before, found, after = said(NEW_RANKS, port)
    assert before == after == [0, 1]
    for rank, (stale, was_initialized, place, total) in enumerate(found):
        assert "call paceline.init() in the forked process too" in stale
        assert not was_initialized
        assert place == [rank, 2]
        assert total == 3.0


@pytest.mark.slow
def test_a_forked_process_with_the_same_place_keeps_it():
    looked, is_initialized, after = said(SAME_PLACE)
    assert looked == [[0, 1], True, 1.0]
    assert not is_initialized
    assert after == [0, 1]


@pytest.mark.slow
def test_what_is_forked_from_a_rank_of_several_takes_no_part(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START + OF_SEVERAL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PACELINE_RANK": str(rank),
                "PACELINE_WORLD_SIZE": "2",
                "PACELINE_LOCAL_RANK": str(rank),
                "PACELINE_LOCAL_SIZE": "2",
                "PACELINE_RENDEZVOUS": str(tmp_path / "meet"),
            },
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, (out, error)) in enumerate(zip(ranks, ended, strict=True)):
        assert process.returncode == 0, error
        (own, *refused), place, total, loss = json.loads(out.splitlines()[-1])
        assert own == place == [rank, 2]
        assert total == 2.0
        assert isinstance(loss, float)
        for text in refused:
            assert f"it is forked from rank {rank} of 2" in text
