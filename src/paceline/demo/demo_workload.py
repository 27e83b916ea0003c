"""Define the demo's workload and its training loop.

`paceline run -n 2 .../demo/workload.py DATA` is what `paceline demo` runs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

import paceline
from paceline.demo.bert import Bert, BertConfig
from paceline.demo.corpus import (
    CLS,
    LENGTH,
    MASK,
    MASKED,
    MASKED_HELD_OUT,
    PAD,
    SEP,
    VOCABULARY,
    read_most_frequent_id,
)
from paceline.demo.lines import GUESSES_AFTER, GUESSES_BEFORE, read_lines

# Small, so that two cores take thousands of steps in two minutes.
SIZES = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=512,
    max_position_embeddings=LENGTH,
    initializer_range=0.05,
)
EVALUATED = 1024  # held-out sequences: with some 10,000 hidden tokens the share that is right is known to 0.5 %
IGNORED = -100  # a label that counts nothing: cross_entropy's default


class MaskedSequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences with some tokens hidden, which depend only on the seed and the position."""

    def __init__(self, path: Path, share: float = MASKED, limit: int | None = None) -> None:
        rows = np.load(path, mmap_mode="r")  # mapped: the ranks of a host share its pages
        every = 1 if limit is None else max(1, len(rows) // limit)  # some of every file, not all of the first ones
        self.rows = rows[::every][:limit]
        self.share = share

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.rows[index].astype(np.int64))
        ordinary = (tokens != CLS) & (tokens != SEP) & (tokens != PAD)
        # As many in every sequence, as BERT's own data has them: shapes must not depend on a draw. The places of the
        # highest random numbers are a sample without repetition; special tokens have -1 and are drawn last.
        draws = torch.where(ordinary, torch.rand(tokens.shape), -1.0)
        chosen = draws.topk(round(self.share * len(tokens))).indices
        originals = tokens[chosen]
        is_ordinary = ordinary[chosen]  # a very short sequence has fewer ordinary tokens
        input_ids = tokens.index_put((chosen,), torch.where(is_ordinary, MASK, originals))
        labels = torch.where(is_ordinary, originals, IGNORED)
        return {"input_ids": input_ids, "labels": labels, "chosen": chosen}


def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the hidden tokens, added up, and their number."""
    labels = batch["labels"].flatten()
    scores = model(batch["input_ids"], batch["chosen"])
    return F.cross_entropy(scores, labels, reduction="sum", ignore_index=IGNORED), (labels != IGNORED).sum()


def score_against(frequent: int) -> Any:
    """Return the score of a batch: loss, accuracy, and the accuracy of always guessing the most frequent token."""

    def score(model: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        scores = model(batch["input_ids"], batch["chosen"])
        labels = batch["labels"].flatten()
        count = (labels != IGNORED).sum()
        return {
            "loss": (F.cross_entropy(scores, labels, reduction="sum", ignore_index=IGNORED), count),
            "accuracy": ((scores.argmax(-1) == labels).sum().float(), count),
            "baseline": ((labels == frequent).sum().float(), count),
        }

    return score


def make_workload(folder: Path, steps: int, batch_size: int = 32, **parts: object) -> paceline.Workload:
    """Return the demo's workload on prepared text in `folder`; `parts` replace or add parts."""
    most_frequent_id = read_most_frequent_id(folder)
    warm_up = max(1, steps // 10)

    def rate_factor(step: int) -> float:
        """Return the learning rate's factor: up to 1 in the warm-up, then down to 0.02, both in a line."""
        rising = (step + 1) / warm_up
        falling = max(0.02, (steps - step) / max(1, steps - warm_up))
        return min(rising, falling)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)

    defaults: dict[str, Any] = {
        "model": lambda: Bert(SIZES),
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(
            model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        ),
        "scheduler": schedule,
        "data": lambda: MaskedSequences(folder / "train.npy"),
        "evaluation": lambda: MaskedSequences(folder / "held_out.npy", MASKED_HELD_OUT, EVALUATED),
        "score": score_against(most_frequent_id),
        "batch_size": batch_size,
        "steps": steps,
        "clip_norm": 1.0,
    }
    return paceline.Workload(**{**defaults, **parts})


def save_for_transformers(model: Bert, data: Path, folder: Path) -> None:
    """Write config, weights and vocabulary as transformers' BertForMaskedLM reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    # Here the head has its bias under two names, of which `named_parameters` gives one; transformers wants this one.
    head = [name for name in weights if name.startswith("cls.predictions.")]
    biases = [name for name in head if weights[name].shape == (model.config.vocab_size,)]
    weights["cls.predictions.bias"] = weights.pop(biases[0])
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "pad_token_id": PAD,
        **asdict(model.config),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "vocab.txt").write_text((data / "vocab.txt").read_text())
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def guess(model: torch.nn.Module, lines: Path, path: Path) -> None:
    """Fill in the hidden token of every line, and write the tokens' numbers to `path`."""
    guesses = []
    with torch.no_grad():
        for line in read_lines(lines):
            scores = model(torch.tensor([line.ids]), torch.tensor([[line.place]]))  # (1, vocabulary)
            guesses.append(int(scores.argmax()))
    path.write_text(json.dumps(guesses) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--lines", type=Path)
    return parser.parse_args()


def main() -> None:
    """Train, and evaluate on held-out text now and then."""
    arguments = _arguments()
    job = paceline.distribute(make_workload(arguments.data, arguments.steps, arguments.batch_size))
    every = arguments.evaluate_every
    lines = arguments.lines if job.rank == 0 else None  # every replica has the whole model
    if job.step_number == 0:  # not again after a restart from a checkpoint
        if every:
            _evaluate(job)
        if lines:
            guess(job.model, lines, lines.with_name(GUESSES_BEFORE))
    for batch in job.batches():
        job.step(batch)
        if every and (job.step_number % every == 0 or job.step_number == job.total_steps):
            _evaluate(job)
    if lines:
        guess(job.model, lines, lines.with_name(GUESSES_AFTER))
    if arguments.save and job.rank == 0:
        save_for_transformers(cast(Bert, job.model), arguments.data, arguments.save)


def _evaluate(job: Any) -> None:
    found = job.evaluate()
    if job.rank == 0:
        print(f"step {job.step_number}: {100 * found['accuracy']:.1f} % of the masked tokens right", flush=True)


if __name__ == "paceline_workload":  # asked for by `paceline plan` and `paceline verify`
    workload = make_workload(_arguments().data, _arguments().steps, _arguments().batch_size)
if __name__ == "__main__":
    main()
