"""Two optimizers for one model, Muon for the hidden matrices and AdamW for the rest, and gradients clipped."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
torch.manual_seed(0)
inputs = torch.randn(250, 16)
targets = inputs.sin().sum(dim=1, keepdim=True)

model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
matrices = [model[0].weight, model[2].weight]
others = [model[0].bias, model[2].bias, model[4].weight, model[4].bias]
muon = torch.optim.Muon(matrices, lr=1e-2)
adamw = torch.optim.AdamW(others, lr=1e-2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
accelerator = Accelerator()
model, muon, adamw, loader = accelerator.prepare(model, muon, adamw, loader)

for _ in range(EPOCHS):
    for batch, target in loader:
        muon.zero_grad()
        adamw.zero_grad()
        loss = F.mse_loss(model(batch), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
