"""Verify compares everything that a loop's step makes: small errors in gradients, buffers and updates are bugs."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from support.mutants import wrap
from support.sample import SLOW
from support.verified_loops import verify_loop

LOOP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 6)
labels = inputs[:, :3].argmax(dim=1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs):
        if self.training:
            self.count += 1
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return self.last(F.relu(self.norm(self.first(inputs))))

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: WARM_UP)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
job, model, optimizer, scheduler, loader = paceline.prepare(model, optimizer, scheduler, loader)
for _ in job.epochs(1):
    for rows, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows), targets)
        job.backward(loss)
        optimizer.step()
        scheduler.step()
"""


def loop(rate=1e-3, is_warm=False):
    return LOOP.replace("RATE", str(rate)).replace("WARM_UP", "(step + 1) / 1000" if is_warm else "1.0")


def scaled(factor):
    """All gradients times `factor`, on every rank."""
    from paceline.parallel.engine.gradient_sums import GradientSums

    def note(plain, self, target):
        plain(self, target)
        for parameter in target.parameters.values():
            parameter.grad.mul_(factor)

    wrap(GradientSums, "_note_summed", note)


def changed_at_end(change):
    """Change the models' buffers after the ranks have made them equal."""
    from paceline.parallel.engine.loop import LoopEngine

    def end(plain, self, *arguments):
        answer = plain(self, *arguments)
        change(dict(self.model.named_buffers()))
        return answer

    wrap(LoopEngine, "_agree_on_end", end)


def half_count():
    changed_at_end(lambda buffers: buffers["count"].copy_(buffers["count"] // 2))


def count_of_batch_norm():
    changed_at_end(lambda buffers: buffers["norm.num_batches_tracked"].add_(1))


def statistics_of_one_rank():
    import paceline.train.loop_job as loop_job

    wrap(loop_job, "share_statistics", lambda plain, model, comm: None)


def wrong_decay():
    """The update alone is wrong, and by little: weights decay twice."""
    _before_updates(lambda group: group.update(weight_decay=0.02))


def wrong_epsilon():
    _before_updates(lambda group: group.update(eps=1e-5))


def wrong_rate():
    _before_updates(lambda group: group.update(lr=group["lr"] * 1.001))


def _before_updates(change):
    from paceline.parallel.engine.loop import LoopEngine

    def begin(plain, self, optimizer, target):
        for group in optimizer.param_groups:
            change(group)
        plain(self, optimizer, target)

    wrap(LoopEngine, "begin_update", begin)


def stale_momentum():
    """A rank's optimizer forgets what it had of a parameter."""
    from paceline.parallel.engine.loop import LoopEngine

    def end(plain, self, target):
        plain(self, target)
        for optimizer in _optimizers():
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(1 + 1e-6)

    wrap(LoopEngine, "end_update", end)


def _optimizers():
    import gc

    return [one for one in gc.get_objects() if isinstance(one, torch.optim.AdamW)]


RATES = [(rate, is_warm) for rate in (1e-5, 1e-4, 1e-2) for is_warm in (False, True)]
SCALED = [
    pytest.param(*rates, factor, marks=() if rates[0] == 1e-5 else SLOW)
    for rates, factor in itertools.product(RATES, (0.5, 2.0, -1.0))
]


def check_bug(verdict, phase, says):
    table = "\n".join(verdict.lines())
    assert verdict.word == "bug", table
    assert verdict.culprit.phase == phase, table
    assert says in verdict.culprit.message, table


@pytest.mark.parametrize(("rate", "is_warm", "factor"), SCALED)
def test_scaled_gradients_are_a_bug(rate, is_warm, factor):
    import functools

    verdict = verify_loop(loop(rate, is_warm), "replicate=2", functools.partial(scaled, factor))
    check_bug(verdict, "backward", f"{factor:g} times what it should be")


BUGS = {
    "half count": (half_count, "replicate=2", "buffer", "count"),
    "count of batch norm": (count_of_batch_norm, "replicate=2", "buffer", "norm.num_batches_tracked"),
    "statistics of one rank": (statistics_of_one_rank, "replicate=2", "loss", "the loss of step 1"),
    "wrong decay": (wrong_decay, "replicate=2", "update", "is changed otherwise in step 1"),
    "wrong epsilon": (wrong_epsilon, "shard=2,zero=1", "update", "is changed otherwise in step 1"),
    "wrong rate": (wrong_rate, "replicate=2", "update", "in step 1"),
    "stale momentum": (stale_momentum, "replicate=2", "update", "exp_avg_sq of"),
    "halved under shard": (functools.partial(scaled, 0.5), "shard=2", "backward", "0.5 times what it should be"),
    "halved under zero=1": (
        functools.partial(scaled, 0.5),
        "shard=2,zero=1",
        "backward",
        "0.5 times what it should be",
    ),
    "halved under tensor": (functools.partial(scaled, 0.5), "tensor=2", "backward", "0.5 times what it should be"),
}


@pytest.mark.parametrize("name", BUGS)
def test_one_wrong_value_is_a_bug(name):
    mutant, plan, phase, says = BUGS[name]
    check_bug(verify_loop(loop(1e-5), plan, mutant), phase, says)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "shard=2,zero=1", "tensor=2"])
