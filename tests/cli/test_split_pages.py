"""The examples of docs/context.md and docs/experts.md: their commands print what the pages show."""

from __future__ import annotations

import re

import pytest

from support.documented_commands import ROOT
from support.jobs import paceline

FILES = {"context": "long.py", "experts": "mixture.py"}
TEXTS = {page: (ROOT / "docs" / f"{page}.md").read_text() for page in FILES}
pytestmark = pytest.mark.slow


def shown(page: str) -> dict[str, str]:
    """What each command of a page prints there."""
    blocks = re.findall(r"^```\n\$ paceline (.*?)\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)
    return dict(blocks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    for page, file in FILES.items():
        start = f"^<!-- test: {re.escape(file)} -->\n```python\n"
        (example,) = re.findall(start + r"(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)
        (made / file).write_text(example)
    return made


def without_rounding(text: str) -> str:
    return re.sub(r"\d\.\de-\d+", "SMALL", text)


@pytest.mark.parametrize(("page", "command"), [(page, command) for page in FILES for command in shown(page)])
def test_a_command_prints_what_is_shown(page, command, folder):
    ended = paceline(folder, *command.split())
    assert ended.code == 0, ended.err
    assert without_rounding(ended.out) == without_rounding(shown(page)[command])


def test_each_page_shows_two_commands():
    assert [len(shown(page)) for page in FILES] == [2, 2]


def test_a_split_sequence_takes_the_memory_that_the_page_says(folder):
    peaks = []
    for plan in ((), ("--plan", "context=4")):
        ended = paceline(folder, "plan", *plan, "--explain-memory", "long.py")
        peaks += re.findall(r"^(?:peak of live tensors|activations) +(\S+ MiB)", ended.out, re.MULTILINE)
    activations, peak, activations_of_four, peak_of_four = peaks
    text = TEXTS["context"]
    assert f"predicts {peak} for one rank, and {peak_of_four} with" in text
    assert f"{activations} of\nactivations become {activations_of_four.removesuffix(' MiB')}." in text


def test_experts_on_two_ranks_train_as_on_one(folder):
    printed = [paceline(folder, "run", *ranks, "mixture.py").out for ranks in ((), ("--plan", "expert=2"))]
    alone, spread = (
        [float(loss) for loss in re.findall(r"^(?:\[0\] )?step \d: ([\d.]+)$", out, re.MULTILINE)] for out in printed
    )
    assert len(alone) == 4
    assert spread == pytest.approx(alone, abs=2e-4)
