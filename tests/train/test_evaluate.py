"""Evaluation over ranks: each sample once, sums added up, counts before ratios."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import LossError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import preload, run_ranks

preload("sklearn.metrics", "torchmetrics.classification")

SAMPLES = 23


def dataset():
    random = torch.Generator().manual_seed(5)
    return [(torch.randn(3, generator=random), index % 4 == 0) for index in range(SAMPLES)]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1].long(), reduction="sum"), len(batch[1])


def workload():
    return paceline.Workload(
        model=lambda: nn.Linear(3, 2),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=dataset(),
        evaluation=dataset(),
        batch_size=8,
        micro_batch_size=2,
    )


def evaluate(rank, axis="replicate={}"):
    from torchmetrics.classification import BinaryF1Score, BinaryMatthewsCorrCoef

    api.init()
    job = Job(workload(), Plan.parse(axis.format(api.size())))
    f1 = {"f1": BinaryF1Score(), "mcc": BinaryMatthewsCorrCoef()}
    from torchmetrics import MetricCollection

    collection = MetricCollection(f1)

    def score(model, batch):
        guess = model(batch[0]).argmax(-1)
        collection.update(guess, batch[1].long())
        return {
            "accuracy": ((guess == batch[1]).sum(), len(guess)),
            "seen": (torch.tensor(float(len(guess))), 1),
        }

    result = job.evaluate(score=score, metrics=collection)
    again = job.evaluate(score=score, metrics=collection)
    assert again == result, "counts of the first evaluation were kept"
    assert job.model.training
    if "shard" in axis:
        return result, job.evaluate()["loss"], None
    guesses = job.model(torch.stack([x for x, _ in dataset()])).argmax(-1)
    return result, job.evaluate()["loss"], guesses.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_measures_are_those_of_the_whole_set(ranks):
    truth = [int(y) for _, y in dataset()]
    alone = run_ranks(1, evaluate)[0]
    for result, loss, guesses in run_ranks(ranks, evaluate):
        assert guesses == alone[2]
        assert result["accuracy"] == sum(g == t for g, t in zip(guesses, truth, strict=True)) / SAMPLES
        assert float(result["metrics"]["f1"]) == pytest.approx(f1_score(truth, guesses), abs=1e-6)
        assert float(result["metrics"]["mcc"]) == pytest.approx(matthews_corrcoef(truth, guesses), abs=1e-6)
        assert loss == pytest.approx(alone[1], rel=1e-6)


@pytest.mark.parametrize("plan", ["shard={}", "shard={},zero=2", "shard={},zero=1"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_evaluate_leaves_out_samples_that_fill_up_micro_batches(ranks, plan):
    """Under `shard` every rank runs as many micro-batches: of the last 7 samples, 3 ranks have 3, 2 and 2."""
    alone = run_ranks(1, evaluate)[0]
    for result, loss, _ in run_ranks(ranks, evaluate, plan):
        assert result["accuracy"] == alone[0]["accuracy"]
        for name, value in alone[0]["metrics"].items():
            assert float(result["metrics"][name]) == pytest.approx(float(value), abs=1e-6)
        assert loss == pytest.approx(alone[1], rel=1e-6)


def fewer_samples_than_ranks(rank):
    api.init()
    return Job(workload(), Plan(mesh=f"replicate={api.size()}")).evaluate(dataset()[:1])["loss"]


def test_a_rank_without_a_sample_takes_part():
    alone = run_ranks(1, fewer_samples_than_ranks)[0]
    assert run_ranks(3, fewer_samples_than_ranks) == [pytest.approx(alone, rel=1e-6)] * 3


def nothing_to_evaluate_on(rank):
    api.init()
    plain = workload()
    job = Job(paceline.Workload(plain.model, plain.loss, plain.optimizer, plain.data, 8), Plan())
    with pytest.raises(WorkloadError, match="the call named none"):
        job.evaluate()
    with pytest.raises(WorkloadError, match="should return a dict"):
        job.evaluate(dataset(), score=lambda model, batch: 1.0)
    for wrong, shown in ((0.5, "0.5 of type float"), ((torch.ones(2), 2), "a pair of a tensor of shape (2,)")):
        with pytest.raises(LossError) as caught:
            job.evaluate(dataset(), score=lambda model, batch, wrong=wrong: {"accuracy": wrong})
        assert caught.value.asked == "the score 'accuracy' should be (sum, weight)"
        assert caught.value.found.startswith(f"it is {shown}")
        assert "(predictions == labels).sum(), len(labels)" in caught.value.fix


def plain_numbers(rank):
    api.init()
    job = Job(workload(), Plan(mesh=f"replicate={api.size()}"))
    scores = job.evaluate(score=lambda model, batch: {"true": (batch[1].sum().item(), len(batch[1])), "none": (0.0, 0)})
    assert scores["true"] == sum(y for _, y in dataset()) / SAMPLES
    assert scores["none"] != scores["none"], "NaN"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_score_may_be_plain_numbers(ranks):
    """No gradient is taken of it."""
    run_ranks(ranks, plain_numbers)


def test_bad_evaluations_are_refused():
    run_ranks(1, nothing_to_evaluate_on)
