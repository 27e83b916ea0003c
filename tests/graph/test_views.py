"""Rearranging a piece gives the piece of the rearranged whole: every rule of `reshape_rules.py` on random shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.graph import reshape_rules as views
from paceline.graph.placement import Split, flattened, unflattened
from paceline.graph.reshape_rules import carry, local_arguments, shape_of

from support.operations import blocks_of, node_of, piece, shape_of_rank, split_of

aten = torch.ops.aten
MANY = settings(deadline=None, max_examples=60)


def regrouped(draw, shape):
    """Another shape of as many elements: dimensions merged, then some taken apart."""
    merged = []
    for size in shape:
        if merged and draw(st.booleans()):
            merged[-1] *= size
        else:
            merged.append(size)
    result = []
    for size in merged:
        while size > 1 and draw(st.booleans()):
            factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            result.append(factor)
            size //= factor
        result.append(size)
    return result


def dim_of(draw, shape, is_new=False):
    rank = len(shape) + is_new
    return draw(st.integers(-rank, rank - 1))


def sections(draw, size):
    return list(draw(blocks_of(size)))


def make_reshape(draw, shape):
    return (regrouped(draw, shape),)


def make_like(draw, shape):
    return (torch.zeros(regrouped(draw, shape)),)


def make_flatten(draw, shape):
    first = draw(st.integers(0, len(shape) - 1))
    return first, draw(st.integers(first, len(shape) - 1))


def make_unflatten(draw, shape):
    dim = draw(st.integers(0, len(shape) - 1))
    return dim, regrouped(draw, [shape[dim]])


def make_two_dims(draw, shape):
    return dim_of(draw, shape), dim_of(draw, shape)


def make_permute(draw, shape):
    order = draw(st.permutations(range(len(shape))))
    return ([dim - len(shape) if draw(st.booleans()) else dim for dim in order],)


def make_unsqueeze(draw, shape):
    return (dim_of(draw, shape, is_new=True),)


def make_dim(draw, shape):
    return (dim_of(draw, shape),)


def make_dims(draw, shape):
    return (draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape))),)


def make_expand(draw, shape):
    kept = [draw(st.sampled_from([size, -1])) if size > 1 else draw(st.integers(1, 3)) for size in shape]
    return ([draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))] + kept,)


def make_select(draw, shape):
    dim = dim_of(draw, shape)
    return dim, draw(st.integers(-shape[dim], shape[dim] - 1))


def make_slice(draw, shape):
    dim = dim_of(draw, shape)
    ends = st.none() | st.integers(-shape[dim], shape[dim]) | st.just(2**63 - 1)
    return dim, draw(ends), draw(ends), draw(st.sampled_from([1, 1, 1, 2]))


def make_split(draw, shape):
    dim = dim_of(draw, shape)
    return draw(st.integers(1, shape[dim])), dim


def make_split_sizes(draw, shape):
    dim = dim_of(draw, shape)
    return sections(draw, shape[dim]), dim


MAKE = {
    aten.view.default: make_reshape,
    aten.reshape.default: make_reshape,
    aten._unsafe_view.default: make_reshape,
    aten.flatten.using_ints: make_flatten,
    aten.unflatten.int: make_unflatten,
    aten.view_as.default: make_like,
    aten.reshape_as.default: make_like,
    aten.split.Tensor: make_split,
    aten.split_with_sizes.default: make_split_sizes,
    aten.split.sizes: make_split_sizes,
    aten.chunk.default: make_split,
    aten.transpose.int: make_two_dims,
    aten.t.default: lambda draw, shape: (),
    aten.numpy_T.default: lambda draw, shape: (),
    aten.permute.default: make_permute,
    aten.unsqueeze.default: make_unsqueeze,
    aten.squeeze.dim: make_dim,
    aten.squeeze.dims: make_dims,
    aten.squeeze.default: lambda draw, shape: (),
    aten.expand.default: make_expand,
    aten.select.int: make_select,
    aten.slice.Tensor: make_slice,
    aten.unbind.int: make_dim,
    aten.flip.default: make_dims,
}


def test_every_rule_is_tried():
    assert set(MAKE) == set(views._RULES)


def check_pieces(node, whole, split, parts):
    """Every rank's piece rearranged is the piece of the whole rearranged, if the rule keeps the split at all."""
    out = carry(node, split, parts)
    if out is None:
        return False
    for part in range(parts):
        target, rest = local_arguments(node, split, out, part, parts)
        found = target(piece(whole, split, part, parts), *rest)
        outputs = node.meta["val"] if isinstance(out, list) else [node.meta["val"]]
        for full, local, placement in zip(
            outputs, found if isinstance(out, list) else [found], out if isinstance(out, list) else [out], strict=True
        ):
            assert placement is None or sum(placement.blocks) == full.shape[placement.dim]
            expected = piece(full, placement, part, parts)
            assert local.shape == expected.shape
            assert torch.equal(local, expected)
    return True


