"""Any sizes, any mesh of up to four ranks, any cutting of the batch: the steps of one rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from test_tensor import Small, loss
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.checkpoint.reshard import take
from paceline.comm import api
from paceline.nouns.errors import PacelineError
from paceline.nouns.mesh import AXES
from paceline.nouns.plan import SCHEDULES, Plan
from paceline.train.job import Job

from support.ranks import run_ranks

STEPS = 2


@st.composite
def meshes(draw):
    """Axes whose product is at most four."""
    sizes, left = {}, 4
    for axis in draw(st.permutations([axis for axis in AXES if axis != "expert"])):  # the models have none
        size = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n <= left]))
        sizes[axis], left = size, left // size
    plan = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if sizes["pipeline"] > 1:
        plan += f",schedule={draw(st.sampled_from([name for name in SCHEDULES if name != 'interleaved']))}"
    return plan


sizes_of_jobs = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["mlp", "transformer"]),
        "widths": st.lists(st.integers(4, 20), min_size=3, max_size=5),
        "heads": st.integers(1, 4),
        "is_tied": st.booleans(),
        "samples": st.integers(9, 24),
        "batch_size": st.integers(4, 9),
        "micro_batch_size": st.none() | st.integers(1, 4),
        "clip_norm": st.none() | st.sampled_from([0.1, 10.0]),
    }
)


def workload(kind, widths, heads, is_tied, samples, **parts):
    random = torch.Generator().manual_seed(1)
    if kind == "transformer":
        vocabulary = widths[0] + 10
        data = [torch.randint(vocabulary, (6,), generator=random) for _ in range(samples)]
        sizes = {"width": 4 * heads, "heads": heads, "wide": widths[1], "is_tied": is_tied}
        return job_of(lambda: Small(vocabulary, **sizes), loss, data, parts)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    data = [(torch.randn(widths[0], generator=random), torch.tensor(index % widths[-1])) for index in range(samples)]
    return job_of(lambda: nn.Sequential(*layers), classes_loss, data, parts)


def classes_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def job_of(model, loss, data, parts):
    return paceline.Workload(
        model=model,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
        data=data,
        steps=STEPS,
        precision="float64",
        **parts,
    )


def train(rank, sizes, plan):
    api.init()
    try:
        job = Job(workload(**sizes), Plan.parse(plan))
        steps = [(job.step(batch), job.last.gradient_norm or 0.0) for batch in job.batches()]
    except PacelineError as error:
        return str(error)
    state = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in job.model.named_parameters() if not p.is_meta}
    return steps, {name: tensor.detach().clone() for name, tensor in state.items()}, job.parallel.local_shards()


# A stage that sends what it also keeps for its weights' half of the backward pass.
KEEPS_WHAT_IT_SENDS = {
    "kind": "transformer",
    "widths": [8, 8, 20, 8],
    "heads": 3,
    "is_tied": False,
    "samples": 9,
    "batch_size": 4,
    "micro_batch_size": None,
    "clip_norm": 0.1,
}


# The function that makes the model returns the same layers each time, and a copy of them is to be tried.
MAKES_ONE_MODEL = {
    "kind": "mlp",
    "widths": [8, 8, 12],
    "heads": 4,
    "is_tied": False,
    "samples": 14,
    "batch_size": 9,
    "micro_batch_size": 2,
    "clip_norm": None,
}


def check_job(sizes, plan):
    """Compare a job under a plan with that of one rank; return False if all ranks refuse the plan."""
    ((steps, whole, _),) = run_ranks(1, train, sizes, "replicate=1")
    results = run_ranks(Plan.parse(plan).world_size, train, sizes, plan)
    if any(isinstance(result, str) for result in results):
        assert all(isinstance(result, str) for result in results), results
        return False
    for rank_steps, state, held in results:
        for step_loss, expected in zip(rank_steps, steps, strict=True):
            assert step_loss == pytest.approx(expected, rel=1e-10)
        for name, tensor in state.items():
            expected = take(whole[name], held[name].shard_spec) if name in held else whole[name]
            torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-11)
    assert {name for _, state, _ in results for name in state} == whole.keys()
    return True


@pytest.mark.slow
def test_any_job_on_any_mesh_is_that_of_one_rank():
    have_trained = []

    @example(MAKES_ONE_MODEL, "shard=3")
    @example(KEEPS_WHAT_IT_SENDS, "pipeline=3,schedule=zero_bubble")
    @given(sizes_of_jobs, meshes())
    @settings(
        deadline=None,
        max_examples=12,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(sizes, plan):
        have_trained.append(check_job(sizes, plan))

    run()
    assert sum(have_trained) >= len(have_trained) / 2, "most plans are refused, and nothing is compared"
