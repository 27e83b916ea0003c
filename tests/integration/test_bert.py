"""The demo's own BERT, whole: 1, 2 and 4 ranks on the same global batch end with equal parameters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.comm import api
from paceline.demo.bert import Bert
from paceline.demo.corpus import VOCABULARY
from paceline.demo.demo_workload import SIZES, loss, make_workload
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

pytestmark = pytest.mark.integration

STEPS, BATCH, SEQUENCES = 20, 12, 100  # of 100, batches of 12: the ninth of an epoch has 4


class BertWithUnused(Bert):
    """The demo's BERT with a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.unused = torch.nn.Parameter(torch.ones(7))


def train(rank, folder, micro, transport):
    api.init()
    parts = {"model": BertWithUnused, "loss": loss, "precision": "float64", "micro_batch_size": micro, "clip_norm": 0.5}
    workload = make_workload(Path(folder), STEPS, BATCH, **parts)
    job = Job(workload, Plan(mesh=f"replicate={api.size()}", transport=transport, bucket_bytes=2**20))
    losses = [job.step(batch) for batch in job.batches()]
    return losses, {name: tensor.clone() for name, tensor in job.model.state_dict().items()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    # Few of the tokens: that the others don't come is learned in some steps.
    rows = np.random.default_rng(0).integers(5, VOCABULARY // 32, (SEQUENCES, 32)).astype(np.uint16)
    np.save(folder / "train.npy", rows)
    np.save(folder / "held_out.npy", rows[:8])
    (folder / "corpus.json").write_text(json.dumps({"most_frequent_id": 5}))
    return str(folder)


@pytest.fixture(scope="module")
def alone(text):
    return run_ranks(1, train, text, None, "auto")[0]


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 2)])
def test_ranks_equal_one(text, alone, ranks, micro, transport):
    losses, state = alone
    results = run_ranks(ranks, train, text, micro, transport)
    for other_losses, other in results:
        assert other_losses == pytest.approx(losses, rel=1e-12)
        assert max(float((state[name] - other[name]).abs().max()) for name in state) <= 1e-12
        assert all(torch.equal(other[name], results[0][1][name]) for name in other)
    assert state["unused"].eq(1).all()
    assert losses[-1] < losses[0]


def train_split(rank, folder, plan):
    api.init()
    workload = make_workload(Path(folder), 8, 12, precision="float64", clip_norm=0.5)
    job = Job(workload, Plan.parse(plan))
    losses = [job.step(batch) for batch in job.batches()]
    return losses, job.evaluate()["loss"]


@pytest.mark.parametrize("plan", ["replicate=2,tensor=2", "pipeline=2,tensor=2"])
def test_a_split_demo_ends_at_the_same_loss(text, plan):
    """The demo has no dropout: nothing but rounding may differ."""
    ((losses, held_out),) = run_ranks(1, train_split, text, "replicate=1")
    for other_losses, other_held_out in run_ranks(4, train_split, text, plan, timeout_s=400):
        assert other_losses == pytest.approx(losses, rel=1e-10)
        assert other_held_out == pytest.approx(held_out, rel=1e-10)
    assert losses[-1] < losses[0]
