"""The job of the runs in this folder: the same file for each, run with two ranks and --checkpoint-every 6."""

import torch
from torch.nn import functional as F

import paceline


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 37

    def __getitem__(self, index):
        noise = torch.randn(4, dtype=torch.float64) / 10
        x = torch.arange(4, dtype=torch.float64) * (index % 5) / 10 + noise
        return x, torch.tensor(float(index % 7), dtype=torch.float64)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y)


torch.manual_seed(0)
workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
    data=Numbers(),
    batch_size=8,
    epochs=2,
    precision="float64",
    clip_norm=1.0,
)

if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
