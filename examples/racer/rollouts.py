"""Rollouts: what environments and a policy do together, for a number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class Environments(Protocol):
    """Several environments that step together: `car.Cars`, `cartpole.Poles`."""

    observation_size: int
    actions: int

    def reset(self, episodes: Sequence[int]) -> np.ndarray: ...
    def begin(self, which: int, episode: int) -> None: ...
    def look(self) -> np.ndarray: ...
    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...


class Rollout(NamedTuple):
    """What was seen and done; all but `returned` are (E, T, ...) for E environments and T steps."""

    seen: torch.Tensor
    actions: torch.Tensor
    log_likelihoods: torch.Tensor
    values: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    returned: list[float]  # rewards of the episodes that ended, added up


class Length(NamedTuple):
    """How long a rollout is, and how far it looks ahead.

    Args:
        steps: in each environment.
        discount: of a reward that is a step later.
        trace: lambda of the advantages (GAE, Schulman et al. 2016).
    """

    steps: int
    discount: float
    trace: float


class Draws:
    """One number from 0 to 1 for each environment and step: the same whichever rank has the environment."""

    def __init__(self, key: Sequence[int], environments: Sequence[int], steps: int) -> None:
        rows = [np.random.default_rng([*key, number]).random(steps) for number in environments]
        self.rows = np.stack(rows)

    def choose(self, logits: torch.Tensor, step: int) -> np.ndarray:
        """Draw an action for each row of logits (E, actions)."""
        reached = logits.double().softmax(1).cumsum(1).numpy()
        # The last sum may be 1 - 1e-16, and the number above it.
        return (self.rows[:, step, None] > reached[:, :-1]).sum(1)


@torch.no_grad()
def play(
    policy: torch.nn.Module,
    environments: Environments,
    numbers: Sequence[int],
    *,
    key: Sequence[int],
    length: Length,
) -> Rollout:
    """Play some steps in each environment; an episode that ends is followed by another.

    Args:
        policy: whole on this rank.
        environments: of this rank.
        numbers: of its environments among those of all ranks.
        key: seed and number of the rollout. With an environment's number it gives all that is drawn.
        length: of the rollout.
    """
    parameter = next(policy.parameters())
    device, dtype = parameter.device, parameter.dtype
    steps, discount, trace = length
    draws = Draws(key, numbers, steps)
    count = len(numbers)
    # Each environment has episode numbers of its own: one a step would be enough.
    episodes = [(key[-1] * 4096 + number) * steps for number in numbers]
    seen = environments.reset(episodes)
    sums = np.zeros(count)
    returned: list[float] = []
    names = ("seen", "actions", "logits", "values", "rewards", "rests", "is_last")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for step in range(steps):
        observed = torch.from_numpy(seen).to(device, dtype)
        logits, values = policy(observed)
        actions = draws.choose(logits.cpu(), step)
        seen, rewards, ended, cut = environments.step(actions)
        sums += rewards
        # An episode that was cut off would have gone on: the value of its last state stands for the rest.
        is_last = ended | cut | (step == steps - 1)
        rest = np.zeros(count)
        if (is_last & ~ended).any():
            rest[is_last & ~ended] = policy(torch.from_numpy(seen).to(device, dtype))[1].cpu()[is_last & ~ended]
        for name, value in zip(names, (observed, actions, logits, values, rewards, rest, is_last), strict=True):
            columns[name].append(value)
        for which in np.flatnonzero(ended | cut):
            returned.append(float(sums[which]))
            sums[which] = 0
            episodes[which] += 1
            environments.begin(which, episodes[which])
        if (ended | cut).any():
            seen = environments.look()
    numbers_of = {
        name: torch.from_numpy(np.stack(columns[name], axis=1)).to(device)
        for name in ("actions", "rewards", "rests", "is_last")
    }
    chosen = numbers_of["actions"][..., None]
    logits, values = (torch.stack(columns[name], dim=1) for name in ("logits", "values"))
    rewards, rests = numbers_of["rewards"].to(dtype), numbers_of["rests"].to(dtype)
    return Rollout(
        seen=torch.stack(columns["seen"], dim=1),
        actions=chosen[..., 0],
        log_likelihoods=logits.log_softmax(-1).gather(-1, chosen)[..., 0],
        values=values,
        rewards=rewards,
        advantages=advantages(rewards + discount * rests, values, numbers_of["is_last"], discount, trace),
        returned=returned,
    )


def advantages(
    rewards: torch.Tensor, values: torch.Tensor, is_last: torch.Tensor, discount: float, trace: float
) -> torch.Tensor:
    """Return the generalized advantages (E, T); the reward of an episode's last step has the value of what follows."""
    result = torch.zeros_like(values)
    later = torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        goes_on = (~is_last[:, step]).to(values)
        following = values[:, step + 1] if step + 1 < values.shape[1] else torch.zeros_like(later)
        error = rewards[:, step] + discount * goes_on * following - values[:, step]
        later = error + discount * trace * goes_on * later
        result[:, step] = later
    return result
