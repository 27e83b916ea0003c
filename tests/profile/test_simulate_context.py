"""A simulated step over a split sequence holds and sends what a real one does, on every rank."""

from __future__ import annotations

import pytest

from support.attention_models import long_workload
from support.simulated import check_simulation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["rotary", "alibi"])
@pytest.mark.parametrize("line", ["context=2,context_by=ring", "context=2,context_by=heads", "context=2,tensor=2"])
def test_it_is_the_real_one(name, line):
    check_simulation(long_workload, name, line)
