"""The order in which each pipeline rank works on its stages and micro-batches.

    gpipe         all forwards, then all backwards (Huang et al. 2019)
    1f1b          backwards as soon as they can be: at most as many micro-batches in flight as stages follow
                  (PipeDream-Flush, Narayanan et al. 2021)
    interleaved   each rank holds several stages, P apart: a smaller bubble for more messages (Megatron-LM,
                  Narayanan et al. 2021)
    zero_bubble   the backward pass in two halves, what the stage before waits for and the weights' own; the
                  second half fills the bubbles (ZB-H1, Qi et al. 2024)

Schedules are made by playing them: in every tick each idle rank takes the first action that its rules allow and
whose inputs have come. What was played through can't deadlock; `check` proves the same of any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.nouns.errors import PlanError

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank does, in order. Stage s belongs to rank s modulo the number of ranks."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]  # by rank
    ticks: tuple[tuple[int, ...], ...]  # when each action begins if all take one tick

    @property
    def length(self) -> int:
        """Ticks until the last rank is done."""
        return max(tick for row in self.ticks for tick in row) + 1

    @property
    def bubble(self) -> float:
        """The share of ticks in which ranks wait."""
        return 1 - sum(map(len, self.actions)) / (self.length * self.ranks)

    def in_flight(self, rank: int) -> int:
        """The most micro-batches whose activations a rank holds at once."""
        held, most = 0, 0
        for action in self.actions[rank]:
            held += {FORWARD: 1, BACKWARD: -1, WEIGHTS: 0}[action.kind]
            most = max(most, held)
        return most


def make_schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule of that name.

    Raises:
        PlanError: it can't be played through (a defect, not a property of the numbers).
    """
    stages = ranks * STAGES_PER_RANK[name]
    halves = name == "zero_bubble"
    rules = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zero_bubble": _one_forward_one_backward}
    rule = rules.get(name, _interleaved)
    todo = [_todo(rank, ranks, stages, micro_batches, halves) for rank in range(ranks)]
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    ticks: list[list[int]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    tick = 0
    while any(todo):
        taken = []
        for rank in range(ranks):
            action = rule(rank, ranks, stages, actions[rank], todo[rank], done)
            if action is not None:
                taken.append((rank, action))
        if not taken:
            raise _stuck(name, todo)
        for rank, action in taken:
            todo[rank].remove(action)
            actions[rank].append(action)
            ticks[rank].append(tick)
            done.add(action)
        tick += 1
    schedule = Schedule(name, ranks, stages, micro_batches, tuple(map(tuple, actions)), tuple(map(tuple, ticks)))
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Prove that every rank gets through its list in order, each action once, never waiting in a circle.

    Raises:
        PlanError: an action is missing or double, or the ranks wait for each other.
    """
    wanted = sorted(
        action
        for rank in range(schedule.ranks)
        for action in _todo(
            rank, schedule.ranks, schedule.stages, schedule.micro_batches, schedule.name == "zero_bubble"
        )
    )
    if sorted(action for row in schedule.actions for action in row) != wanted:
        raise _wrong(schedule.name, "an action is missing, double or of another rank")
    place = [0] * schedule.ranks
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while place[rank] < len(row) and _is_ready(row[place[rank]], schedule.stages, done):
                done.add(row[place[rank]])
                place[rank] += 1
                moved = True
    stuck = [str(row[at]) for row, at in zip(schedule.actions, place, strict=True) if at < len(row)]
    if stuck:
        raise _wrong(schedule.name, f"{', '.join(stuck)} wait for each other")


def picture(schedule: Schedule) -> str:
    """The grid of ranks and ticks as text; `.` is waiting."""
    cells = [
        {tick: f"{action.kind}{action.micro_batch}" for tick, action in zip(row, actions, strict=True)}
        for row, actions in zip(schedule.ticks, schedule.actions, strict=True)
    ]
    chunk = "abcdefgh"
    if schedule.stages > schedule.ranks:
        for row, (row_ticks, actions) in zip(cells, zip(schedule.ticks, schedule.actions, strict=True), strict=True):
            for tick, action in zip(row_ticks, actions, strict=True):
                row[tick] += chunk[action.stage // schedule.ranks]
    width = max(len(text) for row in cells for text in row.values())
    lines = [
        f"rank {rank:>2}  " + " ".join(row.get(tick, ".").ljust(width) for tick in range(schedule.length)).rstrip()
        for rank, row in enumerate(cells)
    ]
    return "\n".join(lines)


def _todo(rank: int, ranks: int, stages: int, micro_batches: int, halves: bool) -> list[Action]:
    kinds = (FORWARD, BACKWARD, WEIGHTS) if halves else (FORWARD, BACKWARD)
    own = range(rank, stages, ranks)
    return [Action(kind, stage, micro) for kind in kinds for stage in own for micro in range(micro_batches)]


def _is_ready(action: Action, stages: int, done: set[Action]) -> bool:
    stage, micro = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return stage == 0 or Action(FORWARD, stage - 1, micro) in done
    if action.kind == WEIGHTS:
        return Action(BACKWARD, stage, micro) in done
    if Action(FORWARD, stage, micro) not in done:
        return False
    return stage == stages - 1 or Action(BACKWARD, stage + 1, micro) in done


Rule = Callable[[int, int, int, list[Action], list[Action], set[Action]], Action | None]


def _first(kind: str, todo: Sequence[Action], stages: int, done: set[Action]) -> Action | None:
    return next((a for a in todo if a.kind == kind and _is_ready(a, stages, done)), None)


def _gpipe(
    rank: int, ranks: int, stages: int, past: list[Action], todo: list[Action], done: set[Action]
) -> Action | None:
    if any(action.kind == FORWARD for action in todo):
        return _first(FORWARD, todo, stages, done)
    return _first(BACKWARD, todo, stages, done)


def _one_forward_one_backward(
    rank: int, ranks: int, stages: int, past: list[Action], todo: list[Action], done: set[Action]
) -> Action | None:
    held = sum({FORWARD: 1, BACKWARD: -1, WEIGHTS: 0}[action.kind] for action in past)
    action = _first(BACKWARD, todo, stages, done)
    if action is None and held < ranks - rank:
        action = _first(FORWARD, todo, stages, done)
    if action is None:
        action = _first(WEIGHTS, todo, stages, done)
    return action


def _interleaved(
    rank: int, ranks: int, stages: int, past: list[Action], todo: list[Action], done: set[Action]
) -> Action | None:
    chunks = stages // ranks
    forwards = sorted(
        (a for a in todo if a.kind == FORWARD),
        key=lambda a: (a.micro_batch // ranks, a.stage, a.micro_batch),
    )
    backwards = sorted(
        (a for a in todo if a.kind == BACKWARD),
        key=lambda a: (a.micro_batch // ranks, -a.stage, a.micro_batch),
    )
    held = sum(1 if action.kind == FORWARD else -1 for action in past)
    limit = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
    backward = next((a for a in backwards if _is_ready(a, stages, done)), None)
    if held >= limit or not forwards:
        return backward
    forward = forwards[0] if _is_ready(forwards[0], stages, done) else None
    if forward is None:
        forward = next((a for a in forwards if _is_ready(a, stages, done)), None) if backward is None else None
    return forward or backward


def _stuck(name: str, todo: list[list[Action]]) -> PlanError:
    left = ", ".join(str(row[0]) for row in todo if row)
    return _wrong(name, f"nothing can be done while {left} are left")


def _wrong(name: str, found: str) -> PlanError:
    return PlanError(f"the schedule {name} should run through", found, "choose another schedule, and report this one")
