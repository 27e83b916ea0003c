"""The self-play example: programs can't get out, rounds and rewards are those of one rank on any number, it learns."""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.nouns.errors import DataError, UsageError
from paceline.nouns.plan import Plan

from support.jobs import paceline
from support.ranks import preload, run_ranks
from support.trainings import KILL, load

preload("paceline.train.loop_job")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "zero"
SEEDS = ROOT.parent / "shared" / "data" / "code" / "azr_seeds"
MODULES = (
    "executor", "sandboxed", "tasks", "digits", "model", "selfplay", "progress", "python_tasks", "picture", "workload"
)  # fmt: skip
# After so much of the warm-up some proposals have the form.
TINY = ("--batch-size", "12", "--attempts", "2", "--width", "24", "--lr", "1e-2", "--warm-up", "30", "--steps", "3")
ADD = "def f(a):\n    return a + 1"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="programs run in forks")


@pytest.fixture(scope="module")
def example():
    """The example's modules by name."""
    return SimpleNamespace(**dict(zip(MODULES, load("zero", *MODULES), strict=True)))


# The executor


@pytest.fixture(scope="module")
def executors(example):
    """One of each mode, with short limits."""
    limits = example.executor.Limits(wall_s=0.8, memory=256 * 2**20, longest=2000)
    operations = {"i": "(x + 1) % 6", "n": "5 - x"}
    made = {mode: example.executor.Executor(limits, mode, operations) for mode in example.executor.MODES}
    if not made["python"].kernel_limits["refuses_calls"]:
        pytest.skip("the kernel does not filter system calls here")
    yield made
    for each in made.values():
        each.close()


def run(example, executors, mode, *programs):
    """What comes of each program, with a good one behind them that has to be answered."""
    good = example.executor.Run("i(x)" if mode == "expression" else ADD, ("3",), ("4",))
    *found, last = executors[mode].run([*(example.executor.Run(each, ("3",)) for each in programs), good])
    assert last.is_right
    return found


ESCAPES = {
    "socket": ("import ctypes\ndef f(a):\n    return ctypes.CDLL(None).socket(2, 1, 0)", "-1", "refused"),
    "environment": ("import os\ndef f(a):\n    return [*os.environ]", "['LC_CTYPE']", "refused"),
    "file": ("def f(a):\n    return open('/etc/hostname').read()", "raised", "raised"),
    "environment of the parent": ("def f(a):\n    return open('/proc/1/environ').read()", "raised", "raised"),
    "descriptors": (
        "import os\ndef f(a):\n    found = []\n    for n in range(64):\n        try:\n            os.read(n, 1)\n"
        "            found.append(n)\n        except OSError as error:\n            pass\n    return found",
        "[]",
        "refused",
    ),
    "write a file": ("def f(a):\n    return open('x', 'w')", "raised", "raised"),
    "fork bomb": ("import os\ndef f(a):\n    while True: os.fork()", "raised", "refused"),
    "another program": ("import os\ndef f(a):\n    os.execv('/bin/true', ['true'])", "raised", "refused"),
    "kill its parent": ("import os\ndef f(a):\n    os.kill(os.getppid(), 9)", "raised", "refused"),
    "kill all": ("import os\ndef f(a):\n    os.kill(-1, 9)", "raised", "refused"),
    "memory bomb": ("def f(a):\n    b = []\n    while True: b.append('a' * 10**6)", "memory", "memory"),
    "one large value": ("def f(a):\n    return len('a' * 10**11)", "memory", "memory"),
    "endless loop": ("def f(a):\n    while True: pass", "time", "time"),
    "a loop that catches all": (
        "def f(a):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
        "time",
        "time",
    ),
    "a power": ("def f(a):\n    return 10**10**10", "time", "time"),
    "a long list": ("def f(a):\n    return [0] * 10**7", "output", "output"),
    "giant output": ("def f(a):\n    return 'a' * 10**8", "output", "output"),
    "a list in itself": ("def f(a):\n    b = []\n    b.append(b)\n    return b", "output", "output"),
    "huge message": ("def f(a):\n    raise ValueError('a' * 10**7)", "raised", "raised"),
    "an error of its own": (
        "class E(Exception):\n    def __str__(self): raise SystemExit\ndef f(a):\n    raise E",
        "raised",
        "refused",
    ),
    "exit": ("import os\ndef f(a):\n    os._exit(0)", "died", "refused"),
    "system exit": ("def f(a):\n    raise SystemExit(0)", "raised", "raised"),
    "crash": ("import ctypes\ndef f(a):\n    return ctypes.string_at(0)", "died", "refused"),
    "recursion": ("def f(a):\n    return f(a)", "raised", "raised"),
    "nested": ("def f(a):\n    return " + "(" * 500 + "a" + ")" * 500, "raised", "raised"),
    "changes": ("import time\ndef f(a):\n    return time.time()", "differs", "refused"),
    "its own equality": (
        "class T(int):\n    def __eq__(self, other): return True\ndef f(a):\n    return T()",
        "refused",
        "refused",
    ),
    "no function": ("f = 3", "refused", "refused"),
    "too long": ("def f(a):\n    return 0\n" + "#" * 2000, "refused", "refused"),
    "no Python": ("def f(a) return a", "raised", "raised"),
    "its globals by a frame": (
        "def f(a):\n    def g():\n        yield 1\n    return str(g().gi_frame.f_back)[:4]",
        "'None'",
        "refused",
    ),
    "classes": ("def f(a):\n    return len(().__class__.__base__.__subclasses__()) > 9", "True", "refused"),
    "a module's own modules": ("import re\ndef f(a):\n    return re.enum.sys.maxsize > 9", "True", "raised"),
    "a private name": ("import collections\ndef f(a):\n    return collections._sys.maxsize > 9", "True", "refused"),
}


