"""In float64 the person's code narrows nothing; what is judged does what it does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paceline.parallel.norm import global_norm
from paceline.verify.ranks.keep_float64 import _JUDGED, kept_wide


def test_a_narrower_dtype_is_ignored_and_everything_is_put_back():
    values, plain = torch.randn(3, 4, dtype=torch.float64), torch.Tensor.to
    with kept_wide(True):
        narrowed = [
            values.float(), values.bfloat16(), values.to(torch.float32), values.to("cpu", torch.float16),
            values.to(torch.zeros(1)), F.softmax(values, -1, dtype=torch.float32), values.sum(dtype=torch.float32),
        ]  # fmt: skip
        assert {one.dtype for one in narrowed} == {torch.float64}
        assert values.to(torch.int64).dtype == torch.int64
        assert torch.zeros(2, dtype=torch.int64).float().dtype == torch.float32
    assert values.float().dtype == torch.float32
    assert torch.Tensor.to is plain
    with kept_wide(False):
        assert values.float().dtype == torch.float32


def test_what_is_judged_is_left_alone():
    source = "def narrow(x):\n    return x.float(), x.to(__import__('torch').bfloat16)"
    names = {}
    exec(compile(source, f"{_JUDGED[0]}made_up.py", "exec"), names)
    assert global_norm.__code__.co_filename.startswith(_JUDGED)
    with kept_wide(True):
        one, other = names["narrow"](torch.ones(2, dtype=torch.float64))
    assert (one.dtype, other.dtype) == (torch.float32, torch.bfloat16)


def test_a_number_that_float32_cannot_hold_is_wide():
    """transformers' XGLM fills its masks so, which no model in float64 could otherwise."""
    lowest = torch.finfo(torch.float64).min
    with pytest.raises(RuntimeError, match="overflow"):
        torch.full((), lowest)
    with kept_wide(True):
        assert torch.full((), lowest).item() == lowest
        assert torch.full((), torch.finfo(torch.float32).min).dtype == torch.float32
        assert torch.full((2,), float("-inf")).dtype == torch.float32
        assert torch.full((), 1e300, dtype=torch.float64).item() == 1e300
