"""PPO: a car learns to drive DeepRacer's tracks, or a cart to hold a pole; rollouts on all ranks.

    paceline run -n 2 workload.py
    paceline run -n 2 workload.py --data deepracer --picture figure.png
    paceline run -n 2 workload.py --task cartpole

Each rank plays in its share of the environments with a copy of the policy that stays as it was when the rollout began.
All that is drawn depends on the rollout's and the environment's number, so any number of ranks sees the same.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import rollouts
import tasks
import torch
from policy import Policy

import paceline
from paceline.nouns.errors import UsageError


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learn to drive, or to hold a pole, by PPO.")
    add = parser.add_argument
    tasks.add_flags(parser)
    add("--rollouts", type=int, help="(default 150; cartpole 50)")
    add("--steps", type=int, help="optimizer steps, instead of --rollouts: each has epochs x parts of them")
    add("--environments", type=int, help="of all ranks together (default 64; cartpole 16)")
    add("--length", type=int, help="steps of a rollout in each environment (default 128; cartpole 512)")
    add("--epochs", type=int, default=4, help="passes over a rollout (default 4)")
    add("--parts", type=int, help="mini-batches of a pass (default 4; cartpole 8)")
    add("--lr", type=float, default=1e-3, help="at the beginning (default 1e-3); it falls to 0")
    add("--trace", type=float, default=0.95, help="lambda of the advantages (default 0.95)")
    add("--clip", type=float, default=0.2, help="how far a probability's ratio may move (default 0.2)")
    add("--entropy", type=float, help="weight of the entropy (default 0.005; cartpole 0)")
    add("--picture", type=Path, metavar="FILE", help="draw the driven lines and the curve")
    arguments = parser.parse_args()
    usual = {"rollouts": (150, 50), "environments": (64, 16), "length": (128, 512), "parts": (4, 8)}
    for name, values in {**usual, "entropy": (0.005, 0.0)}.items():
        if getattr(arguments, name) is None and not (name == "rollouts" and arguments.steps is not None):
            setattr(arguments, name, values[arguments.task == "cartpole"])
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only later."""
    tasks.check_flags(arguments)
    if arguments.steps is not None and arguments.rollouts is not None:
        raise UsageError("--steps with --rollouts", "one gives the other", "leave one of them out")
    least = {"rollouts": 1, "steps": 1, "environments": 1, "length": 2, "epochs": 1, "parts": 1, "width": 1}
    tasks.check_counts(arguments, least)
    if arguments.length % arguments.parts:
        raise UsageError(
            f"--length {arguments.length} with --parts {arguments.parts}",
            "each mini-batch has as many steps of each environment",
            "choose a length that the number of parts divides",
        )
    for name, lowest, highest in (("lr", 0, math.inf), ("clip", 0, 1), ("trace", 0, 1.0000001), ("entropy", -1e-9, 10)):
        value = getattr(arguments, name)
        if not lowest < value < highest:
            found = f"it should be above {lowest:.0f}" + (f", and at most {highest:.0f}" if highest < math.inf else "")
            raise UsageError(f"--{name} {value}", found, "leave it out for the usual value")


