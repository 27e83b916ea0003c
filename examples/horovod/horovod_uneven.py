"""Ranks with different numbers of batches in Horovod's names: `join`, and a process set for one part of the ranks.

paceline horovodrun -np 2 python horovod_uneven.py
"""

import horovod.torch as hvd
import torch
from torch.nn import functional

even_set = hvd.ProcessSet([0])
hvd.init(process_sets=[even_set])
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

generator = torch.Generator().manual_seed(hvd.rank())
batches = 3 + 2 * hvd.rank()  # the later a rank, the more data it has
for _ in range(batches):
    inputs = torch.randn(8, 4, generator=generator)
    optimizer.zero_grad()
    functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
    optimizer.step()
last = hvd.join()  # until all ranks have no more data; meanwhile this one adds zeros to the gradients of others
hvd.broadcast_parameters(model.state_dict(), root_rank=last)

if even_set.included():
    norm = hvd.allreduce(model.weight.detach().norm(), op=hvd.Sum, process_set=even_set)
    print(f"process set {even_set.ranks}: norm {norm.item():.4f}")
counts = hvd.allgather(torch.tensor([batches]))
if hvd.rank() == 0:
    print(f"batches {counts.tolist()}, rank {last} was last")
