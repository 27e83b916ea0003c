"""Run the processes that `bench step` times: the same BERT, data and optimizer under Paceline and under its peers.

`python -m compare.contestants FOLDER NAME ...` imports torch once, forks each contestant's ranks, then
reads names from stdin: for each it runs some steps and prints seconds per step, and the losses where it knows them,
as a line of JSON. Between its turns a contestant sleeps in a pipe. `contestants_strategies.py` is served by the same
code.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline.comm import api
from paceline.demo.bert import Bert, BertConfig
from paceline.demo.demo_workload import MaskedSequences, loss, make_workload
from paceline.nouns.plan import Plan
from paceline.train.job import Job
from paceline.train.loop_job import prepare

BATCH = 8  # samples of a process
STEPS = 4  # of a turn
WARM_UP = 3  # steps before the first turn
SEED = 0
HIDDEN = 0.15  # of the tokens
Step = Callable[[], float | None]  # takes a step and returns its mean loss, where this rank knows it
Contestant = Callable[[Path, int, int], Step]  # arguments: the data's folder, the rank, the number of ranks
# These share a process and take turns step by step: a difference of 1 % must be seen.
ALONE = ("plain", "paceline_alone")


def serve(contestants: Mapping[str, Contestant]) -> None:
    """Serve turns of the contestants named on the command line until stdin ends."""
    folder = Path(sys.argv[1])
    names = sys.argv[2:]
    connections = {name: _start(name, folder, contestants) for name in names}
    for name, ranks in connections.items():
        for connection in ranks:
            connection.recv_bytes()  # ready
        print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        ranks = connections[line.strip()]
        for connection in ranks:
            connection.send_bytes(b"go")
        answers = [json.loads(connection.recv_bytes()) for connection in ranks]
        print(json.dumps(_combined(answers)), flush=True)


def _combined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ranks' answers as one: the time of the slowest, and the mean of the losses where ranks know them."""
    seconds = {}
    for name in answers[0]["seconds"]:
        seconds[name] = max(answer["seconds"][name] for answer in answers)
    means = []
    for step in zip(*(answer["losses"] for answer in answers), strict=True):
        losses = [loss for loss in step if loss is not None]
        if losses:
            means.append(statistics.mean(losses))
    return {"seconds": seconds, "losses": means}


def _start(name: str, folder: Path, contestants: Mapping[str, Contestant]) -> list[Connection[Any, Any]]:
    """Fork the ranks of a contestant, and return a connection to each."""
    ranks = 1 if name == "alone" else 2
    port = _free_port()
    connections = []
    for rank in range(ranks):
        ours, theirs = Pipe()
        if os.fork() == 0:
            try:
                ours.close()  # else this rank would hold its own pipe open, and never see its end
                _set_place(name, rank, ranks, port, folder)
                if name == "alone":
                    _serve_pair(_plain(folder, rank, ranks), _paceline(folder, ranks, "auto"), theirs)
                _serve(name, contestants[name](folder, rank, ranks), theirs, ranks)
            except EOFError:  # the parent has closed the pipe: the benchmark is over
                os._exit(0)
            except BaseException as error:
                print(f"{name}, rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # not sys.exit: the parent's exit handlers and buffers are the parent's
        theirs.close()
        connections.append(ours)
    return connections


def _set_place(name: str, rank: int, ranks: int, port: int, folder: Path) -> None:
    """Set the variables that the contestant's launcher would set."""
    torch.set_num_threads(1)  # for all alike, as launchers set it for several ranks of a host
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if name.startswith("paceline") or name == "alone":
        os.environ.update(PACELINE_RANK=str(rank), PACELINE_WORLD_SIZE=str(ranks))
        os.environ.update(PACELINE_LOCAL_RANK=str(rank), PACELINE_LOCAL_SIZE=str(ranks))
        os.environ["PACELINE_RENDEZVOUS"] = str(folder / f"rendezvous-{name}")
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROUP_RANK="0", TORCHELASTIC_RUN_ID="bench")


def _serve_pair(plain: Step, paceline: Step, connection: Connection[Any, Any]) -> None:
    """Serve turns in which the two contestants of ALONE take their steps one by one, the first of them by turns."""
    for step in (plain, paceline) * WARM_UP:
        step()
    connection.send_bytes(b"ready")
    while connection.recv_bytes():
        plain()  # not timed: it wakes the process, which slept since its last turn
        seconds: dict[str, list[float]] = {name: [] for name in ALONE}
        pairs = list(zip(ALONE, (plain, paceline), strict=True))
        for _ in range(STEPS):
            pairs.reverse()
            for name, step in pairs:
                began_s = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - began_s)
        means = {name: sum(values) / STEPS for name, values in seconds.items()}
        connection.send_bytes(json.dumps({"seconds": means, "losses": []}).encode())


def _serve(name: str, step: Step, connection: Connection[Any, Any], ranks: int) -> None:
    """Serve turns of one rank of a contestant."""
    losses = [step() for _ in range(WARM_UP)]
    connection.send_bytes(b"ready")
    while connection.recv_bytes():
        # One step that is not timed, since all ranks slept; then all begin to measure at the same time.
        _wait_for_all(ranks)
        losses.append(step())
        _wait_for_all(ranks)
        began_s = time.perf_counter()
        losses += [step() for _ in range(STEPS)]
        seconds = {name: (time.perf_counter() - began_s) / STEPS}
        connection.send_bytes(json.dumps({"seconds": seconds, "losses": losses}).encode())
        losses = []