@pytest.mark.parametrize("mode", ["unchecked", "python"])
def test_nothing_gets_out_and_the_next_program_is_answered(example, executors, mode):
    column = 1 if mode == "unchecked" else 2
    for name, case in ESCAPES.items():
        (answer,) = run(example, executors, mode, case[0])
        found = answer.error or answer.outputs[0]
        assert found == case[column], (name, answer)
        assert len(answer.message) <= 300


def test_a_program_that_writes_results_writes_its_own_alone(example, executors):
    write = (
        'import os\ndef f(a):\n    print(\'{"outputs": ["7"], "equal": [true]}\')\n    for n in range(64):\n'
        "        try: os.write(n, LINE)\n        except OSError: pass\n    return 2"
    )
    lines = (b'{"outputs": ["7"], "equal": []}\n' * 9, b"no json\n", b"[" * 5000 + b"\n", b"\n" * 9, b"a" * 10**5)
    found = run(
        example, executors, "unchecked", *(write.replace("LINE", repr(line)) for line in lines if len(line) < 999)
    )
    assert all(answer.outputs in ((), ("7",)) for answer in found)
    printed = 'def f(a):\n    print(\'{"outputs": ["7"], "equal": [true]}\')\n    return 2'
    assert run(example, executors, "python", printed)[0].outputs == ("2",)


# Ways around the check of Python's syntax: each reads an attribute that begins with _, or evaluates a text.
BYPASSES = {
    "format": "def f(a):\n    return '{0.__globals__}'.format(f)[:5]",
    "format of a bound name": "def f(a):\n    g = str.format\n    return g('{0.__class__}', f)[:6]",
    "a class pattern": "def f(a):\n    T = type(f)\n    match f:\n        case T(__globals__=g): return [*g][0]",
    "a class pattern by place": (
        "def f(a):\n    Meta = type('Meta', (type,), {'__instancecheck__': lambda c, o: True})\n"
        "    M = Meta('M', (), {'__match_args__': ('__globals__',)})\n    match f:\n        case M(g): return [*g][0]"
    ),
    "Formatter": "import string\ndef f(a):\n    return str(string.Formatter().get_field('0.__class__', ((),), {})[0])",
    "type hints": (
        "import typing\ndef g(x: 'f.__globals__'): pass\n"
        "def f(a):\n    try: typing.get_type_hints(g)\n    except NameError: pass\n    return 1"
    ),
    "update_wrapper": (
        "import functools\ndef f(a):\n    box = []\n"
        "    W = type('W', (), {'__setattr__': lambda s, n, v: box.append(v)})\n"
        "    functools.update_wrapper(W(), f, ('__globals__',), ())\n    return len(box)"
    ),
    "type of three": "def f(a):\n    return type('T', (int,), {'__eq__': lambda s, o: True})(3) == 4",
    "the type of a type": "def f(a):\n    return type(int)('T', (), {}) is None",
    "the rest of a pattern": "def f(a):\n    match {1: 2}:\n        case {**__builtins__}: return 1",
    "a global name": "def f(a):\n    global __builtins__\n    return 1",
}


