"""The demo's text: the standard library's own source, a WordPiece tokenizer trained on it, two sets of sequences.

Files are held out whole, chosen by a hash of their name, so that no sentence of the evaluation was trained
on. No torch here: it runs before any rank starts.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from paceline.nouns.errors import DataError, ReadError, UsageError
from paceline.nouns.reading import COUNT, read_json

LENGTH = 64  # tokens in a sequence, [CLS] and [SEP] among them
VOCABULARY = 4096
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, _, CLS, SEP, MASK = range(len(SPECIAL))
_SKIPPED = ("site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")
_TOKENIZER_BYTES = 2_500_000  # of text that the tokenizer sees
_LIMIT_BYTES = 6_000_000  # of text in all: enough for far more steps than the demo takes


@dataclass(frozen=True, slots=True)
class Corpus:
    """Where the prepared text lies, and what it holds."""

    folder: str
    files: int
    held_out_files: int
    text_bytes: int
    sequences: int
    held_out_sequences: int
    most_frequent: str
    most_frequent_id: int


def read_corpus(folder: Path) -> Corpus:
    """What an earlier call prepared in `folder`.

    Raises:
        DataError: it can't be read.
    """
    facts = _read_summary(folder, {one.name: str if one.type == "str" else COUNT for one in fields(Corpus)})
    return Corpus(**{one.name: facts[one.name] for one in fields(Corpus)})


def read_most_frequent_id(folder: Path) -> int:
    """The number of the most frequent token of the text in `folder`.

    Raises:
        DataError: it can't be read.
    """
    return int(_read_summary(folder, {"most_frequent_id": COUNT})["most_frequent_id"])


def _read_summary(folder: Path, form: dict[str, Any]) -> dict[str, Any]:
    summary = folder / "corpus.json"
    try:
        facts: dict[str, Any] = read_json(summary, form)
    except ReadError as error:
        raise DataError(f"the prepared text in {summary}", error.found, f"remove {folder}: it is made again") from None
    return facts


def prepare(folder: Path) -> Corpus:
    """Prepare the text in `folder`, or find it there from an earlier call.

    Raises:
        UsageError: the tokenizers library is missing.
        DataError: this Python has no source of its standard library.
    """
    summary = folder / "corpus.json"
    if summary.exists():
        return read_corpus(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept, held_out = _texts()
    tokenizer = _tokenizer(kept)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text(
        "\n".join(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)) + "\n"
    )
    train, test = (_sequences(tokenizer, texts) for texts in (kept, held_out))
    np.save(folder / "train.npy", train)
    np.save(folder / "held_out.npy", test)
    ordinary = train[train >= len(SPECIAL)]
    frequent = int(np.bincount(ordinary).argmax())
    total = sum(len(text) for text in (*kept, *held_out))
    word = tokenizer.id_to_token(frequent)
    corpus = Corpus(str(folder), len(kept) + len(held_out), len(held_out), total, len(train), len(test), word, frequent)
    summary.write_text(json.dumps(asdict(corpus)))
    return corpus


def _texts() -> tuple[list[str], list[str]]:
    """The library's files, those trained on and those held out: about one in ten."""
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[str] = []
    held_out: list[str] = []
    read = 0
    for path in sorted(_files(root), key=_digest):
        text = path.read_text(encoding="utf-8", errors="ignore")
        (held_out if int(_digest(path), 16) % 10 == 0 else kept).append(text)
        read += len(text)
        if read >= _LIMIT_BYTES:
            break
    if not kept or not held_out:
        raise DataError(
            f"can't take text from the standard library in {root}",
            "its source is not there",
            "use a Python that ships its .py files",
        )
    return kept, held_out


def _files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        if not any(part in _SKIPPED for part in path.relative_to(root).parts):
            yield path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.name.encode()).hexdigest()


def _tokenizer(texts: Sequence[str]):  # type: ignore[no-untyped-def]
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    except ImportError:
        raise UsageError(
            "can't train the demo's tokenizer", "the library tokenizers is missing", "pip install 'paceline[demo]'"
        ) from None
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False)
    sample: list[str] = []
    for text in texts:
        if sum(map(len, sample)) > _TOKENIZER_BYTES:
            break
        sample.append(text)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _sequences(tokenizer, texts: Sequence[str]) -> np.ndarray:  # type: ignore[no-untyped-def,type-arg]
    """(sequences, LENGTH) token numbers; a sequence never crosses a file, the rest of a file is left out."""
    body = LENGTH - 2
    rows = []
    for encoded in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids = encoded.ids
        for start in range(0, len(ids) - body + 1, body):
            rows.append([CLS, *ids[start : start + body], SEP])
    return np.array(rows, dtype=np.uint16)
