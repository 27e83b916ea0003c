"""What `bench horovod` and `bench accelerate` make of the seconds that their contestants report."""

from __future__ import annotations

import pytest

from compare import accelerate_scripts, horovod_names
from compare.by_turns import run_by_turns, table
from compare.horovod_job import TENSORS, resnet50_shapes, sizes
from paceline.nouns.errors import UsageError

SUBJECTS = {
    "horovod": (horovod_names, ["names", "group", "raw_calls", "raw_flat"], "drop_in_over_raw"),
    "accelerate": (accelerate_scripts, ["ours", "accelerate"], "script_over_accelerate"),
}


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
    assert horovod_names.ratios(seconds) == {"drop_in_over_raw": ratio, "group_over_raw": 2 * ratio}


def test_a_script_is_compared_by_its_rate():
    assert accelerate_scripts.ratios({"ours": [1.0, 2.0, 1.0], "accelerate": [1.5, 3.0, 9.0]}) == {
        "script_over_accelerate": 1.5
    }


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_round_is_refused(subject, tmp_path):
    bench, _, _ = SUBJECTS[subject]
    with pytest.raises(UsageError, match="--rounds is 0"):
        run_by_turns(bench.JOB, tmp_path, 0, print, bench.ratios)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_it_measures_and_shows(subject, tmp_path):
    bench, names, ratio = SUBJECTS[subject]
    result = run_by_turns(bench.JOB, tmp_path, 1, lambda text: None, bench.ratios)
    assert [row["name"] for row in result["rows"]] == names
    assert result["ratios"][ratio] > 0
    assert ratio in table(result)
