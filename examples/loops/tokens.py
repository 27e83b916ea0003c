"""A stream of texts, packed into rows of one length. The stream has no length, and is read in order by every rank."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import paceline

ROW = 16
torch.manual_seed(0)


class Packed(IterableDataset):
    """Texts of any length one after another, cut into rows; a row begins with the last token of the one before."""

    def __iter__(self):
        random = torch.Generator().manual_seed(1)
        tokens = []
        for _ in range(200):
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
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 40)

    def forward(self, tokens):
        counts = torch.arange(1, tokens.shape[1] + 1)[:, None]
        means = self.embedding(tokens).cumsum(dim=1) / counts
        return self.head(torch.tanh(self.hidden(means)))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Packed(), batch_size=16)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for _ in job.epochs(2):
    for rows in loader:
        logits = model(rows[:, :-1])
        optimizer.zero_grad()
        job.backward(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
        optimizer.step()
