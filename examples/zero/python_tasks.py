"""Python as the language, for a causal language model of transformers in a folder; and Absolute Zero's files of seeds.

Prompts say what is wanted, and answers are in fenced blocks: ```python, ```input, ```output and ```message. Nothing is
downloaded, and no code of the folder is run.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tasks import KINDS, Row, Task

from paceline.nouns.errors import DataError, PacelineError, UsageError

INPUTS = 6  # that are asked for, of a program; four are enough
LEAST_INPUTS = 4
_HELD_OUT = 32  # the last rows of each file
_LONGEST = 2000  # characters of a program
_PADDED_TO = 32
_WHERE = (
    "take a folder of github.com/LeapLabTHU/Absolute-Zero-Reasoner's data, with NAME_seed_io.jsonl and "
    "NAME_code_f_seed_io.jsonl, plain or .xz"
)
_BLOCK = re.compile(r"```(python|input|output|message)[ \t]*\n(.*?)\n?```", re.DOTALL)
IDENTITY = "def f(a):\n    return a"
# Held out where there is no --data.
_KNOWN = (
    ("def f(a):\n    return a[::-1]", ("'abc'", "[1, 2]", "'xy'", "(3, 4, 5)")),
    ("def f(a):\n    return a + 1", ("1", "-1", "7", "0")),
    ("def f(a, b):\n    return a * b", ("2, 3", "4, 4", "'a', 3", "0, 9")),
    ("def f(a):\n    return sorted(set(a))", ("[3, 1, 3]", "'hello'", "[]", "[2, 2]")),
    ("def f(a):\n    return sum(x for x in a if x % 2)", ("[1, 2, 3]", "[4]", "[]", "[9, 9]")),
    ("def f(a):\n    return {k: len(k) for k in a.split()}", ("'a bc'", "''", "'one two'", "'x x'")),
)


class Python:
    """The language of functions f.

    Args:
        tokenizer: of the model.
        size: the most tokens of a prompt with its answer, and of an answer.
        seeds: tasks to begin with.
        held_out: tasks whose programs are not trained on.
        name: for the report.
    """

    mode = "python"

    def __init__(
        self, tokenizer: Any, size: tuple[int, int], seeds: Sequence[Task], held_out: Sequence[Task], name: str
    ) -> None:
        self.tokenizer = tokenizer
        self.operations: dict[str, str] = {}
        positions, self.max_tokens = size
        self.prompt_tokens = positions - self.max_tokens
        self.name = name
        self.held_out = {kind: [task for task in held_out if task.kind == kind] for kind in KINDS}
        self._held_programs = {task.program.strip() for task in held_out}
        self.seeds = [task for task in seeds if not self.is_held_out(task)]
        self.end: int | None = tokenizer.eos_token_id

    def is_held_out(self, task: Task) -> bool:
        """Return whether a program is that of a held-out task."""
        return task.program.strip() in self._held_programs

    def propose(self, kind: str, references: Sequence[Task]) -> str:
        """Return the prompt that asks for a program and its input, or for inputs of a program."""
        if kind == "induction":
            return (
                f"Here is a Python function:\n{_block('python', references[0].program)}"
                f"Give {INPUTS} different inputs, each in a block ```input, from which someone who sees what f returns "
                "could work out f, and a hint in a block ```message.\n"
            )
        shown = "".join(_block("python", task.program) + _block("input", task.inputs[0]) for task in references)
        asked = "what f returns is to be predicted" if kind == "deduction" else "an input is to be found for its output"
        return (
            f"Here are Python functions with an input:\n{shown}Write another function f, unlike these, in a block "
            "```python, and the arguments of a call in a block ```input. It should always return the same, and be "
            f"hard: {asked}.\n"
        )

    def read_proposal(self, kind: str, text: str, references: Sequence[Task]) -> Task | None:
        """Read the blocks of an answer."""
        blocks = _blocks(text)
        if kind == "induction":
            inputs = tuple(dict.fromkeys(blocks["input"]))[:INPUTS]
            message = (blocks["message"] or [""])[0][:_LONGEST]
            return Task(kind, references[0].program, inputs, (), message) if len(inputs) >= LEAST_INPUTS else None
        if len(blocks["python"]) != 1 or len(blocks["input"]) != 1:
            return None
        program = blocks["python"][0]
        return Task(kind, program, (blocks["input"][0],)) if self.python(program) else None

    def solve(self, task: Task) -> str:
        """Return the prompt that asks for an output, an input or a function."""
        if task.kind == "induction":
            pairs = zip(task.inputs[: task.shown], task.outputs, strict=False)
            shown = "".join(_block("input", given) + _block("output", output) for given, output in pairs)
            hint = f"A hint: {task.message}\n" if task.message else ""
            return f"A Python function f returned these outputs:\n{shown}{hint}Write f in a block ```python.\n"
        program = _block("python", task.program)
        if task.kind == "deduction":
            given = _block("input", task.inputs[0])
            return f"{program}{given}What does f return for this input? Write it in a block ```output.\n"
        given = _block("output", task.outputs[0])
        return f"{program}{given}Write an input for which f returns this output in a block ```input.\n"

    def read_solution(self, kind: str, text: str) -> str | None:
        """Read the last block of the kind that was asked for."""
        name = {"deduction": "output", "abduction": "input", "induction": "python"}[kind]
        found = _blocks(text)[name]
        if not found or not found[-1].strip():
            return None
        return found[-1] if kind != "induction" or self.python(found[-1]) else None

    def python(self, program: str) -> str | None:
        """Return the program itself; whether it may run, the executor says."""
        return program if re.search(r"^def f\(", program, re.MULTILINE) and len(program) <= _LONGEST else None

    def warm_up(self, draw: random.Random, count: int) -> list[Row]:
        """Return answers of the seeds, whose form the model should take over."""
        rows = []
        for number in range(count):
            own = [task for task in self.seeds if task.kind == KINDS[number % 3]]
            if not own:
                continue
            task = draw.choice(own)
            name, answer = {
                "deduction": ("output", task.outputs[0]),
                "abduction": ("input", task.inputs[0]),
                "induction": ("python", task.program),
            }[task.kind]
            rows.append(Row("solve", task.kind, self.solve(task), _block(name, answer)))
        return rows

    def encode(self, row: Row) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt, without its beginning where it is too long, and those of the answer."""
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": row.prompt}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            prompt = self.tokenizer(row.prompt)["input_ids"]
        answer = list(row.tokens)
        if not answer and row.answer:
            answer = self.tokenizer(row.answer, add_special_tokens=False)["input_ids"][: self.max_tokens]
            answer += [] if self.end is None else [self.end]
        return prompt[-self.prompt_tokens :], answer

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def group(self, role: str, kind: str) -> str:
        """Return what is computed together."""
        return f"{role} {kind}"

    def longest(self, role: str, kind: str) -> int:
        """Return how many tokens an answer may have."""
        return self.max_tokens

    def padded(self, group: str, length: int) -> int:
        """Return a multiple: each length is captured by itself under tensor."""
        return -(-length // _PADDED_TO) * _PADDED_TO


def _block(name: str, text: str) -> str:
    return f"```{name}\n{text}\n```\n"


def _blocks(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in ("python", "input", "output", "message")}
    for name, content in _BLOCK.findall(text):
        found[name].append(content)
    return found


def open_language(folder: Path, data: Path | None, name: str, max_tokens: int) -> tuple[Python, torch.nn.Module]:
    """Read a model, its tokenizer and the seeds.

    Raises:
        UsageError: one of them is not there, or the model has too few positions.
        DataError: a file of seeds can't be read.
    """
    model, tokenizer = open_model(folder)
    positions = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", 2048)
    if positions <= max_tokens:
        raise UsageError(
            f"--max-tokens {max_tokens}",
            f"the model has {positions} positions",
            "ask for far fewer",
        )
    if data is None:
        seeds = [Task(kind, IDENTITY, ("'Hello world'",), ("'Hello world'",)) for kind in KINDS[:2]]
        held_out = [Task(kind, program, inputs[:1]) for kind in KINDS[:2] for program, inputs in _KNOWN]
        held_out += [Task("induction", program, inputs) for program, inputs in _KNOWN]
        return Python(tokenizer, (positions, max_tokens), seeds, held_out, "Python"), model
    seeds, held_out = read_seeds(data, name)
    return Python(tokenizer, (positions, max_tokens), seeds, held_out, f"Python, {len(seeds)} seeds of {name}"), model


def open_model(folder: Path) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer, from a folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise _no_model(folder, "it has no config.json" if folder.is_dir() else "there is no such folder")
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.get_default_dtype(), output_loading_info=True, **local
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _no_model(folder, first.rstrip(".")[:160]) from error
    if missing := sorted(found["missing_keys"]):
        raise _no_model(folder, f"its weights lack {', '.join(missing[:3])}")
    return model, tokenizer


def _no_model(folder: Path, found: str) -> PacelineError:
    return UsageError(
        f"a causal language model of transformers in --model {folder}",
        found,
        "name a folder with config.json, model.safetensors and a tokenizer, as save_pretrained writes them",
    )


def read_seeds(folder: Path, name: str) -> tuple[list[Task], list[Task]]:
    """Return the tasks to begin with, and the held-out ones, of both files of a name."""
    single = _read(folder, f"{name}_seed_io.jsonl", ("snippet", "input", "output"))
    several = _read(folder, f"{name}_code_f_seed_io.jsonl", ("snippet", "inputs", "outputs"))
    tasks: list[list[Task]] = [[], []]
    for at, row in enumerate(single):
        is_held = len(single) - at <= min(_HELD_OUT, len(single) // 4)
        tasks[is_held] += [Task(kind, row["snippet"], (row["input"],)) for kind in KINDS[:2]]
    for at, row in enumerate(several):
        is_held = len(several) - at <= min(_HELD_OUT, len(several) // 4)
        if len(row["inputs"]) >= LEAST_INPUTS:
            tasks[is_held].append(Task("induction", row["snippet"], tuple(row["inputs"]), (), row.get("message", "")))
    return tasks[0], tasks[1]


def _read(folder: Path, name: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    path = next((each for each in (folder / name, folder / f"{name}.xz") if each.is_file()), None)
    if path is None:
        held = "there is no such folder"
        if folder.is_dir():
            names = sorted(each.name.partition("_seed_io")[0] for each in folder.glob("*_seed_io.jsonl*"))
            held = f"the folder has {', '.join(names) or 'no such files'}"
        raise UsageError(f"seeds in --data {folder}: {name}, or {name}.xz", held, _WHERE)
    rows = []
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_row(path, number, line, fields))
    except (OSError, lzma.LZMAError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path} should be text in UTF-8", f"it can't be read: {error}", _WHERE) from error
    if not rows:
        raise DataError(f"{path} should have a task on each line", "it is empty", _WHERE)
    return rows


def _row(path: Path, number: int, line: str, fields: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    kinds = {"snippet": str, "input": str, "output": str, "inputs": list, "outputs": list}
    is_task = isinstance(row, dict) and all(isinstance(row.get(field), kinds[field]) for field in fields)
    lists = [row[field] for field in fields if kinds[field] is list] if is_task else []
    if not is_task or any(not isinstance(each, str) for values in lists for each in values):
        raise DataError(
            f"{path}, line {number}: an object with {', '.join(fields)}", f"it is {line.strip()[:80]!r}", _WHERE
        )
    return row  # type: ignore[no-any-return]
