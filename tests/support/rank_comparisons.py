"""Hold what ranks end with against what one rank ends with: values and gradients of every part of every tensor."""

from __future__ import annotations

from typing import Any

import torch

import paceline
from paceline.checkpoint.reshard import take
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard, ShardSpec
from paceline.train.job import Job

TOLERANCE = 1e-10
FLOOR = 1e-3  # of a tensor's size: a key's bias has no gradient, AdamW makes steps of its rounding


def two_steps(**parts: Any) -> paceline.Workload:
    """Two steps in float64; without AdamW, which makes steps of the rounding of a key's bias."""
    return paceline.Workload(
        **{
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "steps": 2,
            "precision": "float64",
            "clip_norm": 0.5,
            **parts,
        }
    )


def train(workload: paceline.Workload, plan: str) -> Any:
    """The loss and the gradient norm of each step, and `held_here`; where it is refused, the error's text."""
    try:
        job = Job(workload, Plan.parse(plan))
        steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
        state = held_here(job)
        job.close()
    except PacelineError as error:
        return str(error)
    return steps, state


def held_here(job: Job) -> dict[str, tuple[torch.Tensor, torch.Tensor | None, LocalShard | None]]:
    """Of every state tensor that this rank holds: its part, the part's gradient, and which part it is."""
    held = job.parallel.local_shards()
    return {
        name: (here(tensor), None if tensor.grad is None else here(tensor.grad), held.get(name))
        for name, tensor in [*job.model.named_parameters(), *job.model.named_buffers()]
        if not tensor.is_meta
    }


def here(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def differences(one: Any, part: Any) -> list[str]:
    """What differs between a rank's part of a tensor and the same part of the one-rank result."""
    value, gradient, held = part
    shard_spec = held.shard_spec if held is not None else ShardSpec(tuple(one[0].shape))
    found = []
    for what, full, local in (("value", one[0], value), ("gradient", one[1], gradient)):
        if (full is None) != (local is None):
            found.append(f"{what}: one of the two has none")
        elif full is not None and (shard_spec.local_shape != tuple(local.shape) or full.dtype != local.dtype):
            found.append(f"{what}: it is of shape {tuple(local.shape)}, its placement says {shard_spec.local_shape}")
        elif full is not None and local.numel():
            size = max(float(full.abs().max()), FLOOR) if full.is_floating_point() else 1.0
            error = float((take(full, shard_spec) - local).abs().max()) / size
            if not error <= TOLERANCE:
                found.append(f"{what}: off by {error:.1e}")
    return found


def compare(alone: Any, ranks: list[Any]) -> str:
    """Return `equal`, `refused: ...`, or what is wrong.

    Args:
        alone: what `train` returns on one rank.
        ranks: the same of each rank.
    """
    if any(isinstance(result, str) for result in ranks):
        all_refused = all(isinstance(result, str) for result in ranks)
        return f"refused: {ranks[0]}" if all_refused else "refused by some ranks only"
    steps, whole = alone
    wrong = []
    seen: set[str] = set()
    for rank, (other_steps, state) in enumerate(ranks):
        for one, other in zip(steps, other_steps, strict=True):
            if any(not abs(a - b) <= TOLERANCE * abs(a) for a, b in zip(one, other, strict=True)):
                wrong.append(f"rank {rank} has {other} where one rank has {one}")
        for key, part in state.items():
            wrong += [f"rank {rank}: {key}: {text}" for text in differences(whole[key], part)]
        seen |= state.keys()
    wrong += [f"nobody has {key}" for key in sorted(whole.keys() - seen)]
    return f"wrong: {wrong[0]} and {len(wrong) - 1} more" if wrong else "equal"
