"""Draws the cosines of the test pairs against the scores that people gave."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(path: Path, title: str, given: Sequence[float], cosines: Sequence[float], scores: Mapping[str, float]) -> None:
    """Write the figure: a violin of cosines for each score from 0 to 5, rounded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    groups: dict[int, list[float]] = {}
    for score, cosine in zip(given, cosines, strict=True):
        groups.setdefault(int(score + 0.5), []).append(cosine)
    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=90, layout="constrained")
    places = sorted(groups)
    drawn = axes.violinplot(
        [groups[place] for place in places], places, widths=0.85, showmedians=True, showextrema=False
    )
    for body in drawn["bodies"]:
        body.set(facecolor="#2b6cb0", alpha=0.6)
    axes.set_xticks(places, [f"{place}\n{len(groups[place])} pairs" for place in places], fontsize=8)
    axes.set_xlabel("score that people gave, rounded")
    axes.set_ylabel("cosine of the embeddings")
    axes.set_title(f"{title}, test pairs: Spearman {scores['spearman_test']:.3f}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    pyplot.close(figure)
    Image.open(buffer).convert("RGB").quantize(64, Image.Quantize.FASTOCTREE).save(path, optimize=True)
