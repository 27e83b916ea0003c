"""The table of docs/verify-table.md: twelve unmodified models under twelve plans, verified. `scripts/verify-table`.

Every cell: order of collectives, two steps in float64 with clipping, the ledger against the prediction. A plan may be
refused, with its reason below the table.
"""

from __future__ import annotations

import datetime
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from test_every_plan import plans_of

from paceline.nouns.errors import PacelineError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.profile.describe import describe
from paceline.verify.judge.checks import check_order, check_step, check_traffic
from paceline.verify.judge.compare import Reference, read_ranks
from paceline.verify.judge.order_of_collectives import read_trace
from paceline.verify.judge.verdict import Verdict
from paceline.verify.ranks.dry_run import predicted_traffic

from support import verified_workloads as kit
from support.models import MODELS
from support.ranks import preload, run_ranks

FAMILIES = ("bert", "distilbert", "roberta", "gpt2", "llama", "qwen2", "t5", "vit")


def run_all(rank, name, runs, folder):
    """Every run, one after another in the same process; why those were refused that were."""
    refused = {}
    for one in runs:
        try:
            kit.run(rank, name, None, [one], folder)
        except PacelineError as error:
            refused[one["name"]] = str(error).splitlines()[0]
    return refused


def runs_of(number: int, plan: Plan) -> list[dict]:
    common = {"plan": asdict(plan), "steps": 2}
    exact = {**common, "name": f"float64-{number}", "precision": "float64"}
    return [exact, {**common, "name": f"draws-{number}", "precision": "float32", "draws": True, "steps": 1}]


def cells(name: str, plans: list[str]) -> dict[str, tuple[str, str]]:
    """The word of each plan's cell, and what is to be said of it below the table; all of one number of ranks."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as text:
        folder = Path(text)
        for path in kit.reference_of(name).iterdir():
            (folder / path.name).symlink_to(path)
        runs = [one for number, plan in enumerate(plans) for one in runs_of(number, Plan.parse(plan))]
        ranks = Plan.parse(plans[0]).world_size
        refused = run_ranks(ranks, run_all, name, runs, text, timeout_s=1200)
        for number, plan in enumerate(plans):
            own = [one["name"] for one in runs_of(number, Plan.parse(plan))]
            said = next((one[run] for one in refused for run in own if run in one), "")
            found[plan] = ("refused", said) if said else judged(name, Plan.parse(plan), number, folder)
    return found


def judged(name: str, plan: Plan, number: int, folder: Path) -> tuple[str, str]:
    verdict = Verdict(plan.line())
    traces = {rank: read_trace(folder / f"float64-{number}-trace-{rank}.jsonl") for rank in range(plan.world_size)}
    check_order(verdict, {"float64": traces}, Mesh.parse(plan.mesh), {"graphs": {}})
    check_step(verdict, Reference.read(folder, "float64"), read_ranks(folder, f"float64-{number}", plan.world_size))
    drawn = read_ranks(folder, f"draws-{number}", plan.world_size)
    own = kit.make(name)
    check_traffic(verdict, predicted_traffic(own, plan, describe(own, plan)), drawn)
    if verdict.word == "bug":
        return "**bug**", "; ".join(check.message for check in verdict.checks if not check.passed)
    return f"{verdict.largest:.0e}", ""


def main() -> None:
    preload(*(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES))
    began = time.monotonic()
    names = sys.argv[1:] or list(MODELS)
    plans = list(dict.fromkeys(plan for name in names for plan in plans_of(name)))
    table: dict[tuple[str, str], tuple[str, str]] = {}
    for name in names:
        for ranks in sorted({Plan.parse(plan).world_size for plan in plans_of(name)}):
            these = [plan for plan in plans_of(name) if Plan.parse(plan).world_size == ranks]
            table |= {(name, plan): cell for plan, cell in cells(name, these).items()}
        said = ", ".join(f"{plan} {cell[0]}" for (model, plan), cell in table.items() if model == name)
        print(f"{time.monotonic() - began:6.0f} s  {name}: {said}", file=sys.stderr, flush=True)
    show(names, plans, table)


def show(names: list[str], plans: list[str], table: dict[tuple[str, str], tuple[str, str]]) -> None:
    """The table in Markdown, what was refused, and with which versions."""
    print("| plan | " + " | ".join(names) + " |")
    print("|---|" + "--:|" * len(names))
    for plan in plans:
        print(f"| `{plan}` | " + " | ".join(table.get((name, plan), ("", ""))[0] for name in names) + " |")
    words = [word for word, _ in table.values()]
    equal = sum(word not in ("refused", "**bug**") for word in words)
    print(f"\n{equal} of {len(words)} cells are the same step; {words.count('refused')} are refused; ", end="")
    print(f"{words.count('**bug**')} are bugs.\n")
    for (name, plan), (_, note) in table.items():
        if note:
            print(f"- {name}, `{plan}`: {note}")
    versions = f"torch {torch.__version__}, transformers {_transformers()}, Python {platform.python_version()}"
    print(f"\n{datetime.date.today()}, {versions}.")


def _transformers() -> str:
    from transformers import __version__

    return __version__


if __name__ == "__main__":
    main()
