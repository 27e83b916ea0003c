"""compile=blocks: what is compiled and how often, that nothing else changes by it, and where it is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import api
from paceline.nouns.errors import PlanError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.plan import Plan
from paceline.parallel import compiled_blocks
from paceline.profile.simulate import check_can_try
from paceline.train.job import Job
from paceline.train.parallelize import change_blocks
from parallel.test_every_plan import make

from support.models import WORDS, gpt2
from support.rank_comparisons import compare, train
from support.ranks import run_ranks

CPU = torch.device("cpu")
# The compiler asks for it of each tensor, and hides the warning; here warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


class Block(nn.Module):
    """A block that multiplies by its number, where it has one."""

    def __init__(self, number=None, has_buffer=False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.number = number
        if has_buffer:
            self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        changed = self.second(torch.tanh(self.first(x)))
        return x + (changed if self.number is None else changed * self.number)


class Blocks(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(self.enter(x))


def alike():
    return Blocks([Block() for _ in range(4)])


def numbered():
    return Blocks([Block(number) for number in range(10)])


def square_sum(model, batch):
    return model(batch[0]).square().sum(), len(batch[0])


def mlp(**parts):
    random = torch.Generator().manual_seed(0)
    return paceline.Workload(
        model=alike,
        loss=square_sum,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        data=TensorDataset(torch.randn(24, 8, generator=random)),
        **{"batch_size": 8, "precision": "float64", "clip_norm": 0.5, **parts},
    )


WORKLOADS = {"mlp": mlp, "gpt2": functools.partial(make, "gpt2")}


def compiling_into(found):
    """torch.compile that enters the graphs it is given; without Inductor, which takes seconds."""

    def backend(graph, inputs):
        found.append(graph)
        return aot_eager(graph, inputs)

    return functools.partial(torch.compile, backend=backend)


@pytest.fixture
def compiled(monkeypatch):
    torch._dynamo.reset()
    found = []
    monkeypatch.setattr(compiled_blocks.torch, "compile", compiling_into(found))
    yield found
    torch._dynamo.reset()


def changed(model, line):
    """The model, as a rank has it under a plan, and the notices."""
    notices, _ = change_blocks(model, Plan.parse(line), CPU)
    return model, notices


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_twelve_alike_blocks_are_compiled_once(compiled, checkpointing):
    torch.manual_seed(0)
    plain = gpt2(12)
    torch.manual_seed(0)
    model, notices = changed(gpt2(12), f"replicate=1,compile=blocks,checkpointing={checkpointing}")
    ids = torch.arange(16).reshape(2, 8) % WORDS
    for _ in range(2):
        for each in (plain, model):
            each(input_ids=ids, labels=ids).loss.backward()
    assert len(compiled) == 1
    assert not notices
    for (name, one), (other_name, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(one.grad, other.grad)
    assert plain.state_dict().keys() == model.state_dict().keys()


def test_blocks_that_read_their_number_are_compiled_each(compiled):
    """More than the compiler's own limit, 8."""
    torch.manual_seed(0)
    model = numbered()
    x = torch.randn(4, 8)
    expected = model(x)
    assert torch.allclose(changed(model, "replicate=1,compile=blocks")[0](x), expected)
    assert len(compiled) == 10


def test_a_copy_of_the_model_finds_a_blocks_own_function(compiled):
    for line in ("replicate=1,compile=blocks", "replicate=1,compile=blocks,checkpointing=full"):
        model, _ = changed(alike(), line)
        assert model.blocks[0].forward.__wrapped__.__func__ is Block.forward


def test_compile_blocks_skips_recomputed_blocks_with_buffers(compiled):
    model, notices = changed(
        Blocks([Block(has_buffer=True) for _ in range(2)]), "replicate=1,compile=blocks,checkpointing=full"
    )
    model(torch.randn(4, 8)).sum().backward()
    assert not compiled
    assert "compile=blocks changes nothing" in notices[0]
    model, notices = changed(Blocks([Block(has_buffer=True) for _ in range(2)]), "replicate=1,compile=blocks")
    model(torch.randn(4, 8)).sum().backward()
    assert len(compiled) == 1
    assert not notices


def trained(rank, cells, is_quick):
    """Each cell's result, and how many graphs were compiled."""
    api.init()
    found = []
    if is_quick:
        compiled_blocks.torch.compile = compiling_into(found)
    results = {}
    for name, line in cells:
        found.clear()
        torch._dynamo.reset()
        results[name, line] = train(WORKLOADS[name](), line), len(found)
    return results


