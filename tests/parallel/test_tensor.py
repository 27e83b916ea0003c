"""What is special to `tensor`: sizes that do not divide, heads, tied weights, dropout, and the layouts themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.checkpoint.reshard import take
from paceline.comm import api
from paceline.graph.capture import capture
from paceline.graph.placement import Split
from paceline.graph.tensor.tensor_layout import choose_layout
from paceline.nouns.errors import PacelineError, PlanError
from paceline.nouns.plan import Plan
from paceline.parallel import graph_model
from paceline.train.job import Job

from support.models import MODELS, workload
from support.ranks import run_ranks

SLOW = pytest.mark.slow


class Attention(nn.Module):
    """Grouped-query attention; with sizes that no number of ranks divides if so asked."""

    def __init__(self, width: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.query = nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, groups * self.each) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.each).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        share = self.dropout if self.training else 0.0
        is_grouped = self.heads != self.groups
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=True, enable_gqa=is_grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Small(nn.Module):
    """A transformer of one's own with every size free."""

    def __init__(self, vocabulary=97, width=24, heads=3, groups=None, wide=50, dropout=0.0, is_tied=True, inner=0.0):  # noqa: PLR0913
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList([Attention(width, heads, groups or heads, inner) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(width, wide) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(wide, width) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(4)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for index in range(2):
            x = x + self.dropout(self.attention[index](self.norms[index](x)))
            wide = self.dropout(F.gelu(self.up[index](self.norms[2 + index](x))))
            x = x + self.down[index](wide)
        return self.head(x)


def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def small_workload(**sizes):
    vocabulary = sizes.get("vocabulary", 97)
    random = torch.Generator().manual_seed(3)
    return paceline.Workload(
        model=lambda: Small(**sizes),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=[torch.randint(vocabulary, (8,), generator=random) for _ in range(18)],
        batch_size=6,
        steps=3,
        precision="float64",
        clip_norm=0.5,
    )


def train(rank, sizes, plan):
    api.init()
    job = Job(small_workload(**sizes), Plan.parse(plan))
    steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
    return steps, {n: p.detach().clone() for n, p in job.model.named_parameters()}, job.parallel.local_shards()


def assert_one_rank(ranks, sizes, plan):
    """Train both; the placements by name, as the number of ranks that hold different parts."""
    results = run_ranks(ranks, train, sizes, plan)
    ((steps, whole, _),) = run_ranks(1, train, sizes, "replicate=1")
    for other_steps, state, held in results:
        for one, other in zip(steps, other_steps, strict=True):
            assert other == pytest.approx(one, rel=1e-10)
        for name, tensor in state.items():
            expected = take(whole[name], held[name].shard_spec)
            torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-11)
    return {name: results[0][2][name].shard_spec.cuts for name in whole}


def count_captures(rank, evaluates):
    """Captures in two steps; where an evaluation comes first it has a graph of its own."""
    calls = []
    graph_model.capture = lambda *arguments: calls.append(1) or capture(*arguments)
    api.init()
    job = Job(small_workload(), Plan.parse("tensor=2"))
    if evaluates:
        job.evaluate(job.workload.data[:6])
    for batch in job.batches():
        job.step(batch)
    return len(calls)


@pytest.mark.parametrize(("evaluates", "captures"), [(False, 1), (True, 2)])
def test_the_graph_that_the_layout_is_of_is_the_one_that_runs(evaluates, captures):
    assert run_ranks(2, count_captures, evaluates) == [captures] * 2


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {}),
        pytest.param(3, {"heads": 4}, marks=SLOW),  # neither 97 words nor 50 inner features nor 4 heads divide
        pytest.param(3, {"is_tied": False}, marks=SLOW),
        pytest.param(2, {"heads": 4, "groups": 2}, marks=SLOW),
        pytest.param(2, {"heads": 4, "groups": 1}, marks=SLOW),  # one key head: it can't be split, nor may be wrong
        pytest.param(4, {"vocabulary": 3, "heads": 4}, marks=SLOW),  # fewer words than ranks
    ],
)
def test_sizes_that_do_not_divide(ranks, sizes):
    cuts = assert_one_rank(ranks, sizes, f"tensor={ranks}")
    assert any(cuts.values())


