"""Sentences with a label: SST-2's files or made-up ones, their vocabulary, masks, and batches of similar length."""

from __future__ import annotations

import lzma
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import BertWordPieceTokenizer, Tokenizer

from paceline.nouns.errors import DataError, UsageError

SOURCE = "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip (or gluebenchmark.com/tasks)"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD_TO = 8  # batches are padded to a multiple of it: under `tensor` each new shape is captured anew
MASKED = 0.15  # of the tokens, as in BERT
NOT_PREDICTED = -100


class Rows(NamedTuple):
    """Sentences, their classes (0 negative, 1 positive), and what the set is called."""

    texts: list[str]
    labels: list[int]


def read(data: Path | None, limit: int | None = None) -> tuple[Rows, Rows, str]:
    """Return training rows, dev rows and the name of the set: SST-2 in the folder `data`; made up where None.

    Args:
        data: SST-2's folder, or the folder of GLUE that it is in.
        limit: training rows to read at most.

    Raises:
        UsageError: a file is missing.
        DataError: a row is broken.
    """
    if data is None:
        count = limit or 8000
        return make_up(count, 0), make_up(min(count, 800), 1), "made-up reviews"
    folder = data / "SST-2" if (data / "SST-2").is_dir() else data
    paths = [find(folder, name) for name in ("train.tsv", "dev.tsv")]
    return read_rows(paths[0], limit), read_rows(paths[1]), "SST-2"


def find(folder: Path, name: str) -> Path:
    """Return the file of that name, or the one compressed as NAME.xz.

    Raises:
        UsageError: there is neither.
    """
    for path in (folder / name, folder / f"{name}.xz"):
        if path.is_file():
            return path
    there = "there is no such folder"
    if folder.is_dir():
        there = f"the folder holds {', '.join(sorted(path.name for path in folder.iterdir())[:8]) or 'nothing'}"
    raise UsageError(
        f"SST-2 in --data {folder}: {name}, or {name}.xz",
        there,
        f"take SST-2 from {SOURCE}; without --data the example makes up sentences",
    )


def read_rows(path: Path, limit: int | None = None) -> Rows:
    """Return the rows of a file of GLUE's SST-2: a header, then sentence, tab, 0 or 1. Quotes are part of sentences.

    Raises:
        DataError: the file can't be read, has no rows, or a row is broken.
    """
    texts, labels = [], []
    try:
        content = path.read_bytes()
        lines = (lzma.decompress(content) if path.suffix == ".xz" else content).decode().split("\n")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: text in UTF-8", f"it can't be read: {error}", f"take it from {SOURCE}") from error
    if lines[0].rstrip("\r").split("\t") != ["sentence", "label"]:
        raise DataError(
            f"{path}, line 1: sentence and label, separated by a tab", f"{lines[0][:60]!r}", f"take it from {SOURCE}"
        )
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        text, _, label = line.rstrip("\r").rpartition("\t")
        if label not in ("0", "1") or not text.strip() or "\t" in text:
            raise DataError(
                f"{path}, line {number}: a sentence, a tab, and 0 or 1",
                f"{line[:60]!r}",
                "mend the line, or leave it out",
            )
        texts.append(text.strip())
        labels.append(int(label))
        if len(texts) == limit:
            break
    if not texts:
        raise DataError(f"{path}: rows of sentences", "it has a header alone", f"take it from {SOURCE}")
    return Rows(texts, labels)


_GOOD, _BAD, _THINGS, _DEGREES = map(
    str.split,
    (
        "good great fine charming moving clever warm funny brilliant lovely honest fresh rich bright graceful",
        "bad awful dull flat clumsy cold tired stale dreary empty bland lazy noisy crude shallow",
        "film plot cast script music ending story humor dialogue camera scene hero villain pace tone",
        "very quite rather truly often always",
    ),
)


def make_up(count: int, seed: int) -> Rows:
    """Return made-up reviews: their class is that of most of their judgments, of which `not` and `never` turn some.

    One label in twenty is wrong, so that nothing finds them all.
    """
    draw = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        parts, sum_of = [], 0
        for _ in range(draw.choice((1, 1, 3))):
            is_good, is_turned = draw.random() < 0.5, draw.random() < 0.3
            words = ["the", draw.choice(_THINGS), "is"]
            words += [draw.choice(("not", "never"))] * is_turned + [draw.choice(_DEGREES)] * (draw.random() < 0.5)
            parts.append(" ".join([*words, draw.choice(_GOOD if is_good else _BAD)]))
            sum_of += 1 if is_good != is_turned else -1
        texts.append(" and ".join(parts) + " .")
        labels.append(int(sum_of > 0) if draw.random() > 0.05 else int(sum_of <= 0))
    return Rows(texts, labels)


