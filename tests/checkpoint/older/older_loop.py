"""The same of a plain loop, run with two ranks and --checkpoint-every 6."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(40, 4, dtype=torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1)), batch_size=8, shuffle=True)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for _ in job.epochs(2):
    for batch, targets in loader:
        optimizer.zero_grad()
        job.backward((model(batch)[:, 0] - targets).square().mean())
        optimizer.step()
