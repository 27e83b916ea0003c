"""Forecasts time series by sampled paths of an autoregressive LSTM (DeepAR).

    python workload.py
    paceline run -n 2 workload.py
    paceline run -n 2 workload.py --task etth1 --data DIR
    paceline verify -n 2 workload.py

Without --data it generates seasonal series. DIR holds ETTh1.csv. The scores are those of all ranks' windows: the same
on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import baselines
import deepar
import picture
import scores
import series
import torch
import windows

import paceline
from paceline.nouns.errors import UsageError, did_you_mean
from paceline.nouns.workload import PRECISIONS

AT_ONCE = 64  # windows that are sampled together


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Forecast time series with DeepAR.")
    add = parser.add_argument
    add("--task", help=f"{', '.join(series.TASKS)} (default etth1 with --data, generated without)")
    add("--data", type=Path, metavar="DIR", help="folder with the task's files, plain or .xz")
    add("--horizon", type=int, help="steps ahead, of etth1 and generated (default 24)")
    add("--context", type=int, help="steps before them that the model reads (default: the task's)")
    add("--column", help="target column of etth1 (default OT)")
    add("--likelihood", help=f"{', '.join(deepar.LIKELIHOODS)} (default: the task's)")
    add("--hidden", type=int, default=40, help="units of a layer (default 40)")
    add("--layers", type=int, default=2)
    add("--steps", type=int, default=1000)
    add("--batch-size", type=int, default=64, help="windows, of all ranks together (default 64)")
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--precision", default="float32", help=f"{', '.join(PRECISIONS)} (default float32)")
    add("--paths", type=int, default=100, help="sampled futures of each window (default 100)")
    add("--windows", type=int, metavar="N", help="forecast at most N windows of the test part, evenly spaced")
    add("--baselines", type=int, metavar="N", help="fit statsmodels' baselines to N of these windows")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw four forecasts")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> series.Task:
    """Return the task with what is asked of it.

    Raises:
        UsageError: for what would else be found only after the training.
    """
    task = find_task(arguments)
    least = {"horizon": 1, "context": 1, "hidden": 1, "layers": 1, "steps": 1, "batch_size": 1, "paths": 2}
    for flag, number in {**least, "windows": 1, "baselines": 1, "seed": 0}.items():
        value = getattr(arguments, flag)
        if value is not None and value < number:
            word = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{word} {value}", f"it should be at least {number}", f"write {word} {number} or more")
    if not arguments.lr > 0:
        raise UsageError(f"--lr {arguments.lr}", "it should be above 0", "write e.g. --lr 2e-3")
    if arguments.horizon is not None and task.is_fixed and arguments.horizon != task.horizon:
        asked = f"--horizon {arguments.horizon}"
        raise UsageError(asked, f"that of {task.name} is {task.horizon}", "leave --horizon out")
    for flag in ("output", "picture"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")
    if arguments.baselines is not None:
        baselines.check_installed()
    asked_for = {name: getattr(arguments, name) for name in ("horizon", "context", "likelihood")}
    return replace(task, **{name: value for name, value in asked_for.items() if value is not None})


def find_task(arguments: argparse.Namespace) -> series.Task:
    """Return the task; raise UsageError where there is none, or where data, column or likelihood don't fit it."""
    name = arguments.task or ("etth1" if arguments.data else "generated")
    check_choice("--task", name, series.TASKS)
    if arguments.likelihood is not None:
        check_choice("--likelihood", arguments.likelihood, deepar.LIKELIHOODS)
    task = series.TASKS[name]
    if arguments.data is None and task.source:
        raise UsageError(f"--task {name}", "--data is missing", f"take its files from {task.source}: write --data DIR")
    if arguments.data is not None and not task.source:
        raise UsageError(f"--task {name} --data {arguments.data}", "it reads no files", "leave one of the two out")
    if arguments.column is not None and name != "etth1":
        raise UsageError(f"--column {arguments.column}", f"--task {name} has no columns", "leave --column out")
    return task


def check_choice(flag: str, value: str, choices: Iterable[str]) -> None:
    """Raise UsageError unless it is one of these."""
    if value not in choices:
        raise UsageError(
            f"{flag} {value}",
            f"the choices are {', '.join(choices)}",
            did_you_mean(value, choices, "take one of these"),
        )


def make_workload(panel: series.Panel, arguments: argparse.Namespace) -> paceline.Workload:
    """Random windows, and the mean negative log likelihood of their real positions."""
    kind = panel.task.likelihood

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        lost = deepar.negative_log_likelihood(model(batch["inputs"]), batch["target"], batch["scale"], kind)
        return (lost * batch["counts"]).sum(), batch["counts"].sum()

    return paceline.Workload(
        model=lambda: deepar.DeepAR(windows.width(panel), arguments.hidden, arguments.layers, kind),
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=arguments.lr),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps),
        data=windows.TrainingWindows(panel, arguments.steps * arguments.batch_size, arguments.seed),
        evaluation=windows.ForecastWindows(panel, series.thin(panel.test, 200)),
        batch_size=arguments.batch_size,
        steps=arguments.steps,
        precision=arguments.precision,
        clip_norm=10.0,
        seed=arguments.seed,
    )


