"""Dropout by value: the same under any layout, a share of what it should be, and nothing drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.nouns.errors import WorkloadError
from paceline.verify.ranks.randomness import controlled, drop, keep, watched


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


class Permuted(nn.Module):
    def forward(self, x):
        return x[torch.randperm(len(x))]


@pytest.mark.parametrize("inner", [Noisy(), Permuted(), nn.RReLU()], ids=lambda m: type(m).__name__)
def test_what_draws_otherwise_is_named(inner):
    model = nn.Sequential(nn.Linear(4, 4), inner)
    with controlled(), pytest.raises(WorkloadError, match="1 draws some"), watched(model):
        model(torch.randn(3, 4))


RECURRENT = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "projected": (nn.LSTM, {"proj_size": 3}),
    "without biases": (nn.LSTM, {"bias": False}),
}


def rows_of(is_packed, is_batch_first):
    values = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if not is_batch_first:
        values = values.transpose(0, 1)
    if not is_packed:
        return values
    return nn.utils.rnn.pack_padded_sequence(values, [5, 4, 2], batch_first=is_batch_first)


def tensors(result):
    values, state = result
    return [getattr(values, "data", values), *(state if isinstance(state, tuple) else [state])]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_batch_first", [False, True])
@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_drop_by_value_between_them(kind, is_bidirectional, is_batch_first, is_packed):
    make, parts = RECURRENT[kind]
    settings = {"batch_first": is_batch_first, "bidirectional": is_bidirectional, "dtype": torch.float64, **parts}
    torch.manual_seed(0)
    model = make(4, 6, 3, dropout=0.4, **settings)
    values = rows_of(is_packed, is_batch_first)
    with controlled(is_off=True), watched(model):
        off = tensors(model(values))
    with controlled(), watched(model):
        dropped = tensors(model(values))
        again = tensors(model(values))
    model.dropout = 0.0
    plain = tensors(model(values))
    for one, other in zip(off, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(one, other) for one, other in zip(dropped, again, strict=True))
    assert not torch.allclose(dropped[0], plain[0])
    # Without torch's loop over the layers: each alone, and what the first and the second make dropped.
    ways = 2 if is_bidirectional else 1
    inner = values
    for layer in range(3):
        width = 4 if layer == 0 else ways * parts.get("proj_size", 6)
        alone = make(width, 6, 1, **settings)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.copy_(getattr(model, name.replace("_l0", f"_l{layer}")))
        inner, _ = alone(inner)
        if layer < 2 and is_packed:
            inner = inner._replace(data=drop(inner.data, 0.4, True, False))
        elif layer < 2:
            inner = drop(inner, 0.4, True, False)
    torch.testing.assert_close(getattr(inner, "data", inner), dropped[0], rtol=1e-12, atol=1e-14)
    model.dropout = 0.4
    model.eval()
    with controlled(), watched(model):
        for one, other in zip(tensors(model(values)), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
