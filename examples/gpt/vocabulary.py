"""Tokens of a text: its characters, a byte-pair encoding (BPE) trained on it, or a vocabulary from a file.

All are a `tokenizers.Tokenizer`, so each is written as the tokenizer.json that transformers reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import texts
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.nouns.errors import DataError, UsageError

CHARACTERS, BPE = "characters", "bpe"
_TRAINED_ON = 2_000_000  # characters that a BPE is trained on, at most
# llama2.c's vocabularies: these three, a token for each byte, then pieces in the order in which they are merged.
_LLAMA2C_SPECIAL = ("<unk>", "<s>", "</s>")
_CUT = re.compile(r"(?<=\n)(?=[^\S\n]\S)|(?=\n\S)")
_LLAMA2C_PIECES = len(_LLAMA2C_SPECIAL) + 256
_FILES = "tokenizer.json; vocab.json and merges.txt; gpt2-vocab.json and gpt2-merges.txt; or llama2.c's tok512.bin"


def characters_of(pieces: Sequence[str]) -> Tokenizer:
    """One token for each character of a text, in their order."""
    vocabulary = {character: number for number, character in enumerate(sorted({*"".join(pieces)}))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def train_bpe(pieces: Sequence[str], size: int) -> Tokenizer:
    """A BPE of bytes, as GPT-2's, of `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_lines("".join(pieces)[:_TRAINED_ON]), trainer)
    return tokenizer


def open_folder(folder: Path) -> Tokenizer:
    """The vocabulary in a folder.

    Raises:
        UsageError: there is none.
        DataError: it can't be read.
    """
    if not folder.is_dir():
        raise UsageError(f"a vocabulary in {folder}", "there is no such folder", f"name one with {_FILES}")
    if whole := texts.find_file(folder, "tokenizer.json"):
        return _read(whole, lambda: Tokenizer.from_str(texts.read_bytes(whole).decode()))
    for prefix in ("", "gpt2-"):
        vocabulary = texts.find_file(folder, f"{prefix}vocab.json")
        merges = texts.find_file(folder, f"{prefix}merges.txt")
        if vocabulary and merges:
            return _read(vocabulary, lambda vocabulary=vocabulary, merges=merges: _gpt2(vocabulary, merges))
    if found := sorted(folder.glob("tok*.bin")):
        return _read(found[0], lambda: _llama2c(texts.read_bytes(found[0])))
    raise UsageError(
        f"a vocabulary in {folder}",
        "it has none of the files",
        f"name a folder with {_FILES}; or --tokenizer characters, or bpe",
    )


def are_characters(tokenizer: Tokenizer) -> bool:
    """Whether each token is a character."""
    return isinstance(tokenizer.model, models.WordLevel)


def encode(tokenizer: Tokenizer, piece: str) -> np.ndarray:
    """The token numbers of a text."""
    if are_characters(tokenizer):  # the library would make an object of each
        points = np.frombuffer(piece.encode("utf-32-le"), np.uint32)
        table = np.zeros(int(points.max(initial=0)) + 1, np.int64)
        for character, number in tokenizer.get_vocab().items():
            if ord(character) < len(table):
                table[ord(character)] = number
        return table[points]
    if tokenizer.normalizer is not None:  # a space is put before the text, so lines are not to be encoded one by one
        return np.array(tokenizer.encode(piece, add_special_tokens=False).ids, np.int64)
    encoded = tokenizer.encode_batch_fast(_lines(piece), add_special_tokens=False)
    return np.concatenate([np.array(line.ids, np.int64) for line in encoded])


def check_knows(tokenizer: Tokenizer, prompt: str) -> None:
    """Raise UsageError where the vocabulary lacks a character of the prompt, or there is none."""
    if not prompt:
        raise UsageError("--prompt ''", "it is empty", "write at least one character, or leave --prompt out")
    lacking = [character for character in dict.fromkeys(prompt) if not _knows(tokenizer, character)]
    if lacking:
        raise UsageError(
            f"--prompt {prompt!r}",
            f"the vocabulary lacks {', '.join(map(repr, lacking))}",
            "write characters of the text, or train with --tokenizer bpe, which knows every byte",
        )


def save(tokenizer: Tokenizer, folder: Path, positions: int, end: int | None) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    settings |= {"clean_up_tokenization_spaces": False}
    if end is not None:
        settings |= {"bos_token": tokenizer.id_to_token(end), "eos_token": tokenizer.id_to_token(end)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _knows(tokenizer: Tokenizer, character: str) -> bool:
    if are_characters(tokenizer):
        return tokenizer.token_to_id(character) is not None
    with contextlib.suppress(Exception):  # the library has no class of its own for a token that is missing
        return character in tokenizer.decode(tokenizer.encode(character, add_special_tokens=False).ids)
    return False


def _lines(text: str) -> list[str]:
    """Pieces of about a line, cut where BPEs of bytes cut too: before the last space or line end between two words."""
    return _CUT.split(text)


def _read(path: Path, make):  # type: ignore[no-untyped-def]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return make()
    except (DataError, UsageError):
        raise
    except Exception as error:  # the library raises plain Exceptions
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"a vocabulary in {path}", f"it can't be read: {first:.160}", "copy it anew") from None


def _gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    pairs = [tuple(line.split(" ")) for line in texts.read_file(merges).split("\n") if line and line[:8] != "#version"]
    tokenizer = Tokenizer(models.BPE(json.loads(texts.read_bytes(vocabulary)), pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama2c(content: bytes) -> Tokenizer:
    """The BPE of a file of llama2.c: a number, then of each token its score, its length and its bytes.

    Of all pairs of neighbours the one that makes the token of the highest score is merged first.
    """
    tokens: list[str] = []
    scores: list[float] = []
    offset = 4
    while offset < len(content):
        score, length = struct.unpack_from("<fi", content, offset)
        tokens.append(content[offset + 8 : offset + 8 + length].decode())
        scores.append(score)
        offset += 8 + length
    tokens[: len(_LLAMA2C_SPECIAL)] = _LLAMA2C_SPECIAL
    numbers = {token: number for number, token in enumerate(tokens)}
    merges = []
    for number in sorted(range(_LLAMA2C_PIECES, len(tokens)), key=lambda number: -scores[number]):
        token = tokens[number]
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [pair for pair in halves if pair[0] in numbers and pair[1] in numbers]
    tokenizer = Tokenizer(models.BPE(numbers, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer
