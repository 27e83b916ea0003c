"""A rank of `scripts/bench accelerate`: one script of Accelerate, by its own accelerator and Paceline's in turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import paceline
from paceline.integrations.accelerate import Accelerator

STEPS = 5  # of a turn
BATCH_SIZE = 16  # of a rank, as in nlp_example.py
LENGTH = 64
_ROWS = 4096
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def rows() -> list[dict[str, torch.Tensor]]:
    """Return texts of random tokens, and the class that the first token says."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 30522, (_ROWS, LENGTH), generator=random)
    return [{"input_ids": row, "labels": row[0] % 2} for row in tokens]


def steps_of(kind: Callable[..., Any]) -> Iterator[float]:
    """Train a BERT-Tiny (Turc et al., 2019) as `nlp_example.py` does; yield the loss of each step.

    Args:
        kind: the class of the accelerator.
    """
    accelerator = kind(cpu=True)
    set_seed(42)
    model: Any = BertForSequenceClassification(BertConfig(**_SIZES, **_NO_DROPOUT))
    texts: Any = rows()
    loader: Any = DataLoader(texts, shuffle=True, batch_size=BATCH_SIZE, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    while True:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield float(loss.detach())


CONTESTANTS: dict[str, Callable[..., Any]] = {"ours": Accelerator, "accelerate": accelerate.Accelerator}


def main(rounds: int, output: Path) -> None:
    """Measure on this rank; rank 0 writes the seconds of each contestant's turns as JSON."""
    paceline.init()
    Accelerator()  # the process state then says which rank this is, to both
    scripts = {name: steps_of(kind) for name, kind in CONTESTANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds + 1):
        losses = {}
        for name, steps in scripts.items():
            paceline.barrier()
            began_s = time.perf_counter()
            losses[name] = [next(steps) for _ in range(STEPS)]
            if turn > 0:  # connections and memory are made by the first
                seconds[name].append(time.perf_counter() - began_s)
        if not torch.allclose(torch.tensor(losses["ours"]), torch.tensor(losses["accelerate"]), atol=1e-3):
            raise RuntimeError(f"the losses differ: {losses}")
    if paceline.rank() == 0:
        output.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
