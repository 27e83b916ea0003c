"""The same training in a plain loop, in one process and without Paceline: a reference for times and losses.

    python plain.py --data tinyshakespeare

It has nanoGPT's setting for CPUs, and takes its blocks by a random generator.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import blocks
import decoder
import recipe
import texts
import torch
import vocabulary


def main() -> None:
    """Train, and print the held-out loss over all blocks."""
    parser = argparse.ArgumentParser(description="Train nanoGPT's setting for CPUs in a plain loop.")
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = texts.read_text(arguments.data)
    tokenizer = vocabulary.characters_of([*text.train, *text.held_out])
    tokens = torch.from_numpy(vocabulary.encode(tokenizer, text.train[0]))
    held_out = blocks.Blocks(vocabulary.encode(tokenizer, text.held_out[0]), 64, stride=64)
    torch.manual_seed(arguments.seed)
    config = decoder.small_config(tokenizer.get_vocab_size(), 64, 4, 4, 128)
    decoder.set_dropout(config, 0.0)
    model = decoder.make_model(config, None)
    optimizer = recipe.make_optimizer(model, 1e-3)
    scheduler = recipe.make_schedule(optimizer, arguments.steps, 100)
    loss_of = blocks.loss_of(are_padded=False)
    began_s = time.monotonic()
    for _ in range(arguments.steps):
        starts = torch.randint(len(tokens) - 64, (12,))
        total, count = loss_of(model, torch.stack([tokens[start : start + 65] for start in starts]))
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    seconds = time.monotonic() - began_s
    model.eval()
    with torch.no_grad():
        rows = torch.utils.data.DataLoader(held_out, batch_size=64)
        sums = [loss_of(model, batch) for batch in rows]
    loss = float(sum(total for total, _ in sums)) / sum(count for _, count in sums)
    print(json.dumps({"validation_loss": round(loss, 4), "seconds": round(seconds, 1), "steps": arguments.steps}))


if __name__ == "__main__":
    main()
