"""STS-B's pairs of sentences from the authors' own files, or made-up ones, and the features of a sentence."""

from __future__ import annotations

import hashlib
import itertools
import lzma
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.nouns.errors import DataError, UsageError

BUCKETS, LENGTH = 16384, 128  # features, and the most of a sentence
PARTS = ("train", "dev", "test")
_WHERE = (
    "take Stsbenchmark.tar.gz from https://ixa2.si.ehu.eus/stswiki/index.php/STSbenchmark; "
    "without --data pairs are made up"
)


class Pair(NamedTuple):
    """Two sentences and how much they mean the same, 0 to 5."""

    first: str
    second: str
    score: float


def read_pairs(folder: Path | None) -> tuple[str, dict[str, list[Pair]]]:
    """The name of the data and its pairs by part; made up where `folder` is None.

    Raises:
        UsageError: the folder or a file is missing.
        DataError: a row can't be read.
    """
    if folder is None:
        return "made-up pairs", {
            part: make_up(count, part) for part, count in zip(PARTS, (3000, 500, 500), strict=True)
        }
    if not folder.is_dir():
        raise UsageError(f"--data {folder}", "there is no such folder", _WHERE)
    return "STS-B", {part: _read(folder, f"sts-{part}.csv") for part in PARTS}


def _read(folder: Path, name: str) -> list[Pair]:
    """Rows of genre, file, year, number, score, sentence and sentence, and perhaps their licences; no quoting."""
    plain, packed = folder / name, folder / f"{name}.xz"
    if not plain.is_file() and not packed.is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise UsageError(f"--data {folder} should hold {name} (or {name}.xz)", f"it holds {there}", _WHERE)
    path = plain if plain.is_file() else packed
    try:
        content = path.read_bytes() if path == plain else lzma.decompress(path.read_bytes())
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read", str(error), "download it anew") from None
    return [_pair(f"{path}, line {number}", line.rstrip("\r")) for number, line in enumerate(lines, start=1)]


def _pair(where: str, line: str) -> Pair:
    cells = line.split("\t")
    if len(cells) < 7:
        found = f"it has {len(cells)}"
        raise DataError(f"{where}: a row of 7 columns separated by tabs", found, "mend that line or take it out")
    try:
        score = float(cells[4])
    except ValueError:
        score = math.nan
    if not 0 <= score <= 5:
        raise DataError(f"{where}: a score from 0 to 5", f"it is {cells[4]!r}", "mend that line or take it out")
    if not (cells[5].strip() and cells[6].strip()):
        raise DataError(f"{where}: two sentences", "one is empty", "mend that line or take it out")
    return Pair(cells[5], cells[6], score)


# Words that mean the same stand together; two sentences mean the same by the share of places where theirs do.
_SLOTS = tuple(
    tuple(tuple(word.strip() for word in same.split("/")) for same in place.split(","))
    for place in (
        "man/guy, woman/lady, child/kid, dog/hound, cat/kitten, rabbit/bunny",
        "plays with/toys with, watches/looks at, carries/holds, paints/draws, finds/discovers",
        "small/little, large/big, old/ancient, beautiful/pretty, broken/damaged",
        "guitar, stone/rock, car/automobile, picture/image, boat/ship, ball",
        "in the garden/in the yard, on the street/on the road, at home/in the house, by the sea/on the shore",
    )
)


def digest_of(parts: Mapping[str, list[Pair]]) -> str:
    """Return a text that differs where the pairs do."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def make_up(count: int, part: str) -> list[Pair]:
    """Pairs of sentences of five places each."""
    draw = random.Random(part)
    pairs = []
    for _ in range(count):
        first = [draw.choice(slot) for slot in _SLOTS]
        kept = draw.randint(0, len(_SLOTS))
        second = [one if place < kept else draw.choice(_SLOTS[place]) for place, one in enumerate(first)]
        same = sum(one == other for one, other in zip(first, second, strict=True))
        texts = ["A {} {} a {} {} {}.".format(*(draw.choice(words) for words in one)) for one in (first, second)]
        pairs.append(Pair(*texts, 5 * same / len(_SLOTS)))
    return pairs


def features_of(sentence: str) -> list[int]:
    """The numbers of its words and of their three-letter parts, 1 to BUCKETS - 1, as fastText has them.

    A hash instead of a vocabulary: a word that was never seen still has parts that were.
    """
    found = []
    for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
        found.append(f"={word}")
        marked = f"<{word}>"
        found += [marked[at : at + 3] for at in range(len(marked) - 2)] if word.isalnum() else []
    return [1 + zlib.crc32(text.encode()) % (BUCKETS - 1) for text in found[:LENGTH]] or [1]


def padded(features: list[int]) -> torch.Tensor:
    """The same as (LENGTH,), with zeros behind. One length for all: under `tensor` each new one costs a capture."""
    return torch.tensor(features + [0] * (LENGTH - len(features)))


def rarity(sentences: Iterable[str]) -> torch.Tensor:
    """The logarithm of 1 + the inverse document frequency's of every feature, (BUCKETS,): a softmax's weights."""
    counted = [set(features_of(sentence)) for sentence in sentences]
    seen = Counter(itertools.chain.from_iterable(counted))
    counts = torch.tensor([float(seen[number]) for number in range(BUCKETS)])
    return (1 + (len(counted) / (1 + counts)).log().clamp(min=0)).log()


class Pairs(torch.utils.data.Dataset):
    """Each item: the features of both sentences, (2, LENGTH), and the score from 0 to 1.

    A share `drop` of the features is left out of each sentence, others each time: drawn here, it depends on the seed
    and the sample alone, not on the number of ranks.
    """

    def __init__(self, pairs: list[Pair], drop: float = 0.0) -> None:
        self.features = [[features_of(pair.first), features_of(pair.second)] for pair in pairs]
        self.scores = [pair.score / 5 for pair in pairs]
        self.drop = drop

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.stack([padded(one) for one in self.features[row]])
        if self.drop > 0:
            is_left_out = torch.rand(features.shape, dtype=torch.float64) < self.drop
            is_left_out[:, 0] = False  # something is left of every sentence
            features = features.masked_fill(is_left_out, 0)
        return features, torch.tensor(self.scores[row])
