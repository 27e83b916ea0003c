"""Airflow: download >> train >> evaluate as a DAG, in which Paceline trains on two processes.

    paceline run -n 2 workload.py --save model
    paceline run -n 2 evaluate.py model

README.md says how Airflow runs dag.py, which starts these two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from table import made_up, read_table
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

CLASSES = 3


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="Train a classifier of the rows of a table.")
    parser.add_argument(
        "--data", default="", metavar="FILE", help="rows to train with, as CSV (default, or empty: made up)"
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the trained model to this folder")
    return parser.parse_args()


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the sum of the cross entropies, and of how many rows."""
    rows, classes = batch
    return F.cross_entropy(model(rows), classes, reduction="sum"), len(classes)


def make_workload(data: TensorDataset, epochs: int, seed: int) -> paceline.Workload:
    """Return what train and evaluate share."""
    features = data.tensors[0].shape[1]
    return paceline.Workload(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(features, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=data,
        batch_size=32,  # over all ranks
        epochs=epochs,
        seed=seed,
    )


def main() -> None:
    """Train, and save the model."""
    arguments = parse_arguments()
    data = read_table(Path(arguments.data), CLASSES) if arguments.data else made_up(600, seed=1)
    job = paceline.distribute(make_workload(data, arguments.epochs, arguments.seed))
    for batch in job.batches():
        job.step(batch)
    if arguments.save is not None:
        job.save(arguments.save)


if __name__ == "__main__":
    main()
