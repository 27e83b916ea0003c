"""Tables of numbers: the last column is the class."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from paceline.nouns.errors import DataError


def made_up(rows: int, seed: int) -> TensorDataset:
    """Return rows of four numbers, whose class says which of three centres they are near to."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[0.0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]])
    classes = torch.randint(0, 3, (rows,), generator=random)
    return TensorDataset(centres[classes] + 0.4 * torch.randn(rows, 4, generator=random), classes)


def write_table(data: TensorDataset, path: Path) -> None:
    """Write rows and classes as CSV, without a header."""
    with path.open("w", newline="") as file:
        for row, label in zip(*data.tensors, strict=True):
            csv.writer(file).writerow([*(round(number, 6) for number in row.tolist()), int(label)])


def read_table(path: Path, classes: int) -> TensorDataset:
    """Return the rows of a CSV file without a header.

    Raises:
        DataError: the file can't be read, or a line has another form; says which.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{path} should have the rows to train with",
            f"it can't be read ({error.strerror})",
            "let the download write it, or name another file with --data",
        ) from None
    rows, labels = [], []
    for number, cells in enumerate(csv.reader(lines), 1):
        try:
            values = [float(cell) for cell in cells]
        except ValueError:
            values = []
        if len(values) < 2 or (rows and len(values) != len(rows[0]) + 1) or values[-1] not in range(classes):
            raise DataError(
                f"{path}, line {number}: numbers as in the lines before, then a class from 0 to {classes - 1}",
                f"it is {','.join(cells)!r}",
                "mend that line or take it out",
            )
        rows.append(values[:-1])
        labels.append(int(values[-1]))
    if not rows:
        raise DataError(f"{path} should have the rows to train with", "it is empty", "download it again")
    return TensorDataset(torch.tensor(rows), torch.tensor(labels))