@pytest.mark.parametrize(("ranks", "sizes"), [(2, {"heads": 4}), pytest.param(3, {}, marks=SLOW)])
def test_sequence_split_norms(ranks, sizes):
    cuts = assert_one_rank(ranks, sizes, f"tensor={ranks},sequence=on")
    assert not cuts["norms.0.weight"], "along the sequence norms are split, their weights are not"


@pytest.mark.parametrize("plan", ["tensor=2", pytest.param("tensor=2,sequence=on", marks=SLOW)])
def test_dropout_is_that_of_one_rank(plan):
    """Masks drawn in pieces would differ by far more than rounding."""
    assert_one_rank(2, {"heads": 4, "dropout": 0.3}, plan)
    with_dropout, without = (run_ranks(1, train, {"heads": 4, "dropout": p}, "replicate=1")[0][0] for p in (0.3, 0.0))
    assert with_dropout != without, "nothing was dropped: the test is void"


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"heads": 4}),
        pytest.param(3, {"heads": 4}, marks=SLOW),
        pytest.param(2, {"heads": 4, "groups": 2}, marks=SLOW),
        pytest.param(2, {"heads": 4, "dropout": 0.2}, marks=SLOW),
    ],
)
def test_dropout_of_attention_is_that_of_one_rank(ranks, sizes):
    """Heads on two ranks that draw alike would have equal masks."""
    assert_one_rank(ranks, {**sizes, "inner": 0.3}, f"tensor={ranks}")


def drop(rank):
    """The zeros that dropout makes in a split hidden layer, by what the next layer sees of ones."""
    api.init()
    hidden = 64
    model = nn.Sequential(nn.Linear(2, hidden, bias=False), nn.Dropout(0.5), nn.Linear(hidden, 3, bias=False))

    def ones():
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        return model

    plan = Plan.parse(f"tensor={api.size()}")
    job = Job(
        paceline.Workload(
            model=ones,
            loss=lambda model, batch: (model(batch).sum(), len(batch)),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
            data=[torch.ones(2) for _ in range(8)],
            batch_size=8,
            steps=3,
            precision="float64",
        ),
        plan,
    )
    found = []
    for batch in job.batches():
        job.step(batch)
        gradient = job.model[2].weight.grad  # of ones: twice 2 * kept / 0.5, whole numbers of eighths
        found.append(gradient.clone())
    return found, job.parallel.local_shards().get("2.weight")


def test_dropout_keeps_the_same_elements_bit_for_bit():
    ((whole, _),) = run_ranks(1, drop)
    assert not torch.equal(whole[0], whole[1])
    for found, held in run_ranks(2, drop):
        assert held.shard_spec.cuts
        assert all(torch.equal(one, take(full, held.shard_spec)) for one, full in zip(found, whole, strict=True))


def refused(rank, make):
    api.init()
    try:
        Job(make(), Plan.parse(f"tensor={api.size()}"))
    except PacelineError as error:
        return type(error), str(error)
    return None, "no error"


def too_small():
    return paceline.Workload(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=[torch.ones(1) for _ in range(4)],
        batch_size=4,
    )


def test_a_model_with_nothing_to_split_is_refused():
    for kind, text in run_ranks(2, refused, too_small):
        assert kind is PlanError
        assert "no weight has a dimension that can be split in 2" in text


def test_a_path_that_depends_on_values_is_refused():
    for _, text in run_ranks(2, refused, looks_at_values):
        assert "it looks at values" in text
        assert "test_tensor.py" in text


