"""An operation on pieces gives the pieces, or parts of the sum: every rule of `rules.py` on random shapes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import fx

from paceline.graph import rules
from paceline.graph.placement import Split
from paceline.graph.rules import spec_of, tensor_inputs
from paceline.graph.tensor.choices import Options, choices
from paceline.train.precision import grouped_products_in_float64

from support.operations import blocks_of, node_of, piece, randint, randn, shape_of_rank

aten = torch.ops.aten
MANY = settings(deadline=None, max_examples=25, phases=[Phase.generate])
SIZE = st.integers(1, 6)


def sizes(draw, count):
    return [draw(SIZE) for _ in range(count)]


def make_linear(draw):
    outer, (inner, out) = shape_of_rank(draw, 0, 3), sizes(draw, 2)
    bias = [randn(draw, out)] if draw(st.booleans()) else []
    return randn(draw, *outer, inner), randn(draw, out, inner), *bias


def make_addmm(draw):
    n, inner, out = sizes(draw, 3)
    return randn(draw, out), randn(draw, n, inner), randn(draw, inner, out)


def make_mm(draw):
    n, inner, out = sizes(draw, 3)
    return randn(draw, n, inner), randn(draw, inner, out)


def make_bmm(draw):
    batch, n, inner, out = sizes(draw, 4)
    return randn(draw, batch, n, inner), randn(draw, batch, inner, out)


def broadcast(draw, outer):
    """`outer` with some sizes 1 and some first dimensions left out."""
    kept = outer[draw(st.integers(0, len(outer))) :]
    return [draw(st.sampled_from([1, size])) for size in kept]


def make_matmul(draw):
    outer, (n, inner, out) = shape_of_rank(draw, 0, 2), sizes(draw, 3)
    left, right = (outer, broadcast(draw, outer)) if draw(st.booleans()) else (broadcast(draw, outer), outer)
    return randn(draw, *left, n, inner), randn(draw, *right, inner, out)


def make_baddbmm(draw):
    batch, n, inner, out = sizes(draw, 4)
    added = broadcast(draw, [batch, n, out])
    return randn(draw, *added), randn(draw, batch, n, inner), randn(draw, batch, inner, out)


def make_grouped_mm(draw):
    groups, inner, out = sizes(draw, 3)
    ends = list(itertools.accumulate(draw(st.integers(0, 4)) for _ in range(groups)))
    rows = randn(draw, max(1, ends[-1]), inner)
    return rows, randn(draw, groups, inner, out), torch.tensor(ends, dtype=torch.int32)


def make_weight_norm(draw):
    shape = sizes(draw, draw(st.integers(2, 4)))
    dim = draw(st.integers(0, len(shape) - 1))
    magnitude = [size if place == dim else 1 for place, size in enumerate(shape)]
    return randn(draw, *shape), randn(draw, *magnitude), dim


def make_einsum(draw):
    equation = draw(st.sampled_from(["bij,bjk->bik", "bsd,hdk->bshk", "bshk,hkd->bsd", "ij->i", "i,j->ij", "ij,ij->"]))
    size = dict(zip("bijkshd", sizes(draw, 7), strict=True))
    return equation, [randn(draw, *(size[i] for i in term)) for term in equation.split("->")[0].split(",")]


def make_conv(dims):
    def make(draw):
        n, inner, out = sizes(draw, 3)
        room = [draw(st.integers(3, 5)) for _ in range(dims)]
        bias = randn(draw, out) if draw(st.booleans()) else None
        stride, padding = [draw(st.integers(1, 2))] * dims, [draw(st.integers(0, 1))] * dims
        return randn(draw, n, inner, *room), randn(draw, out, inner, *[3] * dims), bias, stride, padding

    return make


def make_attention(draw):
    outer, (groups, each, length, width) = shape_of_rank(draw, 0, 1), sizes(draw, 4)
    heads = groups * each
    key, value = (randn(draw, *outer, groups, length, width) for _ in range(2))
    mask = randn(draw, *broadcast(draw, [*outer, heads]), length, length) if draw(st.booleans()) else None
    is_causal = mask is None and draw(st.booleans())
    return (randn(draw, *outer, heads, length, width), key, value, mask, 0.0, is_causal), {"enable_gqa": each > 1}


def make_along(*more):
    def make(draw):
        shape = shape_of_rank(draw, 1, 4)
        return randn(draw, *shape), draw(st.integers(-len(shape), len(shape) - 1)), *more

    return make


def make_norm(draw):
    outer, inner = shape_of_rank(draw, 0, 3), shape_of_rank(draw, 1, 2)
    return randn(draw, *outer, *inner), inner, *([randn(draw, *inner)] if draw(st.booleans()) else [])


def make_layer_norm(draw):
    outer, inner = shape_of_rank(draw, 0, 3), shape_of_rank(draw, 1, 2)
    affine = [randn(draw, *inner), randn(draw, *inner)] if draw(st.booleans()) else []
    return randn(draw, *outer, *inner), inner, *affine


def make_batch_norm(draw):
    n, c, room = draw(st.integers(2, 5)), draw(SIZE), shape_of_rank(draw, 0, 2)
    weights = [randn(draw, c), randn(draw, c)] if draw(st.booleans()) else [None, None]
    numbers = randn(draw, c), randn(draw, c).abs()
    return randn(draw, n, c, *room), *weights, *numbers, draw(st.booleans()), 0.1, 1e-5, False


def make_group_norm(draw):
    n, groups, each, size = sizes(draw, 4)
    c = groups * each
    return randn(draw, n, c, size), groups, *([randn(draw, c), randn(draw, c)] if draw(st.booleans()) else [])


def make_pool(dims, is_adaptive=False):
    def make(draw):
        outer = sizes(draw, draw(st.integers(1, 2)))  # with samples, or one sample alone
        room = [draw(st.integers(3, 5)) for _ in range(dims)]
        return randn(draw, *outer, *room), [draw(st.integers(1, 2))] * dims

    return make


def make_reduced(draw):
    shape = shape_of_rank(draw, 1, 4)
    dims = draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape)))
    dims = [dim - len(shape) if draw(st.booleans()) else dim for dim in dims]
    return randn(draw, *shape), dims, draw(st.booleans())


def make_vector_norm(draw):
    source, dims, keep = make_reduced(draw)
    return source, draw(st.sampled_from([1, 2])), dims or None, keep


def make_embedding(draw):
    rows, width = draw(st.integers(2, 6)), draw(SIZE)
    return randn(draw, rows, width), randint(draw, rows, *shape_of_rank(draw, 0, 3))


def make_cat(draw):
    shape = shape_of_rank(draw, 1, 4)
    dim = draw(st.integers(0, len(shape) - 1))
    others = [[*shape[:dim], draw(SIZE), *shape[dim + 1 :]] for _ in range(draw(st.integers(0, 2)))]
    return [randn(draw, *one) for one in (shape, *others)], dim - draw(st.sampled_from([0, len(shape)]))


def make_stack(draw):
    shape = shape_of_rank(draw, 1, 3)
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    return [randn(draw, *shape) for _ in range(draw(st.integers(1, 3)))], dim


def make_gather(draw):
    shape = shape_of_rank(draw, 1, 4)
    dim = draw(st.integers(0, len(shape) - 1))
    index = [draw(st.integers(1, size)) if draw(st.booleans()) else size for size in shape]
    index[dim] = draw(SIZE)
    return randn(draw, *shape), dim - draw(st.sampled_from([0, len(shape)])), randint(draw, shape[dim], *index)


def make_cross_entropy(draw, most=2):
    n, classes, room = draw(SIZE), draw(st.integers(2, 6)), shape_of_rank(draw, 0, most)
    labels = randint(draw, classes, n, *room)
    ignored = int(labels.flatten()[0])
    weight = randn(draw, classes).abs() if draw(st.booleans()) else None
    return randn(draw, n, classes, *room), labels, weight, draw(st.sampled_from([0, 2])), ignored


def make_nll(draw):
    return make_cross_entropy(draw, 0)


def make_pair(draw):
    shape = shape_of_rank(draw, 0, 3)
    return randn(draw, *shape), randn(draw, *broadcast(draw, shape)), draw(st.sampled_from([0, 2]))


def make_entropy(draw):
    shape = shape_of_rank(draw, 0, 3)
    scores, labels = randn(draw, *shape).sigmoid(), randn(draw, *shape).sigmoid()
    weight = randn(draw, *broadcast(draw, shape)) if draw(st.booleans()) else None
    return scores, labels, weight, draw(st.sampled_from([0, 2]))


def make_entropy_of_scores(draw):
    *three, reduction = make_entropy(draw)
    positive = randn(draw, *broadcast(draw, list(three[0].shape))) if draw(st.booleans()) else None
    return *three, positive, reduction


MAKE = {
    aten.linear.default: make_linear,
    aten.addmm.default: make_addmm,
    aten.mm.default: make_mm,
    aten.bmm.default: make_bmm,
    aten.matmul.default: make_matmul,
    aten.baddbmm.default: make_baddbmm,
    aten._grouped_mm.default: make_grouped_mm,
    aten.einsum.default: make_einsum,
    aten.conv1d.default: make_conv(1),
    aten.conv2d.default: make_conv(2),
    aten.conv3d.default: make_conv(3),
    aten.scaled_dot_product_attention.default: make_attention,
    aten.softmax.int: make_along(),
    aten._softmax.default: make_along(False),
    aten.log_softmax.int: make_along(),
    aten._log_softmax.default: make_along(False),
    aten.layer_norm.default: make_layer_norm,
    aten.rms_norm.default: make_norm,
    aten._weight_norm.default: make_weight_norm,
    aten.batch_norm.default: make_batch_norm,
    aten.group_norm.default: make_group_norm,
    aten.max_pool1d.default: make_pool(1),
    aten.max_pool2d.default: make_pool(2),
    aten.avg_pool1d.default: make_pool(1),
    aten.avg_pool2d.default: make_pool(2),
    aten.adaptive_avg_pool1d.default: make_pool(1),
    aten.adaptive_avg_pool2d.default: make_pool(2),
    aten.mean.dim: make_reduced,
    aten.sum.dim_IntList: make_reduced,
    aten.amax.default: make_reduced,
    aten.sum.default: lambda draw: (randn(draw, *shape_of_rank(draw, 0, 4)),),
    aten.embedding.default: make_embedding,
    aten.cat.default: make_cat,
    aten.stack.default: make_stack,
    aten.linalg_vector_norm.default: make_vector_norm,
    aten.cumsum.default: make_along(),
    aten.gather.default: make_gather,
    aten.cross_entropy_loss.default: make_cross_entropy,
    aten.nll_loss.default: make_nll,
    aten.nll_loss_nd.default: make_cross_entropy,
    aten.mse_loss.default: make_pair,
    aten.l1_loss.default: make_pair,
    aten.huber_loss.default: make_pair,
    aten.smooth_l1_loss.default: make_pair,
    aten.binary_cross_entropy.default: make_entropy,
    aten.binary_cross_entropy_with_logits.default: make_entropy_of_scores,
}


def made_node(draw, target):
    args = MAKE[target](draw)
    args, kwargs = args if args and isinstance(args[-1], dict) else (args, {})
    return node_of(target, args, kwargs)


def every_choice(draw, node, parts):
    """What `choices` makes of each way in which one input may lie already, and of undecided weights."""
    inputs = tensor_inputs(node)
    spec = spec_of(node)
    tried = set()
    for number, (source, labels) in enumerate(zip(inputs, spec.inputs, strict=True)):
        for dim, label in enumerate(labels):
            size = source.meta["val"].shape[dim]
            if label is None or size < 2:
                continue
            placements = [None] * len(inputs)
            placements[number] = Split(dim, draw(blocks_of(size)))
            options = Options(parts, {}, {}, set(), set())
            for choice in choices(node, placements, [True] * len(inputs), options):
                if choice.kind == "plain" and choice.is_split:
                    tried.add(label)
                    yield choice
    assert tried or parts > 1, "without ranks to share between every label can be split"


def run_piece(node, choice, part, parts):
    """The operation on one rank's pieces; a bias is added by the first rank alone where parts are summed."""
    spec, inputs = spec_of(node), tensor_inputs(node)
    local = {}
    for number, (source, placement) in enumerate(zip(inputs, choice.inputs, strict=True)):
        local[source] = piece(source.meta["val"], placement, part, parts).clone()
        if choice.after is not None and number == spec.bias and part > 0:
            local[source].zero_()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: local[source])
    return node.target(*args, **kwargs)


