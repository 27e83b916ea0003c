"""A simulated step over spread experts holds and sends what a real one does, where experts are used evenly."""

from __future__ import annotations

import pytest

from support.expert_models import long_workload
from support.simulated import check_simulation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("line", ["expert=2", "replicate=2,expert=2"])
def test_it_is_the_real_one(line):
    check_simulation(long_workload, "even", line)
