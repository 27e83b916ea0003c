"""Sessions of event ids: read, made up, and split into what is trained on, what sets the threshold, and the test set.

A session is one run of something: a block of HDFS, a process, some consecutive lines. The threshold is chosen on a part
of the training sessions; the test set is for the scores at the end alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import templates
from files import open_lines, present

from paceline.nouns.errors import DataError, UsageError, did_you_mean

FOLDS = 5
_THRESHOLD_EVERY = 8  # every eighth training session, of each class, sets the threshold


@dataclass(frozen=True)
class Session:
    """Event ids in the order of time, and whether the session is an anomaly."""

    keys: tuple[int, ...]
    is_anomaly: bool = False


@dataclass(frozen=True, kw_only=True)
class Data:
    """The three parts of a data set, and what to call it."""

    name: str
    train: Sequence[Session]
    threshold: Sequence[Session]
    test: Sequence[Session]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One data set and what is learned from it.

    Args:
        name: of --task.
        is_next_key: the model predicts the next key, and is trained on normal sessions alone; else it tells normal
            sessions from anomalies and is trained on both.
        files: which --data DIR holds, and where to get them.
        read: from the folder, the fold (adfa) and the log's name and lines per session (lines).
    """

    name: str
    is_next_key: bool
    files: str
    read: Callable[[Path, Options], Data]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What only some tasks use."""

    fold: int = 0
    log: str = "BGL"
    lines: int = 20


def find_task(name: str) -> Task:
    """Return the task of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in TASKS:
        fix = did_you_mean(name, TASKS, "write one of these")
        raise UsageError(f"--task {name}", f"the tasks are {', '.join(TASKS)}", fix)
    return TASKS[name]


def load(task: Task, folder: Path | None, options: Options, seed: int) -> Data:
    """Return the task's sessions, of a folder or made up, checked.

    Raises:
        UsageError: a file is missing.
        DataError: a line can't be read, or there are no sessions of a kind that is needed.
    """
    data = make_up(task, options, seed) if folder is None else task.read(folder, options)
    check(data, task)
    return data


def check(data: Data, task: Task) -> None:
    """Raise DataError where a part lacks the sessions that it needs."""
    normal, anomalous = "normal", "anomalous"
    needs = [("training set", data.train, normal), ("part that sets the threshold", data.threshold, normal)]
    needs += [("test set", data.test, normal), ("test set", data.test, anomalous)]
    if not task.is_next_key:
        needs += [("training set", data.train, anomalous), ("part that sets the threshold", data.threshold, anomalous)]
    for part, rows, kind in needs:
        if not any(row.is_anomaly == (kind == anomalous) for row in rows):
            raise DataError(
                f"{data.name}: the {part} needs {kind} sessions",
                f"none of its {len(rows)} sessions is {kind}",
                f"add {kind} sessions to the data, or take another --task",
            )


def split_off(rows: Sequence[Session], every: int, at: int = 0) -> tuple[list[Session], list[Session]]:
    """Return the sessions without every n-th of each class, and those."""
    rest, taken, met = [], [], {False: 0, True: 0}
    for row in rows:
        (taken if met[row.is_anomaly] % every == at else rest).append(row)
        met[row.is_anomaly] += 1
    return rest, taken


def parts_of(name: str, train: Sequence[Session], test: Sequence[Session], next_key: bool) -> Data:
    """Return the data with the part that sets the threshold split off."""
    rest, threshold = split_off(train, _THRESHOLD_EVERY)
    if next_key:
        rest = [row for row in rest if not row.is_anomaly]
        threshold = [row for row in threshold if not row.is_anomaly]
    return Data(name=name, train=rest, threshold=threshold, test=test)


# Readers


def keys_of(text: str, where: str) -> tuple[int, ...]:
    """Return the event ids of a line.

    Raises:
        DataError: one is no whole number from 0, or there is none.
    """
    words = text.split()
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise DataError(
                f"{where}: event ids, whole numbers from 0", f"one is {word!r}", "mend that line or take it out"
            )
    if not words:
        raise DataError(f"{where}: event ids", "there is none", "take that line out")
    return tuple(map(int, words))


