"""docs/tutorial.md: its commands print what it shows, and its pictures are those of the present product."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from support.documented_commands import ROOT
from support.jobs import command, marked

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
STEPS = [block.splitlines() for block in re.findall(r"^```\n\$ (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])"
CODES = {"crash": 1}  # the last word of a command that fails on purpose


def pictures():
    spec = importlib.util.spec_from_file_location("tutorial_pictures", ROOT / "scripts" / "tutorial_pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def is_as_shown(line: str, shown: str) -> bool:
    """True if a line is one that the page shows: the same words, and numbers that differ by at most 3 %."""
    if shown.endswith("..."):
        return line.startswith(shown[:-3])
    if re.sub(NUMBER, "#", line).split() != re.sub(NUMBER, "#", shown).split():
        return False
    pairs = zip(re.findall(NUMBER, line), re.findall(NUMBER, shown), strict=True)
    return all(
        math.isclose(*(float(text.replace(",", "")) for text in pair), rel_tol=0.03, abs_tol=1e-3) for pair in pairs
    )


def run(folder, text: str) -> list[str]:
    """The lines that a command prints, stdout after stderr: the page shows them in the order of their text."""
    words = text.split()
    full = command(*words[1:]) if words[0] == "paceline" else [sys.executable, *words[1:]]
    done = subprocess.run(full, cwd=folder, capture_output=True, text=True, timeout=300, env=marked(folder, {}))
    assert done.returncode == CODES.get(words[-1], 0), done.stdout + done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def shapes(svg: str):
    """The kinds of elements of a picture, its texts, and its numbers."""
    found = []
    for element in ElementTree.fromstring(svg):
        sizes = [float(element.get(name)) for name in ("x", "y", "width", "height") if element.get(name)]
        found.append((element.tag, element.get("fill"), element.text, sizes))
    return found


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("step 20  loss 2.5064", True),
        ("step 20 loss 2.5070", True),
        ("step 21  loss 2.5064", False),
        ("step 20  loss 2.7", False),
        ("[0] step 20  loss 2.5064", False),
    ],
)
def test_lines_are_compared_by_words_and_numbers(line, same):
    assert is_as_shown(line, "step 20  loss 2.5064") is same


def test_the_page_shows_each_picture_and_each_plan():
    names = set(re.findall(r"\(tutorial/(\w+\.svg)\)", PAGE))
    assert names == {path.name for path in (ROOT / "docs" / "tutorial").iterdir()}
    assert all(path.stat().st_size < 60_000 for path in (ROOT / "docs" / "tutorial").iterdir())
    ran = [lines[0] for lines in STEPS]
    for name, plan in pictures().RUNS.items():
        assert f"paceline run --job {name} --plan {plan} letters.py" in ran


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """A folder in which the tutorial was followed, and what each command printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "letters.py").write_text(pictures().letters())
    return folder, [run(folder, said) for said, *_ in STEPS]


@pytest.mark.integration
def test_every_command_of_the_tutorial_prints_what_it_shows(printed):
    assert len(STEPS) >= 12
    for (said, *expected), lines in zip(STEPS, printed[1], strict=True):
        for shown in expected:
            assert any(is_as_shown(line, shown) for line in lines), (said, shown, lines)


@pytest.mark.complete  # their commands: tests/cli/test_plan_memory.py; that each is drawn and shown: above
def test_pictures_of_the_tutorial_show_the_present_product(printed):
    made = pictures()
    for name, svg in made.draw(made.gather(printed[0])).items():
        now, kept = shapes(svg), shapes((ROOT / "docs" / "tutorial" / name).read_text())
        assert len(now) == len(kept), name
        for new, old in zip(now, kept, strict=True):
            assert new[:2] == old[:2], (name, new, old)
            assert is_as_shown(new[2] or "", old[2] or ""), (name, new, old)
            assert new[3] == pytest.approx(old[3], rel=0.03, abs=2), (name, new, old)
