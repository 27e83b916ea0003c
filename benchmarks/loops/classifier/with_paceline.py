"""A classifier with batch norm and a learning-rate scheduler that steps once per epoch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS = 3
torch.manual_seed(0)
inputs = torch.randn(300, 20)
labels = inputs[:, :5].argmax(dim=1)

model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
job, model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)

for _ in job.epochs(EPOCHS):
    for batch, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), targets)
        job.backward(loss)
        optimizer.step()
    scheduler.step()
