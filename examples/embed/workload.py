"""Sentence embeddings from STS-B, and a vector index to search them.

    paceline run -n 2 workload.py --index index
    python search.py index "A man plays a guitar."

Two losses: the cosine of a pair should be its score, and the first sentence of a pair of a high score should find the
second among those of the global batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import encoder
import figure
import sentences
import torch
import vectors
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.integrations.saving import save_model
from paceline.nouns.errors import DataError, UsageError
from paceline.nouns.picture_file import check_picture

try:
    import torchmetrics
except ImportError as error:
    raise UsageError("a rank correlation", "torchmetrics is not installed", "pip install torchmetrics") from error

HIGH = 0.8  # pairs of this score or more, 4 of 5, mean the same
NEIGHBOURS = 10
EPOCHS = 6


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Train sentence embeddings, and write an index to search.")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder with sts-train.csv, sts-dev.csv, sts-test.csv; else made up")
    add("--epochs", type=int, help="passes over the training pairs (default 6)")
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--batch-size", type=int, default=64, help="of all ranks together (default 64)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default 1e-3)")
    add("--width", type=int, default=384, help="numbers of an embedding (default 384)")
    add("--drop", type=float, default=0.2, help="share of a sentence's features left out in training (default 0.2)")
    add("--temperature", type=float, default=0.05, help="of the in-batch negatives (default 0.05)")
    add("--negatives", type=float, default=0.1, help="weight of the in-batch negatives (default 0.1)")
    add("--precision", default="float32", choices=("float32", "float64"))
    add("--seed", type=int, default=0)
    add("--index", type=Path, metavar="DIR", help="write the index and the model to this folder")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw the cosines of the test pairs against their scores")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only after the training."""
    if arguments.epochs is not None and arguments.steps is not None:
        raise UsageError("--epochs and --steps", "both say when training ends", "leave one of them out")
    for flag, least in (("epochs", 1), ("steps", 1), ("batch_size", 2), ("width", 2)):
        value = getattr(arguments, flag)
        if value is not None and value < least:
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{name} {value}", f"it should be at least {least}", f"write {name} {least} or more")
    for flag, usual in (("temperature", 0.05), ("lr", 1e-3)):
        if not getattr(arguments, flag) > 0:
            found, fix = "it should be above 0", f"write --{flag} {usual}"
            raise UsageError(f"--{flag} {getattr(arguments, flag)}", found, fix)
    if not 0 <= arguments.drop < 1:
        raise UsageError(f"--drop {arguments.drop}", "it is a share below 1", "write --drop 0.2")
    if not arguments.negatives >= 0:
        raise UsageError(f"--negatives {arguments.negatives}", "it should be 0 or more", "write --negatives 0.1")
    check_files(arguments)


