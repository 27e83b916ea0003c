"""Attention and exchanges over a split sequence: what one rank computes with all of it, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from paceline.comm.differentiable import take_piece
from paceline.graph.context.context_exchanges import AttentionSplit, SequenceExchanges

from support.ranks import preload, run_ranks

pytestmark = pytest.mark.slow
preload("paceline.graph.context.context_exchanges")

WIDTH = 4
# Of queries and keys: halves that mirror each other, one block, sizes that don't divide, a joined piece at the front.
EVEN = {2: ((8, -8), (8, -8)), 4: ((8, -8), (8, -8))}
SPLITS = [((8, -8), (8, -8)), ((16,), (16,)), ((9, -8), (9, -8)), ((13,), (13,)), ((1, 8, -8), (1, 8, -8))]
CROSSED = [((8, -8), (24,)), ((13,), (9, -9))]
MASKS = ("none", "rows", "hidden", "bias", "heads", "columns")


def whole_mask(kind, heads, queries, keys):
    generator = torch.Generator().manual_seed(3)
    if kind == "none":
        return None
    if kind == "hidden":  # a row that sees nothing at all, and samples with another length
        mask = torch.rand(2, 1, queries, keys, generator=generator) > 0.4
        mask[0, 0, 3] = False
        mask[1, 0, :, keys // 2 :] = False
        return mask
    shape = {"rows": (queries, keys), "bias": (1, heads, queries, keys), "heads": (2, heads, queries, keys)}
    if kind == "columns":
        return torch.randn(2, 1, 1, keys, generator=generator, dtype=torch.float64)
    mask = torch.randn(shape[kind], generator=generator, dtype=torch.float64)
    return mask.requires_grad_() if kind == "bias" else mask


def attend(rank, cases):
    """For each case the worst difference of the result and of each gradient from one rank's."""
    import paceline
    from paceline.comm import api

    paceline.init()
    comm = api.world().comm
    exchanges = SequenceExchanges(comm)
    worst = []
    for blocks, heads, groups, members, kind, is_causal, width in cases:
        (rows, columns), queries, keys = blocks, sum(map(abs, blocks[0])), sum(map(abs, blocks[1]))
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, heads, queries, width), (2, groups, keys, width), (2, groups, keys, WIDTH)]
        full = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
        mask = whole_mask(kind, heads, queries, keys)
        out = F.scaled_dot_product_attention(*full, mask, is_causal=is_causal, enable_gqa=heads != groups)
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        leaves = full + [mask] * (kind == "bias")
        expected = [out, *torch.autograd.grad(out, leaves, upstream)]

        def piece(tensor, blocks):
            return take_piece(tensor, (tensor.dim() - 2, blocks), comm.rank, comm.size)

        own = [
            piece(tensor, b).detach().requires_grad_() for tensor, b in zip(full, (rows, columns, columns), strict=True)
        ]
        own_mask = mask
        if mask is not None and members == 1 and mask.shape[-2] > 1:
            own_mask = piece(mask, rows)
        split = AttentionSplit(rows, columns, members)
        made = exchanges.attention(*own, own_mask, is_causal, None, split)
        found = [made, *torch.autograd.grad(made, own + [mask] * (kind == "bias"), piece(upstream, rows))]
        wanted = [piece(tensor, b) for tensor, b in zip(expected, (rows, rows, columns, columns), strict=False)]
        if kind == "bias":
            comm.all_reduce(found[-1])
            wanted.append(expected[-1])
        worst.append(max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True)))
    return worst


def cases_of(ranks):
    cases = []
    for blocks, kind in itertools.product([*SPLITS, *CROSSED], MASKS):
        cases.append((blocks, 4, 4, 1, kind, False, WIDTH))
        cases.append((blocks, 4, 2, 1, kind, False, 6))  # values of another width than keys
        cases.append((blocks, 4, 4, 2, kind, False, WIDTH))
    for blocks, members in itertools.product([*SPLITS, *CROSSED], (1, 2)):
        cases.append((blocks, 4, 2, members, "none", True, WIDTH))
        cases.append((blocks, 8, 4, members, "none", True, 6))
    if ranks == 4:
        cases += [(blocks, 8, 4, 4, kind, False, WIDTH) for blocks, kind in itertools.product(SPLITS, MASKS)]
        cases.append((SPLITS[0], 4, 4, 4, "none", True, WIDTH))
    return cases


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_equals_that_of_one_rank(ranks):
    cases = cases_of(ranks)
    if ranks == 3:
        cases = [case for case in cases if case[3] == 1]
    results = run_ranks(ranks, attend, cases)
    wrong = {}
    for rank, worst in enumerate(results):
        for case, difference in zip(cases, worst, strict=True):
            if not difference < 1e-12:
                wrong[rank, *case] = difference
    assert not wrong, f"{len(wrong)} of {len(cases)}: {list(wrong.items())[:6]}"