def check_equal(cells, is_quick):
    alone = run_ranks(1, trained, [(name, "replicate=1") for name in WORKLOADS], is_quick)[0]
    ranks = run_ranks(2, trained, cells, is_quick, timeout_s=600)
    for name, line in cells:
        results = [each[name, line] for each in ranks]
        assert compare(alone[name, "replicate=1"][0], [result for result, _ in results]) == "equal", (name, line)
        if is_quick:
            assert all(count > 0 for _, count in results), "nothing was compiled: void"


OPTIONS = ("", "zero=1", "zero=2", "checkpointing=full", "checkpointing=selective", "zero=2,checkpointing=full")
QUICK = [("mlp", f"shard=2,compile=blocks{',' * bool(more)}{more}") for more in OPTIONS]
QUICK += [("mlp", "replicate=2,compile=blocks"), ("mlp", "replicate=2,compile=blocks,checkpointing=full")]


@pytest.mark.slow
def test_two_ranks_are_one():
    check_equal(QUICK, is_quick=True)


@pytest.mark.integration
@pytest.mark.complete  # tests/integration/test_server_jobs.py compiles blocks by it
def test_two_ranks_are_one_by_torchs_own_compiler():
    check_equal([(name, f"{axis}=2,compile=blocks") for name in WORKLOADS for axis in ("replicate", "shard")], False)


def resumed(rank, folder, first, then, is_started):
    """Losses of the first two steps under one plan, or of the third under the other."""
    api.init()
    compiled_blocks.torch.compile = compiling_into([])
    job = Job(mlp(), Plan.parse(first if is_started else then))
    if not is_started:
        job.load(folder)
    losses = []
    for batch in job.batches():
        losses.append(job.step(batch))
        if is_started and len(losses) == 2:
            job.save(folder)
    names = [name for name, _ in job.model.named_parameters()]
    job.close(save=False)
    return losses, names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("replicate=2", "shard=2,compile=blocks"),
        pytest.param("shard=2,compile=blocks", "replicate=2", marks=pytest.mark.complete),
    ],
)
def test_a_checkpoint_is_the_same_with_and_without(first, then, tmp_path):
    for (losses, names), (later, later_names) in zip(
        run_ranks(2, resumed, tmp_path / "saved", first, then, True),
        run_ranks(2, resumed, tmp_path / "saved", first, then, False),
        strict=True,
    ):
        assert later == pytest.approx(losses[2:], rel=1e-12)
        assert names == later_names == [name for name, _ in alike().named_parameters()]


def in_bf16(rank, lines):
    api.init()
    compiled_blocks.torch.compile = compiling_into([])
    results = []
    for line in lines:
        job = Job(mlp(precision="bf16"), Plan.parse(line))
        results.append([job.step(batch) for batch in job.batches()])
        job.close()
    return results


@pytest.mark.slow
def test_bf16_is_as_without():
    plain, found = run_ranks(1, in_bf16, ["replicate=1", "replicate=1,compile=blocks"])[0]
    assert found == pytest.approx(plain, rel=1e-2)
    (split, _) = run_ranks(2, in_bf16, ["shard=2,compile=blocks"])
    assert split[0] == pytest.approx(plain, rel=1e-2)


def parsed(line):
    Plan.parse(line)


def placed(line):
    change_blocks(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), Plan.parse(line), CPU)


REFUSED = [
    (parsed, "tensor=2,compile=blocks", "beside tensor", "write compile=on, or leave tensor out"),
    (parsed, "context=2,compile=blocks", "beside context", "write compile=on, or leave context out"),
    (parsed, "expert=2,compile=blocks", "beside expert", "write compile=on, or leave expert out"),
    (parsed, "pipeline=2,compile=blocks", "beside pipeline", "write compile=on, or leave pipeline out"),
    (parsed, "replicate=2,tensor=2,compile=blocks", "beside tensor", "write compile=on, or leave tensor out"),
    (parsed, "shard=2,checkpointing=offload,compile=blocks", "beside compile=blocks", "leave one of them out"),
    (placed, "replicate=2,compile=blocks", "no repeated blocks", "write compile=on"),
    (
        lambda line: check_plan_of_loop(Plan.parse(line)),
        "replicate=2,compile=blocks",
        "compile=blocks",
        "leave compile",
    ),
    (lambda line: check_can_try(Plan.parse(line)), "replicate=2,compile=blocks", "can't be predicted", "leave compile"),
]


@pytest.mark.parametrize(("ask", "line", "says", "fix"), REFUSED, ids=[line for _, line, *_ in REFUSED])
def test_where_it_does_not_apply_it_is_refused(ask, line, says, fix):
    with pytest.raises(PlanError) as caught:
        ask(line)
    assert says in str(caught.value)
    assert fix in caught.value.fix


@pytest.mark.parametrize("line", ["tensor=1,compile=blocks", "server=1,replicate=2,compile=blocks"])
def test_where_it_applies_it_is_kept(line):
    assert Plan.parse(line).compile == "blocks"
