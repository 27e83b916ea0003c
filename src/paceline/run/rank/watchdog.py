"""Watch a rank from a thread of its own: when it makes no progress, write down its position in the code.

Progress is a finished step or the begin of a collective. After a quarter of the notice time without progress (of the
default's, if that is shorter), the thread writes `stalls/RANK.json` in the run directory, and again from time to time;
with the next progress it removes the file. The supervisor reads these files: see `run/supervise/stalls.py`. Nothing is
ended here. The thread also answers `paceline why`: see `run/read/standing.py`.

Stacks come from `faulthandler`, which prints them without holding a frame: a frame that is held keeps its tensors
alive, and a graph that is being captured notices that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil

import paceline
from paceline.comm import api
from paceline.comm.step_times import TIMES
from paceline.nouns.reading import parse_whole, write_whole
from paceline.run.read.standing import STALLS, poll_s, questions_in
from paceline.run.supervise.stalls import AT_START, DEFAULT_S, notice_time
from paceline.train import open_jobs as jobs

_FIRST = 0.25  # the share of `pace_s` after which a rank reports first
_POLLS = 24  # looks in `pace_s`: six before the first report
_SEEN_S = 0.2
_SAMPLES = 10
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_PACELINE = str(Path(paceline.__file__).parent) + os.sep
_STEP_IN = f"{_PACELINE}train{os.sep}job.py"
_CLOSE_IN = f"{_PACELINE}train{os.sep}base_job.py"
_COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_along", "broadcast", "reduce_scatter", "reduce_scatter_list", "all_to_all",
    "barrier", "receive", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "recv", "send",
    "reduce",
}  # fmt: skip

_WAITS = {  # the files of `comm/` that wait (their stems), and the names of their waits
    "shared_memory": "all_reduce",
    "reducer": "all_reduce",
    "collectives": "a collective",
    "process_group": AT_START,
}
Frame = tuple[str, int, str]  # file, line, function


class Watchdog:
    """The thread that watches one rank.

    Args:
        run_dir: the run directory of the job.
        rank: the rank of this process.
        notice_s: the seconds without progress after which the user is told. With 0 nobody is told, but the files are
            written: by them the supervisor finds a rank that left the job while others wait for it.
        ranks: the number of ranks of the job.
    """

    def __init__(self, run_dir: Path, rank: int, notice_s: float, ranks: int = 1) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / STALLS
        self.rank = rank
        self.answered: set[str] = set()  # the names of the questions that were answered
        self.asked_s = poll_s(ranks)
        self.pace_s = min(notice_s or DEFAULT_S, DEFAULT_S)
        self.path = self.folder / f"{rank}.json"
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="paceline watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.thread.start()

    def stop(self) -> None:
        """Watch no longer; the rank has run its file."""
        self.over.set()
        self.thread.join()
        self.path.unlink(missing_ok=True)

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the thread with a traceback
            self.path.unlink(missing_ok=True)
        # CPU seconds of the whole process since the last progress tell a rank that computes from one that waits.
        since_s = time.monotonic()
        cpu_s = time.process_time()
        before = progress()
        next_s = _FIRST * self.pace_s
        is_written = False
        while not self.over.wait(min(self.pace_s / _POLLS, self.asked_s)):
            with contextlib.suppress(Exception):  # a question must not end the thread
                self._answer(before, since_s, cpu_s)
            now = progress()
            stalled_s = time.monotonic() - since_s
            if now != before:
                since_s = time.monotonic()
                cpu_s = time.process_time()
                before = now
                next_s = _FIRST * self.pace_s
                if is_written:
                    self.path.unlink(missing_ok=True)
                is_written = False
            elif stalled_s >= next_s:
                self._flush()
                next_s += max(_FIRST * self.pace_s, stalled_s / 2)  # ever rarer: files are written for as long
                is_written = self._write(stalled_s, time.process_time() - cpu_s)

    def _answer(self, before: tuple[int, int], since_s: float, cpu_s: float) -> None:
        """Answer the questions that stand in the run directory, each once.

        Args:
            before: the progress at the last look.
            since_s, cpu_s: the time when that progress was first seen, and the CPU seconds that were used up to then.
        """
        questions = [path for path in questions_in(self.run_dir) if path.name not in self.answered]
        if not questions:
            return
        self.answered.update(path.name for path in questions)
        if progress() != before:
            since_s, cpu_s = time.monotonic(), time.process_time()
        states = []
        for _ in range(_SAMPLES):  # over which a rank is seen to go on, and to compute
            self.over.wait(_SEEN_S / _SAMPLES)
            states.append(thread_state(threading.main_thread().native_id))
        self._flush()
        stalled_s = time.monotonic() - since_s
        answer = self._report(stalled_s, time.process_time() - cpu_s)
        answer |= {"states": "".join(states), "work": TIMES.kind, **_of_process()}
        for path in questions:
            self._put(answer, path)

    def _flush(self) -> None:
        """Write the times that the training thread has not written yet: it stands still."""
        job = jobs.newest()
        if job is not None:
            job.times_file.flush()

    def _report(self, stalled_s: float, cpu_s: float) -> dict[str, Any]:
        return {"rank": self.rank, "at": time.time_ns() / 1e9, "stalled_s": stalled_s, "cpu_s": cpu_s, **standing()}

    def _write(self, stalled_s: float, cpu_s: float) -> bool:
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
        self._put(self._report(stalled_s, cpu_s), self.folder)
        return True

    def _put(self, report: dict[str, Any], folder: Path) -> None:
        with contextlib.suppress(OSError):
            write_whole(folder / f"{self.rank}.json", json.dumps(report, indent=1))


def begin_watching(environment: Mapping[str, str], run_dir: Path) -> Watchdog:
    """Start this rank's watchdog.

    Raises:
        UsageError: PACELINE_STALL_NOTICE is no number of seconds.
    """
    ranks = parse_whole(environment.get("PACELINE_WORLD_SIZE", "")) or 1
    watchdog = Watchdog(run_dir, int(environment.get("PACELINE_RANK", "0")), notice_time(environment), ranks)
    watchdog.start()
    return watchdog


def progress() -> tuple[int, int]:
    """Return two numbers that change with every step and every collective: steps taken, collectives begun."""
    job = jobs.newest()
    calls = -1
    if job is not None:
        calls = _calls(job.ledger)
    elif api.is_initialized():
        calls = _calls(api.world().comm.ledger)
    return jobs.steps_done(), calls


def _of_process() -> dict[str, Any]:
    """Return the host, the usable cores and the child processes of this process, for an answer."""
    process = psutil.Process()
    children = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):
            children.append({"pid": child.pid, "state": child.status(), "cpu_s": sum(child.cpu_times()[:2])})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"pid": process.pid, "host": socket.gethostname(), "cores": cores, "children": children}


def thread_state(identifier: int | None) -> str:
    """Return the kernel's letter for the state of a thread of this process, such as R or S; "" where nobody knows."""
    try:
        content = Path(f"/proc/self/task/{identifier}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return content.rpartition(")")[2].split()[0]


