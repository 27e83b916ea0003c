"""Dropout by value: the same under any layout, a share of what it should be, and nothing drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.nouns.errors import WorkloadError
from paceline.verify.ranks.randomness import controlled, keep, watched


def test_pieces_meet_the_same_fate_as_the_whole():
    values = torch.randn(64, 32, dtype=torch.float64)
    whole = keep(values, 0.3)
    assert torch.equal(torch.cat([keep(part, 0.3) for part in values.split(7)]), whole)
    assert torch.equal(torch.cat([keep(part, 0.3) for part in values.split(5, 1)], 1), whole)
    assert torch.equal(keep(values * (1 + 1e-15), 0.3), whole)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_is_about_right(share):
    dropped = 1 - keep(torch.randn(200_000, dtype=torch.float64), share).double().mean()
    assert abs(dropped - share) < 0.1


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.Dropout1d(0.5),
        nn.Dropout2d(0.5),
        nn.AlphaDropout(0.5),
        nn.TransformerEncoderLayer(8, 2, 16, 0.5),
    ],
    ids=lambda module: type(module).__name__,
)
def test_nothing_is_drawn_and_training_and_evaluation_differ(module):
    values = torch.randn(4, 6, 8)
    before = torch.get_rng_state()
    plain = F.dropout
    with controlled():
        one, two = module(values), module(values)
        module.eval()
        evaluated = module(values)
    assert torch.equal(one, two)
    assert not torch.equal(one, evaluated)
    assert torch.equal(torch.get_rng_state(), before)
    assert F.dropout is plain


def test_attention_is_torchs_own_but_for_what_is_dropped():
    query, key, value = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 6) > 0.3
    from paceline.verify.ranks.randomness import attention

    for named in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 0.5}):
        ours, torchs = attention(query, key, value, **named), F.scaled_dot_product_attention(query, key, value, **named)
        torch.testing.assert_close(ours, torchs)
    ours = attention(query, key[:, :2], value[:, :2], enable_gqa=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True))


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


@pytest.mark.parametrize("inner", [Noisy(), nn.LSTM(4, 4, 2, dropout=0.5), nn.RReLU()], ids=lambda m: type(m).__name__)
def test_what_draws_otherwise_is_named(inner):
    model = nn.Sequential(nn.Linear(4, 4), inner)
    with controlled(), pytest.raises(WorkloadError, match="1 draws some"), watched(model):
        model(torch.randn(3, 4))