def check_choice(node, choice, parts):
    whole = node.meta["val"]
    results = [run_piece(node, choice, part, parts) for part in range(parts)]
    if choice.after is not None:
        torch.testing.assert_close(sum(results), whole, rtol=1e-10, atol=1e-12, equal_nan=True)
        return
    for part, result in enumerate(results):
        torch.testing.assert_close(
            result, piece(whole, choice.output, part, parts), rtol=1e-10, atol=1e-12, equal_nan=True
        )


@pytest.fixture(autouse=True, scope="module")
def float64_everywhere():
    with grouped_products_in_float64():
        yield


def test_every_rule_is_tried():
    assert set(MAKE) == set(rules._RULES)


@pytest.mark.parametrize("target", MAKE, ids=str)
@given(data=st.data())
@MANY
def test_rules_for_pieces_give_a_piece_or_a_part_of_the_sum(target, data):
    node = made_node(data.draw, target)
    assume(spec_of(node) is not None)
    parts = data.draw(st.integers(2, 3))
    # A rank may have nothing of an uneven split; some operations refuse empty tensors, which a dry run notices.
    for choice in every_choice(data.draw, node, parts):
        has_some = all(
            placement is None or all(placement.size(part, parts) for part in range(parts))
            for placement in (*choice.inputs, choice.output)
        )
        if has_some:
            check_choice(node, choice, parts)


