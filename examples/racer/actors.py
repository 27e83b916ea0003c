"""Asynchronous actors: each drives with the parameters that it has, pushes a gradient to the servers, and pulls.

    paceline run -n 2 --plan server=1,mode=async actors.py
    paceline run -n 4 --plan server=2,mode=stale,staleness=4 actors.py --data deepracer

A slow actor holds nobody up: by the time its gradient arrives, others may have changed the parameters that it is of.
With mode=async the servers lower the learning rate of such a gradient; with mode=stale no actor gets further ahead.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import rollouts
import tasks
import torch
from policy import Policy

import paceline
from paceline.nouns.errors import UsageError

TRACE = 0.95


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learn to drive by asynchronous advantage actor-critic (A3C).")
    add = parser.add_argument
    tasks.add_flags(parser)
    add("--steps", type=int, default=300, help="gradients that each actor pushes (default 300)")
    add("--environments", type=int, default=32, help="of each actor (default 32)")
    add("--length", type=int, default=32, help="steps of a rollout in each environment (default 32)")
    add("--lr", type=float, default=2e-3, help="at the beginning (default 2e-3); it falls to 0")
    add("--entropy", type=float, default=0.005, help="weight of the entropy (default 0.005)")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only later."""
    tasks.check_flags(arguments)
    tasks.check_counts(arguments, {"steps": 1, "environments": 1, "length": 2, "width": 1})
    if arguments.task == "cartpole":
        found = "each rollout begins anew, and short ones never see a pole that has stood for long"
        raise UsageError("--task cartpole", found, "take workload.py for it")
    if not arguments.lr > 0:
        raise UsageError(f"--lr {arguments.lr}", "it should be above 0", "leave it out for the usual 2e-3")


def make_workload(task: tasks.Task, arguments: argparse.Namespace) -> paceline.Workload:
    """What is trained; an actor makes its own batches."""
    environments = task.make()
    sizes = environments.observation_size, environments.actions, arguments.width

    def loss(policy: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        logits, values = policy(batch["seen"])
        likelihoods = logits.log_softmax(-1)
        chosen = likelihoods.gather(-1, batch["actions"][:, None])[:, 0]
        entropy = -(likelihoods.exp() * likelihoods).sum(-1)
        errors = (values - batch["returns"]).square()
        total = 0.5 * errors - chosen * batch["advantages"] - arguments.entropy * entropy
        return total.sum(), len(total)

    return paceline.Workload(
        model=lambda: Policy(*sizes),
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=arguments.lr, eps=1e-5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(1 - step / arguments.steps, 0.01)
        ),
        data=None,
        steps=arguments.steps,
        precision=arguments.precision,
        clip_norm=0.5,
        seed=arguments.seed,
    )


def train(job: Any, task: tasks.Task, arguments: argparse.Namespace) -> None:
    """Play, push and pull until this actor has pushed all its gradients."""
    environments = task.make()
    numbers = [job.rank * arguments.environments + number for number in range(arguments.environments)]
    while job.step_number < job.total_steps:
        rollout = rollouts.play(
            job.model,
            environments,
            numbers,
            key=(arguments.seed, job.step_number),
            length=rollouts.Length(arguments.length, task.discount, TRACE),
        )
        columns = {
            "seen": rollout.seen,
            "actions": rollout.actions,
            "returns": rollout.advantages + rollout.values,
            "advantages": rollout.advantages,
        }
        job.step({name: column.flatten(0, 1) for name, column in columns.items()})


def main() -> None:
    """Train, test and report."""
    arguments = parse_arguments()
    check_arguments(arguments)
    task = tasks.make_task(arguments)
    job = paceline.distribute(make_workload(task, arguments))
    began_s = time.monotonic()
    train(job, task, arguments)
    train_s = time.monotonic() - began_s
    # On every rank: where each has a part of the model, all of them have to call it.
    results = tasks.test(job.model, task, range(task.episodes), job.device)
    if job.rank != 0:
        return
    scores = tasks.scores_of(task, dict(enumerate(results)))
    actors = f"{job.size} actor{'s' * (job.size > 1)}"
    print(f"{task.name}: {job.step_number} steps of each of {actors}, {train_s:.1f} s")
    for name, score in scores.items():
        print(f"{name:<16} {score:8.3f}")
    if arguments.output:
        result = {"data": task.name, "scores": scores, "seconds": round(train_s, 3), "steps": job.step_number}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
