"""What is known of the training: the curve, which checkpoints keep."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from selfplay import Buffer, Player, Round
from tasks import KINDS, Task

import paceline
from paceline.nouns.errors import UsageError

POINTS = 20  # of the curve, besides that before the first step


class Progress:
    """Adds up rounds, and measures the model on held-out tasks from time to time.

    Args:
        job: of `paceline.prepare`.
        state: a dict that the job keeps.
        player: plays with the job's model.
        held_out: tasks that nothing is trained on.
        arguments: the command line.
    """

    def __init__(
        self, job: Any, state: dict[str, Any], player: Player, held_out: Sequence[Task], arguments: argparse.Namespace
    ) -> None:
        self.job = job
        self.player = player
        self.arguments = arguments
        self.state = state
        for name, value in {"seconds": 0.0, "curve": [], "rounds": 0, "proposals": {}, "attempts": {}}.items():
            state.setdefault(name, value)
        self.held_out = player.with_outputs(held_out)
        if not self.held_out:
            fix = "see what executor.py allows; where the kernel can't filter system calls, no Python runs"
            raise UsageError("held-out tasks whose programs run", f"none of {player.language.name} do", fix)
        self.began = time.monotonic() - state["seconds"]

    def begin(self, buffer: Buffer) -> None:
        """Measure the model before the first round."""
        if not self.state["curve"]:
            self._measure(None, buffer)

    def add(self, played: Round, buffer: Buffer) -> None:
        """Add a round, and measure the model where the curve has a point."""
        state = self.state
        state["rounds"] += 1
        for kind, outcomes in played.outcomes.items():
            counts = state["proposals"].setdefault(kind, {})
            for why, times in outcomes.items():
                counts[why] = counts.get(why, 0) + times
        for kind, rate in played.solved.items():
            state["attempts"][kind] = state["attempts"].get(kind, 0.0) + rate
        done, steps = self.job.step_number - self.arguments.warm_up, self.arguments.steps
        if done * POINTS // steps > (done - 1) * POINTS // steps:
            self._measure(played, buffer)

    def _measure(self, played: Round | None, buffer: Buffer) -> None:
        """Add a point to the curve. Collective."""
        state = self.state
        _, are_right = self.player.attempt(self.held_out, "held out", 0.0)
        rates = {}
        for kind in KINDS:
            own = [bool(each) for task, each in zip(self.held_out, are_right, strict=True) if task.kind == kind]
            if own:
                rates[kind] = sum(own) / len(own)
        # What checkpoints keep has to be the same number on every rank.
        now = torch.tensor(time.monotonic() - self.began, dtype=torch.float64)
        state["seconds"] = float(paceline.broadcast(now, 0))
        point = {
            "step": max(self.job.step_number - self.arguments.warm_up, 0),
            "held_out": rates,
            "attempts": {kind: rate / max(state["rounds"], 1) for kind, rate in state["attempts"].items()},
            "proposals": {kind: dict(counts) for kind, counts in state["proposals"].items()},
            "tasks": len(buffer),
        }
        if played is not None:
            point["examples"] = examples_of(played)
            lengths = [len(task.program) for task in played.accepted if task.kind != "induction"]
            point["program_length"] = sum(lengths) / max(len(lengths), 1)
        state["curve"].append(point)
        state.update(rounds=0, proposals={}, attempts={})
        if self.job.rank == 0:
            shown = "  ".join(f"{kind} {rate:.2f}" for kind, rate in rates.items())
            print(f"step {point['step']:4}  held out: {shown}  {len(buffer):,} tasks", flush=True)


def examples_of(played: Round) -> list[dict[str, Any]]:
    """Return of each kind the accepted task with the largest reward of its proposer."""
    found = []
    for kind in KINDS:
        own = [
            (reward, rate, task)
            for reward, rate, task in zip(played.earned, played.rates, played.accepted, strict=True)
            if task.kind == kind
        ]
        if own:
            _, rate, task = max(own, key=lambda each: each[0])
            shown = {"program": task.program, "inputs": [*task.inputs], "outputs": [*task.outputs]}
            found.append({"kind": kind, **shown, "rate": rate})
    return found
