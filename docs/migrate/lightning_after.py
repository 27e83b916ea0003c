"""The same training as lightning_before.py: paceline run -n 2 lightning_after.py."""

import torch
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(16, 6)
y = x[:, :1].sin()
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def loss(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum"), len(targets)


workload = paceline.Workload(
    model=lambda: model,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data=TensorDataset(x, y),
    batch_size=16,
    epochs=10,
    clip_norm=0.5,
    precision="float64",
)
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
    if job.rank == 0:
        print("result", float(sum(parameter.detach().abs().sum() for parameter in job.model.parameters())))
