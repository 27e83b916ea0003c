"""Fine-tunes a BERT-style encoder on a GLUE task.

    python sample.py data
    paceline run -n 2 workload.py --task SST-2 --data data --tokenizer data/vocab.txt

sample.py makes up a small task, to try the example without GLUE's files.

The dev set's metrics at the end are those of all ranks' counts: the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import encoder
import scores
import tasks
import torch
import transformers
from torch.nn import functional as F

import paceline
from paceline.nouns.errors import UsageError
from paceline.nouns.workload import PRECISIONS


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a BERT-style encoder on a GLUE task.")
    add = parser.add_argument
    add("--task", required=True, help=", ".join(tasks.TASKS))
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with GLUE's own files, DIR/CoLA/train.tsv ...; else from the hub",
    )
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face checkpoint on this disk; else a small BERT from scratch",
    )
    add(
        "--tokenizer", type=Path, metavar="FILE", help="a BERT WordPiece vocab.txt; else the checkpoint's own tokenizer"
    )
    add("--epochs", type=int, default=3)
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--batch-size", type=int, default=32, help="of all ranks together (default 32)")
    add("--lr", type=float, help="peak learning rate (default 5e-5 with --model, 5e-4 from scratch)")
    add("--max-length", type=int, default=64, help="tokens at which a sample is cut (default 64)")
    add("--dropout", type=float, default=0.0, help="default 0: then the result does not depend on the ranks")
    add("--limit-train", type=int, metavar="N", help="only the first N training rows")
    add("--precision", default="float32", help=f"{', '.join(PRECISIONS)} (default float32)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--predictions", type=Path, metavar="FILE", help="write row, label and prediction of the dev set as TSV")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only after the training."""
    for flag, least in (("max_length", 8), ("limit_train", 1), ("batch_size", 1), ("epochs", 1), ("steps", 1)):
        value = getattr(arguments, flag)
        if value is not None and value < least:
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{name} {value}", f"it should be at least {least}", f"write {name} {least} or more")
    for flag in ("output", "predictions"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")


def make_workload(task: tasks.Task, arguments: argparse.Namespace) -> paceline.Workload:
    """Everything read, tokenized and checked; what is left is to train."""
    if arguments.model is not None:
        encoder.check_checkpoint(arguments.model)
    tokenizer = encoder.open_tokenizer(arguments.tokenizer, arguments.model, arguments.max_length)
    outputs = 1 if task.is_regression else len(task.labels)
    config = encoder.open_config(arguments.model, outputs, arguments.dropout, tokenizer.get_vocab_size())
    encoder.check_fits(config, tokenizer, arguments.max_length)
    train, dev = (
        encoder.Encoded(tokenizer, [example.texts for example in part], [example.label for example in part])
        for part in tasks.read_task(task, arguments.data, arguments.limit_train)
    )
    steps = arguments.steps or arguments.epochs * -(-len(train) // arguments.batch_size)
    peak = arguments.lr or (5e-5 if arguments.model else 5e-4)
    return paceline.Workload(
        model=lambda: encoder.make_model(arguments.model, config),
        loss=loss,
        optimizer=lambda model: make_optimizer(model, peak),
        scheduler=lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps),
        data=train,
        evaluation=dev,
        collate=encoder.pad_with(config.pad_token_id or 0, getattr(config, "type_vocab_size", 0) > 1),
        batch_size=arguments.batch_size,
        steps=steps,
        precision=arguments.precision,
        clip_norm=1.0,
        seed=arguments.seed,
    )


def loss(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Cross entropy, or the squared error of a regression: added up, and of how many samples."""
    return loss_of(encoder.logits_of(model, batch), batch["labels"])


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same from logits: (batch, classes), or (batch,) for a regression."""
    if labels.is_floating_point():
        return F.mse_loss(logits.to(labels.dtype), labels, reduction="sum"), len(labels)
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def make_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.Optimizer:
    """AdamW; biases and norms are not decayed."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak)


def evaluate(job: Any, task: tasks.Task) -> tuple[dict[str, Any], list[list[float]]]:
    """The dev set's metrics over all ranks, and every row's prediction. Call it on every rank."""
    metrics = scores.make_metrics(task.is_regression, job.device)

    def score(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, tuple[torch.Tensor, int]]:
        logits, labels = encoder.logits_of(model, batch), batch["labels"]
        guesses = logits.double() if task.is_regression else logits.argmax(-1)
        metrics.update(guesses, labels.double() if task.is_regression else labels, rows=batch["rows"])
        return {"loss": loss_of(logits, labels)}

    return scores.report(job.evaluate(score=score, metrics=metrics), task.labels)


def main() -> None:
    """Train, then say how good it is."""
    arguments = parse_arguments()
    check_arguments(arguments)
    task = tasks.find_task(arguments.task)
    workload = make_workload(task, arguments)
    job = paceline.distribute(workload)
    began_s = time.monotonic()
    for batch in job.batches():
        job.step(batch)
    train_s = time.monotonic() - began_s
    numbers, predictions = evaluate(job, task)
    if job.rank != 0:
        return
    result = {
        "task": task.name,
        "ranks": job.size,
        "steps": job.step_number,
        "train_samples": len(workload.data),
        "train_s": round(train_s, 3),
        "dev": numbers,
    }
    print(f"{task.name}: {job.step_number} steps on {job.size} rank{'s' * (job.size > 1)}, {train_s:.1f} s")
    print(scores.table(numbers))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.predictions:
        scores.write_predictions(arguments.predictions, predictions)


if __name__ == "__main__":
    main()
