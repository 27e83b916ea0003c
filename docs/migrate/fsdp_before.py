"""FSDP: torchrun --nproc-per-node 2 fsdp_before.py."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(16, 6)
y = x[:, :1].sin()
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
total = float(sum(parameter.detach().full_tensor().abs().sum() for parameter in model.parameters()))
if dist.get_rank() == 0:
    print("result", total)
dist.destroy_process_group()
