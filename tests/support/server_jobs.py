"""Jobs with parameter servers for tests: a model that fills several servers, and what a job ends with."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

SLOW = """
import os, time
import torch
import paceline
from torch.nn import functional as F

torch.manual_seed(0)
ROWS = torch.randn(64, 64)

def pause():
    try:
        with open("slow") as file:
            return float(file.read() or os.environ["TEST_PAUSE"])
    except FileNotFoundError:
        return 0.0

def loss(model, batch):
    time.sleep(pause())
    return F.mse_loss(model(batch), batch, reduction="sum"), len(batch)

workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 7000), torch.nn.Dropout(0.1), torch.nn.Linear(7000, 64)),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.95),
    data=list(ROWS), batch_size=16, steps={steps}, clip_norm=1.0, deterministic=True,
)
"""


def saved(folder: Path, job: str) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state of a run's last checkpoint."""
    last = max((folder / "runs" / job / "checkpoints").iterdir())
    tensors = {name: t for path in last.glob("*.safetensors") for name, t in load_file(path).items()}
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("model/", "optimizer/"))}


def check_equal(ours, theirs):
    assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
    apart = {name: float((ours[name] - theirs[name]).abs().max()) for name in ours}
    assert not any(apart.values()), apart
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
