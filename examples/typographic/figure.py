"""Draws test digits without and with a wrong word, what each model says, and how often the attack succeeds."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import captions
import torch

RIGHT, FOOLED, WRONG = "#2a7f3f", "#c62828", "#8a6d00"
SHOWN = {
    "accuracy": "right, without a word",
    "attacked accuracy": "right, with a wrong word",
    "attack success": "says the written word",
    "attack success, other font": "the same, another font",
}


def draw(
    path: Path,
    title: str,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    guesses: Mapping[str, torch.Tensor],
    scores: Mapping[str, Mapping[str, float]],
) -> None:
    """Write the figure.

    Args:
        path: the PNG file.
        title: what was trained on.
        rows: pictures (10, kinds, 1, 32, 32), labels and written names; the first two kinds are shown.
        guesses: by the model's name, what it says to each picture, (10, kinds).
        scores: by the model's name, its scores.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    pictures, labels, written = rows
    count = len(labels)
    figure = pyplot.figure(figsize=(13, 3.6), dpi=80)
    grid = figure.add_gridspec(2, count, left=0.04, right=0.69, top=0.87, bottom=0.14, wspace=0.12, hspace=0.5)
    for kind, name in enumerate(("digit", "digit and\nwrong word")):
        for column in range(count):
            axes = figure.add_subplot(grid[kind, column])
            axes.imshow(pictures[column, kind, 0].numpy(), cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(name, fontsize=8)
            for line, guess in enumerate(guesses.values()):
                said = int(guess[column, kind])
                is_right, is_written = said == labels[column], kind == 1 and said == written[column]
                colour = RIGHT if is_right else FOOLED if is_written else WRONG
                place = (0.5, -0.08 - 0.17 * line)
                axes.text(*place, captions.NAMES[said], color=colour, transform=axes.transAxes, ha="center", va="top",
                          fontsize=9, weight="bold" if line else "normal")  # fmt: skip
    axes = figure.add_axes((0.82, 0.14, 0.17, 0.73))
    for number, (name, of_model) in enumerate(scores.items()):
        values = [100 * of_model[score] for score in SHOWN]
        places = [place + 0.38 * number for place in range(len(SHOWN))]
        bars = axes.barh(places, values, 0.36, label=name, color=("#7c8796", "#2b6cb0")[number])
        axes.bar_label(bars, [f"{value:.0f} %" for value in values], padding=2, fontsize=8)
    axes.set_yticks([place + 0.19 for place in range(len(SHOWN))], SHOWN.values(), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, frameon=False)
    first, second = guesses
    says = f"{title}. Below each picture: what the model says, {first} and, bold, {second}. "
    figure.suptitle(says + "Green: right. Red: it says the word. Brown: neither.", fontsize=9, x=0.01, ha="left")
    drawn = io.BytesIO()
    figure.savefig(drawn)
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(128, Image.Quantize.FASTOCTREE).save(
        path, optimize=True
    )  # half the bytes
