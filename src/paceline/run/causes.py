"""Find the causes for which a job stands still or is slow, in the facts of `run/job_facts.py`.

No file is read here, so that each rule can be tested by itself.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.run.job_facts import BUSY, ENDED, Facts, RankFacts
from paceline.run.read.times import FEW_STEPS, RankSplit, sentence, slow_rank
from paceline.run.shown import rank_names

_STILL_S = 3.0  # a rank that has made no progress for this long stands still
_LONG_STEPS = 3  # the job stands still after as long as this number of steps takes
_FULL_BYTES = 2**20  # a disk with fewer free bytes counts as full
_MANY = 0.4  # the least share of a step that is reported
_MOST_SHOWN = 8  # the largest number of ranks that are named
_CORES_RATIO = 1.3  # both passes take so much longer on a rank with fewer cores
_LOADER = "torch/utils/data/"
_LOADER_FRAMES = 16  # a batch comes through a queue, by way of several modules
_RESTARTS_S = 15.0
_STARTS_S = 60.0  # a rank that starts imports torch
_GRACE_S = 20.0  # the time in which ranks that wait for nobody are not reported
_FIRST_STEP_S = 60.0  # the same in the first step
_LOCK_FILES = ("threading.py",)
_LOCK = re.compile(r"\bacquire\b|\bwith \S*lock|\.join\(|\.wait\(|\.get\(\)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause for which a job stands still or is slow.

    Args:
        name: the cause in a word or two, for programs.
        ranks: the ranks that the cause is about; empty: it is about the whole job.
        text: the sentence that users read.
        fix: the advice to the user.
    """

    name: str
    ranks: tuple[int, ...]
    text: str
    fix: str


def causes(facts: Facts) -> list[Cause]:
    """Return the causes, the one that the others follow from first; empty where nothing is found."""
    if facts.failure is not None:
        return [Cause("failed", (), f"the job has ended: {facts.failure}", "mend that, and go on with --resume")]
    if facts.not_asked is not None:
        found = [Cause("not asked", (), f"the ranks can't be asked: {facts.not_asked}", "mend that, and ask again")]
        return [*found, *_of_disk(facts)]
    found = [*_of_processes(facts)]
    a_step_s = max((split.median_s for split in facts.splits), default=0.0)
    if facts.stands_s >= max(_STILL_S, _LONG_STEPS * a_step_s) and not found:
        found += _of_waits(facts)
    found += _of_disk(facts)
    if not any(cause.name in _STANDING for cause in found):
        found += _of_speed(facts)
    for jump_s, step in facts.clock_jumps:
        text = f"the clock of rank 0's host jumped by {jump_s:+.0f} s at step {step}; times of steps don't depend on it"
        found.append(Cause("clock jump", (0,), text, "let its time daemon adjust the clock in small steps"))
    return found


_STANDING = frozenset(
    {
        "gone", "stopped", "traced", "disk wait", "native code", "no answer", "left", "different calls",
        "data loader", "lock", "computing", "idle", "same call", "checkpoint", "servers",
    }
)  # fmt: skip


