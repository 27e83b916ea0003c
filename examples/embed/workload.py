"""Sentence embeddings from STS-B, and a vector index to search them.

    paceline run -n 2 workload.py --index index
    python search.py index "A man plays a guitar."

Two losses: the cosine of a pair should be its score, and a pair of a high score should find each other among all
sentences of the global batch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import encoder
import figure
import sentences
import torch
import torchmetrics
import vectors
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.checkpoint.export import check_may_export, plan_export, write_export
from paceline.nouns.errors import UsageError

HIGH = 0.8  # pairs of this score or more, 4 of 5, mean the same
NEIGHBOURS = 10


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train sentence embeddings, and write an index to search.")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder with sts-train.csv, sts-dev.csv, sts-test.csv; else made up")
    add("--epochs", type=int, default=8)
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--batch-size", type=int, default=64, help="of all ranks together (default 64)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default 1e-3)")
    add("--width", type=int, default=128, help="numbers of an embedding (default 128)")
    add("--temperature", type=float, default=0.05, help="of the in-batch negatives (default 0.05)")
    add("--negatives", type=float, default=0.1, help="weight of the in-batch negatives (default 0.1)")
    add("--precision", default="float32", choices=("float32", "float64"))
    add("--seed", type=int, default=0)
    add("--index", type=Path, metavar="DIR", help="write the index of all sentences to this folder, new or empty")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw predicted against given scores")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only after the training."""
    for flag, least in (("epochs", 1), ("steps", 1), ("batch_size", 2), ("width", 2)):
        value = getattr(arguments, flag)
        if value is not None and value < least:
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{name} {value}", f"it should be at least {least}", f"write {name} {least} or more")
    for flag, usual in (("temperature", 0.05), ("lr", 1e-3)):
        if not getattr(arguments, flag) > 0:
            found, fix = "it should be above 0", f"write --{flag} {usual}"
            raise UsageError(f"--{flag} {getattr(arguments, flag)}", found, fix)
    if not arguments.negatives >= 0:
        raise UsageError(f"--negatives {arguments.negatives}", "it should be 0 or more", "write --negatives 0.1")
    for flag in ("output", "picture", "index"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")
    if arguments.index is not None:
        check_may_export(arguments.index)


def loss_of(job: Any, model: torch.nn.Module, batch: Any, temperature: float, negatives: float) -> torch.Tensor:
    """This rank's part of the loss: of the mean over its samples, as `job.backward` takes it."""
    features, scores = batch
    first, second = model(features.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    regression = F.mse_loss((first * second).sum(1), scores)
    candidates = job.all_gather(second, grad=True)
    is_high = scores >= HIGH
    counts = job.all_gather(torch.tensor([[len(scores), int(is_high.sum())]], device=scores.device))
    # This rank's sentences stand together among all of them.
    labels = torch.arange(len(scores), device=scores.device) + counts[: job.data_rank, 0].sum()
    each = F.cross_entropy(first @ candidates.T / temperature, labels, reduction="none")
    samples, high = counts.sum(0).tolist()
    # A mean over the high pairs of all ranks, of which each rank has another share than of the samples.
    found = (each * is_high).sum() / max(1, high) * samples / len(scores)
    return regression + negatives * found


def evaluate(job: Any, model: torch.nn.Module, pairs: list[sentences.Pair]) -> float:
    """Spearman's correlation of cosines and scores over all ranks."""
    metric = torchmetrics.SpearmanCorrCoef().to(job.device)

    def score(_: Any, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
        features, scores = batch
        first, second = model(features.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        cosines = (first * second).sum(1)
        # Equal sentences have equal cosines but for rounding, which depends on the ranks; they should share a place.
        metric.update(cosines.double().round(decimals=6), scores.double())
        return {"loss": (F.mse_loss(cosines, scores, reduction="sum"), len(scores))}

    return float(job.evaluate(sentences.Pairs(pairs), score, metric)["metrics"])


def write_index(job: Any, folder: Path, index: Any, texts: list[str]) -> None:
    """Write index, sentences and model. Call it on every rank: each writes its part of the checkpoint."""
    checkpoint = folder.with_name(f".{folder.name}-checkpoint")
    job.save(checkpoint)
    if job.rank == 0:
        write_export(plan_export(checkpoint, "safetensors", print), folder)
        vectors.write(folder, index, texts)
        shutil.rmtree(checkpoint)


def report(job: Any, model: torch.nn.Module, parts: dict[str, Any], arguments: Any, result: dict[str, Any]) -> None:
    """Find the scores, and write what is asked for. Call it on every rank."""
    scores = {f"spearman_{part}": evaluate(job, model, parts[part]) for part in ("dev", "test")}
    texts = sorted({text for pairs in parts.values() for pair in pairs for text in pair[:2]})
    embedded = vectors.encode(model, texts, job.device)
    asked = {text for pair in parts["test"] for text in pair[:2]}
    index = vectors.build(embedded)
    queries = embedded[[row for row, text in enumerate(texts) if text in asked]]
    scores["recall_at_10"] = vectors.recall(index, embedded, queries, NEIGHBOURS)
    if arguments.index is not None:
        write_index(job, arguments.index, index, texts)
    if job.rank != 0:
        return
    print(f"{result['data']}: {result['steps']} steps, {result['seconds']:.1f} s")
    print("\n".join(f"{score:<16}{value:8.4f}" for score, value in scores.items()))
    if arguments.index is not None:
        print(f"{arguments.index}: {len(texts):,} sentences")
    if arguments.picture:
        place = {text: row for row, text in enumerate(texts)}
        cosines = [float(embedded[place[one]] @ embedded[place[other]]) for one, other, _ in parts["test"]]
        title = result["data"].partition(",")[0]
        figure.draw(arguments.picture, title, [pair.score for pair in parts["test"]], cosines, scores)
    if arguments.output:
        arguments.output.write_text(json.dumps({**result, "scores": scores}, indent=1) + "\n")


def main() -> None:
    """Train, say how good it is, and write the index."""
    arguments = parse_arguments()
    check_arguments(arguments)
    torch.set_default_dtype(getattr(torch, arguments.precision))
    name, parts = sentences.read_pairs(arguments.data)
    data = sentences.Pairs(parts["train"])
    if len(data) < arguments.batch_size:
        found = f"there are {len(data)} training pairs"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, "choose a smaller batch")
    a_pass = len(data) // arguments.batch_size
    steps = arguments.steps or arguments.epochs * a_pass

    torch.manual_seed(arguments.seed)
    known = [text for pair in parts["train"] for text in pair[:2]]
    model = encoder.Encoder(arguments.width, sentences.rarity(known))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    # Without a short last batch: a rank without a sample would take part with one that does not count.
    loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    job, model, optimizer, loader, schedule = paceline.prepare(model, optimizer, loader, schedule, seed=arguments.seed)
    if arguments.batch_size < job.data_size:
        found = f"{job.data_size} ranks share it, and each needs a sample of its own"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, f"write {job.data_size} or more")

    began_s = time.monotonic()
    for _ in job.epochs(-(-steps // a_pass)):
        for batch in loader:
            optimizer.zero_grad()
            job.backward(loss_of(job, model, batch, arguments.temperature, arguments.negatives))
            optimizer.step()
            schedule.step()
            if job.step_number == steps:
                break
    train_s = time.monotonic() - began_s

    size = sum(parameter.numel() for parameter in encoder.Encoder(arguments.width).parameters())
    result = {
        "data": f"{name}, {len(data):,} training and {len(parts['test']):,} test pairs",
        "size": f"{size / 1e6:.1f} million parameters",
        "seconds": round(train_s, 3),
        "steps": steps,
    }
    report(job, model, parts, arguments, result)


if __name__ == "__main__":
    main()
