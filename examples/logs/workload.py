"""Finds anomalies in logs: an LSTM that predicts the next event, or a transformer that classifies sessions.

    paceline run -n 2 workload.py --task hdfs-next
    paceline run -n 2 workload.py --task hdfs --picture figure.png

Without --data the sessions are made up. Precision, recall and F1 at the end follow from counts of all ranks: they are
the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import detection
import models
import sessions
import torch

import paceline
from paceline.nouns.errors import UsageError
from paceline.nouns.workload import PRECISIONS

# Of each task: epochs, batch size, peak learning rate, the most keys of a session that the model sees.
DEFAULTS = {
    "hdfs-next": (12, 64, 1e-2, 64),
    "hdfs": (2, 64, 1e-3, 64),
    "adfa": (4, 32, 3e-3, 127),
    "lines": (60, 16, 5e-3, 20),
}
HIDDEN = {"adfa": 0.3}  # of the tokens in training: without it the model learns its traces by heart
FALSE_ALARMS = 0.01  # of normal sessions, where the threshold is set without anomalies
LSTM_AXIS = "keys found likelier than the one that came, at the worst place"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Find anomalies in logs.")
    add = parser.add_argument
    add("--task", default="hdfs-next", help=f"{', '.join(sessions.TASKS)} (default hdfs-next)")
    add("--data", type=Path, metavar="DIR", help="folder of the task's files; else made-up sessions")
    add("--fold", type=int, help="adfa: which of the 5 folds is the test set, from 0 (default 0)")
    add("--log", help=f"lines: whose lines, {', '.join(sessions.templates.FORMATS)} (default BGL)")
    add("--window", type=int, help="keys of a session that the model sees; lines: of which a session consists")
    add("--epochs", type=int)
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--batch-size", type=int, help="of all ranks together")
    add("--lr", type=float, help="peak learning rate")
    add("--precision", default="float32", help=f"{', '.join(PRECISIONS)} (default float32)")
    add("--seed", type=int, default=0)
    add("--linear", action="store_true", help="hdfs, adfa: fit the linear reference too (needs scikit-learn)")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw scores, threshold, precision and recall (needs matplotlib)")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> sessions.Task:
    """Return the task; raise UsageError for what would else be found only after the training."""
    task = sessions.find_task(arguments.task)
    for flag, least in (("window", 2), ("batch_size", 1), ("epochs", 1), ("steps", 1), ("fold", 0)):
        value = getattr(arguments, flag)
        if value is not None and value < least:
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{name} {value}", f"it should be at least {least}", f"write {name} {least} or more")
    if (arguments.fold or 0) >= sessions.FOLDS:
        raise UsageError(
            f"--fold {arguments.fold}", f"there are {sessions.FOLDS} folds", f"write 0 to {sessions.FOLDS - 1}"
        )
    for flag, tasks in (("fold", ["adfa"]), ("log", ["lines"]), ("linear", ["hdfs", "adfa"])):
        if getattr(arguments, flag) not in (None, False) and task.name not in tasks:
            asked = f"--{flag} with --task {task.name}"
            raise UsageError(asked, f"it applies to {', '.join(tasks)} alone", f"leave --{flag} out")
    if arguments.log is not None:
        sessions.templates.find_format(arguments.log)
    if arguments.epochs is not None and arguments.steps is not None:
        raise UsageError("--epochs and --steps", "both say when training ends", "leave one of them out")
    for flag in ("output", "picture"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")
    return task


def window_of(arguments: argparse.Namespace, data: sessions.Data, keys: models.Keys) -> int:
    """Return how many tokens of a session the model sees: what is asked for, or the default."""
    longest = max(len(keys.tokens(row)) for rows in (data.train, data.threshold, data.test) for row in rows)
    if arguments.window is None:
        return min(longest, DEFAULTS[arguments.task][3])
    if arguments.window > longest:
        raise UsageError(
            f"--window {arguments.window}",
            f"it is longer than every session: the longest has {longest} keys",
            f"write --window {longest} or less",
        )
    return arguments.window


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What the training needs, and what the report does."""

    task: sessions.Task
    data: sessions.Data
    keys: models.Keys
    workload: paceline.Workload
    bins: int
    parameters: int