def forecast(job: Any, panel: series.Panel, arguments: argparse.Namespace) -> tuple[dict[str, dict[str, float]], Any]:
    """Return the scores of each method over all ranks, and the model. Each rank samples its part of the windows."""
    # Workers of parameter servers run no collectives: each forecasts all windows.
    part, parts = (0, 1) if job.plan.server else (job.rank, job.size)
    model = job.whole_model()
    chosen = series.thin(panel.test, arguments.windows)
    compared = series.thin(chosen, arguments.baselines) if arguments.baselines else []
    found = {"DeepAR": score_model(model, panel, chosen[part::parts], arguments)}
    found["naive"] = scores.score_naive(panel, chosen[part::parts], 1)
    if panel.task.period > 1:
        found["seasonal naive"] = scores.score_naive(panel, chosen[part::parts], panel.task.period)
    if compared:
        found["DeepAR, same windows"] = score_model(model, panel, compared[part::parts], arguments)
        found |= baselines.score_baselines(panel, compared[part::parts])
    return {name: scores.ratios(total, panel.task) for name, total in total_over_ranks(found, parts).items()}, model


def score_model(
    model: deepar.DeepAR, panel: series.Panel, chosen: list[tuple[int, int]], arguments: argparse.Namespace
) -> scores.Sums:
    """Return the sums of the model's scores on these windows."""
    total: scores.Sums = {}
    for at in range(0, len(chosen), AT_ONCE):
        group = chosen[at : at + AT_ONCE]
        sampled = deepar.sample_paths(model, panel, group, arguments.paths, arguments.seed)
        for (number, start), paths in zip(group, sampled, strict=True):
            total = scores.add(total, scores.score_paths(panel, number, start, paths))
    return total


def total_over_ranks(found: dict[str, scores.Sums], parts: int) -> dict[str, scores.Sums]:
    """Return the sums of all ranks, of which some may have no window."""
    if parts == 1:
        return found
    rows = [(method, name) for method in found for name in scores.NAMES]
    sums = torch.tensor([found[method].get(name, (0.0, 0.0)) for method, name in rows], dtype=torch.float64)
    result: dict[str, scores.Sums] = {method: {} for method in found}
    for (method, name), (over, under) in zip(rows, paceline.all_reduce(sums).tolist(), strict=True):
        if under:
            result[method][name] = (over, under)
    return result


def table(found: dict[str, dict[str, float]]) -> str:
    """Return the scores as a table: a row for each, a column for each method."""
    widths = {method: max(len(method), 9) for method in found}
    lines = [" " * 20 + "  ".join(f"{method:>{size}}" for method, size in widths.items())]
    for name in scores.NAMES:
        cells = [
            f"{found[method][name]:{size}.4f}" if name in found[method] else " " * size
            for method, size in widths.items()
        ]
        if any(map(str.strip, cells)):
            lines.append(f"{name:20}" + "  ".join(cells))
    return "\n".join(lines)


arguments = parse_arguments()
panel = series.read_panel(check_arguments(arguments), arguments.data, arguments.seed, arguments.column or "OT")
workload = make_workload(panel, arguments)  # at the top level, for `paceline verify`


def main() -> None:
    """Train, then sample forecasts and say how good they are."""
    job = paceline.distribute(workload)
    began_s = time.monotonic()
    for batch in job.batches():
        job.step(batch)
    train_s = time.monotonic() - began_s
    lost = job.evaluate()["loss"]
    found, model = forecast(job, panel, arguments)
    if job.rank != 0:
        return
    found["DeepAR"]["nll"] = lost
    task = panel.task
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{panel.description}: {job.step_number} steps, {train_s:.1f} s; {task.likelihood}, {task.horizon} ahead")
    print(table(found))
    if arguments.output:
        result = {
            "data": panel.description,
            "size": f"{parameters:,} parameters",
            "scores": found["DeepAR"],
            "others": {name: each for name, each in found.items() if name != "DeepAR"},
            "seconds": round(train_s, 3),
            "steps": job.step_number,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        shown = series.thin(panel.test, 4)
        sampled = deepar.sample_paths(model, panel, shown, max(arguments.paths, 200), arguments.seed)
        picture.draw(arguments.picture, panel, shown, sampled, f"{panel.description}: DeepAR, {task.likelihood}")


if __name__ == "__main__":
    main()
