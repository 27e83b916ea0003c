"""Distillation: a frozen teacher in evaluation mode beside a student that is trained.

Each rank has the whole student, and keeps only a part of the teacher (`shard_frozen=True`).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

TEMPERATURE = 2.0
torch.manual_seed(0)
inputs = torch.randn(300, 20)
teacher = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5)).requires_grad_(False).eval()
student = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
data = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
loader = DataLoader(data, batch_size=32, shuffle=True)
job, teacher, student, optimizer, scheduler, loader = paceline.prepare(
    teacher, student, optimizer, scheduler, loader, shard_frozen=True
)


def score(models, batch):
    """Count the student's right answers."""
    inputs, labels = batch
    return {"accuracy": ((student(inputs).argmax(dim=1) == labels).sum(), len(labels))}


for _ in job.epochs(4):
    for batch, labels in loader:
        logits = student(batch)
        soft = F.kl_div(
            F.log_softmax(logits / TEMPERATURE, dim=1),
            F.softmax(teacher(batch) / TEMPERATURE, dim=1),
            reduction="batchmean",
        )
        optimizer.zero_grad()
        job.backward(soft * TEMPERATURE**2 + F.cross_entropy(logits, labels))
        optimizer.step()
    # Over all ranks, each sample once: the scheduler must see the same number on every rank.
    scheduler.step(job.evaluate(data, score)["accuracy"])
