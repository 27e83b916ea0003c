"""Predict a model's memory: the other half of `bench planner`, in a process of its own.

`python -m compare.planner_simulation cpu NAME PLAN PARTS`, or `... cuda NAME BATCH LENGTH PARTS`, prints a JSON
list, by rank.
"""

from __future__ import annotations

import json
import sys

import torch

from compare.planner_models import full_workload, workload
from paceline.nouns.plan import Plan
from paceline.plan.memory import memory_of
from paceline.profile.simulate import simulate


def main() -> None:
    """Simulate a step of every rank."""
    device, name, *sizes, text = sys.argv[1:]
    parts = json.loads(text)
    memories = []
    torch.set_num_threads(1)  # as the ranks have
    if device == "cuda":
        batch, length = sizes
        training = full_workload(name, int(batch), int(length), **parts)
        memories.append(memory_of(simulate(training, Plan(), device="cuda")))
    else:
        plan = Plan.parse(sizes[0])
        for rank in range(plan.world_size):
            memories.append(memory_of(simulate(workload(name, **parts), plan, rank)))
    print(json.dumps([memory.to_json() for memory in memories]))


if __name__ == "__main__":
    main()
