"""Make a trace of a run that Perfetto and chrome://tracing read: the activities of each rank, on one clock.

The format is Chrome's JSON: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.run.read.event_columns import EventIndex
from paceline.run.read.times import MOST_NS, StepTime, files_of, read_steps
from paceline.train.profile_files import read_profile

_STEPS, _WORK, _CHECKPOINTS, _AXES = 0, 1, 2, 3  # tracks of a rank; each axis has one from _AXES on
_FIRST_OF_PROFILE = 1000  # the first track of events from torch's profiler
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_PROFILED = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "ac2g", "fwdbwd", *_ON_GPU)
_SPAN_PARTS = 6
_WITH_LENGTH = ("checkpoint", "saved")
_INSTANTS = ("resumed", "stopped", "checkpoint_failed", "end")
_LEAST_MATCHES = 3  # moments of both hosts by which their clocks are compared

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace, and facts about it.

    Args:
        events: the events of the trace in Chrome's format.
        steps: the number of steps in it, of all ranks together.
        detailed: the number of these steps whose single operations are in it.
        ranks: the ranks that have steps in it.
        matched: the hosts whose clocks were compared by the ends of collectives; of the others the wall clock counts.
        messages: the number of arrows from a send to its receive.
        unreadable: the number of lines of the run's events that are no events.
    """

    events: list[Event]
    steps: int
    detailed: int
    ranks: tuple[int, ...]
    matched: tuple[str, ...] = ()
    messages: int = 0
    unreadable: int = 0


@dataclass(slots=True)
class _Clock:
    """The monotonic clocks of processes as nanoseconds since 1970, by that of the first rank."""

    shifts: dict[str, int] = field(default_factory=dict)  # by boot: the nanoseconds to add to its monotonic clock

    def at(self, step: StepTime, monotonic_ns: int) -> float:
        """Return a moment of a step's process in microseconds since 1970."""
        shift = self.shifts.get(step.process.boot)
        if not step.process.boot or shift is None:
            shift = step.process.wall_ns - step.process.monotonic_ns
        return (monotonic_ns + shift) / 1000


def make_trace(
    run_dir: Path, first: int | None = None, last: int | None = None, *, ranks: int = 0, tail_only: bool = False
) -> Trace:
    """Return the trace of a run.

    Args:
        run_dir: the run directory.
        first, last: the first and the last step that are wanted; None: from the first one, up to the last.
        ranks: the number of ranks in the trace, from the first; 0: all.
        tail_only: True to read no more than the end of each rank's file, and no event of the job; of a step that was
            taken again, only the last time.
    """
    by_rank: dict[int, list[StepTime]] = {}
    for rank, path in list(files_of(run_dir).items())[: ranks or None]:
        steps = [step for step in read_steps(path, tail_only) if _is_wanted(step.step, first, last)]
        by_rank[rank] = list({step.step: step for step in steps}.values()) if tail_only else steps
    clock, matched = _aligned(by_rank)
    all_steps = list(itertools.chain.from_iterable(by_rank.values()))
    axes = sorted(kind for kind in _kinds_of(all_steps) if " " in kind)
    tracks = {kind: _AXES + number for number, kind in enumerate([*axes, "bubble"])}
    events: list[Event] = []
    for rank, steps in by_rank.items():
        events += _names(rank, steps, tracks)
        for step in steps:
            events += _events_of(rank, step, clock, tracks)
    arrows = list(_arrows(by_rank, clock, tracks))
    events += arrows
    index = EventIndex(run_dir / "events.jsonl")
    if any(by_rank.values()) and not tail_only:
        events += _events_of_job(index.read_on(), first, last)
        for rank, steps in by_rank.items():
            events += _profile(run_dir, rank, steps, clock)
    return Trace(
        events=events,
        steps=sum(step.step is not None for step in all_steps),
        detailed=sum(bool(step.spans) for step in all_steps if step.step is not None),
        ranks=tuple(rank for rank, steps in by_rank.items() if steps),
        matched=matched,
        messages=len(arrows) // 2,
        unreadable=index.unreadable,
    )


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace, an event a line."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in trace.events))
        file.write("\n]}\n")


