"""Reads GLUE tasks: from the original TSV files, or from the Hugging Face hub.

The original files are no CSV: quotes are part of the sentences, so a row is split at its tabs and nothing
else. Every row is checked when it is read; a broken one is named by file and line.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns.errors import DataError, UsageError, did_you_mean

HUB = "nyu-mll/glue"
SOURCE = "gluebenchmark.com"


@dataclass(frozen=True, slots=True)
class Layout:
    """How one task's files look.

    Attributes:
        train, dev: file names; each may also be compressed, as NAME.xz.
        texts: the columns with the one or two sentences: names, or numbers where the file has no header.
        label: the column with the label.
        columns: how many a row has at least; exactly as many as the header where there is one.
    """

    train: str
    dev: str
    texts: tuple[str | int, ...]
    label: str | int
    columns: int = 0

    @property
    def has_header(self) -> bool:
        """Whether the first line names the columns."""
        return isinstance(self.label, str)


@dataclass(frozen=True, slots=True)
class Task:
    """One GLUE task.

    Attributes:
        name: as GLUE spells it; also the name of its folder.
        labels: what stands in the label column, in the order of the classes; none for a regression.
        layouts: how its files may look; the first whose training file is there is taken.
        hub: its name on the hub, and `hub_texts` the columns there.
    """

    name: str
    labels: tuple[str, ...]
    layouts: tuple[Layout, ...]
    hub: str
    hub_texts: tuple[str, ...]

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number from 0 to 5."""
        return not self.labels

    def parse(self, label: str) -> int | float:
        """The class, or the score, that a label means.

        Raises:
            ValueError: it means none.
        """
        if not self.is_regression:
            return self.labels.index(label)
        score = float(label)
        if not (math.isfinite(score) and 0 <= score <= 5):
            raise ValueError(label)
        return score


@dataclass(frozen=True, slots=True)
class Example:
    """One or two sentences and their label."""

    texts: tuple[str, ...]
    label: int | float


def _pair(first: str, second: str) -> Layout:
    return Layout("train.tsv", "dev.tsv", (first, second), "label")


_PAIR = ("sentence1", "sentence2")
_YES_NO, _ENTAILED = ("0", "1"), ("entailment", "not_entailment")
_MRPC = Layout("train.tsv", "dev.tsv", ("#1 String", "#2 String"), "Quality")
# STS-B comes as GLUE packed it, and as the benchmark's authors did: there the licence may fill two columns more.
_STS_GLUE = Layout("train.tsv", "dev.tsv", _PAIR, "score")
_STS_FIRST = Layout("sts-train.csv", "sts-dev.csv", (5, 6), 4, columns=7)

TASKS = {
    task.name: task
    for task in (
        Task("CoLA", _YES_NO, (Layout("train.tsv", "dev.tsv", (3,), 1, columns=4),), "cola", ("sentence",)),
        Task("SST-2", _YES_NO, (Layout("train.tsv", "dev.tsv", ("sentence",), "label"),), "sst2", ("sentence",)),
        Task("MRPC", _YES_NO, (_MRPC,), "mrpc", _PAIR),
        Task("STS-B", (), (_STS_GLUE, _STS_FIRST), "stsb", _PAIR),
        Task("QNLI", _ENTAILED, (_pair("question", "sentence"),), "qnli", ("question", "sentence")),
        Task("RTE", _ENTAILED, (_pair(*_PAIR),), "rte", _PAIR),
        Task("WNLI", _YES_NO, (_pair(*_PAIR),), "wnli", _PAIR),
    )
}


def find_task(name: str) -> Task:
    """The task called `name`, in GLUE's spelling or the hub's, in any case.

    Raises:
        UsageError: there is none.
    """
    for task in TASKS.values():
        if name.lower() in (task.name.lower(), task.hub):
            return task
    raise UsageError(
        f"--task {name}",
        f"the tasks here are {', '.join(TASKS)}",
        did_you_mean(name, [*TASKS, *(task.hub for task in TASKS.values())], "write one of these"),
    )


def read_task(task: Task, data: Path | None, limit_train: int | None = None) -> tuple[list[Example], list[Example]]:
    """The training and the dev examples of `task`, from the folder `data` or, where None, from the hub.

    Raises:
        UsageError: a file is missing, or the hub can't be reached.
        DataError: a row is broken.
    """
    if data is None:
        return read_hub(task, limit_train)
    train, dev, layout = find_files(task, data)
    return list(read_rows(task, layout, train, limit_train)), list(read_rows(task, layout, dev))


