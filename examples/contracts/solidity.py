"""Solidity as tokens without names, functions, and chunks of a fixed length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<string>"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)
    |(?P<number>0[xX][0-9a-fA-F]+|\d[\d_.]*(?:[eE]-?\d+)?)
    |(?P<name>[A-Za-z_$][\w$]*)
    |(?P<sign>=>|\*\*|[-+*/%&|^<>=!]=|&&|\|\||\+\+|--|<<|>>|.)""",
    re.DOTALL | re.VERBOSE,
)
# What keeps its name: the language's own words, members of its own types, and OpenZeppelin's guard.
_WORDS = """
abstract abi address anonymous as assembly assert balance block blockhash bool break byte bytes call callcode calldata
catch coinbase constant constructor continue data decode delegatecall delete difficulty do else emit encode
encodePacked encodeWithSelector encodeWithSignature enum ether event external fallback false finney fixed for from
function gas gasleft gwei hours if immutable import indexed int interface internal is keccak256 length library mapping
memory minutes modifier msg new nonReentrant now number origin override payable pop pragma private public pure push
receive require return returns revert seconds selfdestruct send sender sha256 sha3 sig solidity staticcall storage
string struct suicide super szabo this throw timestamp transfer true try tx ufixed uint unchecked using value var view
virtual wei weeks while years days _
"""
_SIGNS = "=> ** -= += *= /= %= &= |= ^= <= >= == != && || ++ -- << >>"
NAMES = 24  # variables and functions of a chunk that are told apart, by the order in which they occur
PAD, UNKNOWN, STRING, NUMBER, ZERO = range(5)
_IDS = {
    word: at for at, word in enumerate([*_WORDS.split(), *_SIGNS.split(), *"(){}[];,.?:=<>+-*/%&|^!~"], start=ZERO + 1)
}
FIRST_NAME = ZERO + 1 + len(_IDS)
VOCABULARY = FIRST_NAME + NAMES
_SIZED = re.compile(r"(u?int|bytes)\d+")
_BEGINS = {"function", "constructor", "modifier", "receive", "fallback"}
_CALLS = {"call", "callcode", "delegatecall", "send", "transfer"}


class Token(NamedTuple):
    """A token and its line, from 1."""

    text: str
    line: int


def read_tokens(source: str) -> list[Token]:
    """Return the tokens of a source, without comments."""
    tokens, line = [], 1
    for found in _TOKEN.finditer(source):
        text = found.group()
        if found.lastgroup != "skip":
            tokens.append(Token(text, line))
        line += text.count("\n")
    return tokens


def functions_of(tokens: Sequence[Token]) -> list[list[Token]]:
    """Cut at functions, constructors and modifiers; what is between them is a part too. Nothing is left out."""
    parts: list[list[Token]] = []
    part: list[Token] = []
    depth, outside = 0, None  # `outside` is the depth around the function that is open
    for token in tokens:
        if outside is None and token.text in _BEGINS:
            parts.append(part)
            part, outside = [], depth
        part.append(token)
        depth += (token.text == "{") - (token.text == "}")
        if outside is not None and depth <= outside and token.text in ("}", ";"):
            parts.append(part)
            part, outside = [], None
    return [each for each in [*parts, part] if each]


def has_external_call(tokens: Sequence[Token]) -> bool:
    """Return whether ether is sent or an address is called: `.call`, `.send`, `.transfer`, `.value(`, `{value:`."""
    texts = [token.text for token in tokens]
    return any(
        (before == "." and text in _CALLS) or (before in ".{" and text == "value" and after in "(:")
        for before, text, after in zip(texts, texts[1:], [*texts[2:], " "], strict=False)
    )


def chunks_of(tokens: Sequence[Token], length: int, calls_only: bool = True) -> list[list[Token]]:
    """Return chunks of at most `length` tokens: consecutive functions, as many as fit.

    A longer function is cut into chunks that overlap by half. With `calls_only`, functions without an external call
    are left out; a contract that has none is its beginning.
    """
    parts = functions_of(tokens)
    if calls_only:
        parts = [part for part in parts if has_external_call(part)] or [list(tokens[:length])]
    chunks: list[list[Token]] = []
    for part in parts:
        if chunks and len(chunks[-1]) + len(part) <= length:
            chunks[-1] = [*chunks[-1], *part]
            continue
        starts = range(0, max(len(part) - length // 2, 1), length // 2) if len(part) > length else [0]
        chunks += [list(part[start : start + length]) for start in starts]
    return chunks


def encode(tokens: Sequence[Token]) -> list[int]:
    """Return the numbers of a chunk's tokens. Names are numbered as they occur, so that renaming changes nothing."""
    slots: dict[str, int] = {}
    numbers = []
    for text, _ in tokens:
        word = _SIZED.sub(r"\1", text)
        if word in _IDS:
            numbers.append(_IDS[word])
        elif text[0] in "\"'":
            numbers.append(STRING)
        elif text[0].isdigit():
            numbers.append(ZERO if text == "0" else NUMBER)
        elif text[0].isalpha() or text[0] in "_$":
            numbers.append(FIRST_NAME + min(slots.setdefault(text, len(slots)), NAMES - 1))
        else:
            numbers.append(UNKNOWN)
    return numbers


def kinds_of(tokens: Sequence[Token]) -> list[int]:
    """Return the numbers with one for all names: what two contracts have in common wherever they are cut."""
    return [min(number, FIRST_NAME) for number in encode(tokens)]
