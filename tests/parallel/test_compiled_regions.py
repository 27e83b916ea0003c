"""compile=on where graphs talk to other ranks: what is compiled, what is not, and that nothing else changes by it."""

import functools
import gc

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.comm import api
from paceline.parallel import compiled_regions
from paceline.parallel.compiled_regions import CompiledRegions
from paceline.verify.ranks.keep_float64 import kept_wide
from parallel.test_every_plan import make

from support import attention_models, expert_models
from support.rank_comparisons import compare, train
from support.ranks import run_ranks

TALKED = []


def talk(x):
    """Stands for a collective: it is Python's, and must be called in every step."""
    TALKED.append(tuple(x.shape))
    return 2 * x


def layer(x, weight):
    return torch.tanh(x @ weight).relu() + x


def graph_of(function, *arguments):
    """A graph of ATen operations, in which calls of `torch.neg` are calls of `talk`."""
    made = make_fx(function)(*arguments)
    for node in made.graph.nodes:
        if node.target is torch.ops.aten.neg.default:
            node.target = talk
    made.recompile()
    return made


@pytest.fixture
def compiled(monkeypatch):
    """The graphs that were handed to the compiler; without Inductor, which takes seconds."""
    found = []
    compile_ = torch.compile

    def compile_quickly(module, **options):
        found.append(module)
        return compile_(module, backend="aot_eager", **options)

    monkeypatch.setattr(compiled_regions.torch, "compile", compile_quickly)
    yield found
    torch._dynamo.reset()


def operations(graphs):
    return {
        node.target._schema.name[6:] for graph in graphs for node in graph.graph.nodes if node.op == "call_function"
    }


def check(graph, *arguments):
    expected = graph(*[each.clone() for each in arguments])
    run = CompiledRegions().compile(graph)
    TALKED.clear()
    torch.testing.assert_close(run(*arguments), expected, rtol=0, atol=0)


def test_what_talks_runs_as_it_is_in_every_call(compiled):
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    graph = graph_of(lambda x, w: layer(layer(x, w).neg(), w), x, weight)
    run = CompiledRegions().compile(graph)
    TALKED.clear()
    for _ in range(3):
        run(x, weight)
    assert TALKED == [(4, 4)] * 3
    assert len(compiled) == 1
    assert all(node.target is not talk for node in compiled[0].graph.nodes)


def test_compiled_regions_are_shared_only_by_equal_layers(compiled):
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    alike = graph_of(lambda x, w: layer(layer(layer(x, w).neg(), w).neg(), w), x, weight)
    check(alike, x, weight)
    assert len(compiled) == 1

    compiled.clear()
    others = torch.randn(6, 6), torch.randn(6, 6)
    check(graph_of(lambda x, w, y, v: (layer(x, w).neg(), layer(y, v).neg()), x, weight, *others), x, weight, *others)
    assert len(compiled) == 2  # the same operations, of other shapes


def test_compiled_region_is_freed_with_its_last_graph(compiled):
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    regions = CompiledRegions()
    graph = graph_of(lambda x, w: layer(layer(x, w).neg(), w), x, weight)
    first, second = regions.compile(graph), regions.compile(graph)
    assert len(compiled) == len(regions.shared) == 1
    del first
    gc.collect()
    assert len(regions.shared) == 1
    del second
    gc.collect()
    assert not regions.shared


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_gradients_are_those_of_the_graph(compiled):
    x = torch.randn(4, 4, dtype=torch.float64)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    graph = graph_of(lambda x, w: layer(layer(x, w).neg(), w).sum(), x, weight.detach())
    (expected,) = torch.autograd.grad(graph(x, weight), weight)
    (found,) = torch.autograd.grad(CompiledRegions().compile(graph)(x, weight), weight)
    assert len(compiled) == 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_graph_that_talks_to_nobody_is_compiled_as_one(compiled):
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    graph = graph_of(lambda x, w: layer(layer(x, w), w), x, weight)
    check(graph, x, weight)
    assert compiled == [graph]


def test_a_region_with_nothing_to_fuse_is_left_as_it_is(compiled):
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    check(graph_of(lambda x, w: (x @ w).neg().view(2, 8).t() + 1, x, weight), x, weight)
    assert not compiled


def test_random_numbers_are_those_without_compile(compiled):
    x, weight = torch.randn(64, 4), torch.randn(4, 4)
    graph = graph_of(lambda x, w: layer(torch.native_dropout(layer(x, w), 0.5, True)[0].neg(), w), x, weight)
    torch.manual_seed(5)
    expected = graph(x, weight)
    torch.manual_seed(5)
    found = CompiledRegions().compile(graph)(x, weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert operations(compiled) >= {"tanh", "relu"}
    assert not operations(compiled) & {"bernoulli_", "rand_like", "native_dropout"}


def test_what_is_written_is_written(compiled):
    x, weight, count = torch.randn(4, 4), torch.randn(4, 4), torch.zeros(())

    class Counting(nn.Module):
        def forward(self, x, weight, count):
            made = layer(x, weight)
            count.add_(1)
            return layer(made, weight)

    graph = make_fx(Counting())(x, weight, count)
    assert isinstance(graph, fx.GraphModule)
    count.zero_()
    run = CompiledRegions().compile(graph)
    for _ in range(2):
        run(x, weight, count)
    assert count == 2
    assert len(compiled) == 1  # of the two layers, which are alike
    assert "add_" not in operations(compiled)


CELLS = {
    "tensor=2,compile=on": functools.partial(make, "gpt2"),
    "tensor=2,compile=on,checkpointing=full": functools.partial(make, "gpt2"),
    "context=2,compile=on": functools.partial(attention_models.workload, "absolute", clip_norm=0.5),
    "expert=2,compile=on": functools.partial(expert_models.workload, "mixture", clip_norm=0.5),
    "pipeline=2,tensor=2,compile=on": functools.partial(make, "gpt2"),
}


def trained(rank, line, plan):
    api.init()
    with kept_wide(True):
        return train(CELLS[line](), plan)


@pytest.mark.integration
@pytest.mark.parametrize("line", CELLS)
def test_a_compiled_plan_is_one_rank(line):
    ranks = 4 if "pipeline" in line else 2
    assert compare(run_ranks(1, trained, line, "replicate=1")[0], run_ranks(ranks, trained, line, line)) == "equal"
