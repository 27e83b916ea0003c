"""Count the lines that a plain training loop changes for Paceline, Accelerate and Lightning Fabric.

    python benchmarks/loops/count.py [--markdown]

Each folder beside this file has one loop: `plain.py` for one process, and `with_NAME.py` for each library. A changed
line counts once, an added one once, a removed one once; blank lines and comments do not count.
"""

from __future__ import annotations

import argparse
from difflib import SequenceMatcher
from pathlib import Path

LOOPS = Path(__file__).parent
NAMES = ("classifier", "language_model", "gan", "tokens", "muon")
LIBRARIES = {"paceline": "Paceline", "accelerate": "Accelerate", "fabric": "Fabric"}
TITLES = {
    "classifier": "classifier, learning-rate scheduler",
    "language_model": "causal language model with its own `.loss`",
    "gan": "GAN with gradient penalty, two optimizers",
    "tokens": "token stream, gradients of two batches",
    "muon": "Muon and AdamW, gradients clipped",
}


def lines_of(text: str) -> list[str]:
    """Return the lines of a program that count."""
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def changed_lines(before: str, after: str) -> int:
    """Return how many lines differ between two programs."""
    blocks = SequenceMatcher(None, lines_of(before), lines_of(after), autojunk=False).get_opcodes()
    return sum(max(end - start, to - at) for kind, start, end, at, to in blocks if kind != "equal")


def count() -> dict[str, dict[str, int]]:
    """Return the changed lines by loop and library."""
    counts: dict[str, dict[str, int]] = {}
    for name in NAMES:
        plain = (LOOPS / name / "plain.py").read_text()
        counts[name] = {}
        for library in LIBRARIES:
            counts[name][library] = changed_lines(plain, (LOOPS / name / f"with_{library}.py").read_text())
    return counts


def rows() -> list[list[str]]:
    """Return the table: a head, and a row for each loop."""
    table = [["loop", *LIBRARIES.values()]]
    for name, by_library in count().items():
        table.append([TITLES[name], *(str(number) for number in by_library.values())])
    return table


def aligned() -> str:
    """Return the table for a terminal."""
    table = rows()
    width = max(len(row[0]) for row in table)
    return "\n".join(f"{row[0]:<{width}}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in table)


def markdown() -> str:
    """Return the table for a page."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows()]
    return "\n".join([head, "| --- |" + " ---: |" * len(LIBRARIES), *body])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Count the lines that a plain loop changes for each library.")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    print(markdown() if parser.parse_args().markdown else aligned())
