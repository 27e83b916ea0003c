"""Read what the ranks' steps spent their time on, from `times/RANK.jsonl` in a run directory, and compare the ranks."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.reading import LONGEST_LINE, lines_of, regular
from paceline.nouns.table import aligned
from paceline.train.times_file import FOLDER, VERSION

KINDS = (
    "data", "forward", "backward", "communication", "bubble", "optimizer", "checkpoint", "evaluation", "other",
)  # fmt: skip
WAITING = ("communication", "bubble")  # in which a rank may wait for another
RECENT = 50  # steps that are averaged
_TAIL_BYTES = 2**18
_HEAD = b'{"version":'
_LAST = b'{"step":null'  # what came after the last step
_LEAST_S = 0.001
_ERRORS = 3
FEW_STEPS = 5  # fewer say little of a step's usual time
MOST_NS = 2**63
_LEAST_SHARE = 0.1  # of a step: a rank that takes so much longer than the others is slow


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a rank, and its clocks.

    Args:
        rank: of the process.
        host, pid: where it runs, and its number there.
        boot: equal for processes whose monotonic clocks are one; "" where nobody knows.
        monotonic_ns, wall_ns: what both clocks showed at one moment.
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
    """One step of one rank.

    Args:
        step: its number; None: what came after the last one.
        begin_ns: by the process's monotonic clock: the end of the step before.
        by_kind: nanoseconds by kind of work, as `comm/step_times.py` names them.
        spans: what was done, where it was kept: kind, name, begin, end, peer, tag.
        process: that took it.
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
    """Where the time of a rank's recent steps goes.

    Args:
        rank: whose.
        steps: that were averaged.
        last_step: the number of the newest.
        seconds: of a step, their mean.
        by_kind: seconds of a step, for each of KINDS.
        median_s: of the steps.
        own_steps_s: of each step, the seconds in which the rank waits for no other.
        by_axis: seconds of a step in which each axis communicates.
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
        """Return it for programs."""
        return {
            "rank": self.rank,
            "steps": self.steps,
            "last_step": self.last_step,
            "seconds": self.seconds,
            "median_s": self.median_s,
            "by_kind": dict(self.by_kind),
            "by_axis": dict(self.by_axis),
        }


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank for which the others wait.

    Args:
        rank: which.
        kind: of work in which it loses most.
        excess_s: seconds of a step by which this kind takes longer than on the others (their median).
        own_excess_s: the same of all its own work.
        seconds: of a step.
    """

    rank: int
    kind: str
    excess_s: float
    own_excess_s: float
    seconds: float


def read_steps(path: Path, tail_only: bool = False) -> Iterator[StepTime]:
    """Yield the steps in a rank's file; lines that are torn, or of another version, are passed over.

    Args:
        path: of the file.
        tail_only: read no more than its last 256 KiB. Steps before the first process that begins there count as those
            of the file's first one.
    """
    process = Process(int(path.stem) if path.stem.isdecimal() else -1)
    is_known = True
    for line in _lines(path, tail_only):
        if "version" in line:
            is_known = line["version"] == VERSION
            process = _process(line, process.rank)
        elif is_known and "ns" in line:
            step = _step(line, process)
            if step is not None:
                yield step


def newest_process(path: Path) -> tuple[Process | None, bool]:
    """Return the process that wrote to a rank's file last, and whether it has ended its job; None: there is none."""
    newest, has_ended = None, False
    try:
        with open(path, "rb", opener=regular) as file:
            for text in lines_of(file):  # of many lines few are read
                if text.startswith(_HEAD):
                    newest, has_ended = text, False
                elif text.startswith(_LAST):
                    has_ended = True
        return (None if newest is None else _process(json.loads(newest), int(path.stem))), has_ended
    except (OSError, ValueError, RecursionError):
        return None, False


def _lines(path: Path, tail_only: bool) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb", opener=regular) as file:
            begin = max(path.stat().st_size - _TAIL_BYTES, 0) if tail_only else 0
            if begin:
                yield from _decoded(file.readline(LONGEST_LINE))
                file.seek(begin)
            for text in lines_of(file):
                yield from _decoded(text)
    except OSError:
        return


def _decoded(text: bytes) -> Iterator[dict[str, Any]]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(line, dict):
        yield line


def _process(line: Mapping[str, Any], rank: int) -> Process:
    numbers = {}
    for name in ("pid", "monotonic_ns", "wall_ns"):
        value = line.get(name)
        numbers[name] = value if isinstance(value, int) and 0 <= value < MOST_NS else 0
    return Process(rank, str(line.get("host", "")), boot=str(line.get("boot", "")), **numbers)


