"""A script that fits a LightningModule under each plan that it is given; each rank prints what it has seen."""

from __future__ import annotations

import sys
import warnings

import lightning
import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import Strategy

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def listening():
    """The addresses at which this process takes connections."""
    found = psutil.Process().net_connections("inet")
    return sorted({each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN})


warnings.simplefilter("ignore")
for plan in sys.argv[1:]:
    trainer = lightning.Trainer(strategy=Strategy(plan=plan), accelerator="cpu", max_epochs=1, **QUIET)
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4))
    # One write: lines of two ranks do not mix.
    sys.stdout.write(f"seen: {plan} {trainer.global_rank}/{trainer.world_size} {trainer.global_step} {listening()}\n")
    sys.stdout.flush()
