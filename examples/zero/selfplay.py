"""One round of self-play: propose, run, solve, check, reward; and the baselines of TRR++.

Every rank knows all prompts, answers and rewards, and draws the same random numbers, which depend on the seed and the
round alone. What ranks share out is the work: `job.generate` the rows, and `each_once` the programs.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from executor import Answer, Executor, Run
from tasks import KINDS, PROPOSE, SOLVE, Language, Row, Task, check_of, run_of

NO_FORM, WRONG, RIGHT = -1.0, -0.5, 1.0  # Absolute Zero's rewards of an answer
_EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    """How much a round has.

    Args:
        proposals: of each kind.
        attempts: at each task.
        references: tasks that the proposer is shown.
    """

    proposals: int
    attempts: int
    references: int = 1


@dataclass
class Round:
    """What a round gave: rows with their rewards and advantages, and what to report."""

    rows: list[Row] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    accepted: list[Task] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # of the accepted: the share of attempts that solved it
    earned: list[float] = field(default_factory=list)  # of the accepted: the proposer's reward
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)  # of proposals, by kind and what became of them
    solved: dict[str, float] = field(default_factory=dict)  # by kind: of all attempts


class Buffer:
    """Tasks that were accepted, the same on every rank; `state` is what checkpoints keep.

    Args:
        state: a dict of lists, changed in place.
        seeds: what an empty buffer begins with.
        most: tasks of a kind; the oldest are dropped.
    """

    def __init__(self, state: dict[str, list[list[Any]]], seeds: Sequence[Task], most: int = 10_000) -> None:
        self.state = state
        self.most = most
        for kind in KINDS:
            state.setdefault(kind, [])
        self.known = {_key(task) for kind in KINDS for task in self.tasks(kind)}
        if not self.known:
            self.add(seeds)

    def tasks(self, kind: str) -> list[Task]:
        """Return all tasks of a kind, the oldest first."""
        return [_task(kind, each) for each in self.state[kind]]

    def __len__(self) -> int:
        return sum(map(len, self.state.values()))

    def add(self, tasks: Sequence[Task]) -> None:
        """Take over the tasks that are not known yet."""
        for task in tasks:
            if _key(task) in self.known:
                continue
            self.known.add(_key(task))
            kept = self.state[task.kind]
            kept.append([task.program, [*task.inputs], [*task.outputs], task.message])
            if len(kept) > self.most:
                self.known.discard(_key(_task(task.kind, kept.pop(0))))

    def choose(self, kinds: Sequence[str], count: int, draw: random.Random) -> list[Task]:
        """Return some tasks of these kinds, drawn; fewer where there are fewer."""
        places = [(kind, number) for kind in kinds for number in range(len(self.state[kind]))]
        return [_task(kind, self.state[kind][number]) for kind, number in draw.sample(places, min(count, len(places)))]


def _task(kind: str, each: list[Any]) -> Task:
    program, inputs, outputs, message = each
    return Task(kind, program, tuple(inputs), tuple(outputs), message)


def _key(task: Task) -> tuple[str, str, tuple[str, ...]]:
    return (task.kind, task.program, task.inputs)


class Player:
    """Plays rounds with the job's model.

    Args:
        job: of `paceline.prepare`.
        language: what tasks are written in.
        executor: runs programs.
        seed: of everything that is drawn.
    """

    def __init__(self, job: Any, language: Language, executor: Executor, seed: int) -> None:
        self.job = job
        self.language = language
        self.executor = executor
        self.seed = seed

    def play(self, number: int, buffer: Buffer, sizes: Sizes) -> Round:
        """Play round `number`. The buffer stays as it is. Collective."""
        draw = random.Random(f"{self.seed}/{number}")
        result = Round()
        asked = [(kind, self._references(kind, buffer, sizes, draw)) for kind in KINDS for _ in range(sizes.proposals)]
        prompts = [(PROPOSE, kind, self.language.propose(kind, references)) for kind, references in asked]
        proposed = self.generate(prompts, f"{number}/propose", 1.0)
        tasks, refused = self._judge(asked, proposed, result)
        chosen = self._with_earlier(tasks, buffer, sizes, draw)
        attempts = [(place, task) for place, task in chosen for _ in range(sizes.attempts)]
        solutions, are_right = self.attempt([task for _, task in attempts], f"{number}/solve", 1.0)
        by_place: dict[int, list[bool]] = {}
        by_kind: dict[str, list[bool]] = {}
        for (place, task), is_right in zip(attempts, are_right, strict=True):
            by_kind.setdefault(task.kind, []).append(bool(is_right))
            if place is not None:
                by_place.setdefault(place, []).append(bool(is_right))
        result.solved = {kind: sum(each) / len(each) for kind, each in by_kind.items()}
        result.rates = [sum(by_place[place]) / len(by_place[place]) for place in sorted(by_place)]
        self._reward_proposals(proposed, tasks, refused, result)
        result.rows += solutions
        result.rewards += [NO_FORM if each is None else RIGHT if each else WRONG for each in are_right]
        result.advantages = advantages_of(result.rows, result.rewards)
        return result

    def _references(self, kind: str, buffer: Buffer, sizes: Sizes, draw: random.Random) -> list[Task]:
        if kind == "induction":  # inputs are asked for, of a program that there is
            return buffer.choose(KINDS[:2], 1, draw)
        return buffer.choose(KINDS[:2], sizes.references, draw)

    def _judge(
        self, asked: Sequence[tuple[str, list[Task]]], proposed: Sequence[Row], result: Round
    ) -> tuple[list[Task | None], list[float]]:
        """Return each proposal as a task with outputs, or None, and the reward of those that are none."""
        read = [
            self.language.read_proposal(kind, row.answer, references)
            for (kind, references), row in zip(asked, proposed, strict=True)
        ]
        answers = self.each_once([None if task is None else run_of(self.language, task) for task in read])
        result.outcomes = {kind: {} for kind in KINDS}
        keys = set()
        found: list[Task | None] = []
        rewards = []
        for (kind, _), task, answer in zip(asked, read, answers, strict=True):
            if task is None or answer is None:
                why = "no form"
            elif answer.error is not None:
                why = answer.error
            elif self.language.is_held_out(task):
                why = "held out"
            elif _key(task) in keys:
                why = "twice"
            else:
                why = "accepted"
                keys.add(_key(task))
            # By what was found, and not by the name: an error's comes from the executor.
            is_accepted = task is not None and answer is not None and answer.error is None and why == "accepted"
            found.append(replace(task, outputs=answer.outputs) if is_accepted else None)  # type: ignore[type-var,union-attr]
            rewards.append(NO_FORM if why == "no form" else WRONG)
            counts = result.outcomes[kind]
            counts[why] = counts.get(why, 0) + 1
        return found, rewards

    def _with_earlier(
        self, tasks: Sequence[Task | None], buffer: Buffer, sizes: Sizes, draw: random.Random
    ) -> list[tuple[int | None, Task]]:
        """Return accepted tasks with their places, and of each kind so many earlier ones that all rounds are alike."""
        chosen: list[tuple[int | None, Task]] = []
        for kind in KINDS:
            new = [(place, task) for place, task in enumerate(tasks) if task is not None and task.kind == kind]
            chosen += new
            missing = sizes.proposals - len(new)
            earlier = buffer.choose([kind], missing, draw)
            if earlier:
                chosen += [(None, earlier[at % len(earlier)]) for at in range(missing)]
        return chosen

    def attempt(self, tasks: Sequence[Task], seed: str, temperature: float) -> tuple[list[Row], list[bool | None]]:
        """Return the model's answer to each task, and whether it is right; None: it has no form. Collective."""
        rows = self.generate([(SOLVE, task.kind, self.language.solve(task)) for task in tasks], seed, temperature)
        runs: list[Run | None] = []
        for task, row in zip(tasks, rows, strict=True):
            solution = self.language.read_solution(task.kind, row.answer)
            runs.append(None if solution is None else check_of(self.language, task, solution))
        answers = self.each_once(runs)
        return rows, [None if answer is None else answer.is_right for answer in answers]

    def _reward_proposals(
        self, proposed: Sequence[Row], tasks: Sequence[Task | None], refused: Sequence[float], result: Round
    ) -> None:
        """Add the proposals' rows; `result.rates` has those of accepted tasks, in their order."""
        rates = iter(result.rates)
        for row, task, reward in zip(proposed, tasks, refused, strict=True):
            earned = reward
            if task is not None:
                earned = learnability(next(rates))
                result.accepted.append(task)
                result.earned.append(earned)
            result.rows.append(row)
            result.rewards.append(earned)

    def with_outputs(self, tasks: Sequence[Task]) -> list[Task]:
        """Return tasks with the outputs that the executor finds, without those that have none. Collective."""
        answers = self.each_once([run_of(self.language, task) for task in tasks])
        return [
            replace(task, outputs=answer.outputs)
            for task, answer in zip(tasks, answers, strict=True)
            if answer is not None and answer.error is None
        ]

    def generate(self, prompts: Sequence[tuple[str, str, str]], seed: str, temperature: float) -> list[Row]:
        """Return the model's answer to each prompt (role, kind, text), the same on every rank. Collective."""
        answers: dict[int, Row] = {}
        groups: dict[str, list[int]] = {}
        for place, (role, kind, _) in enumerate(prompts):
            groups.setdefault(self.language.group(role, kind), []).append(place)
        for name, places in groups.items():
            encoded = [self.language.encode(Row(*prompts[place], ""))[0] for place in places]
            longest = max(self.language.longest(*prompts[place][:2]) for place in places)
            drawn = {"seed": _number(f"{self.seed}/{seed}/{name}")} if temperature else {}
            found = self.job.generate(
                encoded, max_new_tokens=longest, temperature=temperature, end=self.language.end, **drawn
            )
            for place, prompt, row in zip(places, encoded, found, strict=True):
                tokens = row.tolist()[len(prompt) :]
                answers[place] = Row(*prompts[place], self.language.decode(tokens), tuple(tokens))
        return [answers[place] for place in range(len(prompts))]

    def each_once(self, runs: Sequence[Run | None]) -> list[Answer | None]:
        """Return what came of each run, on every rank; each runs on one rank. Collective."""
        different = list(dict.fromkeys(run for run in runs if run is not None))
        part, parts = self.job.data_rank, self.job.data_size
        own = range(part, len(different), parts)
        answers = self.executor.run([different[at] for at in own])
        lines = [
            [at, answer.outputs, answer.equal, answer.error, answer.message]
            for at, answer in zip(own, answers, strict=True)
        ]
        found: dict[Run, Answer] = {}
        for at, outputs, equal, error, message in gather(self.job, lines):
            found[different[at]] = Answer(tuple(outputs), tuple(equal), error, message)
        return [None if run is None else found[run] for run in runs]


