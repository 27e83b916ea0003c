"""The same training as fsdp_before.py: paceline run --plan shard=2 fsdp_after.py."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(16, 6)
y = x[:, :1].sin()
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for _ in job.epochs(10):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        job.backward(loss)
        job.clip(0.5)
        optimizer.step()
with torch.no_grad(), job.gathered():
    result = float(sum(parameter.detach().abs().sum() for parameter in model.parameters()))
if job.rank == 0:
    print("result", result)