def _kinds_of(steps: Iterable[StepTime]) -> set[str]:
    """Return the kinds of work in which the steps spent time."""
    return set().union(*(step.by_kind for step in steps))


def _is_wanted(step: int | None, first: int | None, last: int | None) -> bool:
    if step is None:
        return last is None
    return (first is None or step >= first) and (last is None or step <= last)


def _names(rank: int, steps: Sequence[StepTime], tracks: Mapping[str, int]) -> Iterator[Event]:
    """Name the rank and its tracks, those that it uses."""
    if not steps:
        return
    host = steps[-1].process.host
    yield _meta(rank, 0, "process_name", f"rank {rank} ({host})" if host else f"rank {rank}")
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    used = _kinds_of(steps)
    names = {_STEPS: "steps", _WORK: "work"} | {track: kind for kind, track in tracks.items() if kind in used}
    for track, name in names.items():
        yield _meta(rank, track, "thread_name", name)
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _meta(rank: int, track: int, name: str, text: str) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": {"name": text}}


def _events_of(rank: int, step: StepTime, clock: _Clock, tracks: Mapping[str, int]) -> Iterator[Event]:
    if step.step is not None:
        milliseconds = {kind: round(ns / 1e6, 3) for kind, ns in step.by_kind.items()}
        yield {
            "ph": "X", "pid": rank, "tid": _STEPS, "name": f"step {step.step}", "cat": "step",
            "ts": clock.at(step, step.begin_ns), "dur": step.ns / 1000, "args": {"step": step.step, "ms": milliseconds},
        }  # fmt: skip
    for kind, name, begin_ns, end_ns, peer, tag in _spans(step):
        arguments: dict[str, Any] = {"step": step.step}
        if peer >= 0:
            arguments |= {"peer": peer, "tag": tag}
        yield {
            "ph": "X", "pid": rank, "tid": tracks.get(kind, _WORK), "name": name or kind, "cat": kind,
            "ts": clock.at(step, begin_ns), "dur": (end_ns - begin_ns) / 1000, "args": arguments,
        }  # fmt: skip


def _spans(step: StepTime) -> Iterator[tuple[str, str, int, int, int, int]]:
    """Yield the operations of a step; those in another form are passed over."""
    for span in step.spans:
        if not isinstance(span, list) or len(span) != _SPAN_PARTS:
            continue
        kind, name, *numbers = span
        if isinstance(kind, str) and isinstance(name, str) and all(map(_is_number, numbers)):
            begin_ns, end_ns, peer, tag = numbers
            yield kind, name, begin_ns, end_ns, peer, tag


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and -1 <= value < MOST_NS


