"""Reads the time series of a task, or generates some, and says which windows are forecast in the end."""

from __future__ import annotations

import csv
import lzma
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from paceline.nouns.errors import DataError, UsageError

ETT = "https://github.com/zhouhaoyi/ETDataset, folder ETT-small"
M4 = "https://github.com/Mcompetitions/M4-methods, folders Dataset/Train and Dataset/Test"
CARPARTS = "the R package expsmooth (data set carparts), written as CSV"


@dataclass(frozen=True)
class Task:
    """What is forecast.

    Args:
        name: what `--task` calls it.
        horizon: steps ahead.
        context: steps before them that the model reads.
        lags: how far back the values lie that are inputs of each step; 1 is the value before.
        period: of the seasonal naive forecast.
        mase_period: of the naive forecast whose mean absolute error in the training part is the unit of MASE.
        likelihood: the default of `--likelihood`.
        points: the scores of point forecasts that are reported.
        source: where a person gets its files; none where it is generated.
        is_fixed: its files decide on the horizon.
    """

    name: str
    horizon: int
    context: int
    lags: tuple[int, ...]
    period: int
    mase_period: int
    likelihood: str
    points: tuple[str, ...]
    source: str = ""
    is_fixed: bool = False


HOURLY = (1, 2, 24, 168)
TASKS = {
    task.name: task
    for task in (
        Task("generated", 24, 72, HOURLY, 24, 24, "gaussian", ("mse", "mae", "mase")),
        Task("etth1", 24, 72, HOURLY, 24, 24, "gaussian", ("mse", "mae"), ETT),
        Task("m4-hourly", 48, 72, HOURLY, 24, 24, "student-t", ("smape", "mase"), M4, True),
        Task("m4-weekly", 13, 26, (1, 2, 3, 4, 52), 1, 1, "student-t", ("smape", "mase"), M4, True),
        Task("carparts", 8, 12, (1, 2, 12), 1, 1, "negative-binomial", ("rmse",), CARPARTS, True),
    )
}


@dataclass
class Panel:
    """Some series and their windows.

    Args:
        description: what was read, for the result.
        task: of which they are.
        values: each series whole: the training part and what is forecast.
        covariates: of each series (length, covariates): what is known of a position before its value is.
        ends: where each series' training part ends.
        test: the windows to forecast: a series' number and the first position that is forecast.
        units: of each series, what errors are divided by: the deviation of its training part where the target is
            standardised, the error of the naive forecast there for M4, else 1.
    """

    description: str
    task: Task
    values: list[np.ndarray]
    covariates: list[np.ndarray]
    ends: list[int]
    test: list[tuple[int, int]]
    units: list[float]
    names: list[str] = field(default_factory=list)


def read_panel(task: Task, data: Path | None, seed: int, column: str = "OT") -> Panel:
    """Return the series of `task`.

    Args:
        task: with the horizon and the context that are asked for.
        data: the folder of the original files; None for the generated task.
        seed: of generated series.
        column: the target in ETTh1.

    Raises:
        UsageError: a file or a column is missing.
        DataError: a value can't be used.
    """
    counts = task.likelihood == "negative-binomial"
    if task.name == "generated":
        panel = generate(task, seed, counts)
    elif task.name == "etth1":
        panel = read_ett(task, data, column)
    elif task.name == "carparts":
        panel = read_carparts(task, data)
    else:
        panel = read_m4(task, data)
    check_lengths(panel)
    if counts:
        check_counts(panel)
    return panel


def check_lengths(panel: Panel) -> None:
    """Raise DataError for a series that has no whole window."""
    least = panel.task.context + panel.task.horizon
    for name, end in zip(panel.names, panel.ends, strict=True):
        if end < least:
            raise DataError(
                f"series {name} should have at least {least} values to train on: "
                f"{panel.task.context} of context and {panel.task.horizon} to forecast",
                f"it has {end}",
                "take a smaller --context, or take the series out",
            )


def check_counts(panel: Panel) -> None:
    """Raise DataError for a value that is no count."""
    for name, values in zip(panel.names, panel.values, strict=True):
        wrong = np.flatnonzero((values < 0) | (values != np.floor(values)))
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                "the negative binomial is a distribution of counts: whole numbers from 0",
                f"value {at + 1} of series {name} is {values[at]:g}",
                "choose --likelihood gaussian or student-t",
            )


# Files


