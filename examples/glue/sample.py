"""Make up a small task in the form of SST-2, with a vocabulary, to try the example without GLUE's files.

    python sample.py data

writes data/SST-2/train.tsv, data/SST-2/dev.tsv and data/vocab.txt.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

TRAIN, DEV = 640, 64
GOOD, BAD = "funny moving bright tender", "dull clumsy cold noisy"
OTHERS = "the a film plot scene actor is was very often"


def row(number: int) -> str:
    """Make a sentence whose words say its label: something to learn."""
    numbers = random.Random(number)
    label = number % 2
    words = numbers.choices(OTHERS.split(), k=3 + number % 5) + numbers.choices((BAD, GOOD)[label].split(), k=2)
    numbers.shuffle(words)
    return f"{' '.join(words)}\t{label}\n"


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1])
    task = folder / "SST-2"
    task.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train.tsv", range(TRAIN)), ("dev.tsv", range(TRAIN, TRAIN + DEV))):
        (task / name).write_text("sentence\tlabel\n" + "".join(map(row, numbers)))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *f"{OTHERS} {GOOD} {BAD}".split()]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


if __name__ == "__main__":
    main()
