"""paceline.integrations.lightning: a LightningModule ends with the parameters that lightning.Trainer gives it."""

from __future__ import annotations

import functools
import json
import os
import warnings
from dataclasses import asdict

import pytest
import torch

from paceline.integrations.lightning import Trainer
from paceline.nouns.plan import Plan

from support.ranks import preload, run_ranks

lightning = pytest.importorskip("lightning")
modules = pytest.importorskip("support.lightning_modules")

preload("lightning.pytorch", "paceline.integrations.lightning")
PLANS = ["replicate=1", "replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "tensor=2"]
CELLS = list(modules.CELLS)
alone = functools.cache(modules.by_lightning)


def whole_state(trainer):
    """The state of the module, whole under every plan; `state_dict` is refused under tensor."""
    job = trainer.job
    found = {}
    for name, parameter in job._named().items():
        found[name] = job.parallel.whole(parameter).detach().double()
    for name, buffer in job.model.named_buffers():
        found[name] = buffer.double()
    return found


def train(cell, added=()):
    with modules.in_float64(cell):
        trainer = Trainer(callbacks=[*added, *modules.callbacks(cell)], **modules.CELLS[cell][1])
        module = modules.made(cell)
        loader, held_out = modules.data(cell)
        trainer.fit(module, loader, held_out)
        state = whole_state(trainer)
        trainer.job.close()
    return state, modules.rest_of(trainer, module)


def train_all(rank, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    found = {}
    for cell in CELLS:
        if "tensor" not in plan or cell not in modules.NOT_UNDER_TENSOR:
            found[cell] = train(cell)
    return found


@functools.cache
def results(plan):
    return run_ranks(Plan.parse(plan).world_size, train_all, plan, timeout_s=300)


def assert_same(found, expected):
    state, (history, counts, rates) = found
    expected_state, (expected_history, expected_counts, expected_rates) = expected
    assert state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert len(history) == len(expected_history)
    for values, others in zip(history, expected_history, strict=True):
        assert values == pytest.approx(others, rel=1e-9)
    assert counts == expected_counts
    assert rates == pytest.approx(expected_rates)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_and_metrics_are_those_of_lightnings_trainer(plan, cell):
    if "tensor" in plan and cell in modules.NOT_UNDER_TENSOR:
        pytest.skip("refused: a rank has pieces of the gradients")
    for found in results(plan):
        assert_same(found[cell], alone(cell))


def test_modules_of_pytorch_lightning_train_too():
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 1)

        def training_step(self, batch):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def weight(trainer):
        with modules.in_float64("plain"):
            torch.manual_seed(0)
            module = Other()
            trainer.fit(module, modules.training_loader())
        return module.net.weight.detach()

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = weight(other.Trainer(max_epochs=2, **quiet))
    trainer = Trainer(max_epochs=2, callbacks=other.callbacks.EarlyStopping("loss", strict=False))
    assert torch.equal(weight(trainer), expected)
    trainer.job.close()


RESUMED = {"plateau": 7, "stopped": 6, "scheduled": 4, "adversarial": 14, "limits": 7, "clipped": 5}


def train_resumed(rank, plan, folder):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    found = {}
    for cell, after in RESUMED.items():
        saved = f"{folder}/{cell}"
        whole = train(cell, added=[modules.Saves(saved, after)])
        found[cell] = whole, train(cell, added=[modules.Loads(saved)])
    return found


@functools.cache
def resumed(plan, folder):
    return run_ranks(Plan.parse(plan).world_size, train_resumed, plan, str(folder), timeout_s=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("cell", RESUMED)
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_a_resumed_training_ends_bit_for_bit_as_one_that_was_not_stopped(plan, cell, folder):
    for answers in resumed(plan, folder / plan):
        (state, (history, *rest)), (state_again, (history_again, *rest_again)) = answers[cell]
        assert all(torch.equal(state[name], state_again[name]) for name in state)
        assert rest_again == rest
        assert 0 < len(history_again) < len(history)
        assert history_again == history[-len(history_again) :]


def test_one_rank_goes_on_with_what_two_have_saved(folder):
    resumed("replicate=2", folder / "replicate=2")
    for cell in ("plateau", "clipped"):
        state, (history, *rest) = train(cell, added=[modules.Loads(str(folder / "replicate=2" / cell))])
        expected_state, (expected, *expected_rest) = alone(cell)
        assert_same((state, (history, *rest)), (expected_state, (expected[-len(history) :], *expected_rest)))
