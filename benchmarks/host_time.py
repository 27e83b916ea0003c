"""Time the Python of a step: what a rank's host does beside its kernels, under Paceline and under DDP and FSDP2.

A GPU idles where its host takes longer for a step than the kernels do. Here kernels have next to nothing to do: GPT-2's
12 blocks with width 8, on two sequences of four tokens. Two ranks train on CPUs, and a step's time is the CPU time of a
rank's main thread (`time.thread_time`): it waits for the other rank, and Gloo's own threads send, without counting.
Contestants have the same model, data, loader (in the process) and AdamW with fused=True. Each has two ranks of its own,
and they take turns; a ratio is the median over the rounds of that round's ratio. Processes of one program differ by
some percent, so all are started several times.

    python benchmarks/host_time.py --starts 5 --rounds 4 --steps 50
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from compare.small_gpt import SmallGpt
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.nouns.table import aligned
from paceline.train.job import Job

RANKS = 2
WIDTH, HEADS, LENGTH, VOCABULARY = 8, 2, 4, 16
BATCH = 2  # samples of a rank
SAMPLES = 4096
WARM_UP = 5  # steps
SEED = 0
Step = Callable[[], Any]


def main() -> int:
    """Print the table, and write every round's times where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="of all contestants' processes")
    parser.add_argument("--rounds", type=int, default=4, help="after each start")
    parser.add_argument("--steps", type=int, default=50, help="of a contestant in a round")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path, help="file for the numbers as JSON")
    arguments = parser.parse_args()
    names = list(dict.fromkeys([*arguments.only, *(PEERS[name] for name in arguments.only)]))
    load = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.starts):
        with tempfile.TemporaryDirectory() as folder:
            measure(names, arguments, Path(folder), seconds)
    rows = [row_of(name, seconds) for name in names]
    header = ("contestant", "ms of host time", "against", "ratio")
    print(*aligned([header, *rows], "{:<}  {:>}  {:<}  {:>}"), sep="\n")
    if arguments.out is not None:
        facts = {"torch": torch.__version__, "cores": os.cpu_count(), "load_before": load, "argv": sys.argv[1:]}
        arguments.out.write_text(json.dumps({**facts, "seconds_by_round": seconds}, indent=1) + "\n")
    return 0


def row_of(name: str, seconds: dict[str, list[float]]) -> tuple[str, ...]:
    """One line of the table: the median time, and the ratio to the contestant that does the same by raw torch."""
    peer = PEERS[name]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds[name], seconds[peer], strict=True))
    return name, f"{1000 * statistics.median(seconds[name]):.2f}", peer, f"{ratio:.3f}"


def measure(names: list[str], arguments: argparse.Namespace, folder: Path, seconds: dict[str, list[float]]) -> None:
    """Start all ranks, and add the seconds of a step by contestant and round, of the slower rank."""
    ranks = {name: start(name, arguments, folder) for name in names}
    for pipes in ranks.values():
        for pipe in pipes:
            pipe.recv_bytes()  # it is ready
    for number in range(arguments.rounds):
        for name in names if number % 2 else reversed(names):
            for pipe in ranks[name]:
                pipe.send_bytes(b"go")
            seconds[name].append(max(float(pipe.recv_bytes()) for pipe in ranks[name]))
    for pipes in ranks.values():
        for pipe in pipes:
            pipe.close()  # which ends the rank
    for _ in range(RANKS * len(names)):
        os.wait()


