"""The promise: R ranks on the split batch end where one rank on the whole batch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.demo.bert import Bert, BertConfig
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

STEPS = 20
SLOW = pytest.mark.slow
TINY = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


class BertWithUnused(Bert):
    """A BERT with one parameter that no rank ever uses, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__(TINY)
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(5))


def masked_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of different numbers of hidden tokens, so that ranks' weights differ."""
    random = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        labels = torch.randint(5, 97, (16,), generator=random)
        chosen = torch.rand(16, generator=random) < 0.1 + 0.05 * (index % 7)
        chosen[index % 16] = True
        rows.append(
            {"ids": torch.where(chosen, 4, labels), "labels": labels, "chosen": chosen, "index": torch.tensor(index)}
        )
    return rows


def masked_loss(model, batch):
    scores = model(batch["ids"], batch["chosen"])
    total = F.cross_entropy(scores, batch["labels"][batch["chosen"]], reduction="sum")
    if hasattr(model, "sometimes") and (batch["index"] == 3).any():
        total = total + (model.sometimes**2).sum()
    return total, batch["chosen"].sum()


def bert_workload(**parts):
    return paceline.Workload(
        **{
            "model": BertWithUnused,
            "loss": masked_loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5),
            "data": masked_rows(45),  # of 45, batches of 10: the last of an epoch has 5
            "batch_size": 10,
            "steps": STEPS,
            "precision": "float64",
            "clip_norm": 0.5,
            **parts,
        }
    )


def train(rank, make, parts, plan_parts):
    """Train; losses, norms and the state by name."""
    api.init()
    job = Job(make(**parts), Plan(mesh=f"replicate={api.size()}", **plan_parts))
    losses = [job.step(batch) for batch in job.batches()]
    state = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    return losses, job.last.gradient_norm, state


def alone(make, parts, plan_parts=None):
    return run_ranks(1, train, make, parts, plan_parts or {})[0]


def assert_equal_up_to(one, other, tolerance):
    assert one.keys() == other.keys()
    worst = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert worst <= tolerance, f"parameters differ by {worst}"


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize(
    ("ranks", "micro"), [(2, None), pytest.param(2, 3, marks=SLOW), pytest.param(4, 1, marks=SLOW)]
)
def test_ranks_equal_one_rank(ranks, micro, transport):
    losses, norm, state = alone(bert_workload, {})
    results = run_ranks(
        ranks, train, bert_workload, {"micro_batch_size": micro}, {"transport": transport, "bucket_bytes": 20_000}
    )
    for other_losses, other_norm, other in results:
        assert other_losses == pytest.approx(losses, rel=1e-12)
        assert other_norm == pytest.approx(norm, rel=1e-12)
        assert_equal_up_to(state, other, 1e-12)
        assert all(torch.equal(other[name], results[0][2][name]) for name in other), "replicas differ"
    assert torch.equal(state["never"], torch.ones(3, dtype=torch.float64)), "AdamW decayed a parameter nobody used"
    assert not torch.equal(state["sometimes"], torch.ones(5, dtype=torch.float64))


def test_accumulation_equals_the_whole_batch():
    _, _, whole = alone(bert_workload, {})
    _, _, cut = alone(bert_workload, {"micro_batch_size": 3})
    assert_equal_up_to(whole, cut, 1e-12)
    assert not all(torch.equal(whole[name], cut[name]) for name in whole), "nothing was cut: the test is void"


def thaw(rank, is_frozen_first):
    """Two steps with the first layer frozen, then two with it free."""
    api.init()
    job = Job(norm_workload(steps=4, batch_size=11), Plan(mesh=f"replicate={api.size()}"))
    for number, batch in enumerate(job.batches()):
        job.model[0].requires_grad_(number >= 2 if is_frozen_first else True)
        job.step(batch)
    return {name: tensor.clone() for name, tensor in job.model.state_dict().items()}


def test_parameters_set_free_later_are_reduced_too():
    (whole,) = run_ranks(1, thaw, True)
    first, second = run_ranks(2, thaw, True)
    assert_equal_up_to(whole, first, 1e-12)
    assert_equal_up_to(whole, second, 1e-12)
    assert not torch.equal(whole["0.weight"], run_ranks(1, thaw, False)[0]["0.weight"]), "the test is void"


class SparseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.words(x).mean(1))


def sparse_workload(**parts):
    random = torch.Generator().manual_seed(1)
    data = [(torch.randint(50, (4,), generator=random), index % 3) for index in range(21)]
    return paceline.Workload(
        model=SparseModel,
        loss=lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        data=data,
        batch_size=6,
        epochs=3,
        precision="float64",
        **parts,
    )


@pytest.mark.parametrize("clip", [None, 0.1])
def test_sparse_gradients_equal_one_rank(clip):
    losses, _, state = alone(sparse_workload, {"clip_norm": clip})
    for other_losses, _, other in run_ranks(3, train, sparse_workload, {"clip_norm": clip}, {}):
        assert other_losses == pytest.approx(losses, rel=1e-12)
        assert_equal_up_to(state, other, 1e-12)


def norm_workload(**parts):
    data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), float(i)) for i in range(11)]
    return paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        loss=lambda model, batch: (
            F.mse_loss(model(batch[0])[:, 0], batch[1].to(batch[0].dtype), reduction="sum"),
            len(batch[1]),
        ),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=data,
        precision="float64",
        **{"steps": 1, "batch_size": 8, **parts},
    )


def test_batch_norm_sees_the_whole_batch():
    """11 samples in batches of 8: in the second step the last of four ranks has none, and all update."""
    losses, _, state = alone(norm_workload, {"steps": 3})
    for ranks in (2, 4):
        for other_losses, _, other in run_ranks(ranks, train, norm_workload, {"steps": 3}, {}):
            assert other_losses == pytest.approx(losses, rel=1e-12)
            assert_equal_up_to(state, other, 1e-12)


def test_buffers_become_the_mean_over_ranks():
    (_, _, state), (_, _, other) = run_ranks(2, train, norm_workload, {"micro_batch_size": 4}, {})
    assert all(torch.equal(state[name], other[name]) for name in state)
    halves = run_ranks(2, running_means, norm_workload)
    assert not torch.equal(*halves), "both ranks saw the same: the test is void"
    torch.testing.assert_close(state["1.running_mean"], (halves[0] + halves[1]) / 2, rtol=0, atol=1e-15)
    assert int(state["1.num_batches_tracked"]) == 1


def running_means(rank, make):
    """What the running mean becomes on this rank's half alone."""
    api.init()
    job = Job(make(micro_batch_size=4), Plan(mesh=f"replicate={api.size()}"))
    for batch in next(job.batches()).microbatches:
        job.workload.loss(job.model, batch)
    return job.model[1].running_mean


