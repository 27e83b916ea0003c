"""The job that `bench jobs` times: a GPT of 108,000 parameters, written as a user of each library would.

`small_gpt.py LIBRARY STEPS MARK` trains on as many processes as its launcher starts. Rank 0 writes to the file MARK
a line of JSON: the seconds of all steps but the first, and the last loss.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import paceline
from paceline.launch.process_exit import exit_process

VOCABULARY = 65
LENGTH = 64
WIDTH = 64
HEADS = 4
LAYERS = 2
BATCH = 32  # samples of a step, over all ranks
LEARNING_RATE = 1e-3


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a layer norm: (batch, length, width) to the same."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        batch, length, width = x.shape
        heads = self.queries_keys_values(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, length, width / heads) each
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        output: torch.Tensor = x + self.down(gelu(self.up(self.feed_forward_norm(x))))
        return output


class SmallGpt(nn.Module):
    """A GPT on characters: (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(
        self,
        layers: int = LAYERS,
        width: int = WIDTH,
        heads: int = HEADS,
        length: int = LENGTH,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Predict each next character."""
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(characters) + self.positions.weight)))
        return logits


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of made-up text: characters and the next ones, (length,) each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(VOCABULARY, (count + LENGTH + 1,), generator=generator)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[index : index + LENGTH + 1]
        return window[:-1], window[1:]


def summed_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Return the cross entropy summed over characters, and their number."""
    characters, following = batch
    logits = model(characters)
    return cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"), following.numel()


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross entropy of this process's samples."""
    total, count = summed_loss(model, batch)
    return total / count


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all libraries, AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def make_data() -> Windows:
    """Return as many windows as the steps on the command line take."""
    return Windows(BATCH * int(sys.argv[2])) if len(sys.argv) > 2 else Windows(BATCH)


workload = paceline.Workload(
    model=SmallGpt, loss=summed_loss, optimizer=make_optimizer, data=make_data, batch_size=BATCH
)


def train_with_paceline(steps: int, timed: Timed) -> bool:
    """Train with Paceline; returns whether this is rank 0."""
    job = paceline.distribute(workload)
    timed.steps(job.batches(), lambda batch: float(job.step(batch)))
    return job.rank == 0


def train_with_ddp(steps: int, timed: Timed) -> bool:
    """Train in plain torch; returns whether this is rank 0."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    model = nn.parallel.DistributedDataParallel(SmallGpt())
    optimizer = make_optimizer(model)
    data = Windows(BATCH * steps)
    sampler: Any = DistributedSampler(data, ranks, rank)

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    timed.steps(DataLoader(data, BATCH // ranks, sampler=sampler, drop_last=True), step)
    torch.distributed.destroy_process_group()
    return rank == 0


def train_with_accelerate(steps: int, timed: Timed) -> bool:
    """Train with Hugging Face Accelerate; returns whether this is rank 0."""
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True)
    model: Any = SmallGpt()
    optimizer: Any = make_optimizer(model)
    batches: Any = DataLoader(Windows(BATCH * steps), BATCH // accelerator.num_processes, shuffle=True, drop_last=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        return float(loss.detach())

    timed.steps(batches, step)
    accelerator.end_training()
    return bool(accelerator.is_main_process)


def train_with_lightning(steps: int, timed: Timed) -> bool:
    """Train with Lightning Fabric, which starts the second process itself; returns whether this is rank 0."""
    from lightning.fabric import Fabric

    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model: Any = SmallGpt()
    optimizer: Any = make_optimizer(model)
    batches: Any = DataLoader(Windows(BATCH * steps), BATCH // fabric.world_size, shuffle=True, drop_last=True)
    model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(batches)

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        fabric.backward(loss)
        optimizer.step()
        return float(loss.detach())

    timed.steps(batches, step)
    return bool(fabric.is_global_zero)


class Timed:
    """Times a loop from the end of its first step to that of its last."""

    seconds = 0.0
    count = 0
    loss = float("nan")

    def steps(self, batches: Iterable[Any], step: Callable[[Any], float]) -> None:
        """Call `step` with each batch."""
        began_s = time.perf_counter()
        for batch in batches:
            self.loss = step(batch)
            if self.count == 0:  # the first step allocates, and connects the ranks
                began_s = time.perf_counter()
            self.count += 1
        self.seconds = time.perf_counter() - began_s


LIBRARIES: dict[str, Callable[[int, Timed], bool]] = {
    "paceline": train_with_paceline,
    "ddp": train_with_ddp,
    "accelerate": train_with_accelerate,
    "lightning": train_with_lightning,
}


def main() -> None:
    """Train as the command line says."""
    library, steps, mark = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    timed = Timed()
    if LIBRARIES[library](steps, timed):
        mark.write_text(json.dumps({"seconds": timed.seconds, "steps": timed.count, "loss": timed.loss}))


if __name__ == "__main__":
    main()
    if sys.argv[1] != "paceline":  # `paceline run` ends its ranks so: torch's Gloo may abort one that ends otherwise
        exit_process(0)