@pytest.mark.parametrize("target", MAKE, ids=str)
@given(data=st.data())
@MANY
def test_a_rearranged_piece_is_the_piece_of_the_rearranged(target, data):
    most = 2 if target in (aten.t.default, aten.numpy_T.default) else 4
    shape = shape_of_rank(data.draw, 1, most)
    assume(max(shape) > 1)
    whole = torch.arange(math.prod(shape)).view(shape)
    node = node_of(target, (whole, *MAKE[target](data.draw, shape)))
    check_pieces(node, whole, data.draw(split_of(tuple(shape))), data.draw(st.integers(1, 4)))


@pytest.mark.parametrize(
    ("target", "shape", "rest", "split", "out"),
    [
        # Heads: (batch, length, heads * width) as heads, and back; a fused q, k, v.
        (aten.view.default, (2, 5, 32), ([2, 5, 4, 8],), Split(2, (32,)), Split(2, (4,))),
        (aten.reshape.default, (2, 5, 4, 8), ([2, 5, 32],), Split(2, (4,)), Split(2, (32,))),
        (aten.view.default, (2, 5, 96), ([2, 5, 3, 4, 8],), Split(2, (32, 32, 32)), Split(3, (4,))),
        (aten.view.default, (10, 32), ([2, 5, 32],), Split(1, (32,)), Split(2, (32,))),
        (aten.split.Tensor, (5, 96), (32, 1), Split(1, (32, 32, 32)), [Split(1, (32,))] * 3),
        (aten.slice.Tensor, (5, 96), (1, 32, 96), Split(1, (32, 32, 32)), Split(1, (32, 32))),
        (aten.transpose.int, (2, 5, 4, 8), (1, 2), Split(2, (4,)), Split(1, (4,))),
        # What can't be kept: three heads on two ranks, a cut across what a split has not taken apart.
        (aten.view.default, (2, 5, 24), ([2, 5, 3, 8],), Split(2, (24,)), None),
        (aten.view.default, (2, 6), ([12],), Split(1, (5, 1)), Split(0, (5, 1, 5, 1))),
        (aten.view.default, (6, 2), ([12],), Split(0, (5, 1)), None),
        (aten.split.Tensor, (5, 96), (32, 1), Split(1, (96,)), None),
        (aten.select.int, (4, 6), (0, 1), Split(0, (4,)), None),
        (aten.unbind.int, (4, 6), (0,), Split(0, (4,)), None),
        (aten.flip.default, (4, 6), ([0],), Split(0, (4,)), None),
    ],
)
def test_what_transformers_do(target, shape, rest, split, out):
    whole = torch.arange(math.prod(shape)).view(shape)
    node = node_of(target, (whole, *rest))
    assert carry(node, split, 2) == out
    assert check_pieces(node, whole, split, 2) == (out is not None)


@given(st.data())
@MANY
def test_a_split_seen_as_a_row_and_back_is_the_same_piece(data):
    shape = tuple(shape_of_rank(data.draw, 1, 4))
    assume(max(shape) > 1)
    split, parts = data.draw(split_of(shape)), data.draw(st.integers(1, 4))
    assume(split.is_even(parts))
    row = flattened(split, shape)
    back = unflattened(row, shape, parts)
    assert back is not None
    whole = torch.arange(math.prod(shape)).view(shape)
    for part in range(parts):
        expected = piece(whole, split, part, parts)
        assert torch.equal(piece(whole, back, part, parts).reshape(-1), expected.reshape(-1))
        assert torch.equal(piece(whole.view(-1), Split(0, row), part, parts), expected.reshape(-1))


def test_the_shape_of_a_node_is_that_of_its_value():
    assert shape_of(node_of(aten.t.default, (torch.zeros(2, 3),))) == (3, 2)
