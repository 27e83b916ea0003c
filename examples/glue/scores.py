"""What is reported about the dev set.

Every metric is reduced over the ranks from what it counted, not averaged: the confusion matrix and the
counts behind accuracy, precision, recall and F1 are added up; for Pearson the moments are merged, for
Spearman the values are gathered.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryConfusionMatrix,
    BinaryF1Score,
    BinaryPrecision,
    BinaryRecall,
)

ORDER = ("accuracy", "precision", "recall", "f1", "matthews", "pearson", "spearman")


class MatthewsCorrelation(BinaryConfusionMatrix):
    """Matthews correlation; 0, as scikit-learn has it, where it is not defined because a class is never met or guessed.

    torchmetrics' own (1.9) makes 0.026 of a model that finds every CoLA sentence acceptable.
    """

    def compute(self) -> Tensor:
        """Of the counts of all ranks."""
        (tn, fp), (fn, tp) = self.confmat.tolist()
        product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
        return torch.tensor((tp * tn - fp * fn) / math.sqrt(product) if product else 0.0, dtype=torch.float64)


class Predictions(Metric):
    """Every row's label and prediction, in the order of the file."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("table", default=[], dist_reduce_fx="cat")
        self.set_dtype(torch.float64)  # one dtype on every rank, also on one that has met no row

    def update(self, preds: Tensor, target: Tensor, rows: Tensor) -> None:
        """Take in one micro-batch."""
        self.table.append(torch.stack([rows.double(), target.double(), preds.double()], dim=1).flatten())

    def compute(self) -> list[list[float]]:
        """[row, label, prediction] of all ranks."""
        parts = self.table if isinstance(self.table, list) else [self.table]
        return sorted(torch.cat(parts).view(-1, 3).tolist())


def make_metrics(is_regression: bool, device: torch.device) -> MetricCollection:
    """The metrics of a task with two classes, or of a regression."""
    if is_regression:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that Spearman keeps every value: STS-B has 1,500
            metrics: dict[str, Metric] = {"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef()}
    else:
        metrics = {
            "accuracy": BinaryAccuracy(),
            "precision": BinaryPrecision(),
            "recall": BinaryRecall(),
            "f1": BinaryF1Score(),
            "matthews": MatthewsCorrelation(),
            "confusion": BinaryConfusionMatrix(),
        }
    collection = MetricCollection({**metrics, "predictions": Predictions()}).to(device)
    return collection.set_dtype(torch.float64) if is_regression else collection


def report(result: dict[str, Any], labels: tuple[str, ...]) -> tuple[dict[str, Any], list[list[float]]]:
    """The evaluation as plain numbers, and every row's number, label and prediction.

    Args:
        result: of `job.evaluate`.
        labels: of the classes; none for a regression.
    """
    metrics = result["metrics"]
    predictions = metrics["predictions"]
    numbers: dict[str, Any] = {"samples": len(predictions), "loss": result["loss"]}
    numbers |= {name: float(metrics[name]) for name in ORDER if name in metrics}
    if labels:
        numbers["confusion"] = {"labels": list(labels), "rows": metrics["confusion"].tolist()}
        predictions = [[int(value) for value in row] for row in predictions]
    return numbers, [[int(row), label, guess] for row, label, guess in predictions]


def write_predictions(path: Path, predictions: list[list[float]]) -> None:
    """Write them as TSV; a number reads back as what it was."""
    lines = ["row\tlabel\tprediction", *("\t".join(map(repr, row)) for row in predictions)]
    path.write_text("\n".join(lines) + "\n")


def table(numbers: dict[str, Any]) -> str:
    """The numbers for people, aligned; of the confusion matrix the rows are what is true."""
    lines = [
        f"{name:<10} {value:>10.6f}" if name != "samples" else f"{name:<10} {value:>10d}"
        for name, value in numbers.items()
        if name != "confusion"
    ]
    if "confusion" in numbers:
        labels, rows = numbers["confusion"]["labels"], numbers["confusion"]["rows"]
        wide = max(10, *(len(label) + 5 for label in labels))
        lines.append(f"{'true':<{wide}}" + "".join(f" {'says ' + label:>{wide}}" for label in labels))
        lines += [
            f"{label:<{wide}}" + "".join(f" {count:>{wide}d}" for count in row)
            for label, row in zip(labels, rows, strict=True)
        ]
    return "\n".join(lines)