@pytest.mark.slow
class Unseen(nn.Module):
    """Writes into its buffers past the counter of writes, and puts another tensor in a buffer's place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("assigned", torch.zeros(2))

    def forward(self, x):
        hidden = self.layer(x)
        self.written.data.lerp_(hidden.data.mean(0), 0.5)
        self.assigned = 0.5 * self.assigned + 0.5 * hidden.detach().mean(0)
        return hidden


def unseen_workload(**parts):
    random = torch.Generator().manual_seed(3)
    return paceline.Workload(
        model=Unseen,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=[torch.randn(3, generator=random) for _ in range(16)],
        batch_size=4,
        steps=4,
        precision="float64",
    )


def unseen_buffers(rank):
    api.init()
    job = Job(unseen_workload(), Plan(f"replicate={api.size()}"))
    for batch in job.batches():
        job.step(batch)
    return job.model.written.clone(), job.model.assigned.clone()


def test_replicate_averages_buffers_assigned_or_written_by_data():
    """Of equal parts of the batch, so that the mean is what one process has."""
    (alone,) = run_ranks(1, unseen_buffers)
    assert alone[0].abs().sum() > 0
    for found in run_ranks(2, unseen_buffers):
        for here, there in zip(found, alone, strict=True):
            torch.testing.assert_close(here, there)


@pytest.mark.parametrize("compression", ["bf16", "fp16", "powersgd", "topk"])
def test_compressed_replicas_stay_equal_and_learn(compression):
    exact, _, _ = alone(bert_workload, {})
    results = run_ranks(2, train, bert_workload, {"precision": "float32"}, {"compression": compression})
    losses, _, state = results[0]
    assert all(torch.equal(state[name], results[1][2][name]) for name in state)
    assert losses[0] == pytest.approx(exact[0], rel=1e-5)
    assert losses[-1] < losses[0]
    assert losses[1:] != pytest.approx(exact[1:], rel=1e-12), "nothing was compressed: the test is void"


def short_last_batch(**parts):
    return bert_workload(data=masked_rows(9), batch_size=4, steps=6, **parts)


def test_a_rank_without_samples_takes_part():
    losses, _, state = alone(short_last_batch, {})
    for other_losses, _, other in run_ranks(4, train, short_last_batch, {}, {}):
        assert other_losses == pytest.approx(losses, rel=1e-12)
        assert_equal_up_to(state, other, 1e-12)


def nan_on_rank_one(**parts):
    def loss(model, batch):
        total, weight = masked_loss(model, batch)
        return total * (float("nan") if api.rank() == 1 else 1.0), weight

    return bert_workload(loss=loss, **parts)


def first_error(rank, make):
    api.init()
    job = Job(make(), Plan(mesh=f"replicate={api.size()}"))
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    try:
        job.step(next(job.batches()))
    except paceline.PacelineError as error:
        return str(error), all(torch.equal(before[n], t) for n, t in job.model.state_dict().items())
    return "no error", False


def test_a_nan_names_rank_and_step_and_leaves_the_model():
    for text, is_untouched in run_ranks(2, first_error, nan_on_rank_one):
        assert text.startswith("[rank 1, step 1] the loss should be a finite number")
        assert is_untouched


def look_between_steps(rank, make):
    """A backward pass of the person's own after the first step: what a second loss on the same model does."""
    api.init()
    job = Job(make(), Plan(mesh=f"replicate={api.size()}"))
    losses = []
    for batch in job.batches():
        losses.append(job.step(batch))
        for parameter in job.model.parameters():
            parameter.grad = None
        job.workload.loss(job.model, batch.microbatches[0])[0].backward()
        assert any(parameter.grad is not None for parameter in job.model.parameters())
    return losses


def test_replicate_own_backward_pass_between_steps_has_no_effect():
    losses, _, _ = alone(bert_workload, {})
    for others in run_ranks(2, look_between_steps, bert_workload):
        assert others == pytest.approx(losses, rel=1e-12)


def different_models(**parts):
    return bert_workload(model=lambda: nn.Linear(3, 4 + api.rank()), **parts)


def make_only(rank, make):
    try:
        paceline.distribute(make())
    except paceline.PacelineError as error:
        return str(error)
    return "no error"


def test_models_that_differ_between_ranks_are_refused():
    for text in run_ranks(2, make_only, different_models):
        assert "rank 0 has weight (4, 3) torch.float32 where rank 1 has weight (5, 3) torch.float32" in text


def data_by_rank(rank, longer):
    rows = masked_rows(20 + longer * rank)
    rows[:] = rows if longer else [{**row, "index": row["index"] + rank} for row in rows]
    return make_only(rank, lambda: bert_workload(data=rows))


def test_data_sets_of_different_lengths_are_refused():
    for text in run_ranks(2, data_by_rank, True):
        assert "theirs hold 20, 21 samples" in text


def test_data_sets_of_different_samples_get_a_word():
    assert run_ranks(2, told_of_different_data)[0].count("begin with different samples") == 1


def told_of_different_data(rank):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        data_by_rank(rank, False)
    return said.getvalue()


def model_of_its_rank():
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float(api.rank()) + 1)
    model.register_buffer("count", torch.tensor(api.rank()))
    return model


def start_state(rank):
    api.init()
    parts = {
        "model": model_of_its_rank,
        "loss": lambda model, batch: (model.weight.sum() * len(batch["ids"]), len(batch["ids"])),
    }
    workload = bert_workload(**parts, precision="float32")
    return Job(workload, Plan(mesh=f"replicate={api.size()}")).model.state_dict()


def test_training_starts_from_rank_zeros_state():
    for state in run_ranks(2, start_state):
        assert state["weight"].eq(1).all()
        assert int(state["count"]) == 0
