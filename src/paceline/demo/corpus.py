"""Prepare the demo's text: the standard library's source, as tokens of a WordPiece tokenizer that is trained on it.

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
VOCABULARY = 2048  # few, so that each is seen often in two minutes
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, _, CLS, SEP, MASK = range(len(SPECIAL))
# Of the tokens, in training and in held-out text. All become [MASK]: Devlin et al. 2019 leave one in ten as it is, but
# a model that sees a token has not filled it in. More in training: a step then teaches more for nearly the same time.
MASKED, MASKED_HELD_OUT = 0.20, 0.15
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_TOKENIZER_CHARACTERS = 2_500_000  # the characters of text that the tokenizer sees
_LIMIT_CHARACTERS = 6_000_000  # the characters of text in all: enough for far more steps than the demo takes


@dataclass(frozen=True, slots=True)
class Corpus:
    """The folder of the prepared text, and the numbers of its files, bytes and sequences."""

    folder: str
    files: int
    held_out_files: int
    text_bytes: int
    sequences: int
    held_out_sequences: int
    most_frequent: str
    most_frequent_id: int
    vocabulary: int
    length: int


def read_corpus(folder: Path) -> Corpus:
    """Return the summary of the text that an earlier call prepared in `folder`.

    Raises:
        DataError: it can't be read.
    """
    form: dict[str, Any] = {}
    for field in fields(Corpus):
        # The types are strings, since this module postpones annotations.
        form[field.name] = str if field.type == "str" else COUNT
    summary = _read_summary(folder, form)
    return Corpus(**{name: summary[name] for name in form})


def read_most_frequent_id(folder: Path) -> int:
    """Return the number of the most frequent token of the text in `folder`.

    Raises:
        DataError: it can't be read.
    """
    return int(_read_summary(folder, {"most_frequent_id": COUNT})["most_frequent_id"])


def _read_summary(folder: Path, form: dict[str, Any]) -> dict[str, Any]:
    path = folder / "corpus.json"
    try:
        summary: dict[str, Any] = read_json(path, form)
    except ReadError as error:
        raise DataError(f"the prepared text in {path}", error.found, f"remove {folder}: it is made again") from None
    return summary


def _sizes(folder: Path) -> tuple[int, int]:
    """Return the vocabulary and the length with which the text in `folder` was prepared; 0 where it doesn't say."""
    summary = _read_summary(folder, {"vocabulary?": COUNT, "length?": COUNT})
    return summary.get("vocabulary", 0), summary.get("length", 0)


def prepare(folder: Path) -> Corpus:
    """Prepare the text in `folder`, or find it there from an earlier call.

    Raises:
        UsageError: the tokenizers library is missing.
        DataError: this Python has no source of its standard library.
    """
    summary = folder / "corpus.json"
    if summary.exists():  # it is written last: then all other files are there
        if _sizes(folder) == (VOCABULARY, LENGTH):
            return read_corpus(folder)
        summary.unlink()  # an earlier version's: its tokens are others
    folder.mkdir(parents=True, exist_ok=True)
    training_texts, held_out_texts = _texts()
    tokenizer = _tokenizer(training_texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    numbers = tokenizer.get_vocab()
    tokens = sorted(numbers, key=numbers.__getitem__)  # line N of a BERT vocabulary is token N
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    training = _sequences(tokenizer, training_texts)
    held_out = _sequences(tokenizer, held_out_texts)
    np.save(folder / "train.npy", training)
    np.save(folder / "held_out.npy", held_out)
    ordinary = training[training >= len(SPECIAL)]
    most_frequent_id = int(np.bincount(ordinary).argmax())
    corpus = Corpus(
        folder=str(folder),
        files=len(training_texts) + len(held_out_texts),
        held_out_files=len(held_out_texts),
        text_bytes=sum(len(text) for text in (*training_texts, *held_out_texts)),
        sequences=len(training),
        held_out_sequences=len(held_out),
        most_frequent=tokenizer.id_to_token(most_frequent_id),
        most_frequent_id=most_frequent_id,
        vocabulary=VOCABULARY,
        length=LENGTH,
    )
    summary.write_text(json.dumps(asdict(corpus)))
    return corpus


def held_out_files() -> Iterator[Path]:
    """Yield the files that are not trained on, about one in ten, in the order of the hashes of their names."""
    return (path for path in _files() if _is_held_out(path))


def _texts() -> tuple[list[str], list[str]]:
    """Return the texts to train on and those held out."""
    training: list[str] = []
    held_out: list[str] = []
    num_characters = 0
    for path in _files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        (held_out if _is_held_out(path) else training).append(text)
        num_characters += len(text)
        if num_characters >= _LIMIT_CHARACTERS:
            break
    if not training or not held_out:
        raise DataError(
            f"can't take text from the standard library in {_root()}",
            "its source is not there",
            "use a Python that ships its .py files",
        )
    return training, held_out


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files() -> list[Path]:
    root = _root()
    files = (path for path in root.rglob("*.py") if not {*path.relative_to(root).parts} & _SKIPPED)
    return sorted(files, key=_digest)


def _is_held_out(path: Path) -> bool:
    return int(_digest(path), 16) % 10 == 0


def _digest(path: Path) -> str:
    return hashlib.sha256(path.name.encode()).hexdigest()


def open_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the text in `folder`.

    Raises:
        UsageError: the tokenizers library is missing.
    """
    return _tokenizers().Tokenizer.from_file(str(folder / "tokenizer.json"))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "can't prepare the demo's text", "the library tokenizers is missing", "pip install 'paceline[demo]'"
        ) from None
    return tokenizers


def _tokenizer(texts: Sequence[str]) -> Any:
    """Return a tokenizer that is trained on the first of the texts."""
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False
    )
    sample: list[str] = []
    num_characters = 0
    for text in texts:
        if num_characters > _TOKENIZER_CHARACTERS:
            break
        sample.append(text)
        num_characters += len(text)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _sequences(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:  # type: ignore[type-arg]
    """Return token numbers, (sequences, LENGTH); a sequence never crosses a file, the rest of a file is left out."""
    body = LENGTH - 2  # without [CLS] and [SEP]
    rows = []
    for encoded in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids = encoded.ids
        for start in range(0, len(ids) - body + 1, body):
            rows.append([CLS, *ids[start : start + body], SEP])
    return np.array(rows, dtype=np.uint16)  # numbers below VOCABULARY