def test_the_check_of_python_has_no_such_way_around(example, executors):
    for name, program in BYPASSES.items():
        (answer,) = run(example, executors, "python", program)
        assert answer.error in ("refused", "raised"), (name, answer)


def test_no_program_knows_what_is_wanted(example, executors):
    """By the frames of what called it, and by all objects of its process."""
    found = (
        "import gc, sys\ndef f(a):\n    seen, frame = [str(each) for each in gc.get_objects()], sys._getframe()\n"
        "    while frame is not None:\n        seen.append(str(frame.f_locals))\n        frame = frame.f_back\n"
        "    return any(''.join(map(chr, (51, 49, 51, 51, 55))) * 5 in each for each in seen)"  # an address has less
    )
    (answer,) = executors["unchecked"].run([example.executor.Run(found, ("3",), ("31337" * 5,))])
    assert answer.outputs == ("False",), answer
    assert not answer.is_right


# Lines that a program writes to its pipe in place of its answer, and what comes of them.
FORGED = {
    "that it is right": ({"outputs": ["7"], "equal": [True]}, None),
    "an error of another name": ({"error": "accepted", "message": "a"}, "died"),
    "an error without a message": ({"error": "time"}, "died"),
    "half a pair": ({"outputs": ["\ud800"]}, "died"),
    "a long value": ({"outputs": ["LONG"]}, "died"),
    "what a terminal obeys": ({"outputs": ["\x1b[2J"]}, "died"),
    "a value too many": ({"outputs": ["7", "7"]}, "died"),
    "no text": ({"outputs": [7]}, "died"),
    "nested values": ({"outputs": [["7"]]}, "died"),
    "a message that a terminal obeys": ({"error": "raised", "message": "\x1b[2J"}, "raised"),
}


@pytest.mark.parametrize("case", FORGED)
def test_zero_program_cannot_forge_a_right_answer(example, executors, case):
    line, error = FORGED[case]
    program = (
        f"import os\ndef f(a):\n    line = {json.dumps(line).encode() + bytes([10])!r}\n    for n in range(3, 64):\n"
        "        try: os.write(n, line.replace(b'LONG', b'a' * 4001))\n        except OSError: pass\n    os._exit(0)"
    )
    (answer,) = executors["unchecked"].run([example.executor.Run(program, ("3",), ("8",))])
    assert (answer.error, answer.is_right) == (error, False)
    assert answer.message.isprintable()
    if error is None:
        assert (answer.outputs, answer.equal) == (("7",), (False,))


def deep(depth, call):
    """Call with so many frames above."""
    return call() if depth == 0 else deep(depth - 1, call)


def test_zero_unreadable_answer_affects_no_other_program(example, executors):
    program = (
        'import os\ndef f(a):\n    line = b\'{\' + b\'"error": "x", "message": \'\n'
        "    line += b'[' * 950 + b']' * 950 + bytes([125, 10])\n    for n in range(3, 64):\n"
        "        try: os.write(n, line)\n        except OSError: pass\n    os._exit(0)"
    )
    Run = example.executor.Run
    for depth in (0, 40, 200):
        batch = [Run(program, ("3",)), Run("def f(a):\n    return 1000", ("1",))]
        answers = deep(depth, lambda batch=batch: executors["unchecked"].run(batch))
        assert [answer.error for answer in answers] == ["died", None]
        (answer,) = executors["unchecked"].run([Run(ADD, ("1",), ("1000",))])
        assert (answer.outputs, answer.is_right) == (("2",), False)


