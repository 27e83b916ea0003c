"""Draws the losses, nanoGPT's beside them, and a sample of what the model writes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

NANOGPT = 1.88  # validation loss of nanoGPT's setting for CPUs on tiny shakespeare, by its README
_COLUMNS, _LINES = 44, 19


def draw(curves: Mapping[str, Sequence[tuple[int, float]]], title: str, sample: str, is_shakespeare: bool, path: Path):
    """Write a picture.

    Args:
        curves: "training" and "held out": steps and losses.
        title: of the curves.
        sample: text.
        is_shakespeare: nanoGPT's loss is of the same text and tokens.
        path: PNG, or what else matplotlib writes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2.6))
    for name, points in curves.items():
        if points:
            left.plot(*zip(*points, strict=True), label=name, linewidth=1.6, marker="o", markersize=3)
    if is_shakespeare:
        left.axhline(NANOGPT, color="gray", linestyle="--", linewidth=1)
        left.text(0, NANOGPT, f" nanoGPT on a CPU: {NANOGPT}", color="gray", va="bottom", fontsize=9)
    left.set(xlabel="step", ylabel="loss, nats per token", title=title)
    left.legend(frameon=False)
    left.spines[["top", "right"]].set_visible(False)
    right.axis("off")
    right.set_title("what it writes", loc="left")
    right.text(0, 0.98, shown(sample), family="monospace", fontsize=8, va="top", transform=right.transAxes)
    picture.tight_layout()
    picture.savefig(path, dpi=90)
    pyplot.close(picture)


def shown(sample: str) -> str:
    """The beginning of a text, wrapped, in characters that matplotlib's font has and does not read as formulas."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in sample.strip()).replace("$", r"\$")
    lines = [part for line in plain.split("\n") for part in textwrap.wrap(line, _COLUMNS) or [""]]
    return "\n".join(lines[:_LINES])
