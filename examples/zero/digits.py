"""The tiny language, for a model of characters: operations on a digit, one behind the other.

`x` is the identity, and `xin` is n(i(x)): one more, and then 5 less that. Programs become Python expressions for the
executor. A prompt is filled up on its left, so that all of one kind have one length.

    propose  Pd xi|3>     xin|0;     a program and its input, unlike the one shown; Pa the same, for abduction
             Pi xi>       0,3,1,5;   inputs of the program that is shown
    solve    Sd xi|3>     4;         the output
             Sa xi|4>     3;         an input
             Si 0=1,3=4>  xi;        a program
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from tasks import KINDS, PROPOSE, SOLVE, Row, Task

BASE = 6
OPERATIONS = {"i": f"(x + 1) % {BASE}", "n": f"{BASE - 1} - x", "h": "x // 2"}
DIGITS = [str(digit) for digit in range(BASE)]
CHARACTERS = " ;|>=,xPSdai" + "".join(sorted({*OPERATIONS} - {"i"})) + "".join(DIGITS)
END = CHARACTERS.index(";")
PAIRS = 4  # of an induction
_HELD_OUT = 0.2  # the share of pairs of program and input


class Digits:
    """The language with programs of at most `operations` operations."""

    name = "digits"
    mode = "expression"
    operations = OPERATIONS

    def __init__(self, operations: int) -> None:
        self.most = operations
        self.seeds = [Task(kind, "x", ("0",), ("0",)) for kind in KINDS[:2]]
        self.characters = CHARACTERS
        self.end = END
        self._prompt = {PROPOSE: 2 + 1 + operations + 3, SOLVE: 2 + 1 + operations + 3, "pairs": 2 + 4 * (PAIRS // 2)}
        self._hold_out()

    def _hold_out(self) -> None:
        """Choose tasks for evaluation: the same for every seed of the training."""
        draw = random.Random(0)
        counts = range(1, self.most + 1)
        programs = ["x" + "".join(each) for count in counts for each in itertools.product(OPERATIONS, repeat=count)]
        pairs = [(program, digit) for program in programs for digit in DIGITS]
        held = draw.sample(pairs, round(_HELD_OUT * len(pairs)))
        chosen = [(program, tuple(draw.sample(DIGITS, PAIRS))) for program in draw.choices(programs, k=len(held))]
        self._held_pairs = {*held}
        self._held_sets = {(program, frozenset(digits)) for program, digits in chosen}
        self.held_out = {
            "deduction": [Task("deduction", program, (digit,)) for program, digit in held],
            "abduction": [Task("abduction", program, (digit,)) for program, digit in held],
            "induction": [Task("induction", program, digits) for program, digits in chosen],
        }

    def is_held_out(self, task: Task) -> bool:
        """Return whether a pair of program and input, or a set of inputs for induction, is one of those."""
        if task.kind == "induction":
            return (task.program, frozenset(task.inputs)) in self._held_sets
        return (task.program, task.inputs[0]) in self._held_pairs

    def propose(self, kind: str, references: Sequence[Task]) -> str:
        """Return `Pd xi|3>`, or for induction `Pi xi>`."""
        task = references[0]
        return f"P{kind[0]}{task.program}>" if kind == "induction" else f"P{kind[0]}{task.program}|{task.inputs[0]}>"

    def read_proposal(self, kind: str, text: str, references: Sequence[Task]) -> Task | None:
        """Read `xin|0;`, or for induction `0,3,1,5;`, which are four different digits."""
        if not text.endswith(";"):
            return None
        if kind == "induction":
            inputs = tuple(text[:-1].split(","))
            is_task = len(inputs) == PAIRS == len({*inputs}) and {*inputs} <= {*DIGITS}
            return Task(kind, references[0].program, inputs) if is_task else None
        program, _, digit = text[:-1].partition("|")
        return Task(kind, program, (digit,)) if self.python(program) and digit in DIGITS else None

    def solve(self, task: Task) -> str:
        """Return `Sd xi|3>`, `Sa xi|4>` or `Si 0=1,3=4>`."""
        if task.kind == "induction":
            pairs = zip(task.inputs[: task.shown], task.outputs, strict=False)
            return "Si" + ",".join(f"{digit}={output}" for digit, output in pairs) + ">"
        given = task.inputs if task.kind == "deduction" else task.outputs
        return f"S{task.kind[0]}{task.program}|{given[0]}>"

    def read_solution(self, kind: str, text: str) -> str | None:
        """Read a digit, or for induction a program."""
        if not text.endswith(";"):
            return None
        is_solution = self.python(text[:-1]) is not None if kind == "induction" else text[:-1] in DIGITS
        return text[:-1] if is_solution else None

    def python(self, program: str) -> str | None:
        """Return n(i(x)) for `xin`."""
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
        prompt = self.propose(kind, [Task(kind, self._program(draw), (draw.choice(DIGITS),))])
        answer = f"{self._program(draw)}|{draw.choice(DIGITS)};"
        return Row(PROPOSE, kind, prompt, ",".join(draw.sample(DIGITS, PAIRS)) + ";" if kind == "induction" else answer)

    def _drawn_solution(self, draw: random.Random, kind: str) -> Row:
        program = self._program(draw)
        inputs = tuple(draw.sample(DIGITS, PAIRS))
        outputs = inputs if program == "x" else tuple(draw.choice(DIGITS) for _ in inputs)
        task = Task(kind, program, inputs, outputs)
        if kind == "induction":
            return Row(SOLVE, kind, self.solve(task), f"{program};")
        answer = task.outputs[0] if kind == "deduction" else task.inputs[0]
        return Row(SOLVE, kind, self.solve(task), f"{answer};")

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
            return max(self.most + 4, 2 * PAIRS)
        return self.most + 2 if kind == "induction" else 2

    def padded(self, group: str, length: int) -> int:
        """Return one length for all rows of a group."""
        kind = KINDS[2] if group == "pairs" else KINDS[0]
        role = PROPOSE if group == PROPOSE else SOLVE
        return self._prompt[group] + self.longest(role, kind)

    @property
    def positions(self) -> int:
        """How many characters a prompt and its answer have at most."""
        return max(self._prompt.values()) + max(self.longest(PROPOSE, KINDS[0]), self.most + 2)
