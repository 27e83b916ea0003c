"""A mixture by grouped products, whose kernels have no float64, is verified in float64, with its own dropout too."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.nouns.plan import Plan

from support.ranks import run_ranks
from support.verified_loops import verify_loop

EXPERTS = 4


def products(rows, weights, ends):
    return (
        F.grouped_mm(rows, weights, offs=ends) if hasattr(F, "grouped_mm") else torch._grouped_mm(rows, weights, ends)
    )


class Mixture(nn.Module):
    """Each sample goes to one expert; a batched product of three dimensions comes after."""

    def __init__(self):
        super().__init__()
        self.router, self.last = nn.Linear(8, EXPERTS), nn.Linear(8, 3)
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 16) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, 8) / 4)

    def forward(self, inputs):
        chances = self.router(inputs).softmax(-1)
        chosen = chances.argmax(-1)
        order = chosen.argsort(stable=True)
        ends = (chosen[:, None] == torch.arange(EXPERTS)).sum(0).cumsum(0).to(torch.int32)
        hidden = F.dropout(F.silu(products(inputs[order], self.up, ends)), 0.5, self.training)
        made = products(hidden, self.down, ends)[order.argsort()]
        return self.last(made * chances.gather(1, chosen[:, None]))


def workload():
    random = torch.Generator().manual_seed(1)
    return paceline.Workload(
        model=Mixture,
        loss=lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=[(torch.randn(8, generator=random), torch.tensor(i % 3)) for i in range(40)],
        batch_size=8,
        precision="float64",
    )


def draw(rank, folder, plan):
    from paceline.comm import api
    from paceline.verify.ranks.rank_main import WorkloadRun
    from paceline.verify.ranks.trace import Trace

    api.init()
    with (Path(folder) / f"trace-{rank}.jsonl").open("w") as file:
        api.world().comm.ledger = Trace(file=file)
        settings = {"plan": plan, "steps": 2, "name": "draws", "precision": "float64", "draws": True}
        WorkloadRun(workload(), settings).play().write(Path(folder) / f"{settings['name']}-{rank}")


@pytest.mark.parametrize("plan", ["replicate=1", "shard=2"])
def test_ranks_take_steps_with_their_own_dropout(tmp_path, plan):
    parsed = Plan.parse(plan)
    run_ranks(parsed.world_size, draw, str(tmp_path), asdict(parsed))
    facts = json.loads((tmp_path / "draws-0.json").read_text())
    assert len({tuple(drawn) for drawn in facts["drawn"]}) == 2


def test_one_process_can_be_asked_whether_it_repeats_its_draws():
    from paceline.verify.ranks.reference import repeats_draws

    assert not repeats_draws(workload())


LOOP = """
import torch, paceline
from torch.nn import functional as F
from torch.utils.data import DataLoader
from verify.test_grouped import Mixture

torch.manual_seed(0)
model = Mixture()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader([(torch.randn(8), i % 3) for i in range(48)], batch_size=8)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for _ in job.epochs(1):
    for rows, targets in loader:
        optimizer.zero_grad()
        job.backward(F.cross_entropy(model(rows), targets))
        optimizer.step()
"""


def test_a_loop_is_verified_with_its_own_dropout():
    verdict = verify_loop(LOOP, "replicate=2", with_draws=True)
    assert verdict.word in ("equal", "rounding"), "\n".join(verdict.lines())
