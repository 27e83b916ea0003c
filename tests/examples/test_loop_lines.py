"""The loops of benchmarks/loops: the table of changed lines, and Paceline's end where the plain ones do."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from loops import count

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
ROOT = Path(__file__).parents[2]
MOST = 5


def prepared(name: str, program: str) -> str:
    """A program in float64, with the batches and the noise that do not depend on who draws them."""
    text = (count.LOOPS / name / program).read_text().replace("shuffle=True", "shuffle=False")
    text = re.sub(r"^( +)(noise = )", r"\1torch.manual_seed(7)\n\1\2", text, flags=re.MULTILINE)
    return "import torch\ntorch.set_default_dtype(torch.float64)\n" + text


def parameters(rank: int, program: str) -> list[list[float]]:
    import torch

    ended = runpy.run_path(program)
    models = [value for value in ended.values() if isinstance(value, torch.nn.Module)]
    return [parameter.detach().flatten().tolist() for model in models for parameter in model.parameters()]


def test_every_changed_line_counts_once():
    before = "a\nb\n\n# said\nc\n"
    assert count.changed_lines(before, before.replace("# said", "# says\n")) == 0
    assert count.changed_lines(before, "a\nB\nc\n") == 1
    assert count.changed_lines(before, "a\nb\nc\nd\n") == 1
    assert count.changed_lines(before, "a\nc\n") == 1
    assert count.changed_lines(before, "a\nB\nnew\nc\n") == 2


def test_loop_lines_of_paceline_are_at_most_five_and_the_fewest():
    assert sorted(count.count()) == sorted(path.parent.name for path in count.LOOPS.glob("*/plain.py"))
    for name, lines in count.count().items():
        assert 0 < lines["paceline"] <= MOST, name
        assert lines["paceline"] <= min(lines["accelerate"], lines["fabric"]), name


def test_the_page_has_the_table():
    assert count.markdown() in (ROOT / "docs" / "loops-lines.md").read_text()


@pytest.mark.parametrize("name", count.NAMES)
def test_one_process_ends_as_the_plain_loop(tmp_path, name):
    programs = {}
    for program in ("plain.py", "with_paceline.py"):
        programs[program] = tmp_path / program
        programs[program].write_text(prepared(name, program))
    (plain,) = run_ranks(1, parameters, str(programs["plain.py"]))
    (ours,) = run_ranks(1, parameters, str(programs["with_paceline.py"]))
    assert plain
    assert len(ours) == len(plain)
    for here, there in zip(ours, plain, strict=True):
        assert here == pytest.approx(there, rel=1e-9, abs=1e-12)