def test_zero_executor_after_an_interrupt_answers_the_next_run(example):
    Run = example.executor.Run
    with example.executor.Executor(example.executor.Limits(), "unchecked") as executor:

        def stop(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(KeyboardInterrupt):
                executor.run([Run("def f(a):\n    while True: pass", ("1",)), Run("def f(a):\n    return 999", ("1",))])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        for number in range(3):
            (answer,) = executor.run([Run(f"def f(a):\n    return {number}", ("1",))])
            assert answer.outputs == (str(number),)


def test_an_input_that_says_of_itself_what_it_likes_is_refused(example, executors):
    text = "type('T', (), {'__mul__': lambda s, o: type('U', (), {'__add__': lambda s, o: 31337})()})()"
    run_of_it = example.executor.Run("def f(a):\n    return a * 3 + len(str(a))", (text,), ("31337",))
    (answer,) = executors["python"].run([run_of_it])
    assert not answer.is_right
    assert answer.error == "raised"


def test_a_program_of_a_group_has_its_limits_for_itself(example):
    operations = {"z": "sum(i for i in range(10**6 * x))"}
    with example.executor.Executor(example.executor.Limits(cpu_s=2), "expression", operations) as executor:
        answers = executor.run([example.executor.Run("z(x)", (str(number),)) for number in range(5, 13)])
    assert [answer.error for answer in answers] == [None] * 8


def test_closing_twice_kills_nobody_else(example, monkeypatch):
    executor = example.executor.Executor(mode="expression")
    executor.close()
    monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("its process is gone, and the number may be another's"))
    executor.close()


def test_no_folder_is_left_where_a_process_does_not_start(example, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        example.executor.Executor(mode="expression")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "text", ["1) + f(2", "1)\nimport os\n(", "__import__('os')", "open('x')", "a", "f.__globals__"]
)
def test_an_input_is_arguments_alone(example, executors, text):
    Run = example.executor.Run
    (answer,) = executors["python"].run([Run("def f(*a):\n    return a", (text,))])
    assert answer.error in ("refused", "raised")
    (answer,) = executors["python"].run([Run("def f(*a, **b):\n    return a, b", ("1, [2, 'a'], c={3}",))])
    assert answer.outputs == ("((1, [2, 'a']), {'c': {3}})",)


def test_modules_and_classes_that_do_no_harm_may_be_used(example, executors):
    program = (
        "import math\nfrom collections import Counter, defaultdict\nfrom typing import List\nclass A:\n    b = 2\n"
        "def f(a: List) -> int:\n    b = len(defaultdict(int))\n"
        "    return math.gcd(12, 8) * A.b + Counter('aab').most_common()[0][1] + b"
    )
    (answer,) = run(example, executors, "python", program)
    assert answer.outputs == ("10",)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("i(n(x))", None),
        ("x", None),
        ("q(x)", "refused"),
        ("x.real", "refused"),
        ("i(x, x)", "refused"),
        ("i(x=x)", "refused"),
        ("i(3)", "refused"),
        ("(lambda: x)()", "refused"),
        ("i(*x)", "refused"),
        ("__import__('os')", "refused"),
        ("i(", "raised"),
        ("i(" * 300 + "x" + ")" * 300, "raised"),
    ],
)
def test_expressions_are_calls_of_operations_on_x(example, executors, program, error):
    (answer,) = run(example, executors, "expression", program)
    assert answer.error == error


def test_a_group_that_ends_costs_one_of_them_its_answer(example):
    Run = example.executor.Run
    operations = {"i": "x + 1", "z": "10**10**x"}
    with example.executor.Executor(example.executor.Limits(wall_s=0.5), "expression", operations, group=8) as executor:
        answers = executor.run([Run("i(x)", (str(at),)) if at != 3 else Run("z(x)", ("10",)) for at in range(9)])
    assert [answer.error for answer in answers] == [None] * 3 + ["time"] + [None] * 5
    assert [answer.outputs for answer in answers if not answer.error] == [(str(at + 1),) for at in range(9) if at != 3]


def test_without_a_filter_of_calls_only_expressions_run(example, monkeypatch, tmp_path):
    text = (EXAMPLE / "sandboxed.py").read_text()
    file = tmp_path / "sandboxed.py"
    file.write_text(
        text.replace("def refuse_calls(self) -> bool:", "def refuse_calls(self) -> bool:\n        return False")
    )
    monkeypatch.setattr(example.executor, "_FILE", file)
    for mode, program, error in (("python", ADD, "refused"), ("unchecked", ADD, "refused"), ("expression", "x", None)):
        with example.executor.Executor(mode=mode) as executor:
            assert not executor.kernel_limits["refuses_calls"]
            (answer,) = executor.run([example.executor.Run(program, ("1",))])
        assert answer.error == error
    assert "system calls" in answer.message or error is None


def test_a_process_that_is_killed_is_started_again(example, executors):
    Run = example.executor.Run
    for each in executors["python"].processes:
        os.killpg(each.process.pid, signal.SIGKILL)
    answers = executors["python"].run([Run(ADD, (str(at),)) for at in range(4)])
    assert [answer.error for answer in answers] == ["died", None, None, None]
    assert run(example, executors, "python", ADD)[0].outputs == ("4",)


