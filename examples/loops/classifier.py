"""A plain classifier. What differs from the loop for one process is marked."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline  # new

torch.manual_seed(0)
inputs = torch.randn(500, 20)
labels = inputs[:, :5].argmax(dim=1)

model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)
job, model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)  # new

for _ in job.epochs(4):  # for _ in range(4)
    for batch, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), targets)
        job.backward(loss)  # loss.backward()
        optimizer.step()
    scheduler.step()