def _calls(ledger: Any) -> int:
    try:
        return int(ledger.calls.total())
    except RuntimeError:  # the main thread entered a call of a new kind meanwhile: that is progress
        return time.monotonic_ns()


def standing() -> dict[str, Any]:
    """Return the position of this process: its step, its frames, innermost first, and the call that it waits in."""
    threads = stacks()
    frames = threads.get(threading.main_thread().ident or 0, [])
    # The innermost line of the user's own code is what users can act on.
    line = function = source = None
    for file, number, name in frames:
        if _is_user_code(file):
            line = f"{file}:{number}"
            source = linecache.getline(file, number).strip()[:200]
            function = name
            break
    functions = {(name, file) for file, _, name in frames}
    return {
        "step": jobs.current_step(),
        "steps_done": jobs.steps_done(),
        "waits_in": waits_in(frames),
        "is_in_step": ("step", _STEP_IN) in functions,
        "is_closing": ("close", _CLOSE_IN) in functions,
        "line": line,
        "source": source,
        "function": function,
        "stack": frames,
        "threads": {hex(identifier): stack for identifier, stack in threads.items()},
    }


def stacks() -> dict[int, list[Frame]]:
    """Return the frames of every thread, innermost first, by its identifier. No frame object is made."""
    with _scratch_file() as file:
        faulthandler.dump_traceback(file.fileno())
        file.seek(0)
        text = file.read().decode(errors="replace")
    threads: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            current = threads.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.fullmatch(line):
            current.append((frame[1], int(frame[2]), frame[3]))
    return threads


def _scratch_file() -> IO[bytes]:
    """Open a file in memory where that can be: a disk may be full."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def waits_in(frames: list[Frame]) -> str | None:
    """Return the collective that a thread waits in, or another known wait; None: no known wait.

    Only the innermost frames count: a thread may also compute, or import modules, on behalf of a collective.
    """
    inside: list[str] = []  # the files of `comm/` that the thread is in
    for file, _, name in frames:
        stem = Path(file).stem
        if stem == "distributed_c10d" and name in _COLLECTIVES:
            return name
        if stem in ("distributed_c10d", "c10d_logger", "threading"):  # wrappers around the call that waits
            continue
        if not file.startswith(f"{_PACELINE}comm{os.sep}") or stem not in _WAITS:
            return _of_comm(inside) or _otherwise(file, name)
        if name in _COLLECTIVES:
            return name
        inside.append(stem)
    return _of_comm(inside)


def _of_comm(stems: list[str]) -> str | None:
    """Return the wait of frames in files of `comm/`, innermost first: the outermost file names it."""
    return _WAITS[stems[-1]] if stems else None


def _otherwise(file: str, name: str) -> str | None:
    """Return a wait beside collectives, by a thread's innermost frame outside Python's threading; None: none known."""
    if file.startswith(f"{_PACELINE}server{os.sep}"):
        return "an answer of the parameter servers"
    if file == f"{_PACELINE}checkpoint{os.sep}save.py" and name == "wait":
        return "the writing of a checkpoint"
    if f"torch{os.sep}distributed{os.sep}fsdp" in file and "wait" in name:
        return "a collective of shard"
    return None


def _is_user_code(file: str) -> bool:
    """Return True if a source file is the user's own."""
    is_library = "site-packages" in file or f"{os.sep}lib{os.sep}python" in file
    is_paceline_or_no_file = file.startswith((_PACELINE, "<"))  # such as <string> and <frozen runpy>
    return not is_library and not is_paceline_or_no_file
