"""What a loss returns by mistake is refused in words, and an error inside of it says for which batch it was."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.nouns.errors import LossError, WorkloadError
from paceline.parallel.micro_batches import StepHooks, forward_backward
from paceline.train.data import RankLoader

MODEL = nn.Linear(3, 2)
BATCH = {"x": torch.ones(4, 3), "y": torch.zeros(4, dtype=torch.int64)}
MOMENTS = StepHooks(lambda total, weight: None, lambda is_last, is_padding: None, lambda: None)


def total(batch, reduction="sum"):
    return F.cross_entropy(MODEL(batch["x"]), batch["y"], reduction=reduction)


# What the loss returns, and what the error says of it and of what to do.
SLIPS = {
    "nothing": (lambda batch: None, "is its `return` missing?", "cross_entropy(..., reduction='sum')"),
    "a mean": (lambda batch: total(batch, "mean"), "a mean alone can't be split over ranks", "their number"),
    "a number": (lambda batch: total(batch).item(), "a plain number has no gradient and no weight", "their number"),
    "a list": (lambda batch: [total(batch), 4], "a tuple is wanted", "their number"),
    "three things": (lambda batch: (total(batch), 4, None), "a tuple of 3: that is no pair", "their number"),
    "a dict": (lambda batch: {"loss": total(batch)}, "of type dict: that has no weight", "their number"),
    "a plain sum": (lambda batch: (total(batch).item(), 4), "a plain number has no gradient", "without .item()"),
    "no gradient": (lambda batch: (total(batch).detach(), 4), "no gradient leads from it", "leave out .detach()"),
    "outputs": (lambda batch: (total(batch), MODEL(batch["x"])), "a tensor of shape (4, 2)", "such as len(labels)"),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_a_loss_of_another_form_is_refused_in_words(slip):
    loss, found, fix = SLIPS[slip]
    with pytest.raises(LossError) as caught:
        forward_backward(loss, [BATCH], MOMENTS)
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_an_error_inside_the_model_says_for_which_batch_it_was():
    wrong = {"x": torch.ones(4, 5), "y": BATCH["y"]}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        forward_backward(lambda batch: (total(batch), 4), [BATCH, wrong], MOMENTS)
    shown = "".join(traceback.format_exception(caught.value))
    assert "the loss of micro-batch 2 of 2, with tensors of shape (4, 5) of torch.float32, (4,) of torch.int64" in shown


def ragged(**parts):
    workload = paceline.Workload(
        model=lambda: MODEL,
        loss=lambda model, batch: (model(batch).sum(), 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=[torch.ones(length, 3) for length in range(1, 9)],
        batch_size=4,
        **parts,
    )
    return RankLoader(workload.data, workload, 0, 1, torch.device("cpu"))


def test_samples_that_make_no_batch_say_what_to_hand_in():
    with pytest.raises(WorkloadError) as caught:
        next(ragged().training(0, 8))
    assert "stack expects each tensor to be equal size" in caught.value.found
    assert "hand in collate=..." in caught.value.fix


def test_samples_of_other_shapes_go_one_by_one():
    loader = ragged(micro_batch_size=1)
    assert loader.trials() is None
    assert len(next(loader.training(0, 8)).microbatches) == 4