def _step(line: Mapping[str, Any], process: Process) -> StepTime | None:
    step, begin_ns, by_kind = line.get("step"), line.get("begin_ns"), line.get("ns")
    if not isinstance(step, int | None) or not isinstance(begin_ns, int) or not isinstance(by_kind, dict):
        return None
    if not all(isinstance(ns, int) and 0 <= ns < MOST_NS for ns in (begin_ns, *by_kind.values())):
        return None
    spans = line.get("spans")
    return StepTime(step, begin_ns, by_kind, spans if isinstance(spans, list) else [], process)


def files_of(run_dir: Path) -> dict[int, Path]:
    """Return the files of a run's ranks, by rank."""
    ranks = [int(path.stem) for path in (run_dir / FOLDER).glob("*.jsonl") if path.stem.isdecimal()]
    return {rank: run_dir / FOLDER / f"{rank}.jsonl" for rank in sorted(ranks)}


def recent_splits(run_dir: Path, ranks: int, count: int = RECENT) -> list[RankSplit]:
    """Return where the time of the newest steps goes that all ranks have written; of servers' workers each one's own.

    The first step of a process, which connects, is left out.

    Args:
        run_dir: of the job.
        ranks: how many it has now: an earlier start may have had more. 0: nobody knows.
        count: steps of each.
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
    own = tuple(sum(ns for kind, ns in step.by_kind.items() if not kind.startswith(WAITING)) / 1e9 for step in steps)
    return RankSplit(rank, len(steps), steps[-1].step or 0, sum(by_kind.values()), by_kind, median_s, own, by_axis)


def slow_rank(splits: Sequence[RankSplit]) -> SlowRank | None:
    """Return the rank for which the others wait; None: none takes a tenth of a step longer than the others."""
    if len(splits) < 2 or min(split.steps for split in splits) < FEW_STEPS:
        return None
    slowest = max(splits, key=lambda split: split.own_s)
    others = [split for split in splits if split is not slowest]
    own_excess_s = slowest.own_s - statistics.median(split.own_s for split in others)
    if own_excess_s < max(_LEAST_S, _LEAST_SHARE * slowest.seconds) or _is_noise(slowest, others):
        return None
    excess = {}
    for kind in KINDS:
        if kind not in WAITING:
            excess[kind] = slowest.by_kind[kind] - statistics.median(split.by_kind[kind] for split in others)
    kind = max(excess, key=lambda kind: excess[kind])
    return SlowRank(slowest.rank, kind, excess[kind], own_excess_s, slowest.seconds)


def _is_noise(slowest: RankSplit, others: Sequence[RankSplit]) -> bool:
    """Return whether a rank's excess is no more than three standard errors, as far as single steps are known."""
    rows = [split.own_steps_s for split in others]
    if len(slowest.own_steps_s) < 2 or any(len(row) != len(slowest.own_steps_s) for row in rows):
        return False
    usual = [statistics.median(of_step) for of_step in zip(*rows, strict=True)]
    excess: list[float] = [own - other for own, other in zip(slowest.own_steps_s, usual, strict=True)]
    error = statistics.stdev(excess) / math.sqrt(len(excess))
    return bool(statistics.fmean(excess) < _ERRORS * error)


def table(splits: Sequence[RankSplit], most: int = 16) -> list[str]:
    """Return milliseconds of a step by kind, a line for each rank; kinds that none of them has are left out.

    Args:
        splits: of the ranks.
        most: ranks that are shown.
    """
    if not splits:
        return []
    kinds = [kind for kind in KINDS if any(split.by_kind[kind] > 0 for split in splits)]
    rows: list[tuple[str, ...]] = [("ms of a step", *kinds, "all")]
    for split in splits[:most]:
        rows.append((f"rank {split.rank}", *(_ms(split.by_kind[kind]) for kind in kinds), _ms(split.seconds)))
    if len(splits) > most:
        rows.append((f"and {len(splits) - most} more", *("" for _ in kinds), ""))
    return aligned(rows, "{:<}" + "  {:>}" * (len(kinds) + 1))


def sentence(slow: SlowRank) -> str:
    """Say which rank is waited for, and why."""
    share = slow.own_excess_s / slow.seconds
    text = f"rank {slow.rank} is waited for {_ms(slow.own_excess_s)} ms of a step ({share:.0%})"
    kind = "own code" if slow.kind == "other" else slow.kind
    return f"{text}: its {kind} takes {_ms(slow.excess_s)} ms longer than on the others"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 10 else f"{1000 * seconds:.0f}"
