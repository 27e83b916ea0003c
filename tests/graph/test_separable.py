"""Where samples meet is found, and nowhere else: else a pipeline computes another loss, or takes each batch whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.graph.capture import capture
from paceline.graph.loss_is_additive import coupled_at

from support.models import MODELS, workload


def coupled(model, loss, batch):
    return coupled_at(capture(model, loss, batch, torch.device("cpu")))


def pairs(model, batch):
    return model(batch.view(-1, 12)).square().sum(), len(batch)


def flat(model, batch):
    return model(batch.view(-1, 3, 2).flatten(0, 1).view(-1, 3, 2).flatten(1)).square().sum(), len(batch)


def contrastive(model, batch):
    found = F.normalize(model(batch), dim=1)
    return F.cross_entropy(found @ found.T, torch.arange(len(batch)), reduction="sum"), len(batch)


def centred(model, batch):
    found = model(batch)
    return (found - found.mean(0)).square().sum(), len(batch)


@pytest.mark.parametrize("samples", [2, 8, 9])
@pytest.mark.parametrize(("loss", "wide", "meets"), [(flat, 6, False), (contrastive, 6, True), (centred, 6, True)])
def test_samples_meet_whatever_their_number(loss, wide, meets, samples):
    assert (coupled(nn.Linear(wide, 4), loss, torch.randn(samples, 6)) is not None) == meets


def squared(model, batch):
    return model(batch).square().sum()


def of_words(model, batch):
    return F.cross_entropy(model(batch), (batch[:, 0] > 0).long(), reduction="sum")


PENALTIES = {
    "one more": (lambda m, b: squared(m, b) + 1.0, True),
    "nothing more": (lambda m, b: 0 + squared(m, b) + torch.zeros(()), False),
    "a penalty": (lambda m, b: squared(m, b) + 1e-4 * m.weight.square().sum(), True),
    "a penalty first": (lambda m, b: 1e-4 * m.weight.square().sum() - squared(m, b), True),
    "a penalty alone": (lambda m, b: m.weight.square().sum(), True),
    "a factor from the weights": (lambda m, b: squared(m, b) * m.weight.square().sum(), False),
    "divided by the weights": (lambda m, b: squared(m, b) / m.weight.square().sum(), False),
    "two sums": (lambda m, b: squared(m, b) - 2 * of_words(m, b), False),
    "a product of sums": (lambda m, b: squared(m, b) * b.sum(), True),
    "a quotient of sums": (lambda m, b: squared(m, b) / b.square().sum(), True),
    "divided by a sum": (lambda m, b: 3.0 / squared(m, b), True),
    "a mean": (lambda m, b: m(b).square().mean(), True),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_what_counts_once_for_each_part_is_found(name):
    total, meets = PENALTIES[name]
    found = coupled(nn.Linear(6, 4), lambda model, batch: (total(model, batch), len(batch)), torch.randn(8, 6))
    assert (found is not None) == meets


def test_rows_but_the_first_depend_on_where_the_batch_is_cut():
    def all_but_the_first(model, batch):
        rows = torch.arange(len(batch))[1:]
        return model(batch)[rows, torch.zeros_like(rows)].sum(), len(rows)

    assert str(coupled(nn.Linear(6, 4), all_but_the_first, torch.randn(8, 6)).target) == "aten.index.Tensor"


def test_neighbours_that_the_model_pairs_meet():
    assert coupled(nn.Linear(12, 4), pairs, torch.randn(8, 6)) is not None


def test_batch_norm_hides_nothing_behind_it():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    met = coupled(model, contrastive, torch.randn(8, 6))
    assert met is not None
    assert met.target is not torch.ops.aten.batch_norm.default


@pytest.mark.parametrize("samples", [7, 8])
@pytest.mark.parametrize("name", ["mlp", "encoder", "resnet", pytest.param("bert", marks=pytest.mark.slow)])
def test_of_the_models_only_batch_norm_couples(name, samples):
    make, loss, _ = MODELS[name]
    batch = torch.utils.data.default_collate(workload(name).data[:samples])
    met = coupled(make(), loss, batch)
    assert (met is not None) == (name == "resnet")
    assert met is None or met.target is torch.ops.aten.batch_norm.default
