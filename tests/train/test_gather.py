"""States of torchmetrics gathered over ranks of which some have seen nothing and don't know the others' form."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import api
from paceline.train.evaluate import gather_rows, reduce_metric

from support.ranks import preload, run_ranks

preload("torchmetrics.classification")


def gathered(rank, cases):
    api.init()
    return {case: gather_rows(tensors[rank], api.world().comm) for case, tensors in cases.items()}


def tensors_of(*parts):
    return [torch.tensor([]) if part is None else part for part in parts]


CASES = {
    "none is empty": tensors_of(torch.tensor([1, 2]), torch.tensor([3])),
    "integers, the first is empty": tensors_of(None, torch.tensor([3, 4])),
    "integers, the last is empty": tensors_of(torch.tensor([3, 4]), None),
    "one row and one number": tensors_of(torch.tensor([1.0]), torch.tensor(2.0)),
    "rows of three, one is empty": tensors_of(torch.arange(6.0).view(2, 3), None),
    "half precision, one is empty": tensors_of(None, torch.arange(4, dtype=torch.float16)),
    "booleans, one is empty": tensors_of(None, torch.tensor([True, False])),
    "all are empty": tensors_of(None, None),
    "scalars": [torch.tensor(1), torch.tensor(2)],
    "double scalars": [torch.tensor(1.5, dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64)],
}


def test_an_empty_rank_takes_the_others_form():
    for result in run_ranks(2, gathered, CASES):
        for case, tensors in CASES.items():
            full = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
            for part, sent in zip(result[case], tensors, strict=True):
                expected = sent if sent.numel() else full.new_empty((0, *full.shape[1:]))
                assert (part.dtype, part.shape) == (expected.dtype, expected.shape), case
                assert torch.equal(part, expected), case


def metrics_of(mine):
    """A measure of the values, of binary and of many classes, after it has seen some of twelve samples."""
    from torchmetrics import CatMetric
    from torchmetrics.classification import BinaryAUROC, MulticlassAveragePrecision

    scores, labels = torch.linspace(0, 1, 12), torch.arange(12) % 3
    many = torch.softmax(torch.sin(torch.arange(36.0)).view(12, 3), -1)
    metrics = {"area": BinaryAUROC(), "precision": MulticlassAveragePrecision(3), "values": CatMetric()}
    if len(scores[mine]):
        metrics["area"].update(scores[mine], (labels[mine] == 0).long())
        metrics["precision"].update(many[mine], labels[mine])
        metrics["values"].update(scores[mine])
    return metrics


def scored(rank, seen):
    api.init()
    return {name: reduce_metric(metric, api.world().comm) for name, metric in metrics_of(seen[rank]).items()}


@pytest.mark.parametrize("seen", [(slice(0, 0), slice(0, 12)), (slice(0, 5), slice(0, 0), slice(5, 12))], ids=str)
def test_gather_curve_is_right_if_one_rank_saw_no_samples(seen):
    alone = {name: metric.compute() for name, metric in metrics_of(slice(0, 12)).items()}
    for result in run_ranks(len(seen), scored, seen):
        for name, value in alone.items():
            torch.testing.assert_close(result[name], value)
