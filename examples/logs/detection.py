"""From scores to alarms: histograms, the threshold, precision and recall, the references, the picture.

A score is put into a bin; sessions are counted by bin and group. Counts add up over ranks, under every plan, and all
that is reported follows from them. A threshold is the first bin that raises an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import Keys, worst_rank
from sessions import Data, Session
from torch import Tensor, nn

from paceline.nouns.errors import UsageError

GROUPS = ("threshold_normal", "threshold_anomalous", "test_normal", "test_anomalous")
LOGIT_BINS, LARGEST_LOGIT = 64, 8.0  # bins of 0.25; what is beyond is in the first or the last
_NEIGHBOURS = 4  # bins on each side: a logit up and down
Histograms = dict[str, list[int]]


@dataclass(frozen=True)
class Quality:
    """What a threshold makes of a set of sessions."""

    precision: float
    recall: float
    f1: float
    false_alarm_rate: float


def count_bins(bins: Tensor, groups: Tensor, number: int) -> dict[str, tuple[Tensor, int]]:
    """Return how many sessions of each group are in each bin, as sums for `job.evaluate`."""
    one_hot = bins.unsqueeze(1) == torch.arange(number, device=bins.device)  # (batch, bins)
    counts = {}
    for group, name in enumerate(GROUPS):
        rows = (one_hot & (groups == group).unsqueeze(1)).sum(0)
        counts |= {f"{name} {at}": (rows[at].double(), len(bins)) for at in range(number)}
    return counts


def score_next_key(keys: int) -> Any:
    """Return the score function of the LSTM: a session's bin is its worst rank, from 0 to the number of keys."""

    def score(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        return count_bins(worst_rank(model(batch["inputs"]), batch["targets"]), batch["groups"], keys + 1)

    return score


def score_anomaly(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Score sessions by the classifier's logit, in bins of equal width."""
    place = (model(batch["inputs"]) + LARGEST_LOGIT) * (LOGIT_BINS / (2 * LARGEST_LOGIT))
    return count_bins(place.floor().clamp(0, LOGIT_BINS - 1).long(), batch["groups"], LOGIT_BINS)


def histograms(ratios: dict[str, float], sessions: int, bins: int) -> Histograms:
    """Return the counts: `job.evaluate` divides what is added up by the number of sessions."""
    return {name: [round(ratios[f"{name} {at}"] * sessions) for at in range(bins)] for name in GROUPS}


def quality(normal: Sequence[int], anomalous: Sequence[int], threshold: int) -> Quality:
    """Return the measures where bins from `threshold` on raise an alarm; 0 where a measure is not defined."""
    found, false = sum(anomalous[threshold:]), sum(normal[threshold:])
    precision = found / (found + false) if found else 0.0
    recall = found / sum(anomalous) if found else 0.0
    f1 = 2 * precision * recall / (precision + recall) if found else 0.0
    return Quality(precision, recall, f1, false / max(1, sum(normal)))


def threshold_of_normal(counts: Sequence[int], false_alarms: float) -> int:
    """Return the first bin, from 1, such that at most this share of normal sessions is in it or above."""
    total = sum(counts)
    return next((at for at in range(1, len(counts)) if sum(counts[at:]) <= false_alarms * total), len(counts) - 1)


def threshold_of_both(normal: Sequence[int], anomalous: Sequence[int]) -> int:
    """Return the bin with the best F1, averaged over its neighbours; of several equally good ones that in the middle.

    Few anomalies set it, and the F1 of single bins depends on one or two of them.
    """
    scores = [quality(normal, anomalous, at).f1 for at in range(len(normal))]
    smooth = []
    for at in range(len(scores)):
        near = scores[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]
        smooth.append(sum(near) / len(near))
    best = [at for at, score in enumerate(smooth) if math.isclose(score, max(smooth))]
    return best[len(best) // 2]


# The references


def linear_reference(data: Data, keys: Keys) -> Quality:
    """Return what logistic regression does, trained on all training sessions, those of the threshold's part too.

    Of HDFS its features are how often each key occurs, of ADFA-LD which 3-grams occur, as in the published reference.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise UsageError("--linear", "scikit-learn is not installed", "pip install scikit-learn") from None
    train = [*data.train, *data.threshold]
    vectors = CountVectorizer(analyzer=keys.tokens)
    features = vectors.fit_transform(train)
    model = LogisticRegression(solver="liblinear", max_iter=1000).fit(features, [row.is_anomaly for row in train])
    guesses = model.predict(vectors.transform(data.test)).tolist()
    return quality_of(guesses, data.test)


def unseen_pair_reference(data: Data) -> Quality:
    """Return what an alarm at each pair of consecutive keys does that no training session has; start and end count."""
    seen = {pair for row in [*data.train, *data.threshold] for pair in _pairs(row)}
    return quality_of([not seen.issuperset(_pairs(row)) for row in data.test], data.test)


def quality_of(alarms: Sequence[bool], rows: Sequence[Session]) -> Quality:
    """Return the measures of an alarm for each session."""
    counts = {(alarm, kind): 0 for alarm in (False, True) for kind in (False, True)}
    for alarm, row in zip(alarms, rows, strict=True):
        counts[bool(alarm), row.is_anomaly] += 1
    normal, anomalous = ([counts[False, kind], counts[True, kind]] for kind in (False, True))
    return quality(normal, anomalous, 1)


def _pairs(row: Session) -> set[tuple[int, int]]:
    return {*zip((-1, *row.keys), (*row.keys, -1), strict=True)}


# What people see


def table(rows: dict[str, Quality]) -> str:
    """Return the measures, aligned."""
    lines = [f"{'':<22} {'precision':>9} {'recall':>9} {'F1':>9} {'false alarms':>13}"]
    for name, one in rows.items():
        lines.append(
            f"{name:<22} {one.precision:>9.4f} {one.recall:>9.4f} {one.f1:>9.4f} {one.false_alarm_rate:>13.4%}"
        )
    return "\n".join(lines)


def draw(path: Path, counts: Histograms, threshold: int, rows: dict[str, Quality], labels: tuple[str, str]) -> None:
    """Draw the test set's scores with the threshold, and the precision and recall of every threshold."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    normal, anomalous = counts["test_normal"], counts["test_anomalous"]
    name, axis = labels
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    is_logit = len(normal) == LOGIT_BINS
    step = 2 * LARGEST_LOGIT / LOGIT_BINS if is_logit else 1.0
    first = -LARGEST_LOGIT if is_logit else 0.0
    places = [first + step * at for at in range(len(normal))]
    for values, title, colour in ((normal, "normal", "tab:blue"), (anomalous, "anomalous", "tab:red")):
        shares = [value / max(1, sum(values)) for value in values]
        left.bar(places, shares, step, align="edge", alpha=0.5, color=colour, label=f"{title} ({sum(values):,})")
    left.axvline(places[threshold], color="black", linestyle="--", label="threshold")
    left.set(xlabel=axis, ylabel="share of sessions", title=name)
    left.legend(fontsize=8)
    curve = [quality(normal, anomalous, at) for at in range(len(normal))]
    curve = [one for one in curve if one.recall > 0]
    right.plot(
        [one.recall for one in curve], [one.precision for one in curve], color="tab:gray", label="all thresholds"
    )
    for (title, one), marker in zip(rows.items(), ("o", "x", "+"), strict=False):
        right.plot([one.recall], [one.precision], marker, color="black", label=f"{title}: F1 {one.f1:.3f}")
    right.set(xlabel="recall", ylabel="precision", xlim=(0, 1.03), ylim=(0, 1.05), title="test set")
    right.legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
