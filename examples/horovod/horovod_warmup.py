"""Large batches in Horovod's names: several backward passes per step, a warm-up, and a checkpoint that rank 0 writes.

paceline horovodrun -np 2 python horovod_warmup.py
paceline horovodrun -np 2 python horovod_warmup.py --epochs 4
"""

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="goes on from its last checkpoint, if there is one")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
args = parser.parse_args()

BASE_LR = 0.0125
BATCH = 8
hvd.init()
torch.manual_seed(42)

resume_from_epoch = 0
for epoch in range(args.epochs, 0, -1):
    if Path(args.checkpoint_format.format(epoch=epoch)).exists():
        resume_from_epoch = epoch
        break
# Rank 0 alone need have the files.
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

inputs = torch.randn(256, 12)
data = TensorDataset(inputs, inputs[:, :3].argmax(1))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=BATCH * args.batches_per_allreduce, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
lr_scaler = args.batches_per_allreduce * hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR * lr_scaler, momentum=0.9, weight_decay=5e-5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.batches_per_allreduce,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch), weights_only=True)  # noqa: TID251  nothing is unpickled
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def adjust_learning_rate(epoch, batch):
    """From the rate of one rank to that of all, over the warm-up."""
    epoch += (batch + 1) / len(loader)
    adjustment = 1.0
    if epoch < args.warmup_epochs:
        adjustment = 1 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    for group in optimizer.param_groups:
        group["lr"] = BASE_LR * lr_scaler * adjustment


for epoch in range(resume_from_epoch, args.epochs):
    sampler.set_epoch(epoch)
    total = torch.tensor(0.0)
    for batch, (features, targets) in enumerate(loader):
        adjust_learning_rate(epoch, batch)
        optimizer.zero_grad()
        for start in range(0, len(features), BATCH):
            loss = functional.cross_entropy(model(features[start : start + BATCH]), targets[start : start + BATCH])
            (loss / args.batches_per_allreduce).backward()
            total += loss.detach()
        optimizer.step()
    mean = hvd.allreduce(total / len(loader) / args.batches_per_allreduce, name="train_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean.item():.4f}, learning rate {optimizer.param_groups[0]['lr']:.4f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
