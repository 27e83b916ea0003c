"""The order in which each pipeline rank works on its stages and micro-batches.

    gpipe         all forwards, then all backwards (Huang et al. 2019)
    1f1b          backwards as soon as they can be: at most as many micro-batches in flight as stages follow
                  (PipeDream-Flush, Narayanan et al. 2021)
    interleaved   each rank holds several stages, P apart: a smaller bubble for more messages (Megatron-LM,
                  Narayanan et al. 2021)
    zero_bubble   the backward pass in two halves, the gradient for the stage before and that of the weights; the
                  second half fills the bubbles (ZB-H1, Qi et al. 2024)

Schedules are made by playing them: in every tick each idle rank takes the first action that its rules allow and
whose inputs have come. What was played through can't deadlock; `check` proves the same of any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.nouns.errors import PlanError
from paceline.nouns.table import aligned

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
_HOLDS = {FORWARD: 1, BACKWARD: -1, WEIGHTS: 0}  # micro-batches whose activations are held, more or fewer
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
    """The actions of every rank, in order. Stage s belongs to rank s modulo the number of ranks."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]  # the actions of each rank
    ticks: tuple[tuple[int, ...], ...]  # the tick at which each action begins, if all take one tick

    @property
    def length(self) -> int:
        """Return the ticks until the last rank is done."""
        return max(tick for row in self.ticks for tick in row) + 1

    @property
    def bubble(self) -> float:
        """Return the share of ticks in which ranks wait."""
        actions = sum(len(row) for row in self.actions)
        return 1 - actions / (self.length * self.ranks)

    def in_flight(self, rank: int) -> int:
        """Return the most micro-batches whose activations a rank holds at once."""
        num_held = 0
        most = 0
        for action in self.actions[rank]:
            num_held += _HOLDS[action.kind]
            most = max(most, num_held)
        return most


def make_schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    """Make the schedule of that name by playing it through.

    Raises:
        PlanError: it can't be played through (a defect, not a property of the numbers).
    """
    stages = ranks * STAGES_PER_RANK[name]
    rules = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "zero_bubble": _one_forward_one_backward}
    rule = rules.get(name, _interleaved)
    todo = [_all_actions(name, rank, ranks, stages, micro_batches) for rank in range(ranks)]
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    ticks: list[list[int]] = [[] for _ in range(ranks)]
    completed: set[Action] = set()
    tick = 0
    while any(todo):
        begun = []  # entered in `completed` after the tick: an action that begins now can't be used before the next
        for rank in range(ranks):
            action = rule(rank, ranks, stages, actions[rank], todo[rank], completed)
            if action is not None:
                begun.append((rank, action))
        if not begun:  # nothing can change any more: the same tick would come again
            raise _stuck(name, todo)
        for rank, action in begun:
            todo[rank].remove(action)
            actions[rank].append(action)
            ticks[rank].append(tick)
            completed.add(action)
        tick += 1
    schedule = Schedule(name, ranks, stages, micro_batches, tuple(map(tuple, actions)), tuple(map(tuple, ticks)))
    check(schedule)  # a proof by itself: it knows only the order of actions, not how they were chosen
    return schedule


def check(schedule: Schedule) -> None:
    """Prove that every rank gets through its list in order, each action once, never waiting in a circle.

    Raises:
        PlanError: an action is missing or double, or the ranks wait for each other.
    """
    expected: list[Action] = []
    for rank in range(schedule.ranks):
        expected += _all_actions(schedule.name, rank, schedule.ranks, schedule.stages, schedule.micro_batches)
    if sorted(action for row in schedule.actions for action in row) != sorted(expected):
        raise _wrong(schedule.name, "an action is missing, double or of another rank")
    # Each rank goes as far as it can, until none moves. Actions never become impossible again, so the order in which
    # ranks are tried does not matter: who is left waits in a circle.
    places = [0] * schedule.ranks  # the index of each rank's next action
    completed: set[Action] = set()
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(schedule.actions):
            while places[rank] < len(row) and _is_ready(row[places[rank]], schedule.stages, completed):
                completed.add(row[places[rank]])
                places[rank] += 1
                has_moved = True
    waiting = []
    for row, place in zip(schedule.actions, places, strict=True):
        if place < len(row):
            waiting.append(str(row[place]))
    if waiting:
        raise _wrong(schedule.name, f"{', '.join(waiting)} wait for each other")


