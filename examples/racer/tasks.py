"""What is learned: the environments to learn in and those to be tested in, and how well a policy does there."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import car
import cartpole
import numpy as np
import reward
import torch
import tracks
from rollouts import Environments

from paceline.nouns.errors import UsageError
from paceline.nouns.picture_file import check_picture

TASKS = ("racer", "cartpole")
CARTPOLE_EPISODES = 100  # as gymnasium counts: solved with a mean of 475 over 100 episodes
MOST_LAP_STEPS = 1500  # 100 s
TEST_SEED = 1 << 20


@dataclass(frozen=True)
class Task:
    """Environments and their tests.

    Args:
        name: of what is learned, and on what.
        make: makes environments to learn in.
        make_tests: makes environments for a part of the test episodes.
        episodes: of the test.
        discount: of a reward that is a step later.
        groups: names of parts of the test, with the number of the first episode after each.
        digest: of what it is learned on.
    """

    name: str
    make: Callable[[], Environments]
    make_tests: Callable[[], Environments]
    episodes: int
    discount: float
    groups: dict[str, int]
    digest: str
    tracks: Sequence[tracks.Track] = ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what is learned."""
    add = parser.add_argument
    add("--task", choices=TASKS, default="racer", help="drive a car, or hold gymnasium's pole upright (cartpole)")
    add("--data", type=Path, metavar="DIR", help="folder with DeepRacer's tracks; else they are made up")
    add("--reward", type=Path, metavar="FILE", help="Python file with a DeepRacer reward_function(params)")
    add("--width", type=int, default=64, help="of the hidden layers (default 64)")
    add("--precision", default="float32", choices=("float32", "float64"))
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise UsageError for a flag that makes no sense."""
    if arguments.task == "cartpole":
        for name in ("data", "reward", "picture"):
            if getattr(arguments, name, None) is not None:
                fix = f"leave --{name} out, or --task cartpole"
                raise UsageError(f"--{name} with --task cartpole", f"--{name} is about the tracks", fix)
    check_picture(getattr(arguments, "picture", None))
    if arguments.seed < 0:
        raise UsageError(f"--seed {arguments.seed}", "it should be 0 or more", "write --seed 0")
    for name in ("output", "picture"):
        path = getattr(arguments, name, None)
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"--{name} {path}", f"there is no folder {path.parent}", "make the folder first")


def check_counts(arguments: argparse.Namespace, least: dict[str, int]) -> None:
    """Raise UsageError for a number that is too small."""
    for name, lowest in least.items():
        value = getattr(arguments, name)
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value < lowest:
            raise UsageError(f"{flag} {value}", f"it should be at least {lowest}", f"write {flag} {lowest} or more")


def make_task(arguments: argparse.Namespace) -> Task:
    """Read what is to be learned.

    Raises:
        DataError: there are no tracks in `--data`.
        UsageError: gymnasium is missing, or the reward's file has no reward_function.
    """
    seed = arguments.seed
    if arguments.task == "cartpole":
        cartpole.Poles(seed)  # it is refused here where gymnasium is missing
        return Task(
            name="CartPole-v1",
            make=lambda: cartpole.Poles(seed),
            make_tests=lambda: cartpole.Poles(TEST_SEED),
            episodes=CARTPOLE_EPISODES,
            discount=0.99,
            groups={"return": CARTPOLE_EPISODES},
            digest="CartPole-v1",
        )
    rewards = reward.reward_function if arguments.reward is None else read_reward(arguments.reward)
    name, train, held_out = tracks.read_tracks(arguments.data)
    everything = [*train, *held_out]
    return Task(
        name=f"{name}, {len(train)} to learn on and {len(held_out)} held out",
        make=lambda: car.Cars(train, rewards, seed),
        make_tests=lambda: car.Cars(everything, rewards, seed, is_lap=True, most_steps=MOST_LAP_STEPS),
        episodes=len(everything),
        discount=0.97,
        groups={"learned": len(train), "held out": len(everything)},
        digest=tracks.digest_of(train),
        tracks=everything,
    )


def read_reward(path: Path) -> car.Reward:
    """Return the reward function of a file, and try it.

    Raises:
        UsageError: there is no such file or function, or it fails on a car at a beginning.
    """
    fix = "write a file with `def reward_function(params): return 1.0`, as DeepRacer's documentation describes it"
    if not path.is_file():
        raise UsageError(f"--reward {path}", "there is no such file", fix)
    spec = importlib.util.spec_from_file_location("own_reward", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = module.reward_function
        cars = car.Cars([tracks.generate(0)], function, 0)
        cars.reset([0])
        _, rewards, _, _ = cars.step(np.array([0]))
    except Exception as error:
        raise UsageError(f"--reward {path}", f"it raises {type(error).__name__}: {error}", fix) from error
    if not np.isfinite(rewards).all():
        raise UsageError(f"--reward {path}", f"its reward is {rewards[0]}", "return a finite number")
    return function


@torch.no_grad()
def test(policy: torch.nn.Module, task: Task, episodes: Sequence[int], device: torch.device) -> list[dict[str, Any]]:
    """Play test episodes, with the likeliest action at each step.

    Returns:
        For each: `return`, `steps`, and of a car `progress` in percent and `path`, places in metres.
    """
    environments = task.make_tests()
    dtype = next(policy.parameters()).dtype
    seen = environments.reset(episodes)
    results: list[dict[str, Any]] = [{"return": 0.0, "steps": 0, "progress": 0.0, "path": []} for _ in episodes]
    playing = np.ones(len(episodes), bool)
    while playing.any():
        actions = policy(torch.from_numpy(seen).to(device, dtype))[0].argmax(1).cpu().numpy()
        seen, rewards, ended, cut = environments.step(actions)
        for which in np.flatnonzero(playing):
            results[which]["return"] += float(rewards[which])
            results[which]["steps"] += 1
            if isinstance(environments, car.Cars):
                results[which]["progress"] = float(environments.progress[which])
                results[which]["path"].append((*environments.place[which].tolist(), float(environments.speed[which])))
        playing &= ~(ended | cut)
        for which in np.flatnonzero(ended | cut):
            environments.begin(which, episodes[which])  # it goes on, and is not counted
        if (ended | cut).any():
            seen = environments.look()
    return results


def scores_of(task: Task, results: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Return the scores of test episodes, by their numbers."""
    if not task.tracks:
        returns = [result["return"] for result in results.values()]
        return {"mean return": float(np.mean(returns)), "lowest return": float(np.min(returns))}
    scores = {}
    begin = 0
    for name, end in task.groups.items():
        laps = [results[number]["progress"] >= 100 for number in range(begin, end)]
        scores[f"laps, {name}"] = float(np.mean(laps))
        begin = end
    lapped = [number for number, result in results.items() if result["progress"] >= 100]
    metres = sum(task.tracks[number].length_m for number in lapped)
    seconds = sum(results[number]["steps"] for number in lapped) * car.STEP_S
    scores["metres a second"] = metres / seconds if lapped else 0.0
    return scores
