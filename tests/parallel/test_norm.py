"""The norm of the whole gradient."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.squared_norm import square_norm_of
from paceline.parallel.norm import global_norm


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 2_048_000])
def test_a_large_tensor_has_the_norm_of_its_pieces(numel):
    """Where float32 adds up squares in one go, the whole has another norm than its halves together."""
    parameter = torch.nn.Parameter(torch.empty(numel))
    parameter.grad = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-3
    found = float(global_norm([parameter], {}, []))
    assert found == pytest.approx(float(parameter.grad.double().norm()), rel=2e-7)


def test_tensors_together_have_the_norm_of_all():
    random = torch.Generator().manual_seed(2)
    values = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for numel in (1, 7, 5000):
            values.append((torch.randn(numel, generator=random) * 1e-3).to(dtype))
    expected = sum(float(value.double().square().sum()) for value in values)
    found = square_norm_of(values)
    assert found.dtype == torch.float64
    # On a CPU float32 adds up in one go; norms in bfloat16 would be off by 1e-3.
    assert float(found) == pytest.approx(expected, rel=1e-5)