def picture(schedule: Schedule) -> str:
    """Draw the grid of ranks and ticks as text; `.` is waiting."""
    rows = []  # the texts of each rank's actions, by tick
    for ticks, actions in zip(schedule.ticks, schedule.actions, strict=True):
        rows.append({tick: _cell(schedule, action) for tick, action in zip(ticks, actions, strict=True)})
    width = max(len(text) for row in rows for text in row.values())
    lines = []
    for rank, row in enumerate(rows):
        lines.append((rank, *(row.get(tick, ".") for tick in range(schedule.length))))
    form = "rank {:>2} " + f" {{:<{width}}}" * schedule.length
    return "\n".join(line.rstrip() for line in aligned(lines, form))


def _cell(schedule: Schedule, action: Action) -> str:
    """Return an action's kind and micro-batch, and a letter for the stage where a rank has several."""
    text = f"{action.kind}{action.micro_batch}"
    if schedule.stages > schedule.ranks:
        text += "abcdefgh"[action.stage // schedule.ranks]
    return text


def _all_actions(name: str, rank: int, ranks: int, stages: int, micro_batches: int) -> list[Action]:
    """Return all actions of a rank, in any order."""
    kinds = [FORWARD, BACKWARD]
    if name == "zero_bubble":
        kinds.append(WEIGHTS)
    actions = []
    for kind in kinds:
        for stage in range(rank, stages, ranks):
            actions += [Action(kind, stage, micro_batch) for micro_batch in range(micro_batches)]
    return actions


def _is_ready(action: Action, stages: int, completed: set[Action]) -> bool:
    """Return True if all actions that an action needs are done."""
    stage, micro = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return stage == 0 or Action(FORWARD, stage - 1, micro) in completed
    if action.kind == WEIGHTS:
        return Action(BACKWARD, stage, micro) in completed
    if Action(FORWARD, stage, micro) not in completed:
        return False
    return stage == stages - 1 or Action(BACKWARD, stage + 1, micro) in completed


Rule = Callable[[int, int, int, list[Action], list[Action], set[Action]], Action | None]


def _first(kind: str, todo: Sequence[Action], stages: int, completed: set[Action]) -> Action | None:
    return _first_ready([action for action in todo if action.kind == kind], stages, completed)


def _first_ready(actions: Sequence[Action], stages: int, completed: set[Action]) -> Action | None:
    for action in actions:
        if _is_ready(action, stages, completed):
            return action
    return None


def _gpipe(
    rank: int, ranks: int, stages: int, past: list[Action], todo: list[Action], completed: set[Action]
) -> Action | None:
    if any(action.kind == FORWARD for action in todo):
        return _first(FORWARD, todo, stages, completed)
    return _first(BACKWARD, todo, stages, completed)


def _one_forward_one_backward(
    rank: int, ranks: int, stages: int, past: list[Action], todo: list[Action], completed: set[Action]
) -> Action | None:
    # Backward before forward frees activations as early as possible. The limit is the number of stages from this one
    # on: so many micro-batches are on their way before the first gradient can be back. Weights fill what is left.
    num_held = sum(_HOLDS[action.kind] for action in past)
    action = _first(BACKWARD, todo, stages, completed)
    if action is None and num_held < ranks - rank:
        action = _first(FORWARD, todo, stages, completed)
    if action is None:
        action = _first(WEIGHTS, todo, stages, completed)
    return action


def _interleaved(
    rank: int, ranks: int, stages: int, past: list[Action], todo: list[Action], completed: set[Action]
) -> Action | None:
    chunks = stages // ranks
    # Micro-batches go in rounds of as many as there are ranks, each round through one stage after the other.
    forwards = [action for action in todo if action.kind == FORWARD]
    forwards.sort(key=lambda action: (action.micro_batch // ranks, action.stage, action.micro_batch))
    backwards = [action for action in todo if action.kind == BACKWARD]
    backwards.sort(key=lambda action: (action.micro_batch // ranks, -action.stage, action.micro_batch))
    num_held = sum(_HOLDS[action.kind] for action in past)
    # Megatron-LM's number of forwards before the first backward, and the one that each backward then makes room for.
    limit = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
    backward = _first_ready(backwards, stages, completed)
    if num_held >= limit or not forwards:
        return backward
    if _is_ready(forwards[0], stages, completed):  # the next in Megatron's order; another only if nothing else can run
        return forwards[0]
    if backward is not None:
        return backward
    return _first_ready(forwards, stages, completed)


def _stuck(name: str, todo: list[list[Action]]) -> PlanError:
    next_actions = ", ".join(str(actions[0]) for actions in todo if actions)
    return _wrong(name, f"nothing can be done while {next_actions} are left")


def _wrong(name: str, found: str) -> PlanError:
    return PlanError(f"the schedule {name} should run through", found, "choose another schedule, and report this one")
