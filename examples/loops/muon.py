"""Muon for the hidden matrices and AdamW for the rest, with gradients accumulated over two batches."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

ACCUMULATE = 2
torch.manual_seed(0)
inputs = torch.randn(256, 16)
targets = inputs.sin().sum(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
matrices = [model[0].weight, model[2].weight]
others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
muon = torch.optim.Muon(matrices, lr=1e-2)
adamw = torch.optim.AdamW(others, lr=1e-2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
job, model, muon, adamw, loader = paceline.prepare(model, muon, adamw, loader)

for _ in job.epochs(3):
    for number, (batch, target) in enumerate(loader):
        loss = F.mse_loss(model(batch), target)
        job.backward(loss / ACCUMULATE)
        if number % ACCUMULATE == ACCUMULATE - 1:
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