def read_deeplog(folder: Path, options: Options) -> Data:
    """Read DeepLog's HDFS sessions. Without its normal test sessions, every fifth of the training set is held out."""
    get = "take the folder data of https://github.com/wuyifan18/DeepLog"
    normal = _lines(_txt(folder, "hdfs_train", get))
    anomalies = _lines(_txt(folder, "hdfs_test_abnormal", get), is_anomaly=True)
    if _has(folder, "hdfs_test_normal") or _has(folder, "hdfs_test_normal.txt"):
        train, held_out = list(normal), _lines(_txt(folder, "hdfs_test_normal", get))
    else:
        train, held_out = split_off(normal, 5)
    return parts_of(f"DeepLog's HDFS, {len(train):,} sessions", train, [*held_out, *anomalies], next_key=True)


def read_hdfs(folder: Path, options: Options) -> Data:
    """Read deep-loglizer's HDFS_100k sessions, with its split."""
    path = present(folder, "sessions.jsonl", "make it from deep-loglizer's session_train.pkl and session_test.pkl")
    rows: dict[str, list[Session]] = {"train": [], "test": []}
    for number, line in open_lines(path):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
            split, label, events = record["split"], record["label"], record["events"]
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{where}: a JSON object with split, label and events", f"it is {line[:80]!r}", "mend that line"
            ) from None
        if split not in rows or label not in (0, 1):
            raise DataError(
                f"{where}: split should be train or test, label 0 or 1",
                f"they are {split!r} and {label!r}",
                "mend that line",
            )
        rows[split].append(Session(keys_of(" ".join(map(str, events)), where), bool(label)))
    return parts_of(f"HDFS_100k, {len(rows['train']):,} sessions", rows["train"], rows["test"], next_key=False)


def read_adfa(folder: Path, options: Options) -> Data:
    """Read ADFA-LD's traces; the test set is one of five folds, each fifth trace of each class."""
    path = present(folder, "traces.tsv", "take ADFA-LD from https://research.unsw.edu.au/projects/adfa-ids-datasets")
    rows = []
    for number, line in open_lines(path):
        cells = line.split("\t")
        where = f"{path}, line {number}"
        if len(cells) != 4:
            raise DataError(
                f"{where}: trace, part, attack and syscalls, separated by tabs",
                f"it has {len(cells)} columns",
                "mend that line or take it out",
            )
        if number > 1 or cells[0] != "trace":
            rows.append(Session(keys_of(cells[3], where), cells[1] == "attack"))
    train, test = split_off(rows, FOLDS, options.fold)
    name = f"ADFA-LD, fold {options.fold + 1} of {FOLDS}, {len(train):,} traces"
    return parts_of(name, train, test, next_key=False)


def read_lines(folder: Path, options: Options) -> Data:
    """Parse raw lines to templates; a session is some consecutive lines, an anomaly if one of them is an alert.

    The first half of the lines is trained on, the second is the test set.
    """
    numbers, alerts, drain = templates.parse(options.log, folder)
    if alerts is None or not any(alerts):
        raise DataError(
            f"--log {options.log} should have labelled lines",
            "none of its lines is labelled as an alert",
            "take --log BGL; `python templates.py DIR` parses logs without labels",
        )
    name = f"{options.log}, {len(numbers):,} lines, {len(drain.groups)} templates"
    return lines_to_data(numbers, alerts, options.lines, name)


def lines_to_data(numbers: Sequence[int], alerts: Sequence[bool], lines: int, name: str) -> Data:
    """Return sessions of consecutive lines."""
    if lines * 4 > len(numbers):
        raise UsageError(
            f"--window {lines}", f"there are only {len(numbers)} lines", f"write --window {len(numbers) // 4} or less"
        )
    starts = range(0, len(numbers) - lines + 1, lines)
    rows = [Session(tuple(numbers[at : at + lines]), any(alerts[at : at + lines])) for at in starts]
    half = len(rows) // 2
    return parts_of(name, rows[:half], rows[half:], next_key=True)


def _has(folder: Path, name: str) -> bool:
    return any((folder / f"{name}{ending}").is_file() for ending in ("", ".xz"))


def _txt(folder: Path, name: str, fix: str) -> Path:
    """Return the file without ending, as DeepLog's authors name it, or with .txt."""
    return present(folder, name if _has(folder, name) else f"{name}.txt", fix)


def _lines(path: Path, is_anomaly: bool = False) -> list[Session]:
    return [Session(keys_of(line, f"{path}, line {number}"), is_anomaly) for number, line in open_lines(path)]


# Made-up sessions

