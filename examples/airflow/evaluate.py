"""Evaluate the model that workload.py saved, on rows that it was not trained with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from table import made_up, read_table
from workload import CLASSES, loss, make_workload

import paceline


def score(model: torch.nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
    """Return loss and right answers, added up, and of how many rows."""
    rows, classes = batch
    right = (model(rows).argmax(dim=1) == classes).sum()
    return {"loss": loss(model, batch), "accuracy": (right, len(classes))}


def main() -> None:
    """Load the model, and score it over all ranks."""
    parser = argparse.ArgumentParser(description="Evaluate the classifier.")
    parser.add_argument("model", type=Path, help="the folder that workload.py --save wrote")
    parser.add_argument("--data", default="", metavar="FILE", help="rows, as CSV (default, or empty: made up)")
    arguments = parser.parse_args()
    data = read_table(Path(arguments.data), CLASSES) if arguments.data else made_up(300, seed=2)
    job = paceline.distribute(make_workload(data, epochs=1, seed=0))
    job.load(arguments.model, weights_only=True)
    scores = job.evaluate(data, score)
    if job.rank == 0:
        print(f"accuracy {scores['accuracy']:.4f} of {len(data)} rows")


if __name__ == "__main__":
    main()