def make_vocabulary(texts: Sequence[str], size: int) -> list[str]:
    """Return a WordPiece vocabulary of the texts: frequent words, frequent endings of longer words, and characters.

    Every rank makes the same one: it depends on counts alone, and ties go by the alphabet.

    Args:
        texts: lower case, or to be taken so.
        size: tokens at most, if the characters leave room for them.
    """
    words = Counter(word for text in texts for word in text.lower().split())
    characters = sorted({character for word in words for character in word})
    pieces = [*SPECIAL, *characters, *(f"##{character}" for character in characters)]
    frequent = _most(words, max(size - len(pieces), 0) * 9 // 10)
    known = set(frequent)
    endings: Counter[str] = Counter()
    for word, count in words.items():
        for cut in range(3, len(word)):
            if word not in known and word[:cut] in known:
                endings["##" + word[cut:]] += count
    room = max(size - len(pieces) - len(frequent), 0)
    return list(dict.fromkeys([*pieces, *frequent, *_most(endings, room)]))


def _most(counts: Counter[str], number: int) -> list[str]:
    return sorted(counts, key=lambda key: (-counts[key], key))[:number]


def open_tokenizer(vocabulary: Sequence[str], max_length: int) -> Any:
    """Return a BERT tokenizer of a vocabulary, that cuts at `max_length` tokens."""
    tokenizer = BertWordPieceTokenizer({token: number for number, token in enumerate(vocabulary)}, lowercase=True)
    tokenizer.enable_truncation(max_length)
    return tokenizer


def read_vocabulary(path: Path) -> list[str]:
    """Return the tokens of a vocab.txt, or of the WordPiece model of a tokenizer.json.

    Raises:
        UsageError: it is none.
    """
    tokens: list[str] = []
    if path.suffix == ".json" and path.is_file():
        numbers = Tokenizer.from_file(str(path)).get_vocab()
        tokens = sorted(numbers, key=numbers.__getitem__)
    elif path.is_file():
        tokens = path.read_text(encoding="utf-8").splitlines()
    missing = [token for token in SPECIAL if token not in tokens]
    if missing:
        raise UsageError(
            f"a WordPiece vocabulary in {path}",
            f"it lacks {', '.join(missing)}" if path.is_file() else "there is no such file",
            "name a vocab.txt with one token a line, such as bert-base-uncased has",
        )
    return tokens


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences as token numbers; `[]` masks some of them, to be predicted.

    What `[]` draws depends on the seed and the sample's place alone, on any number of ranks. A collate_fn would draw
    for the samples of one rank.

    Args:
        rows: sentences and classes.
        tokenizer: of `open_tokenizer`.
        masked: share of the tokens that are to be predicted; 0: none, for evaluation.
    """

    def __init__(self, rows: Rows, tokenizer: Any, masked: float) -> None:
        self.ids = [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(rows.texts)]
        self.labels = torch.tensor(rows.labels)
        self.masked = masked
        self.mask, self.tokens = tokenizer.token_to_id("[MASK]"), tokenizer.get_vocab_size()
        self.lengths = torch.tensor([len(ids) for ids in self.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        sample = {"ids": ids, "label": self.labels[index]}
        if not self.masked:
            return sample
        drawn = torch.rand(4, len(ids))
        chosen = drawn[0] < self.masked
        chosen[0] = chosen[-1] = False  # [CLS] and [SEP]
        places = chosen.nonzero()[:, 0][: predictions_of(len(ids))]
        shown = ids.clone()
        # As in BERT: of ten tokens that are chosen eight are hidden, one is replaced by another, one stays.
        for place in places.tolist():
            if drawn[1, place] < 0.8:
                shown[place] = self.mask
            elif drawn[2, place] < 0.5:
                shown[place] = int(drawn[3, place] * (self.tokens - len(SPECIAL))) + len(SPECIAL)
        return {**sample, "ids": shown, "places": places, "wanted": ids[places]}


def predictions_of(length: int) -> int:
    """Return how many tokens of a sentence are predicted at most: one number for each length of a batch."""
    return max(length * 3 // 16, 1)


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch, padded to a multiple of PAD_TO tokens."""
    longest = max(len(sample["ids"]) for sample in samples)
    length = -(-longest // PAD_TO) * PAD_TO
    batch = {
        "input_ids": torch.zeros(len(samples), length, dtype=torch.long),
        "attention_mask": torch.zeros(len(samples), length, dtype=torch.long),
        "labels": torch.stack([sample["label"] for sample in samples]),
    }
    if "places" in samples[0]:
        shape = len(samples), predictions_of(length)
        batch |= {"places": torch.zeros(shape, dtype=torch.long), "wanted": torch.full(shape, NOT_PREDICTED)}
    for row, sample in enumerate(samples):
        batch["input_ids"][row, : len(sample["ids"])] = sample["ids"]
        batch["attention_mask"][row, : len(sample["ids"])] = 1
        if "places" in sample:
            batch["places"][row, : len(sample["places"])] = sample["places"]
            batch["wanted"][row, : len(sample["places"])] = sample["wanted"]
    return batch


class Buckets(torch.utils.data.Sampler[list[int]]):
    """So many batches of sentences of similar length, in random order; begins the data again as often as needed.

    Args:
        lengths: of the sentences.
        batch_size: of each batch but the last of a round.
        steps: batches in all.
    """

    POOL = 50  # batches that are sorted by length together

    def __init__(self, lengths: torch.Tensor, batch_size: int, steps: int) -> None:
        self.lengths, self.batch_size, self.steps = lengths, batch_size, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        left = self.steps
        while left > 0:
            for batch in self._round():
                if left == 0:
                    return
                left -= 1
                yield batch

    def _round(self) -> Iterator[list[int]]:
        for pool in torch.randperm(len(self.lengths)).split(self.POOL * self.batch_size):
            batches = pool[self.lengths[pool].argsort(stable=True)].split(self.batch_size)
            for number in torch.randperm(len(batches)).tolist():
                yield batches[number].tolist()