def pointwise_operations():
    """Every operation that torch itself calls pointwise and whose required arguments are tensors."""
    found = {}
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = getattr(packet, overload)
            is_one = torch.Tag.pointwise in target.tags or name in rules._ALSO_POINTWISE
            needed = [a for a in target._schema.arguments if not a.has_default_value()]
            if is_one and not target._schema.is_mutable and all(str(a.type) == "Tensor" for a in needed):
                found[target] = len(needed)
    return found


POINTWISE = pointwise_operations()


@pytest.mark.parametrize("target", POINTWISE, ids=str)
@given(data=st.data())
@settings(deadline=None, max_examples=3, phases=[Phase.generate])
def test_a_pointwise_operation_on_pieces_is_a_piece_of_it(target, data):
    shape = [data.draw(st.integers(2, 4)) for _ in range(data.draw(st.integers(1, 3)))]
    args = [randn(data.draw, *(shape if number == 0 else broadcast(data.draw, shape))) for number in range(9)]
    node = try_node(target, args[: POINTWISE[target]])
    if node is None:
        return
    spec = spec_of(node)
    if spec is None:
        return
    for dim, size in enumerate(shape):
        split = Split(dim, data.draw(blocks_of(size)))
        placements = [split if n == 0 else None for n in range(len(tensor_inputs(node)))]
        for choice in choices(node, placements, [True] * len(placements), Options(2, {}, {}, set(), set())):
            if choice.is_split:
                check_choice(node, choice, 2)


