"""What is reported: F1, accuracy and ROC of logits, intervals by bootstrap, and the references on the same split."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import solidity
from contracts import Contract, Data

from paceline.nouns.errors import UsageError

RESAMPLES = 1000


@dataclass(frozen=True)
class Scored:
    """The logits of contracts by models that were trained on none of their near duplicates; above 0 is an alarm."""

    labels: np.ndarray
    logits: np.ndarray
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, rows: np.ndarray) -> Scored:
        """Return some of them."""
        return Scored(self.labels[rows], self.logits[rows], self.groups[rows])


@dataclass(frozen=True)
class Quality:
    """Measures of alarms; `auc` is the area under the ROC curve."""

    accuracy: float
    precision: float
    recall: float
    f1: float
    auc: float


def quality(scored: Scored) -> Quality:
    """Return the measures; 0 where one is not defined, and an area of a half where a class is missing."""
    labels, alarms = scored.labels, scored.logits > 0
    hits, number = int((labels & alarms).sum()), len(labels)
    precision = hits / int(alarms.sum()) if alarms.any() else 0.0
    recall = hits / int(labels.sum()) if labels.any() else 0.0
    f1 = 2 * hits / int(labels.sum() + alarms.sum()) if labels.any() or alarms.any() else 0.0
    return Quality(int((labels == alarms).sum()) / number, precision, recall, f1, area(labels, scored.logits))


def area(labels: np.ndarray, logits: np.ndarray) -> float:
    """Return how often a reentrant contract has a larger logit than a safe one; equal ones count half."""
    positive, negative = logits[labels], np.sort(logits[~labels])
    if not len(positive) or not len(negative):
        return 0.5
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.mean() / (2 * len(negative)))


def roc(scored: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Return the false and the true positive rates of all thresholds, the highest first."""
    order = np.argsort(-scored.logits, kind="stable")
    labels, logits = scored.labels[order], scored.logits[order]
    last = np.append(np.diff(logits) != 0, True)  # equal logits are one threshold
    true, false = np.cumsum(labels)[last], np.cumsum(~labels)[last]
    return np.append(0, false) / max(1, false[-1]), np.append(0, true) / max(1, true[-1])


def intervals(scored: Scored, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each measure. Groups are drawn, not contracts: near duplicates are no new cases."""
    draw = np.random.default_rng(seed)
    members = [np.flatnonzero(scored.groups == group) for group in np.unique(scored.groups)]
    found = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([members[at] for at in draw.integers(len(members), size=len(members))])
        found.append(list(vars(quality(scored.where(rows))).values()))
    low, high = np.percentile(np.array(found), [2.5, 97.5], axis=0)
    names = Quality.__dataclass_fields__
    return {name: (float(low[at]), float(high[at])) for at, name in enumerate(names)}


def held_out(
    rows: Sequence[Contract], logits: np.ndarray, fold_of_group: Mapping[int, int], chosen: Sequence[int]
) -> Scored:
    """Return the contracts that some model may judge: the mean of the models trained on none of their group.

    logits: (contracts, models); chosen: the fold that each model left out.
    """
    allowed = np.array([[fold_of_group.get(row.group, fold) == fold for fold in chosen] for row in rows])
    judged = allowed.any(1)
    means = (logits * allowed).sum(1)[judged] / allowed.sum(1)[judged]
    labels, groups = np.array([row.is_reentrant for row in rows]), np.array([row.group for row in rows])
    return Scored(labels[judged], means, groups[judged])


# The references


def has_low_level_call(row: Contract) -> bool:
    """Return whether a contract has `.call`: an alarm at each is the reference that reads no order."""
    texts = [token.text for token in solidity.read_tokens(row.source)]
    return any(before == "." and text == "call" for before, text in itertools.pairwise(texts))


def rule_logits(rows: Sequence[Contract], models: int) -> np.ndarray:
    """Return (contracts, models): 1 for an alarm at `.call`, else -1."""
    return np.array([[1.0 if has_low_level_call(row) else -1.0] * models for row in rows])


def linear_logits(data: Data, folds: Sequence[int], chosen: Sequence[int], rows: Sequence[Contract]) -> np.ndarray:
    """Return (contracts, models) of logistic regression on tf-idf of 1 to 3 tokens, names included, comments not.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    vectorizer, regression = linear_parts()
    words = {id(row): [token.text for token in solidity.read_tokens(row.source)] for row in [*data.train, *rows]}
    columns = []
    for fold in chosen:
        train = [row for row, of in zip(data.train, folds, strict=True) if of != fold]
        vectors = vectorizer(analyzer=_grams, sublinear_tf=True, min_df=2)
        features = vectors.fit_transform([words[id(row)] for row in train])
        model = regression(C=10, class_weight="balanced", max_iter=2000)
        model.fit(features, [row.is_reentrant for row in train])
        columns.append(model.decision_function(vectors.transform([words[id(row)] for row in rows])))
    return np.stack(columns, axis=1)


def linear_parts() -> tuple[type, type]:
    """Return scikit-learn's TfidfVectorizer and LogisticRegression.

    Raises:
        UsageError: it is not installed.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise UsageError("--linear", "scikit-learn is not installed", "pip install scikit-learn") from None
    return TfidfVectorizer, LogisticRegression


def _grams(words: Sequence[str]) -> list[str]:
    return [" ".join(words[at : at + n]) for n in (1, 2, 3) for at in range(len(words) - n + 1)]
