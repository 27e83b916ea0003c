"""The picture: a contract's lines, shaded by what hiding each does to the logit, beside the ROC curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import model as models
import numpy as np
import scores
import solidity
import torch
from contracts import Contract

FEWEST, MOST = 14, 24  # lines of a contract that fit
WIDEST = 66  # characters of a line that are drawn


@dataclass(frozen=True)
class Shown:
    """A contract, the models that may judge it, and the fall of its logit when one of its lines is hidden."""

    name: str
    lines: dict[int, str]
    chunks: list[list[solidity.Token]]
    models: list[int]
    logit: float = 0.0
    falls: dict[int, float] = field(default_factory=dict)


def shown_of(row: Contract, allowed: list[int], length: int) -> Shown:
    """Return a contract with its lines that are more than comments."""
    numbers = {token.line for token in solidity.read_tokens(row.source)}
    lines = {at: line for at, line in enumerate(row.source.split("\n"), start=1) if at in numbers}
    lines = {at: line for at, line in lines.items() if not line.lstrip().startswith("pragma")}
    return Shown(row.name, lines, models.chunks_of(row, length), allowed)


def choose(setting: Any, logits: np.ndarray, length: int) -> Shown:
    """Return a reentrant contract that is found, of a length that fits: of those the one with the largest logit.

    It is of the training set, or of the last test set. Models that know a near duplicate don't judge it.
    """
    fold_of_group = {row.group: fold for row, fold in zip(setting.data.train, setting.folds, strict=True)}
    last = list(setting.data.tests.values())[-1]
    found = []
    for row in [*setting.data.train, *last]:
        allowed = [at for at, fold in enumerate(setting.chosen) if fold_of_group.get(row.group, fold) == fold]
        if row.is_reentrant and allowed:
            shown = shown_of(row, allowed, length)
            mean = float(logits[setting.rows.index(row)][allowed].mean())
            too_long = max(0, len(shown.lines) - MOST) + max(0, FEWEST - len(shown.lines))
            found.append(((mean <= 0, too_long, len(shown.chunks), -mean, row.name), shown))
    return min(found, key=lambda one: one[0])[1]


def occlude(shown: Shown, score: Callable[[torch.Tensor], np.ndarray], length: int) -> Shown:
    """Return it with the falls: each line's tokens become unknown in turn. `score` gives (chunks, models)."""
    whole = models.tensor_of(shown.chunks, length)
    lines = sorted({token.line for chunk in shown.chunks for token in chunk})
    variants = [whole]
    for line in lines:
        hidden = whole.clone()
        for at, chunk in enumerate(shown.chunks):
            for place, token in enumerate(chunk):
                if token.line == line:
                    hidden[at, place] = solidity.UNKNOWN
        variants.append(hidden)
    chunks = score(torch.cat(variants))[:, shown.models].reshape(len(variants), len(whole), -1)
    logits = np.logaddexp.reduce(chunks, axis=1).mean(1)
    falls = {line: float(logits[0] - other) for line, other in zip(lines, logits[1:], strict=True)}
    return replace(shown, logit=float(logits[0]), falls=falls)


def draw(path: Path, shown: Shown, judged: Mapping[str, scores.Scored]) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm
    from PIL import Image

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4.6), layout="constrained", gridspec_kw={"width_ratios": [1.5, 1]}
    )
    largest = max([abs(fall) for fall in shown.falls.values()] + [1e-9])
    norm = TwoSlopeNorm(0.0, -largest, largest)
    colours = pyplot.get_cmap("RdBu_r")
    numbers = list(shown.lines)[:MOST]
    for row, number in enumerate(numbers):
        fall = shown.falls.get(number)
        if fall is not None:
            left.axhspan(row - 0.5, row + 0.5, color=colours(norm(0.6 * fall)), linewidth=0)
            left.text(0.99, row, f"{fall:+.1f}", ha="right", va="center", fontsize=7)
        text = shown.lines[number].expandtabs(2).rstrip()[:WIDEST].replace("$", r"\$")
        left.text(0.01, row, f"{number:3d}  {text}", va="center", fontsize=7, family="monospace")
    left.set(xlim=(0, 1), ylim=(max(len(numbers), 1) - 0.5, -0.5), xticks=[], yticks=[])
    left.set_title(f"a contract with logit {shown.logit:+.1f}, and its fall when a line is hidden", fontsize=9)
    for (name, scored), colour in zip(judged.items(), ("tab:blue", "tab:red", "tab:orange"), strict=False):
        low, high = scores.intervals(scored)["auc"]
        area = scores.quality(scored).auc
        label = f"{name} ({len(scored)}): {area:.2f} [{low:.2f}, {high:.2f}]"
        right.plot(*scores.roc(scored), color=colour, label=label)
    right.plot([0, 1], [0, 1], color="tab:gray", linestyle=":", label="chance: 0.50")
    right.set(xlabel="safe contracts with an alarm", ylabel="reentrant contracts with an alarm")
    right.set_title("ROC, near duplicates held out; area [95 %]", fontsize=9)
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=85, metadata={"Software": None})
    pyplot.close(figure)
    with Image.open(path) as drawn:
        drawn.convert("RGB").quantize(64).save(path, optimize=True)