def find_files(task: Task, data: Path) -> tuple[Path, Path, Layout]:
    """The training file, the dev file and their layout.

    Raises:
        UsageError: one is missing.
    """
    folder = data / task.name
    if not folder.is_dir():
        is_inside = data.name == task.name and data.is_dir()
        found = "that is the task's own folder" if is_inside else f"it has no folder {task.name}"
        fix = (
            f"write --data {data.parent}"
            if is_inside
            else f"take {task.name} from {SOURCE} and name the folder above it"
        )
        raise UsageError(f"{task.name} in --data {data}", found if data.is_dir() else "there is no such folder", fix)
    layouts = [layout for layout in task.layouts if _present(folder, layout.train)] or [task.layouts[0]]
    names = (layouts[0].train, layouts[0].dev)
    paths = [_present(folder, name) for name in names]
    for name, path in zip(names, paths, strict=True):
        if path is None:
            there = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_file())) or "nothing"
            raise UsageError(
                f"{task.name} needs {folder / name} (or {name}.xz)",
                f"the folder holds {there}",
                f"take that file from {SOURCE}, or choose another --task",
            )
    return paths[0], paths[1], layouts[0]  # type: ignore[return-value]


def read_rows(task: Task, layout: Layout, path: Path, limit: int | None = None) -> Iterator[Example]:
    """The examples of one file, at most `limit` of them.

    Raises:
        DataError: a row can't be read; file and line are named.
    """
    lines = _lines(path)
    texts, label, columns = layout.texts, layout.label, layout.columns
    if layout.has_header:
        header = next(lines, (1, []))[1]
        missing = [name for name in (*texts, label) if name not in header]
        if missing:
            raise DataError(
                f"{path}, line 1: a header with the columns {', '.join(map(str, (*texts, label)))}",
                f"{', '.join(map(str, missing))} is not among its columns ({', '.join(header)[:80]})",
                f"take the file anew from {SOURCE}; it is separated by tabs",
            )
        texts, label = tuple(header.index(name) for name in texts), header.index(label)
        columns = len(header)
    for done, (number, cells) in enumerate(lines):
        if done == limit:
            return
        too_few, too_many = len(cells) < columns, layout.has_header and len(cells) > columns
        if too_few or too_many:
            raise DataError(
                f"{path}, line {number}: a row of {columns} columns separated by tabs",
                f"it has {len(cells)}",
                "mend that line or take it out",
            )
        try:
            yield Example(tuple(cells[int(column)] for column in texts), task.parse(cells[int(label)]))
        except ValueError:
            raise DataError(
                f"{path}, line {number}: a label that is {' or '.join(task.labels) or 'a number from 0 to 5'}",
                f"column {int(label) + 1} holds {cells[int(label)]!r:.40}",
                "mend that line or take it out",
            ) from None


def read_hub(task: Task, limit_train: int | None = None) -> tuple[list[Example], list[Example]]:
    """The task from the Hugging Face hub, by the `datasets` library.

    Raises:
        UsageError: the library is not installed, or the hub can't be reached.
    """
    fix = f"pass --data DIR, a folder with the folder {task.name} of {SOURCE}"
    asked = f"{task.name} from the Hugging Face hub, as no --data is given"
    try:
        import datasets
    except ImportError:
        raise UsageError(asked, "the library `datasets` is not installed", f"{fix}, or pip install datasets") from None
    try:
        splits = datasets.load_dataset(HUB, task.hub)
        rows = [list(splits[split]) for split in ("train", "validation")]
    except Exception as error:  # the library raises what its many transports raise
        said = str(error).splitlines()[0][:120] if str(error) else "it gave no reason"
        raise UsageError(asked, f"it can't be had ({type(error).__name__}: {said})", fix) from error
    examples = [[Example(tuple(row[c] for c in task.hub_texts), row["label"]) for row in split] for split in rows]
    return examples[0][:limit_train], examples[1]


def _present(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / f"{name}.xz")
    return next((path for path in candidates if path.is_file()), None)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells; a byte-order mark and the last line's end are left out."""
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except lzma.LZMAError as error:
        raise DataError(
            f"{path} should be xz-compressed", f"it is not whole ({error})", f"take it from {SOURCE}"
        ) from None
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number}: text in UTF-8",
                f"byte {error.start + 1} is no part of it",
                "mend that line or take it out",
            ) from None
        yield number, text.removesuffix("\r").split("\t")
