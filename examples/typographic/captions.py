"""Captions and their tokens: one token a word."""

from __future__ import annotations

import torch

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# On the web, a picture of a thing and a picture of its name often have the same caption.
OF_BOTH = ("a picture of the number {}", "the number {}", "{}")
OF_DIGITS = ("a photo of the digit {}", "a {} written by hand", *OF_BOTH)
OF_WORDS = ("the word {}", "a sign that says {}", *OF_BOTH)
PROMPTS = ("a picture of the number {}", "the number {}")  # what a picture is compared with

_WORDS = sorted({*NAMES, *" ".join((*OF_DIGITS, *OF_WORDS)).replace("{}", "").split()})
_NUMBER = {word: number for number, word in enumerate(_WORDS, start=1)}  # 0 is padding
VOCABULARY = 1 + len(_WORDS)
LENGTH = max(len(template.split()) for template in (*OF_DIGITS, *OF_WORDS))


def tokens_of(caption: str) -> torch.Tensor:
    """The tokens of a caption, (LENGTH,)."""
    numbers = [_NUMBER[word] for word in caption.split()]
    return torch.tensor(numbers + [0] * (LENGTH - len(numbers)))


def prompts() -> torch.Tensor:
    """The tokens of every prompt, (10, number of templates, LENGTH)."""
    return torch.stack([torch.stack([tokens_of(template.format(name)) for template in PROMPTS]) for name in NAMES])