class Trainer:
    """The loop's objects and settings, after `paceline.prepare`."""

    def __init__(self, task: tasks.Task, arguments: argparse.Namespace) -> None:
        self.task = task
        self.arguments = arguments
        self.environments = task.make()
        self.updates = arguments.epochs * arguments.parts  # of a rollout
        self.total_steps = arguments.steps or arguments.rollouts * self.updates
        torch.manual_seed(arguments.seed)
        sizes = self.environments.observation_size, self.environments.actions, arguments.width
        policy, player = Policy(*sizes), Policy(*sizes)
        player.requires_grad_(False)
        self.size = sum(parameter.numel() for parameter in policy.parameters())
        optimizer = torch.optim.Adam(policy.parameters(), lr=arguments.lr, eps=1e-5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / self.total_steps, 0))
        # The player is not trained, so each rank has all of it: rollouts communicate under no plan.
        self.job, self.policy, self.player, self.optimizer, self.schedule = paceline.prepare(
            policy, player, optimizer, schedule, seed=arguments.seed
        )
        self.job.keep_settings(
            task=task.digest,
            reward="DeepRacer's" if arguments.reward is None else arguments.reward.read_text(),
            environments=arguments.environments,
            length=arguments.length,
            epochs=arguments.epochs,
            parts=arguments.parts,
            seed=arguments.seed,
        )
        if arguments.environments < self.job.data_size:
            raise UsageError(
                f"--environments {arguments.environments}",
                f"there are {self.job.data_size} parts of them, and each rank plays in one or more",
                f"write --environments {self.job.data_size} or more",
            )
        self.numbers = range(self.job.data_rank, arguments.environments, self.job.data_size)
        self.curve: list[tuple[int, float]] = self.job.keep("curve", [])

    def train(self) -> None:
        """Play and learn by turns, from where the job is."""
        while self.job.step_number < self.total_steps:
            number, done = divmod(self.job.step_number, self.updates)
            if done == 0:
                # Checkpoints have the player, so a job that is resumed between two updates plays this rollout again.
                self.job.copy_weights(self.policy, self.player)
            rollout = self.play(number)
            batches = self.mini_batches(number, rollout)
            for batch in batches[done : done + self.total_steps - self.job.step_number]:
                self.update(batch)

    def play(self, number: int) -> rollouts.Rollout:
        """Play one rollout in this rank's environments."""
        rollout = rollouts.play(
            self.player,
            self.environments,
            self.numbers,
            key=(self.arguments.seed, number),
            length=rollouts.Length(self.arguments.length, self.task.discount, self.arguments.trace),
        )
        sums = [sum(rollout.returned), len(rollout.returned), rollout.rewards.sum().item(), rollout.rewards.numel()]
        returned, episodes, rewards, steps = self.job.all_reduce(torch.tensor(sums, dtype=torch.float64)).tolist()
        if not self.curve or self.curve[-1][0] < number:
            self.curve.append([number, rewards / steps, returned / episodes if episodes else None])
        return rollout

    def mini_batches(self, number: int, rollout: rollouts.Rollout) -> list[dict[str, torch.Tensor]]:
        """Cut a rollout into mini-batches: the same steps of an environment, whichever rank has it."""
        advantages = self.normalized(rollout.advantages)
        columns = {
            "seen": rollout.seen,
            "actions": rollout.actions,
            "log_likelihoods": rollout.log_likelihoods,
            "returns": rollout.advantages + rollout.values,
            "advantages": advantages,
        }
        batches = []
        for epoch in range(self.arguments.epochs):
            orders = [
                np.random.default_rng([self.arguments.seed, number, epoch, environment]).permutation(
                    self.arguments.length
                )
                for environment in self.numbers
            ]
            order = torch.from_numpy(np.stack(orders)).to(self.job.device)
            for part in order.chunk(self.arguments.parts, dim=1):
                rows = torch.arange(len(part), device=part.device)[:, None]
                batches.append({name: column[rows, part].flatten(0, 1) for name, column in columns.items()})
        return batches

    def normalized(self, advantages: torch.Tensor) -> torch.Tensor:
        """Return advantages with the mean 0 and the deviation 1 over the rollouts of all ranks."""
        wide = advantages.double()
        sums = torch.stack([wide.sum(), wide.square().sum(), wide.new_tensor(wide.numel())])
        total, squares, count = self.job.all_reduce(sums)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        return ((wide - mean) / (deviation + 1e-8)).to(advantages.dtype)

    def update(self, batch: dict[str, torch.Tensor]) -> None:
        """Take one optimizer step: PPO's clipped objective (Schulman et al. 2017), value and entropy."""
        logits, values = self.policy(batch["seen"])
        likelihoods = logits.log_softmax(-1)
        ratio = (likelihoods.gather(-1, batch["actions"][:, None])[:, 0] - batch["log_likelihoods"]).exp()
        clipped = ratio.clamp(1 - self.arguments.clip, 1 + self.arguments.clip)
        gain = torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
        entropy = -(likelihoods.exp() * likelihoods).sum(-1)
        loss = -gain + 0.5 * (values - batch["returns"]).square() - self.arguments.entropy * entropy
        self.optimizer.zero_grad()
        self.job.backward(loss.mean(), weight=len(loss))
        self.job.clip(0.5)
        self.optimizer.step()
        self.schedule.step()

    def test(self) -> dict[int, dict[str, Any]]:
        """Play the test episodes, each on one rank. Return the results of all by number, on every rank."""
        self.job.copy_weights(self.policy, self.player)
        numbers = range(self.job.data_rank, self.task.episodes, self.job.data_size)
        results = tasks.test(self.player, self.task, list(numbers), self.job.device)
        own = torch.zeros(self.task.episodes, 3, dtype=torch.float64)
        own[list(numbers)] = torch.tensor(
            [[result["return"], result["steps"], result["progress"]] for result in results], dtype=torch.float64
        ).reshape(-1, 3)
        names = ("return", "steps", "progress")
        rows = self.job.all_reduce(own).tolist()
        return {number: dict(zip(names, row, strict=True)) for number, row in enumerate(rows)}


def main() -> None:
    """Train, test and report."""
    arguments = parse_arguments()
    check_arguments(arguments)
    torch.set_default_dtype(getattr(torch, arguments.precision))
    task = tasks.make_task(arguments)
    if arguments.picture:
        import figure
    trainer = Trainer(task, arguments)
    began_s = time.monotonic()
    trainer.train()
    train_s = time.monotonic() - began_s
    results = trainer.test()
    scores = tasks.scores_of(task, results)
    job = trainer.job
    if job.rank != 0:
        return
    count = job.step_number / trainer.updates
    samples = int(count * arguments.environments * arguments.length)
    ranks = f"{job.size} rank{'s' * (job.size > 1)}"
    print(f"{task.name}: {count:g} rollouts, {samples:,} steps played on {ranks}, {train_s:.1f} s")
    for name, score in scores.items():
        print(f"{name:<16} {score:8.3f}")
    if arguments.output:
        result = {
            "data": task.name,
            "size": f"{trainer.size:,} parameters, {samples / 1e6:.2f} million steps played",
            "scores": scores,
            "seconds": round(train_s, 3),
            "steps": job.step_number,
            "curve": trainer.curve,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        figure.draw(arguments.picture, task, trainer.player, results, trainer.curve)


if __name__ == "__main__":
    main()