def _arrows(by_rank: Mapping[int, Sequence[StepTime]], clock: _Clock, tracks: Mapping[str, int]) -> Iterator[Event]:
    """Yield a pair of events for each message. Messages of one step, sender, receiver and tag match in their order."""
    sends: dict[tuple[int | None, int, int, int], list[Event]] = defaultdict(list)
    receives: dict[tuple[int | None, int, int, int], list[Event]] = defaultdict(list)
    for rank, steps in by_rank.items():
        for step in steps:
            for kind, name, begin_ns, end_ns, peer, tag in _spans(step):
                place = {"pid": rank, "tid": tracks.get(kind, _WORK), "cat": "message", "name": "message"}
                middle = {**place, "ts": clock.at(step, (begin_ns + end_ns) // 2)}
                if peer >= 0 and name == "send" and kind != "bubble":  # of a send that is waited for, the begin counts
                    sends[step.step, rank, peer, tag].append(middle)
                elif peer >= 0 and name == "receive":
                    receives[step.step, peer, rank, tag].append(middle)
    number = 0
    for key, begins in sends.items():
        for begin, end in zip(begins, receives.get(key, []), strict=False):
            number += 1
            yield {"ph": "s", "id": number, **begin}
            yield {"ph": "f", "bp": "e", "id": number, **end}


def _profile(run_dir: Path, rank: int, steps: Sequence[StepTime], clock: _Clock) -> Iterator[Event]:
    """Yield the events that torch's profiler recorded in some steps of a rank, each thread and stream as a track.

    Args:
        run_dir: the run directory.
        rank: the number of the rank.
        steps: the steps that are wanted.
        clock: the clock of the trace; the profiler's is the wall clock of the rank's host.
    """
    numbered = [step for step in steps if step.step is not None]
    if not numbered:
        return
    begin_us = clock.at(numbered[0], numbered[0].begin_ns)
    end_us = clock.at(numbered[-1], numbered[-1].begin_ns + numbered[-1].ns)
    shift_us = begin_us - numbered[0].process.wall_of(numbered[0].begin_ns) / 1000
    tracks: dict[tuple[Any, Any], int] = {}
    for event in read_profile(run_dir, rank):
        kind, phase = event.get("cat"), event.get("ph")
        at_us = event["ts"] + shift_us
        if kind not in _PROFILED or phase not in ("X", "s", "f") or not begin_us <= at_us <= end_us:
            continue
        place = event.get("pid"), event.get("tid")
        if place not in tracks:
            tracks[place] = _FIRST_OF_PROFILE + len(tracks)
            name = f"GPU {place[0]}, stream {place[1]}" if kind in _ON_GPU else f"operations of thread {place[1]}"
            yield _meta(rank, tracks[place], "thread_name", name)
        moved = {**event, "pid": rank, "tid": tracks[place], "ts": at_us}
        if phase != "X":
            moved["id"] = f"{rank} {kind} {event.get('id')}"
        yield moved


def _events_of_job(index: EventIndex, first: int | None, last: int | None) -> Iterator[Event]:
    """Yield rank 0's checkpoints and the job's other events, by the wall clock of its host."""
    yield _meta(0, _CHECKPOINTS, "thread_name", "checkpoints and events")
    for kind in (*_WITH_LENGTH, *_INSTANTS):
        for event in index.events(kind):
            yield from _event_of_job(event, first, last)


def _event_of_job(event: Mapping[str, Any], first: int | None, last: int | None) -> Iterator[Event]:
    kind, at, step = event["event"], event.get("at"), event.get("step")
    if at is None or (step is not None and not _is_wanted(step, first, last)):
        return
    place = {"pid": 0, "tid": _CHECKPOINTS, "cat": "job", "args": {"step": step}}
    if kind in _WITH_LENGTH and "seconds" in event:
        yield {"ph": "X", "name": kind, "ts": 1e6 * (at - event["seconds"]), "dur": 1e6 * event["seconds"], **place}
    elif kind in _INSTANTS:
        yield {"ph": "i", "s": "t", "name": kind, "ts": 1e6 * at, **place}


def _aligned(by_rank: Mapping[int, Sequence[StepTime]]) -> tuple[_Clock, tuple[str, ...]]:
    """Return one clock for all ranks, and the hosts that were compared with the first one.

    Ranks of a host have one monotonic clock. Of another host the ends of each step's last collective are compared: they
    are one moment, but for the way of a message. The wall clock of a host may jump, and may be wrong by seconds.
    """
    clock = _Clock()
    ends: dict[str, dict[int, int]] = {}  # by boot, then by step: the end of the last collective of its first rank
    hosts: dict[str, str] = {}
    for steps in by_rank.values():
        for step in steps:
            boot = step.process.boot
            collective_ends = [end for kind, _, _, end, peer, _ in _spans(step) if " " in kind and peer < 0]
            clock.shifts.setdefault(boot, step.process.wall_ns - step.process.monotonic_ns)
            hosts.setdefault(boot, step.process.host)
            if collective_ends and step.step is not None:
                ends.setdefault(boot, {}).setdefault(step.step, max(collective_ends))
    first, *other_boots = list(clock.shifts) or [""]
    matched = []
    for boot in other_boots:
        common = ends.get(first, {}).keys() & ends.get(boot, {}).keys()
        if not boot or not first or len(common) < _LEAST_MATCHES:
            continue
        differences = [ends[first][step] - ends[boot][step] for step in common]
        clock.shifts[boot] = clock.shifts[first] + int(statistics.median(differences))
        matched.append(hosts[boot])
    return clock, tuple(matched)
