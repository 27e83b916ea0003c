"""The job that `bench restart` interrupts: the small GPT of `bench jobs`, which saves every few steps.

`restart_job.py LIBRARY STEPS FOLDER`: each rank writes its process number to FOLDER/rank-N, and rank 0 appends a line
to FOLDER/steps after each step: nanoseconds since the epoch, the step, its process number.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from compare.small_gpt import BATCH, SmallGpt, Windows, make_optimizer, mean_loss, summed_loss

EVERY = 10  # steps between two checkpoints
PAUSE_S = 0.01  # after each step: without it the job would end before it is interrupted


class Notes:
    """What one rank tells the benchmark.

    Args:
        folder: for it.
        rank: this process's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.steps = folder / "steps"
        self.rank = rank
        draft = folder / f".rank-{rank}"
        draft.write_text(str(os.getpid()))
        draft.rename(folder / f"rank-{rank}")

    def step(self, number: int) -> None:
        """Tell of a step that has been taken."""
        if self.rank == 0:
            with self.steps.open("a") as file:
                file.write(f"{time.time_ns()} {number} {os.getpid()}\n")
        time.sleep(PAUSE_S)


def train_with_paceline(steps: int, folder: Path) -> None:
    """Train with Paceline, which saves and goes on by itself."""
    workload = paceline.Workload(
        model=SmallGpt, loss=summed_loss, optimizer=make_optimizer, data=Windows(BATCH * steps), batch_size=BATCH
    )
    job = paceline.distribute(workload)
    notes = Notes(folder, job.rank)
    for batch in job.batches():
        job.step(batch)
        notes.step(job.step_number)


def train_with_ddp(steps: int, folder: Path) -> None:
    """Train in plain torch, with its distributed checkpoints."""
    checkpoints: Any = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint import state_dict

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    model = nn.parallel.DistributedDataParallel(SmallGpt())
    optimizer = make_optimizer(model)
    data = Windows(BATCH * steps)
    sampler: Any = DistributedSampler(data, ranks, rank)
    taken = 0
    saved = sorted(path for path in folder.glob("saved-*") if (path / ".metadata").exists())
    if saved:
        taken = int(saved[-1].name.removeprefix("saved-"))
        weights, state = state_dict.get_state_dict(model, optimizer)
        checkpoints.load({"model": weights, "optimizer": state}, checkpoint_id=saved[-1])
        state_dict.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    notes = Notes(folder, rank)
    for number, batch in enumerate(DataLoader(data, BATCH // ranks, sampler=sampler, drop_last=True), start=1):
        if number <= taken:
            continue
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        notes.step(number)
        if number % EVERY == 0:
            weights, state = state_dict.get_state_dict(model, optimizer)
            checkpoints.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"saved-{number:08d}")
    torch.distributed.barrier()
    # Measured: a rank may wait for ever as it ends, after its last step. Only the way to the next step is of interest.
    os._exit(0)


def main() -> None:
    """Train as the command line says."""
    torch.manual_seed(0)
    train = {"paceline": train_with_paceline, "ddp": train_with_ddp}[sys.argv[1]]
    train(int(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