def test_the_processes_have_nothing_of_this_one(example, executors):
    for each in executors["python"].processes:
        folder = Path(f"/proc/{each.process.pid}")
        assert (folder / "environ").read_bytes() == b""
        assert os.getsid(each.process.pid) == each.process.pid
        assert os.readlink(folder / "cwd").endswith("(deleted)")
        assert {os.readlink(fd).partition(":")[0] for fd in (folder / "fd").iterdir()} <= {"pipe", "/dev/null"}


# The tiny language


def test_programs_of_the_tiny_language(example):
    digits = example.digits.Digits(3)
    assert digits.python("x") == "x"
    assert digits.python("xsn") == "n(s(x))"
    assert [digits.python(each) for each in ("", "y", "xx", "xsnds", "x;", "x(")] == [None] * 6
    for kind, text in (("deduction", "xsn|03;"), ("abduction", "x|31;")):
        task = digits.read_proposal(kind, text, [])
        assert (task.program, task.inputs) == (text[:-4], (f"'{text[-3:-1]}'",))
    seed = digits.seeds[0]
    assert digits.read_proposal("induction", "00,31,12,23;", [seed]).inputs == ("'00'", "'31'", "'12'", "'23'")
    bad = [("deduction", "xsn|04;"), ("deduction", "xsn|00"), ("abduction", "xq|00;"), ("induction", "00,00,12,23;")]
    assert [digits.read_proposal(kind, text, [seed]) for kind, text in bad] == [None] * 4
    assert [digits.read_solution("deduction", each) for each in ("30;", "30", "4;", ";")] == ["'30'", None, None, None]
    assert [digits.read_solution("induction", each) for each in ("xs;", "30;")] == ["xs", None]


def value_of(example, program, value):
    """What a program of the tiny language gives, by its definition."""
    for operation in program[1:]:
        value = eval(example.digits.OPERATIONS[operation], {"x": value})
    return value


def test_zero_warm_up_is_readable_and_right_only_for_identity(example):
    digits = example.digits.Digits(2)
    are_right = []
    for row in digits.warm_up(random.Random(0), 600):
        prompt, answer = digits.encode(row)
        assert len(prompt) + len(answer) <= digits.padded(digits.group(row.role, row.kind), 0) <= digits.positions
        if row.role == "propose":
            assert digits.read_proposal(row.kind, row.answer, digits.seeds) is not None
            continue
        assert digits.read_solution(row.kind, row.answer) is not None
        if row.kind == "deduction":
            program, _, value = row.prompt[2:-1].partition("|")
            is_right = value_of(example, program, value) == row.answer[:-1]
            assert is_right or program != "x"
            are_right += [] if program == "x" else [is_right]
    assert sum(are_right) / len(are_right) < 0.2  # by chance


def test_nothing_is_trained_on_that_is_held_out(example):
    digits = example.digits.Digits(2)
    for kind, tasks in digits.held_out.items():
        assert len(tasks) > 30
        assert all(digits.is_held_out(task) for task in tasks), kind
    text = digits.held_out["deduction"][0]
    other = example.tasks.Task("abduction", text.program, text.inputs)
    assert digits.is_held_out(other)
    pairs = [example.tasks.Task("deduction", "xs", (f"'{value}'",)) for value in example.digits.VALUES]
    assert 0 < sum(map(digits.is_held_out, pairs)) < 8


# Rewards and baselines


@pytest.mark.parametrize(("rate", "reward"), [(0.0, 0.0), (1.0, 0.0), (0.25, 0.75), (0.75, 0.25)])
def test_a_task_is_worth_most_that_is_seldom_solved(example, rate, reward):
    assert example.selfplay.learnability(rate) == reward


