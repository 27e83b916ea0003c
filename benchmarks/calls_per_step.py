"""Count the functions of the product that one steady step calls, and those of FSDP2 and DDP for their own.

    python benchmarks/calls_per_step.py [--step 10] [--list] [--json]

A step of a small MLP with AdamW on one rank, from one batch to the next: of a declared `paceline.Workload`, and of a
plain loop with `paceline.prepare`. Functions, methods and comprehensions are counted once each, in the process's main
thread, where `sys.setprofile` sees them. The fewer there are, the less has to be read to know a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH, BATCHES = 8, 16
OWN = os.path.dirname(paceline.__file__) + os.sep
FSDP = os.sep + os.path.join("torch", "distributed", "fsdp") + os.sep
DDP = os.sep + os.path.join("torch", "nn", "parallel") + os.sep


class Calls:
    """Calls of functions whose files lie under a folder, while it is entered."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.calls: Counter[CodeType] = Counter()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.folder in frame.f_code.co_filename:
            self.calls[frame.f_code] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside; threads that are not this one are left out."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def row(self, name: str) -> dict[str, Any]:
        """Return what was counted."""
        files = {code.co_filename for code in self.calls}
        return {"step": name, "functions": len(self.calls), "files": len(files), "calls": self.calls.total()}

    def shown(self) -> list[str]:
        """Return a line for each function."""
        lines = []
        for code, count in self.calls.items():
            lines.append(f"{count:4d}  {code.co_filename.rpartition(self.folder)[2]}: {code.co_qualname}")
        return sorted(lines, key=lambda line: line[6:])


def model() -> nn.Module:
    """Return the MLP."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def data() -> TensorDataset:
    """Return its samples."""
    return TensorDataset(torch.randn(BATCH * BATCHES, 16), torch.randn(BATCH * BATCHES, 4))


def declared(calls: Calls, step: int) -> None:
    """Train a Workload, and count one step."""
    workload = paceline.Workload(
        model=model,
        loss=lambda model, batch: (mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()),
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3),
        data=data(),
        batch_size=BATCH,
        epochs=BATCHES,
    )
    job = paceline.distribute(workload)
    batches = iter(job.batches())
    for _ in range(step - 1):
        job.step(next(batches))
    with calls.counted():
        job.step(next(batches))
    job.close()


def own_loop(calls: Calls, step: int) -> None:
    """Train by a plain loop, and count one step."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    job, net, optimizer, loader = paceline.prepare(net, optimizer, DataLoader(data(), BATCH, shuffle=True))
    batches = iter(loader)

    def one_step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        job.backward(mse_loss(net(inputs), targets))
        optimizer.step()

    for _ in range(step - 1):
        one_step()
    with calls.counted():
        one_step()
    job.close()


def of_torch(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Calls, int], None]:
    """Return what trains a model that torch itself distributes, on one rank."""

    def run(calls: Calls, step: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        net = wrap(model())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        batches = iter(DataLoader(data(), BATCH))

        def one_step() -> None:
            inputs, targets = next(batches)
            optimizer.zero_grad()
            mse_loss(net(inputs), targets).backward()
            optimizer.step()

        for _ in range(step - 1):
            one_step()
        with calls.counted():
            one_step()
        dist.destroy_process_group()

    return run


STEPS = {
    "declared": (OWN, declared),
    "own loop": (OWN, own_loop),
    "FSDP2": (FSDP, of_torch(lambda net: fully_shard(net))),
    "DDP": (DDP, of_torch(DistributedDataParallel)),
}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=int, default=10, help="which step is counted (default 10)")
    parser.add_argument("--list", action="store_true", help="name the functions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = []
    for name, (folder, train) in STEPS.items():
        calls = Calls(folder)
        train(calls, arguments.step)
        rows.append(calls.row(name))
        if arguments.list:
            rows[-1]["of"] = calls.shown()
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'step':12}{'functions':>10}{'files':>7}{'calls':>7}")
    for row in rows:
        print(f"{row['step']:12}{row['functions']:10}{row['files']:7}{row['calls']:7}")
        for line in row.get("of", []):
            print(f"    {line}")


if __name__ == "__main__":
    main()
