"""The process that runs untrusted programs; `executor.py` starts this file by `python -I -S`, and nothing else does.

It is trusted until it forks. Each program, or group of programs that can do no harm, runs in a fork which first gives
up everything: file descriptors, memory beyond a limit, and every system call but those on ALLOWED. What comes back is
a line of JSON through one pipe.

This file imports the standard library alone, before anything untrusted is read: afterwards no file can be opened.
"""

from __future__ import annotations

import ast
import bisect
import builtins as python_builtins
import collections
import contextlib
import ctypes
import functools
import heapq
import itertools
import json
import math
import os
import platform
import re
import resource
import select
import signal
import string
import sys
import time
import types
import typing

EXPRESSION, PYTHON, UNCHECKED = "expression", "python", "unchecked"
COMPARE = "compare"  # texts of plain data; no program runs
_GROUPED = (EXPRESSION, COMPARE)  # nothing in these can do harm
LONGEST_MESSAGE = 200

# System calls --------------------------------------------------------------------------------------------------------

# What CPython needs to compute, to write its answer to a pipe that is open, and to end. By name: x86-64, arm64.
ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "sched_yield": (24, 124),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of ALLOWED, AUDIT_ARCH
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_ALLOW, _KILL_PROCESS, _ERRNO
_EPERM = 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 1, 38, 22, 2
_PR_SET_DUMPABLE = 4
_NEW_USER, _NEW_IPC, _NEW_NET = 0x10000000, 0x08000000, 0x40000000


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def filter_of(machine: str) -> list[tuple[int, int, int, int]] | None:
    """Return a seccomp filter as (code, jump if true, jump if false, k); None for a machine that is not known.

    It refuses by EPERM every call that is not ALLOWED, so those of other numberings of the same machine too, and kills
    what calls by another architecture's.
    """
    if machine not in MACHINES:
        return None
    column, architecture = MACHINES[machine]
    numbers = sorted(pair[column] for pair in ALLOWED.values())
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for at, number in enumerate(numbers):
        lines.append((_EQUAL, len(numbers) - at, 0, number))  # to the last line
    return [*lines, (_RETURN, 0, 0, _ERROR | _EPERM), (_RETURN, 0, 0, _ALLOW)]


class Kernel:
    """What the kernel is asked for, through libc."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        lines = filter_of(platform.machine()) if self.libc is not None else None
        self.program: _Program | None = None
        if lines is not None:
            self.lines = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
            self.program = _Program(len(lines), self.lines)

    def end_with_parent(self) -> None:
        """Have this process be killed when the one that started it ends."""
        if self.libc is not None:
            self.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def withhold_memory(self) -> None:
        """Have no core written, not by handlers either that take no notice of RLIMIT_CORE, and nobody trace it."""
        if self.libc is not None:
            self.libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

    def leave_namespaces(self) -> bool:
        """Go to user, network and IPC namespaces of its own, where there is no interface; return whether it may."""
        return self.libc is not None and self.libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC) == 0

    def refuse_calls(self) -> bool:
        """Have this process make only the calls of ALLOWED from now on; return whether the kernel does so."""
        if self.libc is None or self.program is None:
            return False
        if self.libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return self.libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(self.program), 0, 0) == 0


# What may be written --------------------------------------------------------------------------------------------------

_BUILTINS = (
    "abs all any bin bool bytes chr complex dict divmod enumerate filter float format frozenset hex int isinstance "
    "issubclass iter len list map max min next oct ord pow print range repr reversed round set slice sorted str sum "
    "tuple type zip __build_class__ Exception ArithmeticError AssertionError AttributeError IndexError KeyError "
    "LookupError NotImplementedError OverflowError RuntimeError StopIteration TypeError ValueError ZeroDivisionError"
)
_MODULES = (math, itertools, functools, collections, heapq, bisect, string, re, typing)
# Of the modules that read attributes by name, or evaluate text (Formatter.get_field, get_type_hints, update_wrapper).
_STRING = (
    "ascii_letters ascii_lowercase ascii_uppercase capwords digits hexdigits octdigits printable punctuation whitespace"
)
_FUNCTOOLS = "cache cmp_to_key lru_cache partial reduce"
_TYPING = (
    "Any Callable Collection Container Counter DefaultDict Deque Dict FrozenSet Generator Hashable Iterable Iterator "
    "List Literal Mapping MutableMapping MutableSequence NoReturn Optional OrderedDict Sequence Set Sized Tuple "
    "TypeVar Union"
)
_OFFERED = {"string": _STRING.split(), "functools": _FUNCTOOLS.split(), "typing": _TYPING.split()}
# Attributes by which a value leads to the frames, and so to the globals, of what called it, or to those of any name.
_FRAMES = {"gi_frame", "gi_code", "gi_yieldfrom", "cr_frame", "cr_code", "ag_frame", "ag_code", "tb_frame", "tb_next"}
_FRAMES |= {"f_back", "f_globals", "f_locals", "f_builtins", "f_code", "mro", "format", "format_map"}
_UNWANTED = (ast.MatchClass, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)


class RefusedError(Exception):
    """The program is not one of those that may run."""


def check_expression(tree: ast.Expression, names: typing.Container[str]) -> None:
    """Raise RefusedError unless it is x, or calls of one argument of these names, inside each other."""
    node: ast.AST = tree.body
    while isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in names or len(node.args) != 1 or node.keywords:
            raise RefusedError("a call should be of one of the language's operations, with one argument")
        node = node.args[0]
    if not isinstance(node, ast.Name) or node.id != "x":
        raise RefusedError("a program should be x, or operations on x")


def check_python(tree: ast.AST) -> None:
    """Raise RefusedError for what a function of plain data does not need."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            _check_import(node)
        elif isinstance(node, _UNWANTED):
            raise RefusedError(f"{type(node).__name__} is not allowed")
        names = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module", "asname", "rest")]
        names += node.names if isinstance(node, ast.Global | ast.Nonlocal) else []
        for name in names:
            if not isinstance(name, str):
                continue
            if name.startswith("__") or (isinstance(node, ast.Attribute) and (name[:1] == "_" or name in _FRAMES)):
                raise RefusedError(f"the name {name:.50} is not allowed")


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    known = [module.__name__ for module in _MODULES]
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        if name not in known or getattr(node, "level", 0):
            raise RefusedError(f"import of {name:.50} is not allowed")