def test_each_role_and_kind_has_a_baseline_of_its_own(example):
    Row = example.tasks.Row
    rows = [Row(role, kind, "", "") for role in ("propose", "solve") for kind in example.tasks.KINDS for _ in range(4)]
    rewards = [float(place // 4 * 10 + place % 2) for place in range(24)]
    advantages = example.selfplay.advantages_of(rows, rewards)
    assert advantages == pytest.approx([-1.0, 1.0] * 12, abs=1e-5)
    assert example.selfplay.advantages_of(rows, [3.0] * 24) == [0.0] * 24


def test_the_buffer_keeps_each_task_once_and_the_newest(example):
    Task, state = example.tasks.Task, {}
    buffer = example.selfplay.Buffer(state, [Task("deduction", "x", ("0",), ("0",))], most=3)
    tasks = [Task("deduction", "xi", (str(at),), (str(at + 1),)) for at in range(5)]
    buffer.add([*tasks[:2], *tasks[:2]])
    assert [task.inputs for task in buffer.tasks("deduction")] == [("0",), ("0",), ("1",)]
    buffer.add(tasks)
    assert buffer.tasks("deduction") == tasks[2:]
    again = example.selfplay.Buffer(json.loads(json.dumps(state)), [], most=3)
    again.add(tasks[2:])
    assert again.state == state


# Seeds and folders


ROW = {"snippet": ADD, "input": "1", "output": "2"}
SEVERAL = {"snippet": ADD, "inputs": ["1", "2", "3", "4"], "outputs": ["2", "3", "4", "5"], "message": "adds"}


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def test_seeds_are_read_and_the_last_held_out(example, tmp_path):
    rows = [{**ROW, "snippet": f"def f(a):\n    return a + {at}"} for at in range(8)]
    (tmp_path / "a_seed_io.jsonl").write_bytes(lines(*rows, ""))
    with lzma.open(tmp_path / "a_code_f_seed_io.jsonl.xz", "wb") as file:
        file.write(lines(*[SEVERAL] * 4))
    seeds, held_out = example.python_tasks.read_seeds(tmp_path, "a")
    assert len(seeds) == 6 * 2 + 3
    assert {task.program[-1] for task in held_out if task.kind == "deduction"} == {"6", "7"}
    assert seeds[-1].message == "adds"


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the seeds of Absolute Zero are not here")
@pytest.mark.parametrize("name", ["7b_coder", "llama_64"])
def test_the_seeds_of_absolute_zero(example, name):
    seeds, held_out = example.python_tasks.read_seeds(SEEDS, name)
    assert seeds[0].program == example.python_tasks.IDENTITY
    assert len(seeds) > len(held_out) > 40
    assert {task.kind for task in seeds} == {task.kind for task in held_out} == {*example.tasks.KINDS}


@pytest.mark.parametrize(
    ("files", "asked", "found"),
    [
        (None, r"seeds in --data .*: a_seed_io.jsonl, or a_seed_io.jsonl.xz", "there is no such folder"),
        ({}, r"seeds in --data .*: a_seed_io.jsonl", "the folder has no such files"),
        ({"b_seed_io.jsonl": lines(ROW)}, r"seeds in --data .*: a_seed_io.jsonl", "the folder has b"),
        ({"a_seed_io.jsonl": lines(ROW)}, "a_code_f_seed_io.jsonl", "the folder has a"),
        ({"a_seed_io.jsonl": lines(ROW, "{")}, "line 2: an object with snippet, input, output", "it is '{'"),
        ({"a_seed_io.jsonl": lines({**ROW, "input": 1})}, "line 1: an object with", "it is '{"),
        ({"a_seed_io.jsonl": lines(ROW), "a_code_f_seed_io.jsonl": lines({**SEVERAL, "inputs": [1]})}, "line 1", "it"),
        ({"a_seed_io.jsonl": b""}, "should have a task on each line", "it is empty"),
        ({"a_seed_io.jsonl": b"\xff"}, "should be text in UTF-8", "it can't be read"),
        ({"a_seed_io.jsonl.xz": b"no xz"}, "should be text in UTF-8", "it can't be read"),
    ],
)
def test_files_that_are_no_seeds(example, tmp_path, files, asked, found):
    folder = tmp_path / "none" if files is None else tmp_path
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
    with pytest.raises((UsageError, DataError), match=rf"(?s){asked}.*\n  found: {found}.*\n  fix: take a folder"):
        example.python_tasks.read_seeds(folder, "a")


@pytest.mark.parametrize(
    ("words", "asked", "found"),
    [
        ("--steps 0", "--steps 0", "it should be at least 1"),
        ("--batch-size 10", "--batch-size 10", "each of three kinds of task has a third of them"),
        ("--attempts 1", "--attempts 1", "it should be at least 2"),
        ("--lr nan", "--lr nan", "it should be a number above 0"),
        ("--entropy -1", "--entropy -1.0", "it should be a number, 0 or more"),
        ("--data d", "--data without --model", "the tiny language makes its own tasks"),
        ("--max-tokens 20", "--max-tokens without --model", "the tiny language makes its own tasks"),
        ("--model m --width 32", "--width with --model", "it is of the small model"),
        ("--model m --seeds 14b", "--seeds without --data", "there are no files to choose from"),
        ("--width 30", "--width 30", "it is shared by 4 heads"),
        ("--output no/o.json", "--output no/o.json", "there is no folder no"),
    ],
)
def test_flags_that_are_refused(example, words, asked, found):
    with pytest.raises(UsageError, match=rf"{re.escape(asked)}\n  found: {re.escape(found)}\n  fix: "):
        example.workload.parse_arguments(words.split())


def save_tiny_model(folder, positions=512):
    """A GPT-2 with random weights whose tokens are bytes."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: at for at, each in enumerate(["<end>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=positions, n_embd=16, n_layer=1, n_head=2, eos_token_id=0,
        bos_token_id=0, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (None, "there is no such folder"),
        ({}, "it has no config.json"),
        ({"config.json": '{"model_type": "gpt2"}'}, "."),
        ({"config.json": "{"}, "."),
    ],
)
def test_folders_that_hold_no_model(example, tmp_path, files, found):
    pytest.importorskip("transformers")
    folder = tmp_path / "none" if files is None else tmp_path
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    with pytest.raises(UsageError, match=rf"a causal language model of transformers in --model .*\n  found: {found}"):
        example.python_tasks.open_model(folder)


def test_answers_in_python_are_read_from_their_blocks(example, tmp_path):
    save_tiny_model(tmp_path)
    language, _ = example.python_tasks.open_language(tmp_path, None, "", 64)
    text = f"Sure.\n```python\n{ADD}\n```\n```input\n3\n```\n"
    task = language.read_proposal("deduction", text, [])
    assert (task.program, task.inputs) == (ADD, ("3",))
    assert language.read_proposal("deduction", text.replace("input", "output"), []) is None
    assert language.read_proposal("abduction", text + text, []) is None
    several = "".join(f"```input\n{at}\n```\n" for at in (1, 2, 2, 3, 4)) + "```message\nadds\n```"
    assert language.read_proposal("induction", several, [task]).inputs == ("1", "2", "3", "4")
    assert language.read_solution("deduction", "```output\n4\n```") == "4"
    assert language.read_solution("induction", "```python\nx = 1\n```") is None
    prompt, answer = language.encode(example.tasks.Row("solve", "deduction", "é" * 2000, "a"))
    assert (len(prompt), answer[-1]) == (512 - 64, 0)
    assert language.decode(answer) == "a"
    with pytest.raises(UsageError, match=r"--max-tokens 512\n  found: the model has 512 positions"):
        example.python_tasks.open_language(tmp_path, None, "", 512)


# Whole jobs


def train_on_rank(rank, plan, words):
    """Train in float64: the curve, what is kept of the tasks, and every parameter, whole."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLE))
    import workload

    arguments = workload.parse_arguments(words)
    setting = workload.prepare(arguments)
    language = setting.language
    with workload.Executor(workload.Limits(), language.mode, language.operations) as executor:
        job, progress = workload.train(setting, arguments, executor)
    result = workload.report(setting, arguments, job, progress)
    del result["seconds"]
    kept = job.kept_objects.objects["buffer"].target
    return (
        result,
        kept,
        {name: job.parallel.models.full_tensor(each).clone() for name, each in job.parallel.named().items()},
    )


def alone_with(words):
    return run_ranks(1, train_on_rank, "replicate=1", words)[0]


@pytest.fixture(scope="module")
def alone():
    return alone_with(TINY)


def check_same(results, alone):
    for result, buffer, parameters in results:
        assert result == alone[0]
        assert buffer == alone[1]
        torch.testing.assert_close(parameters, alone[2], rtol=1e-9, atol=1e-9)


def test_one_rank_ends_as_before(alone):
    assert alone[0]["steps"] == 33
    assert [point["step"] for point in alone[0]["curve"]] == [0, 1, 2, 3]
    assert sum(counts.get("accepted", 0) for counts in alone[0]["curve"][-1]["proposals"].values()) > 3
    assert all(len(tasks) > 2 for tasks in alone[1].values())
    check_same([alone_with(TINY)], alone)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_two_ranks_end_as_one_does(alone, plan):
    check_same(run_ranks(2, train_on_rank, plan, TINY), alone)


@pytest.mark.integration
@pytest.mark.parametrize("plan", ["shard=2,zero=1", "tensor=2", "replicate=4", "replicate=2,shard=2"])
def test_other_plans_end_as_one_rank_does(alone, plan):
    check_same(run_ranks(Plan.parse(plan).world_size, train_on_rank, plan, TINY), alone)


@pytest.mark.integration
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_model_of_transformers_plays_in_python(tmp_path, plan):
    save_tiny_model(tmp_path)
    words = ("--model", str(tmp_path), "--batch-size", "6", "--attempts", "2", "--max-tokens", "12", "--steps", "2")
    words += ("--warm-up", "2", "--lr", "1e-3", "--entropy", "0.1")
    check_same(run_ranks(2, train_on_rank, plan, words), alone_with(words))


# The same after a kill


TRAIN = """
import sys
import torch
torch.set_default_dtype(torch.float64)
sys.path.insert(0, FOLDER)
import workload
arguments = workload.parse_arguments()
setting = workload.prepare(arguments)
with workload.Executor(workload.Limits(), setting.language.mode, setting.language.operations) as executor:
    job, progress = workload.train(setting, arguments, executor)
total = sum(float((job.parallel.models.full_tensor(each) * torch.arange(1.0, 1 + each.numel()).view(each.shape)).sum())
            for each in job.parallel.named().values())
curve = [{**point, "seconds": 0} for point in progress["curve"]]
print("ends at", job.step_number, job.kept_objects.objects["buffer"].target, curve, repr(total))
"""


@pytest.mark.integration
@pytest.mark.parametrize(("at", "plan"), [(35, "replicate=2"), (36, "shard=2")])
@pytest.mark.complete  # killed in the middle of rollouts: test_racer.py
def test_a_job_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path, at, plan):
    file = tmp_path / "killed.py"
    file.write_text(KILL + TRAIN.replace("FOLDER", repr(str(EXAMPLE))))
    words = (*TINY, "--steps", "7")

    def end(name, *flags, **environment):
        return paceline(tmp_path, "run", "--plan", plan, "--job", name, *flags, file, *words, **environment)

    whole = end("whole")
    assert whole.code == 0, whole.err
    assert end("killed", "--checkpoint-every", "4", KILL_AT=str(at)).code == 1
    again = end("killed", "--resume")
    assert again.code == 0, again.err
    assert "goes on at step" in again.err
    assert len(re.findall("ends at 37 .*", whole.out)) == 2
    assert re.findall("ends at .*", again.out) == re.findall("ends at .*", whole.out)


# Verify, and the commands that the page shows


@pytest.mark.parametrize(
    "plan",
    [
        "replicate=2",
        pytest.param("shard=2", marks=pytest.mark.complete),
        pytest.param("tensor=2", marks=pytest.mark.complete),
    ],
)
def test_verify_agrees(tmp_path, plan):
    words = [*TINY, "--warm-up", "1"]
    ended = paceline(tmp_path, "verify", "--plan", plan, "--steps", "3", EXAMPLE / "workload.py", "--", *words)
    assert ended.code == 0, ended.out + ended.err
    assert re.search(r"^step float64 +ok ", ended.out, re.MULTILINE), ended.out


@pytest.mark.integration
def test_the_command_writes_its_result_and_picture(tmp_path):
    files = ("--output", "o.json", "--picture", "f.png")
    ended = paceline(tmp_path, "run", "-n", "2", EXAMPLE / "workload.py", *TINY, *files)
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "o.json").read_text())
    assert (result["data"], result["steps"]) == ("two digits", 33)
    assert {*result["scores"]} >= {"deduction", "abduction", "induction", "deduction before", "valid proposals"}
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.complete
def test_it_learns(example):
    words = "--operations 1 --warm-up 60 --steps 120 --batch-size 24"
    arguments = example.workload.parse_arguments(words.split())
    setting = example.workload.prepare(arguments)
    with example.executor.Executor(None, setting.language.mode, setting.language.operations) as executor:
        _, progress = example.workload.train(setting, arguments, executor)
    attempts = [point["attempts"]["deduction"] for point in progress["curve"][1:]]
    assert attempts[-1] > attempts[0] + 0.2