def try_node(target, args):
    """The node, with numbers or booleans where the operation takes no fractions; None where it wants others yet."""
    for kind in (torch.float64, torch.int64, torch.bool):
        try:
            return node_of(target, tuple(one.to(kind) for one in args))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue
    return None


def test_most_pointwise_operations_are_tried():
    args = [torch.ones(2, 2, dtype=torch.float64)] * 9
    tried = [target for target, count in POINTWISE.items() if try_node(target, args[:count]) is not None]
    assert len(tried) > 120, len(tried)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linear.default, (torch.ones(3), torch.ones(3))),
        (aten.addmm.default, (torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))),
        (aten.matmul.default, (torch.ones(3), torch.ones(3))),
        (aten.einsum.default, ("...i,i->...", [torch.ones(2, 3), torch.ones(3)])),
        (aten.einsum.default, ("ii->i", [torch.ones(3, 3)])),
        (aten.einsum.default, ("ij,k->k", [torch.ones(2, 3), torch.ones(3)])),
        (aten.conv2d.default, (torch.ones(2, 4, 3, 3), torch.ones(4, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 2)),
        (aten.conv2d.default, (torch.ones(4, 3, 3), torch.ones(4, 4, 3, 3))),
        (aten.cross_entropy_loss.default, (torch.ones(4), torch.tensor(2))),
        (aten.cross_entropy_loss.default, (torch.ones(2, 4), torch.tensor([2, 1]))),
        (aten.mse_loss.default, (torch.ones(2, 4), torch.ones(2, 4))),
        (aten.sort.default, (torch.ones(4),)),
    ],
)
def test_what_no_rule_covers_runs_whole(target, args):
    assert spec_of(node_of(target, args)) is None