def looks_at_values():
    def looking(model, batch):
        hidden = model(batch)
        return (hidden.sum() if hidden.sum() > 0 else -hidden.sum()), len(batch)

    return paceline.Workload(
        model=lambda: nn.Linear(4, 4),
        loss=looking,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=[torch.ones(4) for _ in range(4)],
        batch_size=4,
    )


def lays_of(name, parts=2):
    """The layout of a model of real proportions: with a hundred words a table is too small to be worth a sum."""
    sizes = {"vocab_size": 30_000, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers_model(name, {**sizes, "num_hidden_layers": 2})
    batch = torch.utils.data.default_collate(workload(name).data[:4])
    return choose_layout(capture(model, MODELS[name][1], batch, torch.device("cpu")), parts).placements


def transformers_model(name, sizes):
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=30_000, n_embd=256, n_layer=2, n_head=4))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    return BertForMaskedLM(BertConfig(**sizes))


def by_hand(placements, prefix, columns, rows):
    """Weights split by their outputs, then weights split by their inputs, and what follows from it for biases."""
    for name in columns:
        placement = placements[f"{prefix}.{name}.weight"]
        assert (placement.dim, len(placement.blocks)) == (0, 1), name
        assert placements.get(f"{prefix}.{name}.bias", placement) == placement, name
    for name in rows:
        placement = placements[f"{prefix}.{name}.weight"]
        assert (placement.dim, len(placement.blocks)) == (1, 1), name
        assert placements.get(f"{prefix}.{name}.bias") is None, name


BERT = [f"attention.self.{name}" for name in ("query", "key", "value")] + ["intermediate.dense"]
LLAMA = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")] + ["mlp.gate_proj", "mlp.up_proj"]


BERT_CASE = ("bert", "bert.encoder.layer", BERT, ["attention.output.dense", "output.dense"])
LLAMA_CASE = ("llama", "model.layers", LLAMA, ["self_attn.o_proj", "mlp.down_proj"])  # two key heads: at most two ranks


@pytest.mark.parametrize(
    ("name", "prefix", "columns", "rows", "parts"),
    [(*BERT_CASE, 2), pytest.param(*BERT_CASE, 4, marks=SLOW), (*LLAMA_CASE, 2)],
)
def test_the_layout_is_the_one_made_by_hand(name, prefix, columns, rows, parts):
    placements = lays_of(name, parts)
    for index in range(2):
        by_hand(placements, f"{prefix}.{index}", columns, rows)
    head = next(key for key in placements if "word_embeddings.weight" in key or "lm_head.weight" in key)
    assert placements[head] == Split(0, (30_000,)), "the head and the loss are split by vocabulary"


def test_a_fused_matrix_is_split_block_by_block():
    placements = lays_of("gpt2")
    assert placements["transformer.h.0.attn.c_attn.weight"] == Split(1, (256, 256, 256))
    assert placements["transformer.h.0.attn.c_attn.bias"] == Split(0, (256, 256, 256))
    assert placements["transformer.h.0.attn.c_proj.weight"] == Split(0, (256,))
    assert placements["transformer.h.0.mlp.c_fc.weight"] == Split(1, (1024,))
    assert placements["transformer.h.0.mlp.c_proj.weight"] == Split(0, (1024,))


def narrow_channels(rank):
    api.init()
    make = lambda: nn.Sequential(nn.Conv2d(3, 9, 3), nn.BatchNorm2d(9), nn.Flatten(), nn.Linear(9 * 9, 5))  # noqa: E731
    data = [(torch.randn(3, 5, 5), torch.tensor(index % 5)) for index in range(8)]
    job = Job(
        paceline.Workload(
            model=make,
            loss=classes,
            optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            data=data,
            batch_size=4,
        ),
        Plan.parse("tensor=4,sequence=on"),
    )
    return job.step(next(iter(job.batches())))


def classes(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


@SLOW
def test_no_rank_is_left_with_an_empty_convolution():
    """Nine channels in pieces of three leave the fourth rank none: torch has no convolution of nothing."""
    assert len(set(run_ranks(4, narrow_channels))) == 1
