"""Batches of samples of similar length, by a batch sampler of one's own: little is padded."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

import paceline

torch.manual_seed(0)
lengths = torch.randint(4, 40, (200,)).tolist()
sequences = [torch.randn(length, 6) for length in lengths]
targets = torch.stack([sequence.mean(dim=0).sum() for sequence in sequences])


class Buckets(Sampler):
    """Sort by length, cut into batches, and shuffle the batches."""

    def __len__(self):
        return len(lengths) // 20

    def __iter__(self):
        by_length = sorted(range(len(lengths)), key=lambda index: (lengths[index], random.random()))
        batches = [by_length[start : start + 20] for start in range(0, len(by_length), 20)]
        random.shuffle(batches)
        yield from batches


def pad(indices):
    """Make a batch: padded sequences, which places are real, targets."""
    chosen = [sequences[index] for index in indices]
    places = pad_sequence([torch.ones(len(sequence), 1) for sequence in chosen], batch_first=True)
    return pad_sequence(chosen, batch_first=True), places, targets[indices]


model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(range(len(lengths)), batch_sampler=Buckets(), collate_fn=pad)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for _ in job.epochs(3):
    for batch, places, target in loader:
        means = (model(batch) * places).sum(dim=1)[:, 0] / places.sum(dim=1)[:, 0]
        optimizer.zero_grad()
        job.backward((means - target).square().mean())
        optimizer.step()
