"""Measure what event sinks cost a step: one job for each sink in one process, 100 steps each in turn.

Printed are the median step, its ratio to that without a sink, and the time to hand an event over.

python benchmarks/sinks.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.nouns.plan import Plan
from paceline.nouns.sink import MakeSink
from paceline.train import sinks
from paceline.train.job import Job

ROUNDS = 12  # the first warms up
STEPS = 100


class Nothing:
    """Does nothing."""

    def __init__(self, run_dir: Path | None) -> None:
        del run_dir

    def write(self, event: Mapping[str, Any]) -> None:
        """Pass over an event."""

    def close(self) -> None:
        """Nothing is left."""


class Waits(Nothing):
    """Waits as for a network, longer than a step takes."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Wait."""
        time.sleep(0.01)


class Computes(Nothing):
    """Holds the interpreter for a millisecond."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Compute."""
        end_s = time.thread_time() + 0.001
        while time.thread_time() < end_s:
            pass


SINKS: dict[str, Sequence[MakeSink]] = {
    "none": [],
    "nothing": [Nothing],
    "waits 10 ms": [Waits],
    "computes 1 ms": [Computes],
    "TensorBoard": [paceline.TensorBoard],
}


def make_job(makers: Sequence[MakeSink]) -> Job:
    """Return a job of a small model."""
    workload = paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=torch.randn(4096, 512),
        batch_size=64,
        epochs=99,
        sinks=makers,
    )
    return Job(workload, Plan())


def handover_s(job: Job) -> float:
    """Return the median time of handing over an event, at 500 a second."""
    assert job.last is not None
    event = job.last.to_json()
    seconds = []
    for _ in range(400):
        began_s = time.perf_counter()
        job.events.write(event)
        seconds.append(time.perf_counter() - began_s)
        time.sleep(0.002)
    return statistics.median(seconds)


def main() -> None:
    """Measure and print."""
    sinks.CLOSE_S = 0.5  # one of them is far behind
    torch.set_num_threads(1)
    paceline.init()
    jobs = {name: make_job(makers) for name, makers in SINKS.items()}
    batches = {name: iter(job.batches()) for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in SINKS}
    for turn in range(ROUNDS):
        for name, job in jobs.items():
            for _ in range(STEPS):
                batch = next(batches[name])
                began_s = time.perf_counter()
                job.step(batch)
                if turn:
                    seconds[name].append(time.perf_counter() - began_s)
    for name, each in seconds.items():
        median_s = statistics.median(each)
        ratio = median_s / statistics.median(seconds["none"])
        print(f"{name:14} {1e3 * median_s:7.3f} ms   {ratio:.2f}   {1e6 * handover_s(jobs[name]):5.1f} us", flush=True)


if __name__ == "__main__":
    main()
