"""Those of the nine loops that a Workload can declare, under the plans that a loop of one's own can't have."""

from __future__ import annotations

import re

import pytest

from support.jobs import paceline
from support.ranks import preload

preload("paceline.train.job")
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import paceline
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
inputs = torch.randn(96, 20)
labels = inputs[:, :5].argmax(dim=1)
"""
TAIL = """
job = paceline.distribute(workload)
losses = [job.step(batch) for batch in job.batches()]
print("rank", job.rank, "losses", *map(repr, losses))
"""
CLASSIFIER = """
workload = paceline.Workload(
    model=lambda: nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5)),
    loss=lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8),
    data=TensorDataset(inputs, labels), batch_size=16, steps=6,
)
"""
LANGUAGE_MODEL = """
from transformers import GPT2Config, GPT2LMHeadModel

def make():
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)

def loss(model, tokens):
    labels = tokens.masked_fill(tokens == 0, -100)[:, 1:]
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()

texts = torch.randint(1, 50, (96, 12))
texts[::3, 7:] = 0
workload = paceline.Workload(
    model=make, loss=loss, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=texts, batch_size=16, steps=6, clip_norm=1.0,
)
"""
MUON = """
def optimizers(model):
    matrices = [model[0].weight, model[2].weight]
    others = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]

workload = paceline.Workload(
    model=lambda: nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)),
    loss=lambda model, batch: (F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])),
    optimizer=optimizers, data=TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True)), batch_size=16, steps=6,
)
"""
DISTILLATION = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x):
        return self.teacher(x), self.student(x)

def loss(model, batch):
    inputs, labels = batch
    teacher, student = model(inputs)
    soft = F.kl_div(F.log_softmax(student / 2, dim=1), F.softmax(teacher / 2, dim=1), reduction="sum")
    return soft * 4 + F.cross_entropy(student, labels, reduction="sum"), len(inputs)

workload = paceline.Workload(
    model=Both, loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.student.parameters(), lr=0.1, momentum=0.9),
    data=TensorDataset(inputs, labels), batch_size=16, steps=6,
)
"""
TOKENS = """
def rows():
    random = torch.Generator().manual_seed(1)
    tokens = []
    for _ in range(200):
        length = int(torch.randint(3, 30, (1,), generator=random))
        tokens += [0, *torch.randint(1, 40, (length,), generator=random).tolist()]
        while len(tokens) > 16:
            yield torch.tensor(tokens[:17])
            tokens = tokens[16:]

def loss(model, rows):
    tokens, labels = rows[:, :-1], rows[:, 1:]
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()

workload = paceline.Workload(
    model=lambda: nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 40)),
    loss=loss, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data=rows, batch_size=16, steps=6,
)
"""
DECLARED = {
    "classifier": CLASSIFIER,
    "language_model": LANGUAGE_MODEL,
    "muon": MUON,
    "distillation": DISTILLATION,
    "tokens": TOKENS,
}
PIPELINE, SERVER = ("--plan", "pipeline=2"), ("--plan", "replicate=2,server=1")
REFUSED = {
    ("classifier", SERVER): "the model has a BatchNorm1d, and 2 workers of parameter servers",
    ("muon", SERVER): "it returns 2 (Muon, AdamW)",
    ("tokens", SERVER): "stream",
}


def trained(folder, name, *flags):
    file = folder / f"{name}.py"
    file.write_text(HEAD + DECLARED[name] + TAIL)
    return paceline(folder, "run", *flags, file)


def losses_of(ended):
    assert ended.code == 0, ended.err
    return [[float(each) for each in words.split()] for words in re.findall(r"losses (.*)", ended.out)]


@pytest.mark.integration
@pytest.mark.parametrize("plan", [PIPELINE, SERVER], ids=["pipeline", "server"])
@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_loop_trains_as_one_process_does(tmp_path, name, plan):
    ended = trained(tmp_path, name, *plan, "--job", "two")
    if (name, plan) in REFUSED:
        assert ended.code != 0
        assert REFUSED[name, plan] in ended.err
        return
    found = losses_of(ended)
    assert len(found) == 2
    (alone,) = losses_of(trained(tmp_path, name, "-n", "1", "--job", "one"))
    assert len(alone) == 6
    assert alone[0] != alone[-1]
    for losses in found:
        assert losses == pytest.approx(alone, rel=1e-7)
