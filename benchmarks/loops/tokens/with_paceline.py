"""A stream of tokens (an IterableDataset), with gradients accumulated over two batches."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import paceline

EPOCHS, ACCUMULATE, ROW = 2, 2, 16
torch.manual_seed(0)


class Rows(IterableDataset):
    """Texts of any length one after another, cut into rows of one length."""

    def __iter__(self):
        random = torch.Generator().manual_seed(1)
        tokens = []
        for _ in range(100):
            length = int(torch.randint(3, 30, (1,), generator=random))
            tokens += [0, *torch.randint(1, 40, (length,), generator=random).tolist()]
            while len(tokens) > ROW:
                yield torch.tensor(tokens[: ROW + 1])
                tokens = tokens[ROW:]


class Model(nn.Module):
    """Predicts the next token from a running mean of those before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 40))

    def forward(self, tokens):
        counts = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(self.embedding(tokens).cumsum(dim=1) / counts)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Rows(), batch_size=8)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for _ in job.epochs(EPOCHS):
    for number, rows in enumerate(loader, 1):
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / ACCUMULATE
        job.backward(loss)
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
