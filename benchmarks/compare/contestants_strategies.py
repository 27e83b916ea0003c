"""Run the processes that `bench strategies` times: Paceline's strategies, and each of them by hand in raw torch."""

from __future__ import annotations

from pathlib import Path

# Imported before the ranks are forked, so that they need not.
import torch._dynamo
import torch.fx.experimental.proxy_tensor  # noqa: F401

from compare.bert_workload import MICRO_BATCHES, make_workload
from compare.contestants import Contestant, Step, serve
from compare.raw_strategies import raw_1f1b, raw_gpipe, raw_shard, raw_tensor
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job

PLANS = {
    "paceline_shard": "shard=2,zero=3",
    "paceline_tensor": "tensor=2",
    "paceline_gpipe": f"pipeline=2,schedule=gpipe,micro_batches={MICRO_BATCHES}",
    "paceline_1f1b": f"pipeline=2,schedule=1f1b,micro_batches={MICRO_BATCHES}",
}


def _paceline(plan: str) -> Contestant:
    """Return the contestant that trains under a plan."""

    def start(folder: Path, rank: int, ranks: int) -> Step:
        api.init()
        job = Job(make_workload(folder), Plan.parse(plan))
        batches = job.batches()
        return lambda: job.step(next(batches))

    return start


CONTESTANTS: dict[str, Contestant] = {
    **{name: _paceline(plan) for name, plan in PLANS.items()},
    "raw_shard": raw_shard,
    "raw_tensor": raw_tensor,
    "raw_gpipe": raw_gpipe,
    "raw_1f1b": raw_1f1b,
}


if __name__ == "__main__":
    serve(CONTESTANTS)
