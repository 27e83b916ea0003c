"""What `bench horovod` makes of the seconds that its contestants report."""

from __future__ import annotations

import pytest

from compare.horovod_job import TENSORS, resnet50_shapes, sizes
from compare.horovod_names import ratios, run_horovod, table
from paceline.nouns.errors import UsageError


def test_the_tensors_are_those_of_a_resnet50():
    counts = []
    for shape in resnet50_shapes():
        count = 1
        for length in shape:
            count *= length
        counts.append(count)
    assert sum(counts) == 25_557_032  # torchvision's resnet50
    assert len(sizes()) == TENSORS


@pytest.mark.parametrize(("flat", "ratio"), [(3.0, 2.0), (1.0, 1.0)])
def test_names_are_compared_with_the_faster_raw_way(flat, ratio):
    seconds = {"names": [1.0] * 3, "group": [0.5] * 3, "raw_calls": [2.0] * 3, "raw_flat": [flat] * 3}
    assert ratios(seconds) == {"drop_in_over_raw": ratio, "group_over_raw": 2 * ratio}


def test_no_round_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--rounds is 0"):
        run_horovod(tmp_path, 0, print)


def test_it_measures_and_shows(tmp_path):
    result = run_horovod(tmp_path, 1, lambda text: None)
    assert [row["name"] for row in result["rows"]] == ["names", "group", "raw_calls", "raw_flat"]
    assert result["ratios"]["drop_in_over_raw"] > 0
    assert "drop_in_over_raw" in table(result)
