"""Tasks and their three kinds, as Absolute Zero has them, and what is played with: the interface of a language.

A task is a program with inputs and outputs. In **deduction** the output is asked for, in **abduction** an input that
gives the output, in **induction** a program that agrees with pairs of input and output; half of these are shown.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from executor import Run

KINDS = ("deduction", "abduction", "induction")
PROPOSE, SOLVE = "propose", "solve"


@dataclass(frozen=True)
class Task:
    """A program with what goes in and what comes out, each as the language writes it.

    Args:
        kind: one of KINDS.
        program: as the language writes it.
        inputs: one, or for induction several, of which the first half is shown.
        outputs: of each; empty as long as the program has not run.
        message: what the proposer says of the program, for induction in a language that has words.
    """

    kind: str
    program: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    message: str = ""

    @property
    def shown(self) -> int:
        """How many pairs the solver of an induction sees."""
        return (len(self.inputs) + 1) // 2


@dataclass(frozen=True)
class Row:
    """A prompt and its answer, as text; and the answer's tokens, where the model has made them."""

    role: str
    kind: str
    prompt: str
    answer: str
    tokens: tuple[int, ...] = ()


class Language(Protocol):
    """What the self-play needs to know of a language."""

    name: str
    mode: str  # of the executor
    operations: dict[str, str]
    seeds: list[Task]
    held_out: dict[str, list[Task]]  # by kind; nothing is trained on these
    end: int | None  # the token that ends an answer

    def propose(self, kind: str, references: Sequence[Task]) -> str:
        """Return the prompt that asks for a task like, and unlike, others; for induction, for inputs of a program."""

    def read_proposal(self, kind: str, text: str, references: Sequence[Task]) -> Task | None:
        """Return the task in an answer, without outputs; None where there is none."""

    def solve(self, task: Task) -> str:
        """Return the prompt that asks for the solution of a task."""

    def read_solution(self, kind: str, text: str) -> str | None:
        """Return the solution in an answer; None where there is none."""

    def python(self, program: str) -> str | None:
        """Return a program as the executor runs it; None for what is none."""

    def is_held_out(self, task: Task) -> bool:
        """Return whether a task is one of those that nothing is trained on."""

    def warm_up(self, draw: random.Random, count: int) -> list[Row]:
        """Return rows that show the form of proposals and solutions; none where the model knows it."""

    def encode(self, row: Row) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt and of its answer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the answer that these tokens are."""

    def group(self, role: str, kind: str) -> str:
        """Return what rows are computed together: those of like length."""

    def longest(self, role: str, kind: str) -> int:
        """Return how many tokens an answer may have."""

    def padded(self, group: str, length: int) -> int:
        """Return to which length rows of a group are filled up whose longest is `length`."""


def run_of(language: Language, task: Task) -> Run | None:
    """Return what has to run for a task's outputs; None for a program that is none."""
    program = language.python(task.program)
    return None if program is None else Run(program, task.inputs)


def check_of(language: Language, task: Task, solution: str) -> Run | None:
    """Return what has to run to see whether a solution is right; None for one that can't be."""
    hidden = slice(task.shown, None)
    program = language.python(solution if task.kind == "induction" else task.program)
    if program is None:
        return None
    if task.kind == "deduction":
        return Run(program, task.inputs, (solution,))
    if task.kind == "abduction":
        return Run(program, (solution,), task.outputs)
    return Run(program, task.inputs[hidden], task.outputs[hidden])