def prepare(arguments: argparse.Namespace) -> Prepared:
    """Read and check everything; what is left is to train."""
    task = check_arguments(arguments)
    epochs, batch_size, peak, _ = DEFAULTS[task.name]
    options = sessions.Options(
        fold=arguments.fold or 0, log=arguments.log or "BGL", lines=arguments.window or DEFAULTS["lines"][3]
    )
    data = sessions.load(task, arguments.data, options, arguments.seed)
    keys = models.Keys(data.train, gram=3 if task.name == "adfa" else 1)
    window = window_of(arguments, data, keys)
    rows, groups = models.groups_of(data)
    train = models.Sessions(data.train, [0] * len(data.train), keys, window, HIDDEN.get(task.name, 0.0))
    batch_size = arguments.batch_size or batch_size
    steps = arguments.steps or (arguments.epochs or epochs) * -(-len(train) // batch_size)
    peak = arguments.lr or peak

    def make_model() -> torch.nn.Module:
        if task.is_next_key:
            return models.NextKey(len(keys))
        return models.Classifier(len(keys), models.padded(window), layers=1 if task.name == "adfa" else 2)

    workload = paceline.Workload(
        model=make_model,
        loss=models.next_key_loss if task.is_next_key else models.anomaly_loss,
        score=detection.score_next_key(len(keys)) if task.is_next_key else detection.score_anomaly,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / (0.1 * steps + 1), 1.02 - step / steps)
        ),
        data=train,
        evaluation=models.Sessions(rows, groups, keys, window),
        collate=models.collate,
        batch_size=batch_size,
        steps=steps,
        precision=arguments.precision,
        clip_norm=1.0,
        seed=arguments.seed,
    )
    bins = len(keys) + 1 if task.is_next_key else detection.LOGIT_BINS
    return Prepared(task, data, keys, workload, bins, sum(p.numel() for p in make_model().parameters()))


def report(arguments: argparse.Namespace, prepared: Prepared, ratios: dict[str, float], size: dict[str, Any]) -> None:
    """Print the measures beside the reference, and write the files that are asked for."""
    task, data = prepared.task, prepared.data
    sessions_counted = len(data.threshold) + len(data.test)
    counts = detection.histograms(ratios, sessions_counted, prepared.bins)
    if task.is_next_key:
        threshold = detection.threshold_of_normal(counts["threshold_normal"], FALSE_ALARMS)
    else:
        threshold = detection.threshold_of_both(counts["threshold_normal"], counts["threshold_anomalous"])
    model = detection.quality(counts["test_normal"], counts["test_anomalous"], threshold)
    rows = {"LSTM" if task.is_next_key else "transformer": model}
    if task.is_next_key:
        rows["unseen pairs of keys"] = detection.unseen_pair_reference(data)
    if arguments.linear:
        rows["logistic regression"] = detection.linear_reference(data, prepared.keys)
    print(f"{data.name}: {size['steps']} steps, {size['seconds']:.1f} s")
    print(f"test set: {sum(counts['test_normal']):,} normal, {sum(counts['test_anomalous']):,} anomalous")
    if task.is_next_key:
        print(f"an alarm where the key that came is not among the {threshold} likeliest")
    print(detection.table(rows))
    scores = dataclasses.asdict(model) | {"threshold": threshold}
    for name, one in list(rows.items())[1:]:
        scores |= {f"{name.replace(' ', '_')}_f1": one.f1}
    if arguments.output:
        million = f"{prepared.parameters / 1e6:.2f} million parameters"
        result = {"data": data.name, "size": million, "scores": scores, **size}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        axis = LSTM_AXIS if task.is_next_key else "logit"
        detection.draw(arguments.picture, counts, threshold, rows, (data.name, axis))


arguments = parse_arguments()
prepared = prepare(arguments)
workload = prepared.workload  # `paceline verify` and `paceline plan` find it by this name


def main() -> None:
    """Train, then say how good it is."""
    job = paceline.distribute(workload)
    began_s = time.monotonic()
    for batch in job.batches():
        job.step(batch)
    train_s = time.monotonic() - began_s
    ratios = job.evaluate()
    if job.rank == 0:
        report(arguments, prepared, ratios, {"seconds": round(train_s, 1), "steps": job.step_number})


if __name__ == "__main__":
    main()