def _stand_in(module: types.ModuleType) -> types.ModuleType:
    """Return a module of its public names, without the modules that it imports itself."""
    found = types.ModuleType(module.__name__)
    for name in getattr(module, "__all__", dir(module)):
        value = getattr(module, name)
        is_offered = name in _OFFERED.get(module.__name__, (name,))
        if is_offered and name[:1] != "_" and not isinstance(value, types.ModuleType):
            setattr(found, name, value)
    return found


_STAND_INS = {module.__name__: _stand_in(module) for module in _MODULES}


def _type(value: object, /) -> type:
    """Return the class of a value: with three arguments `type` makes classes whose methods have names of any kind."""
    if isinstance(value, type):
        raise TypeError("the type of a type is not allowed")
    return type(value)


def _import(name: str, *others: object) -> types.ModuleType:
    if name not in _STAND_INS:
        raise ImportError(f"{name:.50} is not allowed")
    return _STAND_INS[name]


# Running --------------------------------------------------------------------------------------------------------------


class TooLargeError(Exception):
    """A value is larger than an answer may be."""


def shown(value: object, longest: int) -> str:
    """Return a plain value as Python writes it.

    Raises:
        TooLargeError: it, or what is in it, is longer than `longest`.
        RefusedError: it is of another type: what a program defines itself says of itself what it likes.
    """
    left = longest
    waiting = [value]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        left -= 1
        if kind in (str, bytes):
            left -= len(part)  # type: ignore[arg-type]
        elif kind in (list, tuple, set, frozenset, dict):
            left -= len(part)  # type: ignore[arg-type]
            if left >= 0:
                waiting.extend(part)  # type: ignore[arg-type]
                waiting.extend(part.values() if kind is dict else ())  # type: ignore[attr-defined]
        elif kind is int:
            left -= part.bit_length() // 3  # type: ignore[attr-defined]
        elif part is not None and kind not in (float, bool, complex):
            raise RefusedError(f"the value has a {kind.__name__:.50}, which is no plain data")
        if left < 0:
            raise TooLargeError
    text = repr(value)
    if len(text) > longest:
        raise TooLargeError
    return text


