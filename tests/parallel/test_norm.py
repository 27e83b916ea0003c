"""The norm of the whole gradient."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.norm import global_norm


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 2_048_000])
def test_a_large_tensor_has_the_norm_of_its_pieces(numel):
    """Where float32 adds up squares in one go, the whole has another norm than its halves together."""
    parameter = torch.nn.Parameter(torch.empty(numel))
    parameter.grad = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-3
    found = float(global_norm([parameter], {}, []))
    assert found == pytest.approx(float(parameter.grad.double().norm()), rel=2e-7)