def gather(job: Any, values: Sequence[Any]) -> list[Any]:
    """Return the values of all ranks that have different samples, by way of JSON. Collective."""
    text = "".join(json.dumps(value) + "\n" for value in values)
    sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8)
    received = job.all_gather(sent.to(job.device)).cpu().numpy().tobytes().decode()
    return [json.loads(line) for line in received.splitlines()]


def learnability(rate: float) -> float:
    """Return the proposer's reward for a task: 1 - the mean solve rate, and 0 where it is always or never solved."""
    return 0.0 if rate in (0.0, 1.0) else 1.0 - rate


def advantages_of(rows: Sequence[Row], rewards: Sequence[float]) -> list[float]:
    """Return rewards less their mean, divided by their standard deviation, of each role and kind (TRR++).

    These are six baselines, each over the rows of all ranks.
    """
    by_group: dict[tuple[str, str], list[float]] = {}
    for row, reward in zip(rows, rewards, strict=True):
        by_group.setdefault((row.role, row.kind), []).append(reward)
    baselines = {}
    for group, values in by_group.items():
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        baselines[group] = mean, deviation
    found = []
    for row, reward in zip(rows, rewards, strict=True):
        mean, deviation = baselines[row.role, row.kind]
        found.append((reward - mean) / (deviation + _EPSILON) if deviation > _EPSILON else 0.0)
    return found


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
