"""A classifier in Horovod's names: a sampler per rank, a distributed optimizer, metrics averaged over ranks.

paceline horovodrun -np 2 python horovod_digits.py
"""

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def draw(count, seed):
    """Pictures of 8x8 pixels in four classes: a bright quarter, and noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    pictures = torch.randn(count, 1, 8, 8, generator=generator) * 0.5
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        picture[0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1
    return TensorDataset(pictures, labels)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 8, 3)
        self.output = torch.nn.Linear(8 * 9, 4)

    def forward(self, pictures):
        hidden = functional.max_pool2d(functional.relu(self.conv(pictures)), 2)
        return self.output(hidden.flatten(1))


def average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


hvd.init()
torch.manual_seed(hvd.rank())  # broadcast_parameters makes the models equal
train_set, test_set = draw(256, 1), draw(64, 2)
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, batch_size=16, sampler=train_sampler)
test_loader = DataLoader(test_set, batch_size=16, sampler=test_sampler)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)

for epoch in range(3):
    model.train()
    train_sampler.set_epoch(epoch)
    for pictures, labels in train_loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    test_loss = accuracy = 0.0
    with torch.no_grad():
        for pictures, labels in test_loader:
            output = model(pictures)
            test_loss += functional.cross_entropy(output, labels, reduction="sum").item()
            accuracy += (output.argmax(1) == labels).sum().item()
    test_loss = average(test_loss / len(test_sampler), "avg_loss")
    accuracy = average(accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.0%}")