def check_files(arguments: argparse.Namespace) -> None:
    """Raise UsageError for a file that could not be written after the training."""
    for flag in ("output", "picture", "index"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")
    check_picture(arguments.picture)
    if arguments.index is not None:
        vectors.check_may_write(arguments.index)


def loss_of(job: Any, model: torch.nn.Module, batch: Any, temperature: float, negatives: float) -> torch.Tensor:
    """Return this rank's part of the loss, of which `job.backward` takes the mean over the samples of all ranks."""
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


def embed(job: Any, model: torch.nn.Module, texts: list[str]) -> torch.Tensor:
    """Return the embeddings of all sentences (N, width) on every rank. Each computes its part of them."""
    begin, end = (len(texts) * rank // job.data_size for rank in (job.data_rank, job.data_rank + 1))
    # Under `shard` ranks call the model equally often otherwise.
    with torch.no_grad(), job.gathered():
        own = vectors.encode(model, texts[begin:end], job.device)
    return job.all_gather(own).cpu()


def distinct(*parts: list[sentences.Pair]) -> list[str]:
    """Return the sentences of these pairs, each once."""
    return sorted({text for pairs in parts for pair in pairs for text in pair[:2]})


def cosines_of(pairs: list[sentences.Pair], embedding_of: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the cosine of each pair, (N,)."""
    first, second = (torch.stack([embedding_of[pair[side]] for pair in pairs]) for side in (0, 1))
    return (first * second).sum(1)


def spearman(pairs: list[sentences.Pair], cosines: torch.Tensor) -> float:
    """Return the rank correlation of cosines and scores."""
    # Rounded: equal sentences have equal cosines but for rounding, and should share a place.
    rounded = cosines.double().round(decimals=6)
    scores = torch.tensor([pair.score for pair in pairs], dtype=torch.float64)
    return float(torchmetrics.functional.spearman_corrcoef(rounded, scores))


class Report:
    """What is found of a model, before and after training.

    Raises:
        DataError: the index would have every test sentence.
    """

    def __init__(self, parts: Mapping[str, list[sentences.Pair]], model: torch.nn.Module) -> None:
        self.parts = parts
        self.texts = distinct(parts["train"], parts["dev"])
        known = {*self.texts}
        # The index is asked for sentences that it does not have.
        self.queries = [text for text in distinct(parts["test"]) if text not in known]
        if not self.queries:
            found = "all of them are in training or dev pairs"
            raise DataError("test pairs with new sentences", found, "use the parts as they were published")
        texts = distinct(parts["test"])
        self.untrained = cosines_of(parts["test"], dict(zip(texts, vectors.encode(model, texts), strict=True)))

    def write(self, job: Any, model: torch.nn.Module, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
        """Find the scores, and write what is asked for. Call it on every rank."""
        texts, queries = self.texts, self.queries
        embedded = embed(job, model, texts + queries)
        index = vectors.build(embedded[: len(texts)]) if job.rank == 0 else None
        if arguments.index is not None:
            save_model(job, model, arguments.index, lambda folder: vectors.write(folder, index, texts))
        if job.rank != 0:
            return
        embedding_of = dict(zip(texts + queries, embedded, strict=True))
        cosines = {part: cosines_of(self.parts[part], embedding_of) for part in ("dev", "test")}
        scores = {f"spearman_{part}": spearman(self.parts[part], found) for part, found in cosines.items()}
        scores["spearman_test_untrained"] = spearman(self.parts["test"], self.untrained)
        scores["recall_at_10"] = vectors.recall(index, embedded[: len(texts)], embedded[len(texts) :], NEIGHBOURS)
        print(f"{result['data']}: {result['steps']} steps on {job.size} rank{'s' * (job.size > 1)}, ", end="")
        print(f"{result['seconds']:.1f} s")
        print("\n".join(f"{score:<24}{value:8.4f}" for score, value in scores.items()))
        if arguments.index is not None:
            print(f"{arguments.index}: {len(texts):,} sentences")
        if arguments.picture:
            given = [pair.score for pair in self.parts["test"]]
            shown = {"before training": self.untrained.tolist(), "after": cosines["test"].tolist()}
            figure.draw(arguments.picture, result["data"].partition(",")[0], given, shown)
        if arguments.output:
            arguments.output.write_text(json.dumps({**result, "scores": scores}, indent=1) + "\n")


def main() -> None:
    """Train, say how good it is, and write the index."""
    arguments = parse_arguments()
    check_arguments(arguments)
    torch.set_default_dtype(getattr(torch, arguments.precision))
    name, parts = sentences.read_pairs(arguments.data)
    data = sentences.Pairs(parts["train"], arguments.drop)
    if len(data) < arguments.batch_size:
        found = f"there are {len(data)} training pairs"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, "choose a smaller batch")
    a_pass = len(data) // arguments.batch_size
    steps = arguments.steps or (arguments.epochs or EPOCHS) * a_pass

    torch.manual_seed(arguments.seed)
    model = encoder.Encoder(arguments.width, sentences.rarity(distinct(parts["train"])))
    size = sum(parameter.numel() for parameter in model.parameters())
    report = Report(parts, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    # Without a short last batch: a rank without a sample would take part with one that does not count.
    loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    job, model, optimizer, loader, schedule = paceline.prepare(model, optimizer, loader, schedule, seed=arguments.seed)
    if arguments.batch_size < job.data_size:
        found = f"{job.data_size} ranks share it, and each needs a sample of its own"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, f"write {job.data_size} or more")

    job.keep_settings(data=sentences.digest_of(parts), batch_size=arguments.batch_size)
    began_s = time.monotonic()
    for _ in job.epochs(-(-steps // a_pass)):
        for batch in loader:
            optimizer.zero_grad()
            job.backward(loss_of(job, model, batch, arguments.temperature, arguments.negatives))
            optimizer.step()
            schedule.step()
            if job.step_number == steps:
                break
    result = {
        "data": f"{name}, {len(data):,} training and {len(parts['test']):,} test pairs",
        "size": f"{size / 1e6:.1f} million parameters",
        "seconds": round(time.monotonic() - began_s, 3),
        "steps": job.step_number,
    }
    report.write(job, model, arguments, result)


if __name__ == "__main__":
    main()