class Runner:
    """Runs programs in this process; what it gave up before is up to the caller.

    Args:
        mode: EXPRESSION, PYTHON or UNCHECKED, which is without the checks of the text.
        operations: of the expressions: by name, a Python expression of x.
        longest: characters of a program, and of each value that is returned.
    """

    def __init__(self, mode: str, operations: dict[str, str], longest: int) -> None:
        self.mode = mode
        self.longest = longest
        self.operations = {name: eval(f"lambda x: {text}", {}) for name, text in operations.items()}
        builtins: dict[str, object] = {}
        everything = vars(python_builtins)
        for name in _BUILTINS.split():
            builtins[name] = everything[name]
        self.builtins = {**builtins, "__import__": _import, "type": _type} if mode == PYTHON else everything

    def answer(self, job: dict[str, typing.Any]) -> dict[str, object]:
        """Return what a program gives for its inputs, or why there is nothing; or whether values are those wanted."""
        try:
            return self._answer(job)
        except RefusedError as error:
            return _failed("refused", error)
        except (SyntaxError, ValueError) as error:
            return _failed("raised", error)
        except TooLargeError:
            return {"error": "output", "message": f"a value is longer than {self.longest} characters"}
        except MemoryError:
            return {"error": "memory", "message": "no memory was left"}
        except BaseException as error:  # SystemExit and KeyboardInterrupt too
            return _failed("raised", error)

    def _answer(self, job: dict[str, typing.Any]) -> dict[str, object]:
        if self.mode == COMPARE:
            pairs = zip(job["outputs"], job["wanted"], strict=True)
            return {"equal": [_same(output, wanted, self.longest) for output, wanted in pairs]}
        texts = [job["program"], *job["inputs"]]
        if max(map(len, texts)) > self.longest:
            return {"error": "refused", "message": f"the text is longer than {self.longest} characters"}
        function = self._function(job["program"])
        return {"outputs": [shown(self._call(function, text), self.longest) for text in job["inputs"]]}

    def _function(self, program: str) -> typing.Callable[..., object]:
        if self.mode == EXPRESSION:
            tree = ast.parse(program, mode="eval")
            check_expression(tree, self.operations)
            code = compile(tree, "program", "eval")
            return lambda x: eval(code, {"__builtins__": {}, **self.operations, "x": x})
        module = ast.parse(program)
        if self.mode == PYTHON:
            check_python(module)
        names: dict[str, typing.Any] = {"__builtins__": self.builtins, "__name__": "program"}
        exec(compile(module, "program", "exec"), names)
        if not isinstance(names.get("f"), types.FunctionType):
            raise RefusedError("a program should define a function f")
        return names["f"]  # type: ignore[no-any-return]

    def _call(self, function: typing.Callable[..., object], text: str) -> object:
        if self.mode == EXPRESSION:
            return function(ast.literal_eval(text))
        tree = ast.parse(f"f({text})", mode="eval")
        call = tree.body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "f"):
            raise RefusedError("an input should be arguments of f, separated by commas")
        if self.mode == PYTHON:
            for each in [*call.args, *(keyword.value for keyword in call.keywords)]:
                ast.literal_eval(each)  # else it could bring an object that says of itself what it likes
        builtins = {"set": set} if self.mode == PYTHON else self.builtins
        return eval(compile(tree, "input", "eval"), {"__builtins__": builtins, "f": function})


def _same(output: str, wanted: str, longest: int) -> bool:
    """Return whether both are the same plain data."""
    if output == wanted or max(len(output), len(wanted)) > longest:
        return output == wanted
    try:
        return bool(ast.literal_eval(output) == ast.literal_eval(wanted))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _failed(kind: str, error: BaseException) -> dict[str, object]:
    message = ""
    with contextlib.suppress(BaseException):  # a program's own error may have a __str__ of its own
        message = str(error)[:LONGEST_MESSAGE]
    return {"error": kind, "message": f"{type(error).__name__}: {message}"}


