"""Reads texts: one file, of which the last tenth is held out; WikiText's files; or stories.

Each file may also be compressed, as NAME.xz. Without any there is a text that every Python has.
"""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns.errors import DataError, UsageError

TRAINED_ON = 0.9  # of one text, its beginning, as nanoGPT splits it
HELD_OUT_STORIES = 60
SOURCES = (
    "tiny shakespeare is input.txt of github.com/karpathy/char-rnn, in data/tinyshakespeare; "
    "WikiText-2 is train.txt and valid.txt of github.com/pytorch/examples, in word_language_model/data/wikitext-2"
)
# TinyStories' files have no other mark between two stories.
_BETWEEN_STORIES = re.compile(r"\n\n(?=Once upon a time|One day)")


@dataclass(frozen=True, slots=True)
class Text:
    """What is trained on and what is held out.

    Attributes:
        name: of the text.
        train, held_out: pieces that have nothing to do with each other: one, or many stories.
        are_stories: each piece is a story, which begins with the token of a beginning.
    """

    name: str
    train: list[str]
    held_out: list[str]
    are_stories: bool = False

    def __str__(self) -> str:
        trained = sum(map(len, self.train))
        return f"{self.name}, {trained:,} of {trained + sum(map(len, self.held_out)):,} characters"


def read_text(place: Path | None) -> Text:
    """The text of a folder or a file, or the built-in one.

    Args:
        place: a folder with input.txt; with train.txt and valid.txt; or with another single text. Or a text file.

    Raises:
        UsageError: there is none.
        DataError: it is not UTF-8, torn, or empty.
    """
    if place is None:
        return _built_in()
    if place.is_file():
        return _one_text(place)
    if not place.is_dir():
        raise UsageError(f"--data {place}", "there is no such file or folder", SOURCES)
    train, valid = _find(place, "train"), _find(place, "valid")
    if train and valid:
        return Text(place.name, [read_file(train)], [read_file(valid)])
    if train or valid:
        there, missing = ("train", "valid") if train else ("valid", "train")
        raise UsageError(
            f"--data {place} with train.txt and valid.txt", f"{there}.txt has no {missing}.txt beside it", SOURCES
        )
    found = sorted([*place.glob("*.txt"), *place.glob("*.txt.xz")])
    if one := _find(place, "input"):
        return _one_text(one)
    if len(found) == 1:
        return _one_text(found[0])
    names = ", ".join(path.name for path in found[:5]) or "no text"
    raise UsageError(f"--data {place} with input.txt, or train.txt and valid.txt", f"it has {names}", SOURCES)


def read_file(path: Path) -> str:
    """A text file's content, with its line ends as they are.

    Raises:
        DataError: it is not UTF-8, torn, or empty.
    """
    content = read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: text in UTF-8", f"byte {error.start + 1} is no part of it", SOURCES
        ) from None
    if not text.strip():
        raise DataError(f"{path} should have a text", "it is empty", SOURCES)
    return text


def read_bytes(path: Path) -> bytes:
    """A file's content, uncompressed.

    Raises:
        DataError: it can't be read.
    """
    try:
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except lzma.LZMAError as error:
        raise DataError(f"{path} should be xz-compressed", f"it is not whole ({error})", "copy it anew") from None
    except OSError as error:
        raise DataError(f"can't read {path}", f"{error.strerror}", "see that you may read it") from None


def find_file(folder: Path, *names: str) -> Path | None:
    """The first of these files that is in `folder`, plain or as NAME.xz."""
    for name in names:
        for path in (folder / name, folder / f"{name}.xz"):
            if path.is_file():
                return path
    return None


def split_stories(text: str) -> list[str]:
    """Stories of a file of TinyStories, with one line end between paragraphs, as models of it were trained."""
    return [story.strip().replace("\n\n", "\n") for story in _BETWEEN_STORIES.split(text)]


def _find(folder: Path, stem: str) -> Path | None:
    return find_file(folder, f"{stem}.txt")


def _one_text(path: Path) -> Text:
    text = read_file(path)
    name = path.name.removesuffix(".xz").removesuffix(".txt")
    stories = split_stories(text)
    if len(stories) > 2 * HELD_OUT_STORIES:
        return Text(name, stories[HELD_OUT_STORIES:], stories[:HELD_OUT_STORIES], are_stories=True)
    return _split(name if name != "input" else path.resolve().parent.name, text)


def _split(name: str, text: str) -> Text:
    cut = int(len(text) * TRAINED_ON)
    return Text(name, [text[:cut]], [text[cut:]])


def _built_in() -> Text:
    """The text of Python's own `help()`: about 0.7 million characters of English and examples."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "the built-in text is that of Python's help()", "this Python has no pydoc_data", "pass --data; " + SOURCES
        ) from None
    return _split("Python's help()", "\n\n".join(topics[name] for name in sorted(topics)))
