"""The promise: R ranks that each hold a part of every parameter end where one rank with all of them does."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm import api
from paceline.comm.collectives import open_axes
from paceline.comm.ledger import Ledger
from paceline.demo.bert import Bert, BertConfig
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.parallel.shard.blocks import find_blocks
from paceline.parallel.shard.shard_strategy import Shard, check_can_split, local

from support.closed_traffic import ShardTraffic, shard_traffic
from support.ranks import run_ranks

SLOW = pytest.mark.slow
CPU = torch.device("cpu")
TINY = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24)
STEPS, BATCH = 3, 12


class BertWithUnused(Bert):
    """Tied embeddings, a parameter that no rank ever uses and one that only one row's rank uses."""

    def __init__(self):
        super().__init__(TINY)
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(5))


class Convolutions(nn.Module):
    """Two stages of residual blocks, their weights in channels_last."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(1, width)

        def forward(self, x):
            return x + F.relu(self.norm(self.conv(x)))

    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 10, 3, stride=2)
        self.first = nn.Sequential(*[self.Block(6) for _ in range(2)])
        self.second = nn.Sequential(*[self.Block(10) for _ in range(2)])
        self.out = nn.Linear(10, 97)
        self.to(memory_format=torch.channels_last)

    def forward(self, ids, chosen):
        x = self.first(self.stem(ids.view(-1, 1, 4, 4).to(self.out.weight.dtype)))
        x = self.second(self.down(F.pad(x, (1, 1, 1, 1)))).mean((2, 3))
        return self.out(x)[:, None].expand(-1, 16, -1)[chosen]


class Odd(nn.Module):
    """Odd sizes, a scalar, a frozen matrix, a layer used three times, lists in lists, views between blocks."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 7)
            self.outer = nn.Linear(7, 5)
            self.one = nn.Parameter(torch.full((1, 5), 0.5))

        def forward(self, x):
            return self.outer(torch.tanh(self.inner(x * self.one))).view(x.shape)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(97, 5)
        self.frozen = nn.Embedding(16, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layers = nn.ModuleList([self.Block() for _ in range(2)])
        shared = self.Block()
        self.same = nn.ModuleList([shared, shared, shared])
        self.pairs = nn.ModuleList([nn.ModuleList([self.Block(), self.Block()]) for _ in range(2)])

    def forward(self, ids, chosen):
        x = self.embed(ids) + self.frozen.weight
        for layer in (*self.layers, *self.same):
            y = layer(x)
            y += x  # in place, on what a block returned as a view
            x = y
        for first, second in self.pairs:
            x = x + first(x) - second(x)
        return (x @ self.embed.weight.T * self.scale)[chosen]


MODELS = {"bert": BertWithUnused, "convolutions": Convolutions, "odd": Odd}


def rows(count, start=0):
    """Sequences of different numbers of hidden tokens, so that ranks' weights differ."""
    batch = []
    for index in range(start, start + count):
        random = torch.Generator().manual_seed(index)
        labels = torch.randint(5, 97, (16,), generator=random)
        chosen = torch.rand(16, generator=random) < 0.1 + 0.05 * (index % 7)
        chosen[index % 16] = True
        batch.append(
            {"ids": labels.where(~chosen, 4), "labels": labels, "chosen": chosen, "index": torch.tensor(index)}
        )
    return batch


def stacked(batch):
    return {key: torch.stack([row[key] for row in batch]) for key in batch[0]}


def masked_loss(model, batch):
    scores = model(batch["ids"], batch["chosen"])
    total = F.cross_entropy(scores, batch["labels"][batch["chosen"]], reduction="sum")
    if hasattr(model, "sometimes") and (batch["index"] == 3).any():
        total = total + (model.sometimes**2).sum()
    return total, batch["chosen"].sum()


def open_shard(rank, make, line, dtype=torch.float64):
    api.init()
    comm = open_axes(Mesh.parse(f"shard={api.size()}"), rank, Ledger())["shard"]
    torch.manual_seed(rank)  # training starts from rank 0's
    model = make().to(dtype)
    options = dict(item.split("=") for item in line.split(",") if item)
    compression = options.pop("compression", "none")
    plan = Plan(
        mesh=f"shard={api.size()}",
        compression=compression,
        **{key: int(value) if value.isdecimal() else value for key, value in options.items()},
    )
    return model, Shard(model, comm, plan, CPU)


def step(shard, optimizer, batch, micro=1, loss=masked_loss, padding=None):
    """One step as a job takes it, on this rank's rows of `batch`; `padding` where it has none."""
    mine = batch[shard.comm.rank :: shard.comm.size]
    size = -(-len(mine) // micro) if mine else 1
    pieces = [mine[at : at + size] for at in range(0, len(mine), size)] or [[padding]]
    optimizer.zero_grad()
    shard.begin_step()
    weights = torch.zeros((), dtype=torch.float64)
    losses = torch.zeros((), dtype=torch.float64)
    for number, piece in enumerate(pieces):
        total, weight = shard.forward(loss, stacked(piece))
        shard.begin_backward(number == len(pieces) - 1, is_padding=not mine)
        (total if mine else total * 0).backward()
        weights += weight if mine else 0
        losses += total.detach() if mine else 0
    shard.finish_backward()
    sent = {row["collective"]: (row["calls"], row["bytes"]) for row in shard.comm.ledger.rows()}
    shard.comm.all_reduce(weights)
    shard.comm.all_reduce(losses)
    for parameter in shard.parameters.values():
        if parameter.grad is not None:
            local(parameter.grad).div_(weights)
    optimizer.step()
    return float(losses / weights), sent


def parts(shard):
    held = {name: local(parameter).detach().clone() for name, parameter in shard.model.named_parameters()}
    places = shard.shard_specs()
    assert list(held) == list(places) == list(shard.parameters)
    assert all(places[name].local_shape == tuple(tensor.shape) for name, tensor in held.items())
    return held, places


def train(rank, name, line, micro=1, dtype=torch.float64):
    model, shard = open_shard(rank, MODELS[name], line, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = [step(shard, optimizer, rows(BATCH, BATCH * number), micro)[0] for number in range(STEPS)]
    shard.close()
    return losses, *parts(shard)


def assembled(results):
    """Full tensors from every rank's part, each row from exactly one rank."""
    full = {}
    for name, shard_spec in results[0][2].items():
        tensor = torch.full(shard_spec.shape, math.nan, dtype=results[0][1][name].dtype)
        for _, held, places in results:
            cuts = places[name].cuts
            where = slice(*cuts[0].ranges[0]) if cuts else ...
            assert not cuts or tensor[where].isnan().all(), f"{name}: two ranks hold the same rows"
            tensor[where] = held[name]
        full[name] = tensor
    return full


def assert_equal_up_to(full, alone, tolerance=1e-11):
    for name, tensor in alone.items():
        torch.testing.assert_close(
            full[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


QUICK = [(2, "bert", "zero=3", 1)]
CASES = [
    *[(2, "bert", f"zero={zero}", micro) for zero in (2, 3) for micro in (1, 3)],
    *[(4, name, f"zero={zero}", 3) for name in MODELS for zero in (2, 3)],
    (2, "odd", "zero=3", 2),
    (2, "bert", "zero=3,offload=on", 2),
]


@pytest.mark.parametrize(
    ("ranks", "name", "line", "micro"), [*QUICK, *[pytest.param(*case, marks=SLOW) for case in CASES]]
)
def test_ranks_equal_one_rank(ranks, name, line, micro):
    losses, alone, _ = train(0, name, line, micro)
    results = run_ranks(ranks, train, name, line, micro)
    for other, _, _ in results:
        assert other == pytest.approx(losses, rel=1e-11)
    full = assembled(results)
    assert_equal_up_to(full, alone)
    if name == "bert":
        assert torch.equal(full["never"], torch.ones(3, dtype=torch.float64)), "AdamW decayed what nobody used"
        assert not torch.equal(full["sometimes"], torch.ones(5, dtype=torch.float64))


def test_shard_blocks_are_outermost_repeats_that_share_nothing():
    assert list(find_blocks(BertWithUnused())) == [f"bert.encoder.layer.{index}" for index in range(3)]
    assert list(find_blocks(Odd())) == ["layers.0", "layers.1", "pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1"]
    assert list(find_blocks(Convolutions())) == ["first.0", "first.1", "second.0", "second.1"]
    assert not find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    tied = Odd()
    tied.layers[1].outer.weight = tied.layers[0].outer.weight
    assert not [name for name in find_blocks(tied) if name.startswith("layers.")]
    assert len(find_blocks(nn.Transformer(8, 2, 3, 3, 8, batch_first=True))) == 6


def sizes(model, blocks, whole):
    return [
        ShardTraffic(
            tuple(parameter.shape),
            parameter.itemsize,
            str(parameter.dtype),
            next((block for block in blocks if name.startswith(f"{block}.")), ""),
            parameter.requires_grad,
            name in whole,
        )
        for name, parameter in model.named_parameters()
    ]


def count(rank, name, line, micro):
    """What each of three steps sent, and what was predicted."""
    model, shard = open_shard(rank, MODELS[name], line, torch.float32)
    shard.comm.ledger.calls.clear()
    shard.comm.ledger.payload_bytes.clear()
    optimizer = torch.optim.AdamW(model.parameters())
    sent = []
    for _ in range(2):
        sent.append(step(shard, optimizer, rows(BATCH), micro)[1])
        shard.comm.ledger.calls.clear()
        shard.comm.ledger.payload_bytes.clear()
    whole_model = MODELS[name]().float()
    predicted = shard_traffic(shard.plan, api.size(), sizes(whole_model, shard.blocks, shard.replicated), micro)
    return sent, {collective: numbers for (collective, _), numbers in predicted.items()}


TRAFFIC = [
    (ranks, name, f"zero={zero},compression={compression}", micro)
    for ranks, name, compression, micro in (
        (2, "bert", "none", 1),
        (2, "bert", "bf16", 3),
        (4, "odd", "none", 3),
        (4, "convolutions", "none", 1),
    )
    for zero in (2, 3)
]


@pytest.mark.parametrize(
    ("ranks", "name", "line", "micro"),
    [(2, "odd", "zero=3", 2), *[pytest.param(*case, marks=SLOW) for case in TRAFFIC]],
)
def test_the_ledger_counts_what_was_predicted(ranks, name, line, micro):
    for sent, predicted in run_ranks(ranks, count, name, line, micro):
        assert sent == [predicted, predicted]


def weigh(rank, line):
    """Bytes of tensors alive between steps, of the parameters and Adam's moments, and of the model in full."""
    gc.collect()
    before = live_bytes()
    wide = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=256
    )
    model, shard = open_shard(rank, lambda: Bert(wide), line, torch.float32)
    full = 4 * sum(math.prod(shape) for shape in shard.shapes.values())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(shard, optimizer, rows(4))
    optimizer.zero_grad()
    gc.collect()
    return live_bytes() - before, full


def live_bytes():
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@SLOW
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("zero", [2, 3])
def test_between_steps_a_rank_holds_its_part_alone(ranks, zero):
    for held, full in run_ranks(ranks, weigh, f"zero={zero}"):
        assert 3 * full / ranks <= held < 1.1 * 3 * full / ranks, "parameters and two moments, a part of each"


def short_batch(rank):
    """Three rows on four ranks, none of them the one that uses `sometimes`; the last rank repeats that one."""
    model, shard = open_shard(rank, BertWithUnused, "zero=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(shard, optimizer, rows(3), padding=rows(1, 3)[0])[0]]
    return losses, *parts(shard)


@SLOW
def test_a_rank_without_samples_takes_part():
    losses, alone, _ = short_batch(0)
    results = run_ranks(4, short_batch)
    assert results[3][0] == pytest.approx(losses, rel=1e-11)
    full = assembled(results)
    assert_equal_up_to(full, alone)
    assert torch.equal(full["sometimes"], torch.ones(5, dtype=torch.float64))


def penalty(model):
    return sum(parameter.square().sum() for parameter in model.parameters() if parameter.requires_grad)


def penalty_first(model, batch):
    extra = penalty(model)
    total, weight = masked_loss(model, batch)
    return total + 0.1 * extra * weight, weight


def penalty_last(model, batch):
    total, weight = masked_loss(model, batch)
    return total + 0.1 * penalty(model) * weight, weight


def uncalled_loss(model, batch):
    block = model.layers[0]
    hidden = F.linear(model.embed(batch["ids"]), block.inner.weight)
    return hidden.sum(), batch["chosen"].sum()


OUTSIDE = {"first": penalty_first, "last": penalty_last, "functional": uncalled_loss}


def penalized(rank, line, loss):
    model, shard = open_shard(rank, Odd, line)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(shard, optimizer, rows(8), 2, loss)[0] for _ in range(2)]
    return losses, *parts(shard)


@SLOW
@pytest.mark.parametrize(("zero", "loss"), [(2, "last"), (2, "functional")])
def test_shard_zero_2_loss_may_use_parameters_outside_the_block(zero, loss):
    losses, alone, _ = penalized(0, "zero=2", OUTSIDE[loss])
    results = run_ranks(2, penalized, f"zero={zero}", OUTSIDE[loss])
    assert results[1][0] == pytest.approx(losses, rel=1e-11)
    assert_equal_up_to(assembled(results), alone)


@SLOW
def test_a_gradient_that_comes_too_late_is_noticed():
    for text, _ in run_ranks(2, refused, penalty_first, "zero=2"):
        assert "was also used before the block ran" in text


def refused(rank, loss, line="zero=3"):
    """The error of a bad step, then the losses of two good ones."""
    model, shard = open_shard(rank, Odd, line)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(WorkloadError) as error:
        step(shard, optimizer, rows(4), loss=loss)
    return str(error.value), [step(shard, optimizer, rows(4))[0] for _ in range(2)]


@SLOW
@pytest.mark.parametrize(
    ("loss", "found"),
    [(uncalled_loss, "layers.0, layers.1, pairs.0.0"), (penalty_last, "every block was called")],
)
def test_shard_zero_3_refuses_parameters_used_outside_the_block(loss, found):
    results = run_ranks(2, refused, loss)
    for text, losses in results:
        assert found in text
        assert "write zero=2" in text
        assert losses == results[0][1]
    assert losses[1] != losses[0]


class Break(torch.autograd.Function):
    """Raises in the middle of the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError


def breaking_loss(model, batch):
    hidden = Break.apply(model.layers[0](model.embed(batch["ids"])))
    return model.layers[1](hidden).sum(), batch["chosen"].sum()


def train_after_a_failure(rank, fails):
    model, shard = open_shard(rank, Odd, "zero=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if fails:
        with pytest.raises(ArithmeticError):
            step(shard, optimizer, rows(4), loss=breaking_loss)
    return [step(shard, optimizer, rows(4))[0] for _ in range(2)], *parts(shard)


@SLOW
def test_a_step_that_failed_leaves_no_trace():
    _, alone, _ = train_after_a_failure(0, False)
    assert_equal_up_to(assembled(run_ranks(2, train_after_a_failure, True)), alone)


def skipping_loss(model, batch):
    """Calls its two first blocks in an order that depends on the rank: of one size, so nobody hangs."""
    x = model.embed(batch["ids"])
    for index in (0, 1) if api.rank() else (1, 0):
        x = model.layers[index](x)
    return x.sum(), batch["chosen"].sum()


@SLOW
def test_blocks_in_another_order_are_noticed():
    for text, _ in run_ranks(2, refused, skipping_loss):
        assert "call the model's blocks in the same order" in text


def evaluate_first(rank):
    """A loss in inference mode, the model called directly, then a step; each with rank 0's parameters."""
    model, shard = open_shard(rank, BertWithUnused, "zero=2")
    batch = stacked(rows(2))
    with torch.inference_mode():
        before = float(shard.forward(masked_loss, batch)[0])
    with torch.no_grad():
        direct = model(batch["ids"], batch["chosen"])
    held = sum(local(parameter).nbytes for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(shard, optimizer, rows(4))
    with torch.no_grad():
        after = float(shard.forward(masked_loss, batch)[0])
    return before, float(F.cross_entropy(direct, batch["labels"][batch["chosen"]], reduction="sum")), after, held


@SLOW
def test_evaluation_leaves_parts_and_sees_the_newest_parameters():
    alone = evaluate_first(0)
    for before, direct, after, held in run_ranks(2, evaluate_first):
        assert (before, direct, after) == pytest.approx((alone[0], alone[0], alone[2]), rel=1e-12)
        assert after != before
        assert held < 0.6 * alone[3]


class Scaled(BertWithUnused):
    """With a scalar that two modules hold."""

    def __init__(self):
        super().__init__()
        self.scale, self.child = nn.Parameter(torch.tensor(2.0)), nn.Module()
        self.child.scale = self.scale
        self.cls["predictions"].decoder.weight = self.bert["embeddings"].word_embeddings.weight

    def forward(self, ids, chosen):
        return super().forward(ids, chosen) * self.scale * self.child.scale


def fill_from_meta(rank, is_on_meta):
    api.init()
    comm = open_axes(Mesh.parse(f"shard={api.size()}"), rank, Ledger())["shard"]
    torch.manual_seed(7)
    source = Scaled().double()
    with torch.device("meta" if is_on_meta else "cpu"):
        model = Scaled().double()
    shard = Shard(model, comm, Plan(mesh=f"shard={api.size()}"), CPU)
    for name, tensor in source.named_parameters():
        shard.fill(name, tensor.detach())
    losses = [step(shard, torch.optim.SGD(model.parameters(), lr=0.1), rows(4))[0] for _ in range(2)]
    return losses, *parts(shard)


@SLOW
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_on_meta_is_filled_part_by_part(ranks):
    losses, alone, _ = fill_from_meta(0, False)
    results = run_ranks(ranks, fill_from_meta, True)
    assert results[0][0] == pytest.approx(losses, rel=1e-12)
    assert_equal_up_to(assembled(results), alone)


class Mixed(nn.Module):
    """bfloat16 matrices with float32 norms and a float32 head, as people write them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8)

        def forward(self, x):
            return x + self.norm(self.linear(x.bfloat16()).float())

    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.Sequential(*[self.Block() for _ in range(2)]), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.blocks(x))


def train_mixed(rank):
    api.init()
    comm = open_axes(Mesh.parse(f"shard={api.size()}"), rank, Ledger())["shard"]
    torch.manual_seed(0)
    model = Mixed()
    shard = Shard(model, comm, Plan(mesh=f"shard={api.size()}"), CPU)
    data = [{"x": torch.full((8,), float(index)).sin()} for index in range(4)]
    step(
        shard,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        loss=lambda model, batch: (model(batch["x"]).square().sum(), len(batch["x"])),
    )
    return shard.replicated, *parts(shard)


@SLOW
def test_a_minority_dtype_stays_whole():
    _, alone, _ = train_mixed(0)
    results = run_ranks(2, train_mixed)
    assert results[0][0] == {f"blocks.{index}.norm.{kind}" for index in range(2) for kind in ("weight", "bias")}
    assert_equal_up_to(assembled(results), alone, 1e-2)
    assert torch.equal(results[0][1]["blocks.0.norm.weight"], results[1][1]["blocks.0.norm.weight"])


@SLOW
def test_bf16_rounds_the_wire_alone():
    losses, alone, _ = train(0, "bert", "zero=3")
    results = run_ranks(2, train, "bert", "zero=3,compression=bf16")
    assert results[0][0] == pytest.approx(losses, rel=1e-2)
    full = assembled(results)
    name = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(full[name], full[name].bfloat16().double()), "the parameters themselves were rounded"
    assert not torch.allclose(full[name], alone[name], rtol=1e-6), "nothing was compressed: the test is void"


@pytest.mark.parametrize("compression", ["topk", "powersgd", "fp16"])
def test_other_compressions_are_refused(compression):
    with pytest.raises(PlanError, match="the axis shard has none and bf16"):
        check_can_split(nn.Linear(2, 2), Plan(compression=compression))


def test_sparse_gradients_are_refused():
    with pytest.raises(WorkloadError, match=r"the gradient of 0\.weight is sparse"):
        check_can_split(nn.Sequential(nn.Embedding(4, 2, sparse=True)), Plan())
