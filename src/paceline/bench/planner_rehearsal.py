"""What is predicted of a model's memory: the other half of `bench planner`, in a process of its own.

`python -m paceline.bench.planner_rehearsal cpu NAME PLAN PARTS`, or `... cuda NAME BATCH LENGTH PARTS`, prints a JSON
list, by rank.
"""

from __future__ import annotations

import json
import sys

import torch

from paceline.bench.planner_models import full_workload, workload
from paceline.nouns.plan import Plan
from paceline.plan.memory import memory_of
from paceline.profile.simulate import rehearse


def main() -> None:
    """Rehearse a step of every rank."""
    device, name, *words, text = sys.argv[1:]
    parts, memories = json.loads(text), []
    torch.set_num_threads(1)  # as the ranks have
    if device == "cuda":
        batch, length = (int(word) for word in words)
        memories.append(memory_of(rehearse(full_workload(name, batch, length, **parts), Plan(), device="cuda")))
    else:
        plan = Plan.parse(words[0])
        for rank in range(plan.world_size):
            memories.append(memory_of(rehearse(workload(name, **parts), plan, rank)))
    print(json.dumps([memory.to_json() for memory in memories]))


if __name__ == "__main__":
    main()