def open_rows(data: Path, name: str, source: str) -> tuple[Path, Iterator[tuple[int, list[str]]]]:
    """Return the file `name`, or `name`.xz, of the folder, and its rows with the numbers of their lines.

    Raises:
        UsageError: it is not there.
    """
    for path in (data / name, data / f"{name}.xz"):
        if path.is_file():
            return path, _rows(path)
    there = ", ".join(sorted(path.name for path in data.iterdir())[:6]) if data.is_dir() else ""
    raise UsageError(
        f"the task needs {data / name} (or {name}.xz)",
        f"the folder holds {there or 'nothing'}" if data.is_dir() else f"there is no folder {data}",
        f"take that file from {source}, or leave --task and --data out for generated series",
    )


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    opened = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
    except (lzma.LZMAError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} should be a table of comma-separated values", str(error), "take it anew") from None


def number(text: str, path: Path, line: int, column: str) -> float:
    """Return the number that a cell holds.

    Raises:
        DataError: it holds none, or one that is not finite.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    raise DataError(
        f"{path}, line {line}: a number in column {column}",
        f"it holds {text!r}",
        "fill the gap, or take the line out",
    )


def read_ett(task: Task, data: Path, target: str) -> Panel:
    """Return one column of ETTh1, split as Informer's authors did: 12, 4 and 4 months of 30 days.

    The windows to forecast begin at every hour of the last four months that leaves a whole horizon.
    """
    path, rows = open_rows(data, "ETTh1.csv", ETT)
    header = next(rows, (1, []))[1]
    targets = [name for name in header if name != "date"]
    if "date" not in header or target not in targets:
        raise UsageError(
            f"{path} should have the columns date and {target}",
            f"its columns are {', '.join(header)}",
            f"write --column with one of {', '.join(targets)}" if "date" in header else f"take it anew from {ETT}",
        )
    at, when = header.index(target), header.index("date")
    values, hours = [], []
    for line, cells in rows:
        if len(cells) != len(header):
            raise DataError(f"{path}, line {line}: a row of {len(header)} cells", f"it has {len(cells)}", "mend it")
        values.append(number(cells[at], path, line, target))
        try:
            hours.append(datetime.fromisoformat(cells[when]))
        except ValueError:
            raise DataError(f"{path}, line {line}: a date", f"it is {cells[when]!r}", "mend that line") from None
    month = 30 * 24
    if len(values) < 20 * month:
        raise DataError(
            f"{path} should have 20 months of 30 days: {20 * month} hours",
            f"it has {len(values)}",
            f"take it anew from {ETT}",
        )
    series = np.array(values[: 20 * month])
    clock = np.array([[when.hour / 24, (when.weekday() * 24 + when.hour) / 168] for when in hours[: 20 * month]])
    return Panel(
        description=f"ETTh1, {target}, {12 * month:,} hours to train on",
        task=task,
        values=[series],
        covariates=[_waves(clock)],
        ends=[12 * month],
        test=[(0, start) for start in range(16 * month, 20 * month - task.horizon + 1)],
        units=[float(series[: 12 * month].std())],
        names=[target],
    )


def read_m4(task: Task, data: Path) -> Panel:
    """Return the series of M4: what follows each training series is forecast.

    The files have no dates: the covariate is the series' age.
    """
    kind = "Hourly" if task.name == "m4-hourly" else "Weekly"
    values, ends, names = [], [], []
    parts = [_read_m4(data, f"{kind}-{part}.csv") for part in ("train", "test")]
    if [*parts[0]] != [*parts[1]]:
        odd = {*parts[0]} ^ {*parts[1]}
        raise DataError(
            f"{kind}-train.csv and {kind}-test.csv should have the same series in the same order",
            f"{', '.join(sorted(odd)[:5]) or 'the order'} differs",
            f"take both from {M4}",
        )
    for name, train in parts[0].items():
        future = parts[1][name]
        if len(future) != task.horizon:
            raise DataError(
                f"series {name} of {kind}-test.csv should have {task.horizon} values",
                f"it has {len(future)}",
                f"take the file anew from {M4}",
            )
        values.append(np.array(train + future))
        ends.append(len(train))
        names.append(name)
    return Panel(
        description=f"M4 {kind.lower()}, {len(values)} series",
        task=task,
        values=values,
        covariates=[_age(len(each)) for each in values],
        ends=ends,
        test=list(enumerate(ends)),
        units=[naive_error(task, each[:end]) or 1.0 for each, end in zip(values, ends, strict=True)],
        names=names,
    )


def _read_m4(data: Path, name: str) -> dict[str, list[float]]:
    path, rows = open_rows(data, name, M4)
    next(rows, None)
    found: dict[str, list[float]] = {}
    for line, cells in rows:
        while cells and not cells[-1].strip():
            cells.pop()  # shorter series end with blanks
        if len(cells) < 2:
            raise DataError(f"{path}, line {line}: a series' name and its values", "it has no value", "take it out")
        found[cells[0]] = [number(cell, path, line, str(at)) for at, cell in enumerate(cells[1:], 2)]
    return found


def read_carparts(task: Task, data: Path) -> Panel:
    """Return the monthly sales of car parts that the DeepAR paper takes: the last eight months are forecast.

    Taken are parts without a gap, with sales in at least ten months, in the first fifteen and in the last fifteen.
    """
    path, rows = open_rows(data, "carparts.csv", CARPARTS)
    header = next(rows, (1, []))[1]
    values, names = [], []
    for line, cells in rows:
        if len(cells) != len(header):
            raise DataError(f"{path}, line {line}: a row of {len(header)} cells", f"it has {len(cells)}", "mend it")
        if not all(cells):
            continue
        sales = np.array([number(cell, path, line, name) for cell, name in zip(cells[1:], header[1:], strict=True)])
        if (sales > 0).sum() >= 10 and sales[:15].any() and sales[-15:].any():
            values.append(sales)
            names.append(cells[0])
    ends = [len(each) - task.horizon for each in values]
    month = np.arange(len(header) - 1)[:, None] / 12
    return Panel(
        description=f"car parts, {len(values):,} series of {len(header) - 1} months",
        task=task,
        values=values,
        covariates=[_waves(month)] * len(values),
        ends=ends,
        test=list(enumerate(ends)),
        units=[1.0] * len(values),
        names=names,
    )


# Generated series


def generate(task: Task, seed: int, counts: bool, series: int = 40, days: int = 35) -> Panel:
    """Return hourly series with a trend, a daily and a weekly wave, and noise that grows with the level.

    They depend on the seed alone. The last four horizons of each are forecast.
    """
    length = days * 24
    test_windows = 4
    hours = np.arange(length)
    clock = np.stack([hours / 24, hours / 168], axis=1)
    values = []
    for at in range(series):
        random = np.random.default_rng([seed, at])
        size = np.exp(random.uniform(1, 4))
        daily, weekly = random.uniform(0.3, 0.7), random.uniform(0.1, 0.3)
        wave = 1 + daily * np.sin(2 * np.pi * (clock[:, 0] - random.uniform(0.2, 0.3)))
        wave += weekly * np.sin(2 * np.pi * (clock[:, 1] - random.uniform(0.4, 0.6)))
        level = size * np.maximum(wave, 0.05) * (1 + random.uniform(-0.2, 0.4) * hours / length)
        drawn = random.poisson(level) if counts else level * (1 + 0.1 * random.standard_normal(length))
        values.append(drawn.astype(float))
    end = length - test_windows * task.horizon
    return Panel(
        description=f"{series} generated series of {length} hours",
        task=task,
        values=values,
        covariates=[_waves(clock)] * series,
        ends=[end] * series,
        test=[(at, end + turn * task.horizon) for at in range(series) for turn in range(test_windows)],
        units=[float(each[:end].std()) for each in values],
        names=[str(at) for at in range(series)],
    )


def naive_error(task: Task, train: np.ndarray) -> float:
    """Return the unit of MASE: the mean absolute error of the (seasonal) naive forecast in the training part."""
    return float(np.abs(train[task.mase_period :] - train[: -task.mase_period]).mean())


def _waves(phases: np.ndarray) -> np.ndarray:
    """Return sine and cosine of each phase, in turns."""
    return np.concatenate([np.sin(2 * np.pi * phases), np.cos(2 * np.pi * phases)], axis=1)


def _age(length: int) -> np.ndarray:
    return np.log10(2.0 + np.arange(length))[:, None] / 3


def thin(windows: Sequence[tuple[int, int]], at_most: int | None) -> list[tuple[int, int]]:
    """Return at most so many of the windows, evenly spaced."""
    if at_most is None or at_most >= len(windows):
        return list(windows)
    return [windows[int(at)] for at in np.linspace(0, len(windows) - 1, at_most).round()]