def _read(line: bytes) -> dict[str, object]:
    """Return an answer; a program may have written its own."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    found = {}
    for name, value in answer.items() if isinstance(answer, dict) else ():
        values = value if isinstance(value, list) else [value]
        if name in ("outputs", "equal", "error", "message") and all(isinstance(each, str | bool) for each in values):
            found[name] = value
    return found or {"error": "died", "message": "the answer is none"}


class Zygote:
    """Forks for every group of jobs, and collects what each has to say within its limits."""

    def __init__(self, setting: dict[str, typing.Any]) -> None:
        self.setting = setting
        self.kernel = Kernel()
        self.kernel.end_with_parent()
        self.runner = Runner(setting["mode"], setting["operations"], setting["longest"])
        self.namespaces = self.kernel.leave_namespaces()
        self.kernel.end_with_parent()  # the change of the user has undone it
        self.refuses_calls = self._tries_to_refuse()

    def _tries_to_refuse(self) -> bool:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if self.kernel.refuse_calls():
                    os.pipe()  # any call that is not allowed
            except PermissionError:
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def run(self, jobs: list[dict[str, typing.Any]]) -> typing.Iterator[dict[str, object]]:
        """Yield an answer for each job, in their order."""
        if self.setting["mode"] not in _GROUPED and not self.refuses_calls:
            for _ in jobs:
                yield {"error": "refused", "message": "the kernel does not filter system calls here"}
            return
        at = 0
        while at < len(jobs):
            size = self.setting["group"] if self.setting["mode"] in _GROUPED else 1
            answers, why = self._run_group(jobs[at : at + size])
            yield from answers
            at += len(answers)
            if why and answers:  # those before it have used the fork's limits: it has not had its own yet
                continue
            if why:
                yield why
                at += 1

    def _run_group(self, jobs: list[dict[str, typing.Any]]) -> tuple[list[dict[str, object]], dict[str, object] | None]:
        """Return the answers up to the first job without one, and what became of that."""
        ours, theirs = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_child(theirs, jobs, parent)
        os.close(theirs)
        try:
            lines, why = self._collect(ours, len(jobs))
        finally:
            os.close(ours)
            for kill in (os.killpg, os.kill):  # its group, and itself where it has none yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        answers = [_read(line) for line in lines]
        if len(answers) == len(jobs):
            return answers, None
        if why is None:
            code = os.waitstatus_to_exitcode(status)
            is_cpu = code in (-signal.SIGXCPU, -signal.SIGKILL)  # the second where it ignores the first
            why = {"error": "time" if is_cpu else "died", "message": f"the process ended with {code}"}
        return answers, why

    def _collect(self, pipe: int, count: int) -> tuple[list[bytes], dict[str, object] | None]:
        received = b""
        longest = 8 * self.setting["longest"] * count + 65536  # of honest answers, JSON's escapes included
        deadline = time.monotonic() + self.setting["wall_s"]
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                why = {"error": "time", "message": f"no answer within {self.setting['wall_s']} s"}
                return received.split(b"\n")[:-1][:count], why
            part = os.read(pipe, 65536)
            received += part
            if b"\n" in part:  # the limit is that of each program
                deadline = time.monotonic() + self.setting["wall_s"]
            if len(received) > longest:
                why = {"error": "output", "message": "it writes more than all values together may have"}
                return received.split(b"\n")[:-1][:count], why
            if not part or received.count(b"\n") >= count:
                return received.split(b"\n")[:-1][:count], None

    def _be_child(self, pipe: int, jobs: list[dict[str, typing.Any]], parent: int) -> typing.NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            self.kernel.end_with_parent()
            if os.getppid() != parent:  # it ended before the kernel was asked
                os._exit(1)
            self._confine(pipe)
            for job in jobs:
                os.write(pipe, json.dumps(self.runner.answer(job)).encode() + b"\n")
            code = 0
        finally:
            os._exit(code)

    def _confine(self, pipe: int) -> None:
        """Give up what a program does not need. Nothing that is untrusted has been read before."""
        sys.stdin = sys.stdout = sys.stderr = None  # print writes nowhere
        os.closerange(0, pipe)
        os.closerange(pipe + 1, 1024)
        limits = {
            resource.RLIMIT_AS: self.setting["memory"],
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: 0,
            resource.RLIMIT_NPROC: 0,
            resource.RLIMIT_CORE: 0,
        }
        for kind, limit in limits.items():
            resource.setrlimit(kind, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (self.setting["cpu_s"], self.setting["cpu_s"] + 1))
        self.kernel.withhold_memory()
        is_filtered = self.refuses_calls and self.kernel.refuse_calls()  # a filter that failed its test kills
        if not is_filtered and self.setting["mode"] not in _GROUPED:
            os._exit(1)


def main() -> None:
    """Answer requests, a line of JSON each, until there are no more."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    zygote = Zygote(json.loads(requests.readline()))
    kernel_limits = {"refuses_calls": zygote.refuses_calls, "namespaces": zygote.namespaces}
    answers.write(json.dumps(kernel_limits).encode() + b"\n")
    answers.flush()
    for line in requests:
        for answer in zygote.run(json.loads(line)):
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
