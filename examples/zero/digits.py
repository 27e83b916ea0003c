"""The tiny language, for a model of characters: operations on two digits, one behind the other.

`x` is the identity, and `xsn` is n(s(x)): the digits are swapped, and then each is one more. Programs become Python
expressions for the executor. A prompt is filled up on its left, so that all of one kind have one length.

    propose  Pd xs|03>       xsn|20;        a program and its input, unlike the one shown; Pa the same, for abduction
             Pi xs>          03,12,20,31;   inputs of the program that is shown
    solve    Sd xs|03>       30;            the output
             Sa xs|30>       03;            an input
             Si 03=30,12=21> xs;            a program
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from tasks import KINDS, PROPOSE, SOLVE, Row, Task

DIGITS = "0123"
OPERATIONS = {
    "s": "x[1] + x[0]",
    "n": "''.join(str((int(c) + 1) % 4) for c in x)",
    "d": "x[0] + x[0]",
}
VALUES = [first + second for first in DIGITS for second in DIGITS]
CHARACTERS = " ;|>=,xPSai" + "".join(OPERATIONS) + DIGITS
END = CHARACTERS.index(";")
PAIRS = 4  # of an induction
_HELD_OUT = 0.2  # the share of pairs of program and input
_EVALUATED = 60  # tasks of each kind


class Digits:
    """The language with programs of at most `operations` operations."""

    name = "two digits"
    mode = "expression"
    operations = OPERATIONS

    def __init__(self, operations: int) -> None:
        self.most = operations
        self.seeds = [Task(kind, "x", (quoted("03"),)) for kind in KINDS[:2]]
        self.characters = CHARACTERS
        self.end = END
        self._prompt = {PROPOSE: 2 + 1 + operations + 4, SOLVE: 2 + 1 + operations + 4, "pairs": 2 + 6 * (PAIRS // 2)}
        self._hold_out()

    def _hold_out(self) -> None:
        """Choose tasks for evaluation: the same for every seed of the training."""
        draw = random.Random(0)
        counts = range(1, self.most + 1)
        programs = ["x" + "".join(each) for count in counts for each in itertools.product(OPERATIONS, repeat=count)]
        pairs = [(program, value) for program in programs for value in VALUES]
        held = draw.sample(pairs, round(_HELD_OUT * len(pairs)))
        self._held_pairs = {(program, quoted(value)) for program, value in held}
        chosen = [(program, draw.sample(VALUES, PAIRS)) for program in draw.choices(programs, k=_EVALUATED)]
        sets = [(program, tuple(map(quoted, values))) for program, values in chosen]
        self._held_sets = {(program, frozenset(values)) for program, values in sets}
        evaluated = [(program, (quoted(value),)) for program, value in held[:_EVALUATED]]
        self.held_out = {
            kind: [Task(kind, program, values) for program, values in (sets if kind == "induction" else evaluated)]
            for kind in KINDS
        }

    def is_held_out(self, task: Task) -> bool:
        """Return whether a pair of program and input, or a set of inputs for induction, is one of those."""
        if task.kind == "induction":
            return (task.program, frozenset(task.inputs)) in self._held_sets
        return (task.program, task.inputs[0]) in self._held_pairs

    def propose(self, kind: str, references: Sequence[Task]) -> str:
        """Return `Pd xs|03>`, or for induction `Pi xs>`."""
        task = references[0]
        if kind == "induction":
            return f"P{kind[0]}{task.program}>"
        return f"P{kind[0]}{task.program}|{bare(task.inputs[0])}>"

    def read_proposal(self, kind: str, text: str, references: Sequence[Task]) -> Task | None:
        """Read `xsn|20;`, or for induction `03,12,20,31;`, which are four different values."""
        if not text.endswith(";"):
            return None
        if kind == "induction":
            inputs = text[:-1].split(",")
            is_task = len(inputs) == PAIRS == len({*inputs}) and {*inputs} <= {*VALUES}
            return Task(kind, references[0].program, tuple(map(quoted, inputs))) if is_task else None
        program, _, value = text[:-1].partition("|")
        return Task(kind, program, (quoted(value),)) if self.python(program) and value in VALUES else None

    def solve(self, task: Task) -> str:
        """Return `Sd xs|03>`, `Sa xs|30>` or `Si 03=30,12=21>`."""
        if task.kind == "induction":
            pairs = zip(task.inputs[: task.shown], task.outputs, strict=False)
            return "Si" + ",".join(f"{bare(value)}={bare(output)}" for value, output in pairs) + ">"
        given = task.inputs if task.kind == "deduction" else task.outputs
        return f"S{task.kind[0]}{task.program}|{bare(given[0])}>"

    def read_solution(self, kind: str, text: str) -> str | None:
        """Read a value, as Python writes it, or for induction a program."""
        if not text.endswith(";"):
            return None
        if kind == "induction":
            return None if self.python(text[:-1]) is None else text[:-1]
        return quoted(text[:-1]) if text[:-1] in VALUES else None

    def python(self, program: str) -> str | None:
        """Return n(s(x)) for `xsn`."""
        if program[:1] != "x" or len(program) > 1 + self.most or not {*program[1:]} <= {*OPERATIONS}:
            return None
        expression = "x"
        for operation in program[1:]:
            expression = f"{operation}({expression})"
        return expression

    def warm_up(self, draw: random.Random, count: int) -> list[Row]:
        """Return rows with the form alone: what stands in them is drawn, and right only for the identity."""
        rows = []
        for number in range(count):
            kind = KINDS[number % 3]
            rows.append(self._drawn_proposal(draw, kind))
            rows.append(self._drawn_solution(draw, kind))
        return rows

    def _drawn_proposal(self, draw: random.Random, kind: str) -> Row:
        prompt = self.propose(kind, [Task(kind, self._program(draw), (quoted(draw.choice(VALUES)),))])
        if kind == "induction":
            return Row(PROPOSE, kind, prompt, ",".join(draw.sample(VALUES, PAIRS)) + ";")
        return Row(PROPOSE, kind, prompt, f"{self._program(draw)}|{draw.choice(VALUES)};")

    def _drawn_solution(self, draw: random.Random, kind: str) -> Row:
        program = self._program(draw)
        inputs = draw.sample(VALUES, PAIRS)
        outputs = inputs if program == "x" else [draw.choice(VALUES) for _ in inputs]
        task = Task(kind, program, tuple(map(quoted, inputs)), tuple(map(quoted, outputs)))
        if kind == "induction":
            return Row(SOLVE, kind, self.solve(task), f"{program};")
        return Row(SOLVE, kind, self.solve(task), f"{outputs[0] if kind == 'deduction' else inputs[0]};")

    def _program(self, draw: random.Random) -> str:
        return "x" + "".join(draw.choice([*OPERATIONS]) for _ in range(draw.randint(0, self.most)))

    def encode(self, row: Row) -> tuple[list[int], list[int]]:
        """Return the characters' numbers; the prompt is filled up on its left."""
        length = self._prompt["pairs" if self.group(row.role, row.kind) == "pairs" else row.role]
        prompt = [CHARACTERS.index(each) for each in row.prompt.rjust(length)]
        return prompt, [*row.tokens] or [CHARACTERS.index(each) for each in row.answer]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters."""
        return "".join(CHARACTERS[token] for token in tokens)

    def group(self, role: str, kind: str) -> str:
        """Return what is computed together."""
        return role if role == PROPOSE or kind != "induction" else "pairs"

    def longest(self, role: str, kind: str) -> int:
        """Return how many characters an answer has at most."""
        if role == PROPOSE:
            return max(self.most + 5, 3 * PAIRS)
        return self.most + 2 if kind == "induction" else 3

    def padded(self, group: str, length: int) -> int:
        """Return one length for all rows of a group."""
        kind = KINDS[2] if group == "pairs" else KINDS[0]
        role = PROPOSE if group == PROPOSE else SOLVE
        return self._prompt[group] + self.longest(role, kind)

    @property
    def positions(self) -> int:
        """How many characters a prompt and its answer have at most."""
        return max(self._prompt.values()) + max(self.longest(PROPOSE, KINDS[0]), self.most + 2)


def quoted(value: str) -> str:
    """Return a value as Python writes it, which it is everywhere but in the model's text."""
    return f"'{value}'"


def bare(text: str) -> str:
    """Return the value in what `quoted` returned."""
    return text.strip("'")