def _of_processes(facts: Facts) -> Iterator[Cause]:
    """Yield a cause for each state of processes that do not answer."""
    for state, name, text, fix in _STATES:
        if name == "gone" and facts.run.quiet_s < _RESTARTS_S:
            continue  # it may be started again just now
        ranks = tuple(rank.rank for rank in facts.ranks if rank.answer is None and rank.state in state)
        if ranks:
            pids = [str(rank.pid) for rank in facts.ranks if rank.rank in ranks[:_MOST_SHOWN]]
            yield Cause(name, ranks, f"{rank_names(ranks)}: {text}", fix.replace("PID", " ".join(pids)))
    silent = [rank for rank in facts.ranks if rank.answer is None and rank.state != ENDED and not _is_judged(rank)]
    if min(facts.age_s, facts.run.quiet_s) < _STARTS_S:  # a rank answers as soon as it runs the file
        silent = [rank for rank in silent if rank.pid]
    native = tuple(rank.rank for rank in silent if rank.is_here and rank.state)
    if native:
        uses = "compute" if any(rank.cpu > BUSY for rank in silent if rank.rank in native) else "wait"
        uses += "s" * (len(native) == 1)
        text = f"{rank_names(native)} {uses} in native code that lets no other thread of Python run (it holds the GIL)"
        yield Cause("native code", native, text, "look with `py-spy dump --native --pid`; release the GIL in that code")
    unanswered = tuple(rank.rank for rank in silent if rank.rank not in native)
    if unanswered:
        hosts = sorted({rank.host for rank in silent if rank.host and rank.rank in unanswered})
        on_hosts = f" (on {', '.join(hosts[:_MOST_SHOWN])})" if hosts else ""
        text = f"{rank_names(unanswered)}{on_hosts} did not answer within {facts.answer_s:.0f} s"
        yield Cause("no answer", unanswered, text, "look whether that host is up, and sees this run directory")


_STATES = (
    (("gone", "zombie", "dead"), "gone", "the process has gone", "look for what ended it; start again with --resume"),
    (("stopped",), "stopped", "the process is stopped (SIGSTOP)", "let it go on: kill -CONT PID"),
    (("tracing-stop",), "traced", "a debugger has stopped the process", "go on, or leave, in the debugger"),
    (
        ("disk-sleep",), "disk wait", "the process waits for a disk or a network file system",
        "look at the file system that is read or written: dmesg, df, the server's state",
    ),
)  # fmt: skip


def _is_judged(rank: RankFacts) -> bool:
    return any(rank.state in states for states, *_ in _STATES)