@pytest.mark.parametrize(("rate", "is_warm"), [(1e-5, False), (1e-2, True)])
def test_without_a_bug_it_is_the_same_step(rate, is_warm, plan):
    verdict = verify_loop(loop(rate, is_warm), plan)
    assert verdict.word in ("equal", "rounding"), "\n".join(verdict.lines())


UPDATE = "        job.backward(loss)\n        optimizer.step()\n"
ZERO = "        optimizer.zero_grad()\n"
MADE = "model = Net()\n"
PREPARE = "job, model, optimizer, scheduler, loader = paceline.prepare(model, optimizer, scheduler, loader)"


def with_more(name, made):
    return PREPARE.replace("job, ", f"job, {name}, ").replace("prepare(", f"prepare({made}, ")


# What is changed in the loop: pairs of old and new text.
RIGHT = {
    "clipping": [(UPDATE, "        job.backward(loss)\n        job.clip(0.1)\n        optimizer.step()\n")],
    "accumulation": [
        (ZERO, ""),
        (UPDATE, "        job.backward(loss / 2, share=0.5)\n        count = globals().get('count', 0) + 1\n"
         "        if count % 2 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n"),
    ],
    "a scaler": [
        (PREPARE, with_more("scaler", "torch.amp.GradScaler('cpu')")),
        (UPDATE, "        job.backward(scaler.scale(loss))\n        scaler.step(optimizer)\n"
         "        scaler.update()\n"),
    ],
    "tied weights": [(MADE, "model = Net()\nmodel.again = model.last\nmodel.first.bias = model.norm.bias\n")],
    "gradients by sign": [("torch.optim.AdamW(", "torch.optim.Rprop(")],
    "a frozen average": [
        (MADE, "model = Net()\nimport copy\naverage = copy.deepcopy(model).requires_grad_(False)\n"),
        (PREPARE, with_more("average", "average")),
        ("        scheduler.step()\n", "        scheduler.step()\n        with torch.no_grad(), job.gathered():\n"
         "            for mean, own in zip(average.parameters(), model.parameters()):\n"
         "                mean.lerp_(own, 0.1)\n"),
    ],
}  # fmt: skip


def right_loop(name):
    text = loop()
    for old, new in RIGHT[name]:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", pytest.param("shard=2,zero=1", marks=SLOW)])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_the_same_step(name, plan):
    verdict = verify_loop(right_loop(name), plan)
    assert verdict.word in ("equal", "rounding"), "\n".join(verdict.lines())
    assert not verdict.notices, verdict.notices


def dropping():
    plain = "F.relu(self.norm(self.first(inputs)))"
    assert plain in LOOP
    return loop().replace(plain, f"F.dropout({plain}, 0.5, self.training)")


def same_masks_in_each_step():
    """The ranks' random numbers begin anew in each step, each rank with its own seed."""
    from paceline.train.loop_job import LoopJob

    def take(plain, self, *given):
        plain(self, *given)
        torch.manual_seed(3 + self.rank)

    wrap(LoopJob, "take", take)


def same_masks_on_all_ranks():
    from paceline.nouns.mesh import Mesh

    Mesh.random_stream = lambda self, rank: 0


MASKS = {
    "same in each step": (same_masks_in_each_step, "step 2: rank 0 draws the dropout masks of step 1 once more"),
    "same on all ranks": (same_masks_on_all_ranks, "draw the same random numbers"),
}


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
@pytest.mark.parametrize("name", MASKS)
def test_wrong_masks_are_a_bug(name, plan):
    mutant, says = MASKS[name]
    verdict = verify_loop(dropping(), plan, mutant, with_draws=True)
    assert verdict.word == "bug"
    assert says in verdict.checks[-1].message, "\n".join(verdict.lines())


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "shard=2,zero=1", "tensor=2"])
def test_own_masks_in_each_step_are_right(plan):
    verdict = verify_loop(dropping(), plan, with_draws=True)
    assert verdict.word in ("equal", "rounding"), "\n".join(verdict.lines())
    assert not verdict.notices
