"""Predict a table of published measurements: each row's steps, in as many processes as there are cores.

`scripts/bench planner --published FILE` starts it; it prints the result as JSON, and progress on stderr.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compare.published_table import (
    MEMORY,
    Row,
    by_source,
    claim_of,
    communicators_of,
    device_of,
    ratios,
    read,
    said_of,
    source_of,
)
from paceline.launch.process_exit import die_with_parent
from paceline.plan.memory import activations_of
from published import stage

CUTTABLE = ("llm_foundry", "megatron", "intern_evo", "bert")
CLEARLY = 0.8  # of a GPU's memory: what needs less by extrapolation fits


def predict_table(path: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Predict every row of a table that tells of memory.

    Args:
        path: the CSV file.
        tell: told how far it is.

    Returns:
        `rows` (each a `Said`), `sources` (by source: rows, how many right, errors), and `ratios`.

    Raises:
        UsageError: the file can't be read, or is no such table.
    """
    rows = read(path)
    claims = [(number, row) for number, row in rows if claim_of(row) is not None]
    jobs: dict[tuple[str, ...], Row] = {}
    for _, row in sorted(claims, key=lambda claim: claim[1]["metric"] not in MEMORY):
        if _why_not(row) is None:
            jobs.setdefault(_same(row), row)
    predictions: dict[tuple[str, ...], tuple[float, bool] | str] = dict(_predictions(jobs, tell))
    said = [said_of(number, row, _why_not(row) or predictions[_same(row)]) for number, row in claims]
    return {"rows": [asdict(one) for one in said], "sources": by_source(said), "ratios": ratios(said)}


def _same(row: Row) -> tuple[str, ...]:
    """Rows for which these are the same take the same steps."""
    name, _ = source_of(row) or ("", "")
    is_told = row["metric"] == "max_batch" or row["source"].startswith("litgpt")
    kind = "pretrain" if "pretrain" in row["note"] else ""
    columns = [row[one] for one in ("model", "strategy", "precision", "seq_len", "micro_batch", "act_ckpt", "rev")]
    gpus = "" if name == "bert" else row["gpus"]
    device = device_of(row)
    more = (row["value"] if is_told else "", kind, gpus, device.name, row["framework"])
    return (name, *columns, row["global_batch"] if name == "megatron" else "", *more)


def _why_not(row: Row) -> str | None:
    name, _ = source_of(row) or ("", "")
    module = importlib.import_module(f"published.{name}")
    if not hasattr(module, "SHAPES") or row["model"].split()[0] in module.SHAPES or name == "megatron":
        return module.why_not(row)  # type: ignore[no-any-return]
    return f"the model {row['model']} is not known here"


def _predictions(
    jobs: dict[tuple[str, ...], Row], tell: Callable[[str], None]
) -> Iterator[tuple[tuple[str, ...], tuple[float, bool] | str]]:
    began, done = time.monotonic(), 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=die_with_parent) as pool:
        waiting = {pool.submit(predict, row): key for key, row in jobs.items()}
        for future in as_completed(waiting):
            done += 1
            left = (time.monotonic() - began) / done * (len(jobs) - done)
            tell(f"published: {done} of {len(jobs)} jobs, {left / 60:.0f} min left")
            yield waiting[future], future.result()


def predict(row: Row) -> tuple[float, bool] | str:
    """Bytes of a row's fullest GPU, as its authors read them, and whether that is too much; or why it can't be told."""
    torch.set_num_threads(1)
    name, number = source_of(row) or ("", "")
    module = importlib.import_module(f"published.{name}")
    device, beside = device_of(row), device_of(row).beside(communicators_of(row))
    try:
        if row["metric"] not in MEMORY and name in CUTTABLE:
            about = stage.extrapolated(lambda: module.predicted(row)) + beside
            if about < CLEARLY * (device.memory or 0):
                return float(about), False
        recordings = module.predicted(row)
    except (ValueError, KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    if number == "activations":
        return max(activations_of(one) for one in recordings), False
    all_taken = [stage.taken(one, device.capacity(communicators_of(row))) for one in recordings]
    most = max(all_taken, key=lambda one: one.reserved)
    nbytes = {"reserved": most.reserved, "allocated": most.allocated}.get(number)
    return nbytes or most.reserved + beside, any(one.is_too_large for one in all_taken)


def main() -> None:
    """Predict the table that is named."""

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    print(json.dumps(predict_table(Path(sys.argv[1]), tell)))


if __name__ == "__main__":
    main()
