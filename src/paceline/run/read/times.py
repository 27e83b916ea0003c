"""Read the ranks' times by kind of work, from `times/RANK.jsonl` in a run directory, and compare the ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from paceline.nouns.reading import LARGEST, LONGEST_LINE, LineFollower, lines_backwards, regular
from paceline.nouns.table import aligned
from paceline.run.shown import milliseconds
from paceline.train.times_file import FOLDER, VERSION

KINDS = (
    "data", "forward", "backward", "communication", "bubble", "optimizer", "checkpoint", "evaluation", "other",
)  # fmt: skip
WAITING = ("communication", "bubble")  # the kinds of work in which a rank may wait for another
RECENT = 50  # steps that are averaged
_TAIL_BYTES = 2**18
_HEAD = b'{"version":'
_LAST = b'{"step":null'  # the begin of the line after the last step
_LEAST_S = 0.001
_ERRORS = 3
FEW_STEPS = 5  # fewer say little of a step's usual time
MOST_NS = LARGEST
_Ns: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
_LEAST_SHARE = 0.1  # a rank that takes this share of a step longer than the others is slow


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a rank, and its clocks.

    Args:
        rank: the rank that the process runs.
        host, pid: the host on which it runs, and its process number there.
        boot: a text that is equal for processes whose monotonic clocks are one; "" where nobody knows.
        monotonic_ns, wall_ns: the times of both clocks at one moment, in nanoseconds.
    """

    rank: int
    host: str = ""
    pid: int = 0
    boot: str = ""
    monotonic_ns: int = 0
    wall_ns: int = 0

    def wall_of(self, monotonic_ns: int) -> int:
        """Return the nanoseconds since 1970 of a moment of the monotonic clock."""
        return self.wall_ns + monotonic_ns - self.monotonic_ns


@dataclass(frozen=True, slots=True)
class StepTime:
    """The times of one step of one rank.

    Args:
        step: the number of the step; None: the time after the last step.
        begin_ns: the begin of the step by the process's monotonic clock, which is the end of the step before.
        by_kind: the nanoseconds by kind of work, as `comm/step_times.py` names them.
        spans: the single operations, where they were kept: kind, name, begin, end, peer, tag.
        process: the process that took the step.
    """

    step: int | None
    begin_ns: int
    by_kind: Mapping[str, int]
    spans: Sequence[Sequence[Any]]
    process: Process

    @property
    def ns(self) -> int:
        """Return the nanoseconds of the whole step."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class RankSplit:
    """The times of a rank's recent steps, split by kind of work.

    Args:
        rank: the number of the rank.
        steps: the number of steps that were averaged.
        last_step: the number of the newest step.
        seconds: the mean time of a step.
        by_kind: the mean seconds of a step, for each of KINDS.
        median_s: the median time of a step, in seconds.
        own_steps_s: the seconds of each step in which the rank waits for no other.
        by_axis: the mean seconds of a step in which each axis communicates.
    """

    rank: int
    steps: int
    last_step: int
    seconds: float
    by_kind: Mapping[str, float]
    median_s: float = 0.0
    own_steps_s: Sequence[float] = ()
    by_axis: Mapping[str, float] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """Return the seconds of a step in which the rank waits for no other."""
        return self.seconds - sum(self.by_kind[kind] for kind in WAITING)

    def to_json(self) -> dict[str, Any]:
        """Return the times for programs."""
        facts = asdict(self)
        del facts["own_steps_s"]
        return facts


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank for which the others wait.

    Args:
        rank: the number of the rank.
        kind: the kind of work in which the rank loses most.
        excess_s: the seconds of a step by which this kind takes longer than on the others (their median).
        own_excess_s: the seconds of a step by which all its own work takes longer than on the others.
        seconds: the mean time of a step.
    """

    rank: int
    kind: str
    excess_s: float
    own_excess_s: float
    seconds: float


def read_steps(path: Path, tail_only: bool = False) -> Iterator[StepTime]:
    """Yield the steps in a rank's file; lines that are torn, or of another version, are passed over.

    Args:
        path: the path of the file.
        tail_only: True to read no more than the last 256 KiB. Steps before the first process that begins there count as
                those of the file's first one.
    """
    process = Process(int(path.stem) if path.stem.isdecimal() else -1)
    is_known = True
    for line in _lines(path, tail_only):
        if line.version is not None:
            is_known = line.version == VERSION
            process = line.process(process.rank)
        elif is_known and line.ns is not None:
            yield StepTime(line.step, line.begin_ns, line.ns, line.spans, process)


def newest_process(path: Path) -> tuple[Process | None, bool]:
    """Return the process that wrote to a rank's file last, and whether it has ended its job; None: there is none."""
    has_ended = False
    for text in lines_backwards(path):  # of many lines few are decoded
        has_ended = has_ended or text.startswith(_LAST)
        if text.startswith(_HEAD):
            return next(((line.process(int(path.stem)), has_ended) for line in _decoded(text)), (None, False))
    return None, False


class _Line(msgspec.Struct):
    """A line of a rank's file: of a process that begins, or of a step."""

    version: int | None = None
    host: str = ""
    pid: _Ns = 0
    boot: str = ""
    monotonic_ns: _Ns = 0
    wall_ns: _Ns = 0
    step: int | None = None
    begin_ns: _Ns = 0
    ns: dict[str, _Ns] | None = None
    spans: list[Any] = []

    def process(self, rank: int) -> Process:
        return Process(rank, self.host, self.pid, self.boot, self.monotonic_ns, self.wall_ns)


_decoder = msgspec.json.Decoder(_Line)


