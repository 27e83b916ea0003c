"""Draws the cosines of the test pairs against the scores that people gave, before and after training."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(path: Path, title: str, given: Sequence[float], cosines: Mapping[str, Sequence[float]]) -> None:
    """Write the figure: beside each other the spread of the cosines for each score from 0 to 5, rounded.

    `cosines` has those of all pairs by the name of the model, the untrained one first.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    rounded = [int(score + 0.5) for score in given]
    places = sorted({*rounded})
    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=90, layout="constrained")
    for number, ((name, of_model), colour) in enumerate(zip(cosines.items(), ("#a0aec0", "#2b6cb0"), strict=True)):
        groups = [[one for one, score in zip(of_model, rounded, strict=True) if score == place] for place in places]
        beside = [place + (number - 0.5) * 0.42 for place in places]
        drawn = axes.violinplot(groups, beside, widths=0.4, showmedians=True, showextrema=False)
        for body in drawn["bodies"]:
            body.set(facecolor=colour, alpha=0.8)
        drawn["cmedians"].set_color("black")
        axes.plot([], [], color=colour, linewidth=8, label=name)
    counts = [rounded.count(place) for place in places]
    names = [f"{place}\n{count} pairs" for place, count in zip(places, counts, strict=True)]
    axes.set_xticks(places, names, fontsize=8)
    axes.set_xlabel("score that people gave, rounded")
    axes.set_ylabel("cosine of the embeddings")
    axes.set_title(f"{title}, test pairs", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    pyplot.close(figure)
    Image.open(buffer).convert("RGB").quantize(64, Image.Quantize.FASTOCTREE).save(path, optimize=True)