def start(name: str, arguments: argparse.Namespace, folder: Path) -> list[Connection[Any, Any]]:
    """Start the ranks of a contestant; they end when this process does."""
    pipes = []
    for rank in range(RANKS):
        ours, theirs = Pipe()
        if os.fork() == 0:
            theirs.close()
            try:
                serve(name, rank, arguments, folder, ours)
            except EOFError:  # the benchmark is over
                os._exit(0)
            except BaseException as error:
                print(f"{name}, rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        ours.close()
        pipes.append(theirs)
    return pipes


def serve(name: str, rank: int, arguments: argparse.Namespace, folder: Path, pipe: Connection[Any, Any]) -> None:
    """Be a rank: take steps whenever asked, and answer with the host time of one."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = str(folder / name.replace(" ", "-"))
    os.environ.update(PACELINE_RANK=str(rank), PACELINE_WORLD_SIZE=str(RANKS), PACELINE_RENDEZVOUS=rendezvous)
    os.environ.update(PACELINE_LOCAL_RANK=str(rank), PACELINE_LOCAL_SIZE=str(RANKS))
    step = CONTESTANTS[name](arguments.blocks, rank, f"{rendezvous}-raw")
    for _ in range(WARM_UP):
        step()
    pipe.send_bytes(b"ready")
    while pipe.recv_bytes():
        step()  # not measured: the rank slept
        began_s = time.thread_time()
        for _ in range(arguments.steps):
            step()
        pipe.send_bytes(str((time.thread_time() - began_s) / arguments.steps).encode())


def make_model(blocks: int) -> SmallGpt:
    """Return the model, with the same values on every rank."""
    torch.manual_seed(SEED)
    return SmallGpt(blocks, WIDTH, HEADS, LENGTH, VOCABULARY)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, fused: else the host has work with each parameter."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def make_data() -> list[torch.Tensor]:
    """Return sequences of tokens: (length + 1,) each."""
    return list(torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(SEED)))


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum of the tokens' losses, and how many samples it is of."""
    logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), len(batch)


def forever(loader: Any) -> Iterator[Any]:
    """Yield the batches of one pass after another."""
    while True:
        yield from loader


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, backward: Callable[[torch.Tensor], Any]
) -> Step:
    """A step of a loop as people write it."""
    batches = forever(loader)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        total, weight = loss(model, next(batches))
        backward(total / weight)
        optimizer.step()

    return step


def raw(wrap: Callable[[SmallGpt], nn.Module]) -> Callable[[int, int, str], Step]:
    """A contestant of raw torch."""

    def make(blocks: int, rank: int, store: str) -> Step:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        model = wrap(make_model(blocks))
        data: Any = make_data()
        sampler: Any = DistributedSampler(data, RANKS, rank, seed=SEED)
        loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
        return plain_loop(model, make_optimizer(model), loader, torch.Tensor.backward)

    return make


def shard_by_hand(model: SmallGpt) -> nn.Module:
    """Shard every block, and what is left, as torch's tutorial does."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_workload(plan: str) -> Callable[[int, int, str], Step]:
    """A contestant that declares its job."""

    def make(blocks: int, rank: int, store: str) -> Step:
        api.init()
        workload = paceline.Workload(
            model=lambda: make_model(blocks),
            loss=loss,
            optimizer=make_optimizer,
            data=make_data(),
            batch_size=BATCH * RANKS,
            seed=SEED,
        )
        job = Job(workload, replace(Plan.parse(plan), check="off"))
        batches = job.batches()
        return lambda: job.step(next(batches))

    return make


def by_prepare(plan: str) -> Callable[[int, int, str], Step]:
    """A contestant with the loop that the raw ones have."""

    def make(blocks: int, rank: int, store: str) -> Step:
        os.environ["PACELINE_PLAN"] = json.dumps(asdict(replace(Plan.parse(plan), check="off")))
        model = make_model(blocks)
        data: Any = make_data()
        loader = DataLoader(data, BATCH * RANKS, shuffle=True, drop_last=True)
        job, model, optimizer, loader = paceline.prepare(model, make_optimizer(model), loader, seed=SEED)
        return plain_loop(model, optimizer, loader, job.backward)

    return make


REPLICATE, BY_GLOO, SHARD = f"replicate={RANKS}", f"replicate={RANKS},transport=gloo", f"shard={RANKS}"
CONTESTANTS: dict[str, Callable[[int, int, str], Step]] = {
    "DDP": raw(DistributedDataParallel),
    "replicate, Workload": by_workload(REPLICATE),
    "replicate, own loop": by_prepare(REPLICATE),
    "replicate by Gloo, Workload": by_workload(BY_GLOO),
    "replicate by Gloo, own loop": by_prepare(BY_GLOO),
    "FSDP2": raw(shard_by_hand),
    "shard, Workload": by_workload(SHARD),
    "shard, own loop": by_prepare(SHARD),
}
PEERS = {name: "FSDP2" if name.startswith(("FSDP2", "shard")) else "DDP" for name in CONTESTANTS}


if __name__ == "__main__":
    sys.exit(main())