def _of_waits(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for which ranks that answer stand still."""
    answered = [rank for rank in facts.ranks if rank.answer is not None]
    waiting = [rank for rank in answered if rank.waits_in]
    not_waiting = [rank for rank in answered if not rank.waits_in]
    furthest = max((rank.target for rank in answered), default=0)
    early_leavers = [
        rank for rank in answered if rank.answer and rank.answer.get("is_closing") and rank.target < furthest
    ]
    if early_leavers:
        ranks = tuple(rank.rank for rank in early_leavers)
        left_at = early_leavers[0].answer["steps_done"]  # type: ignore[index]
        text = f"{rank_names(ranks)} left the loop after step {left_at}, while the others go on"
        yield Cause("left", ranks, text, "let every rank take equally many steps: leave the loop on all, or on none")
        return
    at_disk = [rank for rank in waiting if "checkpoint" in str(rank.waits_in)]
    if at_disk and len(at_disk) < len(answered):
        yield _checkpoint(at_disk, len(waiting) > len(at_disk))
        return
    if not_waiting and not waiting and facts.stands_s < (_FIRST_STEP_S if facts.is_first_step else _GRACE_S):
        return  # a long step, a compilation or slow data: nobody waits for another
    if not_waiting:
        yield from _of_those_that_do_not_wait(not_waiting, waiting)
        return
    calls = Counter((rank.waits_in, rank.line) for rank in waiting)
    if len(calls) > 1:
        yield _different_calls(waiting, calls)
        return
    if waiting:
        call, line = next(iter(calls))
        if call is not None and "servers" in call:
            text = f"all workers wait for an answer of the parameter servers, at {line}"
            yield Cause("servers", (), text, "see `paceline server why-waiting JOB`")
        elif call is not None and "checkpoint" in call:
            yield _checkpoint(waiting, False)
        elif len(waiting) == len(facts.ranks):
            text = f"all ranks wait in {call}, at {line}: its shapes or dtypes differ, or the network lets nothing pass"
            yield Cause("same call", (), text, "print the shapes before it; `paceline doctor` tries the network")


def _checkpoint(at_disk: Sequence[RankFacts], holds_up: bool) -> Cause:
    """Return the cause that ranks wait until a checkpoint is written."""
    ranks = tuple(rank.rank for rank in at_disk)
    text = f"{rank_names(ranks)} wait{'s' * (len(ranks) == 1)} until a checkpoint is written"
    if holds_up:
        text += ", and the others for that"
    return Cause("checkpoint", ranks, text, "look at the disk's speed; write checkpoints less often")


def _different_calls(waiting: Sequence[RankFacts], calls: Counter[tuple[str | None, str]]) -> Cause:
    """Return the cause that ranks wait in different calls; the rank whose call no other rank makes is named first."""
    (rare_call, rare_line), _ = min(calls.items(), key=lambda item: (item[1], item[0][1]))
    ranks = tuple(rank.rank for rank in waiting if (rank.waits_in, rank.line) == (rare_call, rare_line))
    parts = []
    for (call, line), _ in sorted(calls.items(), key=lambda item: item[1]):
        ranks_at_call = tuple(rank.rank for rank in waiting if (rank.waits_in, rank.line) == (call, line))
        parts.append(f"{rank_names(ranks_at_call)} in {call} at {line}")
    text = "ranks wait for each other in different calls: " + "; ".join(parts)
    return Cause("different calls", ranks, text, "make the same calls in the same order on every rank")


def _of_those_that_do_not_wait(not_waiting: Sequence[RankFacts], waiting: Sequence[RankFacts]) -> Iterator[Cause]:
    if not waiting and all(_evaluates(rank) for rank in not_waiting):
        return
    for rank in not_waiting[:_MOST_SHOWN]:
        name, does, fix = _activity(rank)
        step = "" if rank.answer is None or rank.answer["step"] is None else f" in step {rank.answer['step']}"
        text = f"rank {rank.rank}{step} {does}"
        if waiting:
            waiting_names = rank_names(tuple(waiting_rank.rank for waiting_rank in waiting))
            text += f"; {waiting_names} wait{'s' * (len(waiting) == 1)} for it in {waiting[0].waits_in}"
        yield Cause(name, (rank.rank,), text, fix)


def _evaluates(rank: RankFacts) -> bool:
    return rank.answer is not None and rank.answer.get("work") == "evaluation"


def _activity(rank: RankFacts) -> tuple[str, str, str]:
    """Return the activity of a rank that waits for no other: its name, a description, and the advice to the user."""
    files = [str(frame[0]) for frame in rank.stack[:_LOADER_FRAMES]]
    functions = [str(frame[2]) for frame in rank.stack[:1]]
    if any(_LOADER in file for file in files) and not rank.computes:
        children = _children(rank)
        fix = "look at the data set's __getitem__ and at the disk; raise num_workers"
        if "stopped" in children:
            fix = "let the loader's processes go on: kill -CONT PID"
        return "data loader", f"waits for its data loader{children}, at {rank.line}", fix
    innermost = f"{files[0]} {functions[0]}" if files else ""
    source = str(rank.answer.get("source") or "") if rank.answer is not None else ""
    location = f"{rank.line}{f': {source}' if source else ''}"
    is_lock = bool(files) and files[0].endswith(_LOCK_FILES)
    if not rank.computes and (is_lock or _LOCK.search(innermost) or _LOCK.search(source)):
        return "lock", f"waits for a lock or an event at {location}", "look at who holds it: the other threads' stacks"
    if rank.computes:
        return "computing", f"computes at {location}", "shorten that, or do it on every rank at the same step"
    return "idle", f"sleeps, reads or writes at {location}", "look at that line: a file, a socket, a sleep"


def _children(rank: RankFacts) -> str:
    """Describe the states of a data loader's processes; "" where there are none."""
    children = rank.answer.get("children", []) if rank.answer is not None else []
    states = Counter(str(child.get("state")) for child in children if isinstance(child, dict))
    if not states:
        return ""
    words = [f"{count} of its processes {state}" for state, count in states.items()]
    return f" ({', '.join(words)})"


def _of_disk(facts: Facts) -> Iterator[Cause]:
    if facts.free_bytes < _FULL_BYTES:
        text = f"the disk of {facts.run.folder} is full: checkpoints and events can't be written"
        yield Cause("full disk", (), text, "free space there; training goes on, and the next checkpoint is written")
    elif facts.checkpoint_fault is not None:
        text = f"the newest checkpoint could not be written: {facts.checkpoint_fault}"
        yield Cause("checkpoint failed", (), text, "mend that: the job would go on from an older one")


def _of_speed(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for which steps take long."""
    splits = [split for split in facts.splits if split.steps >= FEW_STEPS]
    if not splits:
        return
    slow = None if facts.run.has_servers else slow_rank(splits)
    if slow is not None:
        other_splits = [split for split in splits if split.rank != slow.rank]
        slow_split = next(split for split in splits if split.rank == slow.rank)
        name, fix, more = _why_slow(facts, slow_split, other_splits, slow.kind)
        yield Cause(name, (slow.rank,), f"{sentence(slow)}{more}", fix)
        return
    least = {}
    for kind in ("data", "checkpoint", "communication", "bubble", "evaluation", "other"):
        # The smallest: what is true of every rank.
        least[kind] = min((split.by_kind[kind] / split.seconds for split in splits if split.seconds), default=0.0)
    for kind, text, fix in _SHARES:
        if least[kind] >= _MANY:
            yield Cause(f"much {kind}", (), f"{least[kind]:.0%} of each step is {text}", fix)


_SHARES = (
    ("data", "waiting for data, on every rank", "raise num_workers of the loader, or prepare the data beforehand"),
    ("checkpoint", "waiting for checkpoints", "raise --checkpoint-every, or write to a faster disk"),
    (
        "communication", "communication that does not overlap",
        "raise the batch size, accumulate, or compress (`paceline plan FILE` compares plans)",
    ),
    ("bubble", "waiting of pipeline stages for each other", "raise micro_batches, or take schedule=zero-bubble"),
    ("evaluation", "evaluation", "evaluate less often"),
    ("other", "the loop's own code", "look for what it prints, logs or copies in every step"),
)  # fmt: skip


def _why_slow(
    facts: Facts, slow_split: RankSplit, other_splits: Sequence[RankSplit], kind: str
) -> tuple[str, str, str]:
    """Return the name of the cause, the advice, and further words, for the rank that the others wait for."""
    if kind == "data":
        return "slow data", "look at that rank's disk and at its part of the data; raise num_workers", ""
    if kind == "checkpoint":
        return "slow checkpoint", "look at that host's disk", ""
    if kind in ("forward", "backward", "optimizer"):
        cores = {rank.rank: int(rank.answer.get("cores") or 0) for rank in facts.ranks if rank.answer is not None}
        own_cores = cores.get(slow_split.rank)
        peer_cores = [cores[split.rank] for split in other_splits if cores.get(split.rank)]
        ratio = _ratio(slow_split, other_splits)
        if own_cores and peer_cores and own_cores < statistics.median(peer_cores):
            more = f"; it may use {own_cores} core{'s' * (own_cores > 1)}, the others {max(peer_cores)}"
            return "fewer cores", "give it as many cores: taskset, cgroup, --cpus-per-task", more
        if ratio >= _CORES_RATIO:
            more = f"; forward and backward take {ratio:.1f} times as long there"
            return "slow compute", "look for other programs on its cores, its clock speed, or a longer batch", more
        return "uneven work", "even out the batch: pad or sort by length; or the stages' layers", ""
    return "slow loop", "let every rank do the same work in its loop, or none of them", ""


def _ratio(slow_split: RankSplit, other_splits: Sequence[RankSplit]) -> float:
    """Return the factor by which both passes take longer on a rank: the smaller of the two ratios."""
    ratios = []
    for kind in ("forward", "backward"):
        usual = statistics.median(split.by_kind[kind] for split in other_splits)
        ratios.append(slow_split.by_kind[kind] / usual if usual > 0 else 1.0)
    return min(ratios)