def _lines(path: Path, tail_only: bool) -> Iterator[_Line]:
    try:
        begin = max(path.stat().st_size - _TAIL_BYTES, 0) if tail_only else 0
        if begin:
            with open(path, "rb", opener=regular) as file:
                yield from _decoded(file.readline(LONGEST_LINE))
        for _, text in LineFollower(path, begin).lines():
            yield from _decoded(text)
    except OSError:
        return


def _decoded(text: bytes) -> Iterator[_Line]:
    try:
        line = _decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: not UTF-8
        return
    yield line


def files_of(run_dir: Path) -> dict[int, Path]:
    """Return the files of a run's ranks, by rank."""
    ranks = [int(path.stem) for path in (run_dir / FOLDER).glob("*.jsonl") if path.stem.isdecimal()]
    return {rank: run_dir / FOLDER / f"{rank}.jsonl" for rank in sorted(ranks)}


def recent_splits(run_dir: Path, ranks: int, count: int = RECENT) -> list[RankSplit]:
    """Return the split of each rank over the newest steps that all ranks have written; servers' workers: each its own.

    The first step of a process, which connects, is left out.

    Args:
        run_dir: the run directory of the job.
        ranks: the number of ranks now: an earlier start may have had more. 0: nobody knows.
        count: the largest number of steps of each rank.
    """
    by_rank: dict[int, dict[int, StepTime]] = {}
    for rank, path in files_of(run_dir).items():
        if ranks and rank >= ranks:
            continue
        numbered = [step for step in read_steps(path, tail_only=True) if step.step is not None]
        of_process = [step for step in numbered if step.process == numbered[-1].process]
        if of_process:
            by_rank[rank] = {int(step.step or 0): step for step in of_process[1:] or of_process}
    # Lines wait in memory for a while, so that files end with different steps: only the same ones can be compared.
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    splits = []
    for rank, steps in by_rank.items():
        chosen = sorted(common or steps)[-count:]
        splits.append(_split(rank, [steps[number] for number in chosen]))
    return splits


def _split(rank: int, steps: Sequence[StepTime]) -> RankSplit:
    by_kind = dict.fromkeys(KINDS, 0.0)
    by_axis: dict[str, float] = {}
    for step in steps:
        for name, ns in step.by_kind.items():
            kind, _, axis = name.partition(" ")
            seconds = ns / 1e9 / len(steps)
            by_kind[kind if kind in by_kind else "other"] += seconds
            if axis:
                by_axis[axis] = by_axis.get(axis, 0.0) + seconds
    median_s = statistics.median(step.ns for step in steps) / 1e9
    own_steps_s = tuple(
        sum(ns for kind, ns in step.by_kind.items() if not kind.startswith(WAITING)) / 1e9 for step in steps
    )
    return RankSplit(
        rank, len(steps), steps[-1].step or 0, sum(by_kind.values()), by_kind, median_s, own_steps_s, by_axis
    )


def slow_rank(splits: Sequence[RankSplit]) -> SlowRank | None:
    """Return the rank for which the others wait; None: none takes a tenth of a step longer than the others."""
    if len(splits) < 2 or min(split.steps for split in splits) < FEW_STEPS:
        return None
    slowest = max(splits, key=lambda split: split.own_s)
    other_splits = [split for split in splits if split is not slowest]
    own_excess_s = slowest.own_s - statistics.median(split.own_s for split in other_splits)
    if own_excess_s < max(_LEAST_S, _LEAST_SHARE * slowest.seconds) or _is_noise(slowest, other_splits):
        return None
    excess = {}
    for kind in KINDS:
        if kind not in WAITING:
            excess[kind] = slowest.by_kind[kind] - statistics.median(split.by_kind[kind] for split in other_splits)
    kind = max(excess, key=lambda kind: excess[kind])
    return SlowRank(slowest.rank, kind, excess[kind], own_excess_s, slowest.seconds)


def _is_noise(slowest: RankSplit, other_splits: Sequence[RankSplit]) -> bool:
    """Return whether a rank's excess is no more than three standard errors, as far as single steps are known."""
    rows = [split.own_steps_s for split in other_splits]
    if len(slowest.own_steps_s) < 2 or any(len(row) != len(slowest.own_steps_s) for row in rows):
        return False
    usual = [statistics.median(of_step) for of_step in zip(*rows, strict=True)]
    excess: list[float] = [own_s - usual_s for own_s, usual_s in zip(slowest.own_steps_s, usual, strict=True)]
    error = statistics.stdev(excess) / math.sqrt(len(excess))
    return bool(statistics.fmean(excess) < _ERRORS * error)


def table(splits: Sequence[RankSplit], most: int = 16) -> list[str]:
    """Return milliseconds of a step by kind, a line for each rank; kinds that none of them has are left out.

    Args:
        splits: the times of each rank.
        most: the largest number of ranks that are shown.
    """
    if not splits:
        return []
    kinds = [kind for kind in KINDS if any(split.by_kind[kind] > 0 for split in splits)]
    rows: list[tuple[str, ...]] = [("ms of a step", *kinds, "all")]
    for split in splits[:most]:
        rows.append(
            (f"rank {split.rank}", *(milliseconds(split.by_kind[kind]) for kind in kinds), milliseconds(split.seconds))
        )
    if len(splits) > most:
        rows.append((f"and {len(splits) - most} more", *("" for _ in kinds), ""))
    return aligned(rows, "{:<}" + "  {:>}" * (len(kinds) + 1))


def sentence(slow: SlowRank) -> str:
    """Return the sentence that names the slow rank and the kind of work in which it loses time."""
    share = slow.own_excess_s / slow.seconds
    text = f"rank {slow.rank} is waited for {milliseconds(slow.own_excess_s)} ms of a step ({share:.0%})"
    kind = "own code" if slow.kind == "other" else slow.kind
    return f"{text}: its {kind} takes {milliseconds(slow.excess_s)} ms longer than on the others"