def _wait_for_all(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


def _free_port() -> int:
    """Return a port for MASTER_PORT that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _model() -> tuple[Bert, torch.optim.Optimizer]:
    """Return the model, with the same values on all ranks and in all contestants, and its optimizer."""
    torch.manual_seed(SEED)
    model = _bert()
    return model, _adamw(model)


def _bert() -> Bert:
    return Bert(BertConfig())


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def _data(folder: Path) -> MaskedSequences:
    return MaskedSequences(folder / "train.npy", HIDDEN)


def _loader(folder: Path, rank: int, ranks: int) -> DataLoader[Any]:
    data = _data(folder)
    sampler: Any = DistributedSampler(data, ranks, rank, seed=SEED)
    return DataLoader(data, BATCH, sampler=sampler, drop_last=True)


def _forever(loader: Any) -> Iterator[Any]:
    """Yield batches of one epoch after another; turns may take more steps than an epoch has."""
    while True:
        yield from loader


def _mean(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    total, weight = loss(model, batch)
    return total / weight


def _backward(mean: torch.Tensor) -> None:
    mean.backward()  # type: ignore[no-untyped-call]


def _loop(
    model: torch.nn.Module,
    optimizer: Any,
    batches: Iterator[Any],
    backward: Callable[[torch.Tensor], None] = _backward,
) -> Step:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward(_mean(model, next(batches)))
        optimizer.step()

    return step


def _plain(folder: Path, rank: int, ranks: int) -> Step:
    model, optimizer = _model()
    return _loop(model, optimizer, _forever(_loader(folder, rank, ranks)))


def _no_communication(folder: Path, rank: int, ranks: int) -> Step:
    """Train two models side by side: the speed that a contestant which communicates can't exceed."""
    dist.init_process_group("gloo")
    return _plain(folder, rank, ranks)


def _flat_all_reduce(folder: Path, rank: int, ranks: int) -> Step:
    """Average all gradients with one all-reduce after the backward pass, without overlap."""
    dist.init_process_group("gloo")
    model, optimizer = _model()

    def backward(mean: torch.Tensor) -> None:
        _backward(mean)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= ranks  # Gloo has no average
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean_gradient in zip(gradients, means, strict=True):
            gradient.copy_(mean_gradient.view_as(gradient))

    return _loop(model, optimizer, _forever(_loader(folder, rank, ranks)), backward)


def _ddp(folder: Path, rank: int, ranks: int) -> Step:
    dist.init_process_group("gloo")
    model, optimizer = _model()
    return _loop(DistributedDataParallel(model), optimizer, _forever(_loader(folder, rank, ranks)))


def _accelerate(folder: Path, rank: int, ranks: int) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != ranks:  # it would train alone, and look fast
        raise RuntimeError(f"Accelerate runs {accelerator.num_processes} processes, not {ranks}")
    model, optimizer = _model()
    loader = DataLoader(_data(folder), BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return _loop(model, optimizer, _forever(loader), accelerator.backward)


def _lightning(folder: Path, rank: int, ranks: int) -> Step:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    if fabric.world_size != ranks:
        raise RuntimeError(f"Fabric runs {fabric.world_size} processes, not {ranks}")
    plain, plain_optimizer = _model()
    model, optimizer = fabric.setup(plain, plain_optimizer)
    loader = DataLoader(_data(folder), BATCH, shuffle=True, drop_last=True)
    return _loop(model, optimizer, _forever(fabric.setup_dataloaders(loader)), fabric.backward)


def _paceline(folder: Path, ranks: int, transport: str) -> Step:
    api.init()
    # The peers' loops have none of these.
    omitted: dict[str, Any] = {"scheduler": None, "clip_norm": None, "evaluation": None}
    workload = make_workload(folder, 10**6, BATCH * ranks, model=_bert, optimizer=_adamw, data=_data(folder), **omitted)
    job = Job(workload, Plan(mesh=f"replicate={ranks}", transport=transport))
    batches = job.batches()

    def step() -> None:
        job.step(next(batches))

    return step


def _paceline_prepare(folder: Path, rank: int, ranks: int) -> Step:
    """Train by a plain loop with `paceline.prepare`. Its loader has the batches of all ranks together."""
    plain, plain_optimizer = _model()
    data = DataLoader(_data(folder), BATCH * ranks, shuffle=True, drop_last=True)
    job, model, optimizer, loader = prepare(plain, plain_optimizer, data)
    return _loop(model, optimizer, _forever(loader), job.backward)


CONTESTANTS: dict[str, Contestant] = {
    "paceline": lambda folder, rank, ranks: _paceline(folder, ranks, "auto"),
    "paceline_gloo": lambda folder, rank, ranks: _paceline(folder, ranks, "gloo"),
    "paceline_prepare": _paceline_prepare,
    "ddp": _ddp,
    "flat_all_reduce": _flat_all_reduce,
    "no_communication": _no_communication,
    "accelerate": _accelerate,
    "lightning": _lightning,
}


if __name__ == "__main__":
    serve(CONTESTANTS)