# A file is allocated, written by one to three replicas, and may be read and deleted. State: (key, next states).
_MACHINE: dict[str, tuple[int, tuple[str, ...]]] = {
    "allocate": (1, ("receiving",)),
    "receiving": (2, ("receiving", "received", "received", "retry")),
    "retry": (3, ("receiving",)),
    "received": (4, ("stored", "stored", "received")),
    "stored": (5, ("stored", "served", "verified", "delete", "end")),
    "served": (6, ("served", "verified", "delete", "end")),
    "verified": (7, ("served", "delete", "end")),
    "delete": (8, ("deleted",)),
    "deleted": (9, ("end",)),
}
_LONGEST = 24


def walk(draw: random.Random) -> list[int]:
    """Return the keys of one normal session."""
    while True:
        state, keys = "allocate", []
        while state != "end" and len(keys) <= _LONGEST:
            key, following = _MACHINE[state]
            keys.append(key)
            state = draw.choice(following)
        if len(keys) <= _LONGEST:
            return keys


def spoil(keys: list[int], draw: random.Random) -> list[int]:
    """Return the session with something in it that the machine does not do."""
    at = draw.randrange(len(keys))
    kind = draw.choice(("cut", "foreign", "swapped", "early"))
    if kind == "cut" and keys[:at] and keys[at - 1] < 5:
        return keys[:at]
    if kind == "foreign":
        return [*keys[:at], 10, *keys[at:]]
    if kind == "swapped" and at > 0 and {*keys[at - 1 : at + 1]} in ({1, 2}, {2, 4}, {8, 9}):
        return [*keys[: at - 1], keys[at], keys[at - 1], *keys[at + 1 :]]
    return [*keys[:2], 9, *keys[2:]]


def made_up_sessions(count: int, share: float, draw: random.Random) -> list[Session]:
    """Return sessions of which `share` are anomalies."""
    rows = []
    for _ in range(count):
        keys, is_anomaly = walk(draw), draw.random() < share
        rows.append(Session(tuple(spoil(keys, draw) if is_anomaly else keys), is_anomaly))
    return rows


def make_up(task: Task, options: Options, seed: int) -> Data:
    """Return made-up sessions of the same kinds as the task's."""
    draw = random.Random(seed)
    if task.name == "lines":
        lines = list(enumerate(made_up_lines(draw), start=1))
        form = templates.Format(line=r"(?P<label>\S+) \d+ (?P<content>.*)", masks=(r"blk_\d+",))
        numbers, alerts, drain = templates.parse_lines(lines, form, "made-up lines")
        return lines_to_data(
            numbers, alerts or [], options.lines, f"made-up log, {len(numbers):,} lines, {len(drain.groups)} templates"
        )
    rows = made_up_sessions(4000, 0.0 if task.is_next_key else 0.1, draw)
    test = made_up_sessions(1000, 0.1, draw)
    return parts_of(f"made up, {len(rows):,} sessions", rows, test, next_key=task.is_next_key)


_TEXTS = (
    "disk scrubber took offline unit {} of shelf",
    "allocate block blk_{} for writing",
    "receiving block blk_{} from peer {}",
    "retry {} of receiving after timeout",
    "received block blk_{} of {} bytes",
    "stored block blk_{} in map",
    "served block blk_{} to reader {}",
    "verification succeeded for blk_{}",
    "ask replica {} to delete its copy",
    "deleting file of blk_{}",
    "fatal: parity error at address {}",
)


def made_up_lines(draw: random.Random) -> list[str]:
    """Return raw lines: a label, a time, a text with numbers in it."""
    lines = []
    for _ in range(600):
        for key in walk(draw):
            is_alert = draw.random() < 0.005
            text = _TEXTS[10 if is_alert else key]
            words = " ".join(str(draw.randrange(10**6)) if word == "{}" else word for word in text.split())
            words = words.replace("blk_{}", f"blk_{draw.randrange(10**9)}")
            lines.append(f"{'FATAL' if is_alert else '-'} {len(lines)} {words}")
    return lines


TASKS = {
    task.name: task
    for task in (
        Task(name="hdfs-next", is_next_key=True, files="hdfs_train.txt, hdfs_test_abnormal.txt", read=read_deeplog),
        Task(name="hdfs", is_next_key=False, files="sessions.jsonl", read=read_hdfs),
        Task(name="adfa", is_next_key=False, files="traces.tsv", read=read_adfa),
        Task(name="lines", is_next_key=True, files="BGL_2k.log", read=read_lines),
    )
}


def longest(parts: Iterable[Sequence[Session]]) -> int:
    """Return how many keys the longest session has."""
    return max(len(row.keys) for rows in parts for row in rows)
