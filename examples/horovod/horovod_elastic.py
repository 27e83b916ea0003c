"""A training that goes on from its last commit after a rank has died, in Horovod's names.

paceline horovodrun -np 2 --reset-limit 3 python horovod_elastic.py
"""

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
BATCH = 8
BATCHES_PER_COMMIT = 2

hvd.init()
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(128, 10, generator=generator)
labels = (inputs[:, 0] > 0).long()
data = TensorDataset(inputs, labels)
sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020  as elastic scripts are written
        for batch, (features, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(features), targets)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(batch, BATCH)
            state.batch += 1
            if state.batch % BATCHES_PER_COMMIT == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {loss.item():.4f} after {state.batch} batches", flush=True)
        state.sampler.set_epoch(state.epoch + 1)


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
