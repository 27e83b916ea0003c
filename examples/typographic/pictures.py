"""Pictures of 32 x 32: a digit above, and below it perhaps a written word.

What is drawn at random is drawn in the data set's `[]`: there it depends on the seed and the sample alone, not on the
number of ranks.
"""

from __future__ import annotations

from functools import lru_cache

import captions
import torch
from digits import SIDE, Digits
from matplotlib import font_manager

from paceline.nouns.errors import UsageError

CANVAS = 32
PLAIN, OTHER = "DejaVu Sans", "DejaVu Serif"  # fonts as matplotlib names them; OTHER is never trained with
WORD_ALONE, OWN_WORD = 0.2, 0.65  # shares of the training pictures: a word without a digit, a digit over its own name


@lru_cache
def draw_word(word: str, size: int, font: str = PLAIN) -> torch.Tensor:
    """The word's pixels (height, width), without a margin.

    Raises:
        UsageError: it is wider or higher than the canvas.
    """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont  # Pillow comes with matplotlib

    opened = ImageFont.truetype(font_manager.findfont(font), size)
    left, top, right, bottom = opened.getbbox(word)
    if right - left > CANVAS or bottom - top > CANVAS - SIDE:
        raise UsageError(
            f"the word {word!r} should fit on {CANVAS} x {CANVAS - SIDE} pixels",
            f"with --font-size {size} it takes {right - left} x {bottom - top}",
            "choose a smaller --font-size",
        )
    picture = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(picture).text((-left, -top), word, 255, opened)
    return torch.from_numpy(np.asarray(picture, np.float32) / 255)


def check_words(size: int) -> None:
    """Raise UsageError if some name of a digit does not fit."""
    for name in captions.NAMES:
        for font in (PLAIN, OTHER):
            draw_word(name, size, font)


def compose(digit: torch.Tensor | None, word: torch.Tensor | None, place: torch.Tensor) -> torch.Tensor:
    """One picture (1, 32, 32). `place` has four numbers in 0..1: where digit and word are, across and down."""
    picture = torch.zeros(CANVAS, CANVAS, dtype=torch.float32)
    if digit is not None:
        left, top = int(place[0] * (CANVAS - SIDE + 1)), int(place[1] * 2)
        picture[top : top + SIDE, left : left + SIDE] = digit
    if word is not None:
        height, width = word.shape
        left, top = int(place[2] * (CANVAS - width + 1)), int(place[3] * (CANVAS - SIDE - height + 1)) + SIDE
        field = picture[top : top + height, left : left + width]
        torch.maximum(field, word, out=field)
    return picture[None]


class Training(torch.utils.data.Dataset):
    """Each item: a picture, the same with a random word (the defence), and the tokens of its caption.

    A fifth of the pictures is a written word alone, with a caption that says so; without them the model could not
    read. The defence leaves these as they are.
    """

    def __init__(self, digits: Digits, font_size: int, random_words: float) -> None:
        self.digits = digits
        self.font_size = font_size
        self.random_words = random_words

    def __len__(self) -> int:
        return len(self.digits.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        draws, place = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
        digit, label = self.digits.pictures[index], int(self.digits.labels[index])
        own = self._word(label)
        if draws[0] < WORD_ALONE:
            picture = guarded = compose(None, own, place)
            templates = captions.OF_WORDS
        else:
            other = self._word(int(draws[2] * 10)) if draws[3] < self.random_words else None
            picture = compose(digit, own if draws[0] < WORD_ALONE + OWN_WORD else None, place)
            guarded = compose(digit, other, place)
            templates = captions.OF_DIGITS
        caption = templates[int(draws[1] * len(templates))].format(captions.NAMES[label])
        # The models' own type: float64 under --precision float64.
        dtype = torch.get_default_dtype()
        return picture.to(dtype), guarded.to(dtype), captions.tokens_of(caption)

    def _word(self, label: int) -> torch.Tensor:
        return draw_word(captions.NAMES[label], self.font_size)


class Tests(torch.utils.data.Dataset):
    """Each item: the label, the name that is written, and the picture clean, attacked, attacked in another font,
    word alone.

    Drawn once, by the row's number alone, so that every run and every rank tests with the same.
    """

    def __init__(self, digits: Digits, font_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        places = torch.rand(len(digits.labels), 4, dtype=torch.float64, generator=generator)
        self.labels = digits.labels
        # Any name but the right one.
        self.written = (self.labels + torch.randint(1, 10, self.labels.shape, generator=generator)) % 10
        rows = []
        for digit, written, place in zip(digits.pictures, self.written.tolist(), places, strict=True):
            word, other = (draw_word(captions.NAMES[written], font_size, font) for font in (PLAIN, OTHER))
            kinds = [(digit, None), (digit, word), (digit, other), (None, word)]
            rows.append(torch.stack([compose(*kind, place) for kind in kinds]))
        self.pictures = torch.stack(rows)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.pictures[row].to(torch.get_default_dtype()), self.labels[row], self.written[row]
