"""The losses, each a mean over the sentences of a batch: so the mean over the ranks is that of the whole batch.

A sentence's tokens are averaged first. A mean over all tokens of the batch would weigh ranks by their tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import texts
import torch
from torch import Tensor
from torch.nn import functional as F

# The masked tokens' share beside the class: with 1 the class is learned much later, as their gradients are far larger.
TOKENS = 0.1


class Weights(NamedTuple):
    """How much each part of the student's loss counts; those of Sanh et al. are 5, 2 and 1."""

    soft: float
    hard: float
    cosine: float


def hard_loss(made: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the masked tokens and of the class: what the teacher, and a student without one, learns by."""
    wanted = batch["wanted"]
    tokens = F.cross_entropy(made["tokens"].transpose(1, 2), wanted, ignore_index=texts.NOT_PREDICTED, reduction="none")
    return TOKENS * _mean(tokens, wanted != texts.NOT_PREDICTED) + F.cross_entropy(made["classes"], batch["labels"])


def student_loss(
    made: dict[str, Tensor], teacher: dict[str, Tensor], batch: dict[str, Tensor], weights: Weights, temperature: float
) -> Tensor:
    """The three parts: soft targets, the teacher's own losses, and the direction of the hidden states."""
    is_wanted = batch["wanted"] != texts.NOT_PREDICTED
    soft = TOKENS * _mean(_divergence(made["tokens"], teacher["tokens"], temperature), is_wanted)
    soft = soft + _divergence(made["classes"], teacher["classes"], temperature).mean()
    cosine = 1 - F.cosine_similarity(made["hidden"], teacher["hidden"], dim=-1)
    along = _mean(cosine, batch["attention_mask"].bool())
    return weights.soft * soft + weights.hard * hard_loss(made, batch) + weights.cosine * along


def _divergence(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """KL divergence of softened distributions; temperature² keeps gradients as large as without it (Hinton et al.)."""
    here, there = (F.log_softmax(each / temperature, dim=-1) for each in (logits, wanted))
    return F.kl_div(here, there, reduction="none", log_target=True).sum(-1) * temperature**2


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """Mean over the sentences of the mean over those of a sentence's values that count; 0 where none does."""
    of_each = torch.where(counts, values, 0).sum(1) / counts.sum(1).clamp(min=1)
    return of_each.mean()
