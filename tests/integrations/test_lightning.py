"""paceline.integrations.lightning: Lightning's Trainer ends under our Strategy where it ends under its own DDP."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings

import pytest
import torch

from paceline.comm import api
from paceline.nouns.errors import PlanError, UsageError
from paceline.nouns.plan import Plan

from support.ranks import preload, run_ranks

lightning = pytest.importorskip("lightning")
modules = pytest.importorskip("support.lightning_modules")

from lightning.pytorch import callbacks as own  # noqa: E402
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.plugins import Precision  # noqa: E402
from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from paceline.integrations.lightning import LaunchedRanks, Strategy  # noqa: E402

preload("lightning.pytorch", "paceline.integrations.lightning")
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available")
PLANS = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2"]


@pytest.fixture(autouse=True)
def leave_world():
    """Leave the world of one that a fit in this process has joined: a Strategy has its number of ranks."""
    api.shutdown()


def begin():
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")


def train(strategy, cell, loader=None):
    kind, settings = modules.CELLS[cell]
    module = modules.made(kind)
    trainer = lightning.Trainer(strategy=strategy, max_epochs=2, **modules.quiet(**settings))
    trainer.fit(module, loader or modules.loader(), modules.loader(False))
    state = strategy.lightning_module_state_dict()
    found = {name: value.clone() for name, value in state.items()}
    return found, {name: float(value) for name, value in trainer.callback_metrics.items()}


def train_all(rank, plan):
    begin()
    found = {}
    for cell in modules.CELLS:
        found[cell] = train(Strategy(plan=plan) if plan else DDPStrategy(cluster_environment=LaunchedRanks()), cell)
    return found


@functools.cache
def expected(plan):
    return run_ranks(1, alone)[0] if "tensor" in plan else run_ranks(2, ddp)[0]


def alone(rank):
    """Lightning in one process, with the order of samples that a DistributedSampler gives."""
    begin()
    found = {}
    for cell in modules.CELLS:
        sampler = DistributedSampler(modules.numbers(), num_replicas=1, rank=0)
        loader = DataLoader(modules.numbers(), 4, sampler=sampler)
        found[cell] = train(SingleDeviceStrategy(torch.device("cpu")), cell, loader)
    return found


def ddp(rank):
    api.init()
    begin()
    found = {}
    for cell in modules.CELLS:
        strategy = DDPStrategy(cluster_environment=LaunchedRanks(), find_unused_parameters=True)
        strategy.parallel_devices = [torch.device("cpu")] * 2
        found[cell] = train(strategy, cell)
    return found


@functools.cache
def results(plan):
    return run_ranks(Plan.parse(plan).world_size, train_all, plan, timeout_s=300)


@pytest.mark.parametrize("cell", modules.CELLS)
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_and_metrics_are_those_of_ddp(plan, cell):
    state, metrics = results(plan)[0][cell]
    expected_state, expected_metrics = expected(plan)[cell]
    assert state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9)


def use_all(rank, plan, folder):
    begin()
    saving = own.ModelCheckpoint(folder, "{step}", monitor="val_loss", save_top_k=3, save_last=True)
    steps = own.ModelCheckpoint(f"{folder}/steps", "{step}", every_n_train_steps=3, save_top_k=-1)
    eight = [saving, steps, own.LearningRateMonitor(), own.EarlyStopping("val_loss", patience=9), own.Timer()]
    eight += [own.GradientAccumulationScheduler({1: 2}), own.ModelSummary(), own.DeviceStatsMonitor()]
    eight += [own.LambdaCallback(on_train_start=lambda trainer, module: None)]
    loggers = [CSVLogger(folder, "csv"), TensorBoardLogger(folder, "board")]
    settings = modules.quiet(logger=loggers, log_every_n_steps=1, callbacks=eight, max_epochs=2)
    del settings["enable_checkpointing"], settings["enable_model_summary"]
    strategy = Strategy(plan=plan)
    trainer = lightning.Trainer(strategy=strategy, **settings)
    trainer.fit(modules.made(modules.Regression), modules.loader(), modules.loader(False))
    tested = trainer.test(dataloaders=modules.loader(False), ckpt_path="best", verbose=False)
    predicted = trainer.predict(dataloaders=modules.loader(False), ckpt_path=None)
    trainer.validate(dataloaders=modules.loader(False), ckpt_path="last", verbose=False)
    state = {name: value.clone() for name, value in strategy.lightning_module_state_dict().items()}
    return state, resume(rank, plan, f"{folder}/steps/step=3.ckpt"), tested, len(predicted), saving.best_model_path


def resume(rank, plan, file):
    """Go on in the middle of an epoch, under the plan, or under DDP."""
    begin()
    if plan:
        strategy = Strategy(plan=plan)
    else:
        api.init()
        strategy = DDPStrategy(cluster_environment=LaunchedRanks())
        strategy.parallel_devices = [torch.device("cpu")] * 2
    accumulation = own.GradientAccumulationScheduler({1: 2})
    trainer = lightning.Trainer(strategy=strategy, max_epochs=2, **modules.quiet(callbacks=[accumulation]))
    trainer.fit(modules.made(modules.Regression), modules.loader(), modules.loader(False), ckpt_path=file)
    return {name: value.clone() for name, value in strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2,zero=1", "shard=2", "tensor=2"])
def test_callbacks_loggers_loops_and_a_resume(plan, tmp_path):
    state, resumed, tested, predicted, best = run_ranks(2, use_all, plan, str(tmp_path), timeout_s=300)[0]
    file = str(tmp_path / "steps/step=3.ckpt")
    is_tensor = "tensor" in plan
    expected_state = run_ranks(1 if is_tensor else 2, resume, "replicate=1" if is_tensor else None, file)[0]
    assert state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert tested[0]["test_loss"] > 0
    assert predicted == (10 if "tensor" in plan else 5)
    assert best
    assert (tmp_path / "last.ckpt").exists()
    assert "lr-AdamW" in (tmp_path / "csv/version_0/metrics.csv").read_text()
    assert list(tmp_path.glob("board/version_0/events*"))
    content = torch.load(best, weights_only=True)
    assert content["state_dict"]["net.0.weight"].shape == (16, 6)
    assert content["optimizer_states"][0]["state"][0]["exp_avg"].shape == (16, 6)


@pytest.mark.parametrize(
    ("plan", "settings", "found"),
    [
        ("replicate=2", {"devices": 3}, "there are 3"),
        ("replicate=2", {"devices": 2, "num_nodes": 4}, "it is 4"),
        (2, {}, "it is 2"),
    ],
)
def test_settings_that_contradict_the_plan_are_refused(plan, settings, found):
    with pytest.raises(UsageError, match=found):
        lightning.Trainer(strategy=Strategy(plan=plan), **modules.quiet(**settings))


def test_a_plan_that_no_loop_can_have_is_refused():
    with pytest.raises(PlanError, match="pipeline"):
        Strategy(plan="pipeline=2")


class OwnBackward(modules.Regression):
    def backward(self, loss):
        loss.backward()


def test_a_backward_of_the_modules_own_is_refused():
    trainer = lightning.Trainer(strategy=Strategy(plan="replicate=1"), max_epochs=1, **modules.quiet())
    with pytest.raises(UsageError, match="overrides backward"):
        trainer.fit(modules.made(OwnBackward), modules.loader(), modules.loader(False))


RANK_OF_TWO = {
    "PACELINE_RANK": "0",
    "PACELINE_WORLD_SIZE": "2",
    "PACELINE_LOCAL_SIZE": "2",
    "PACELINE_MASTER": "127.0.0.1:9",
}
# By name: the command's plan, other variables of the rank, the plan of Strategy, and what the error says.
COMMANDS = {
    "--resume": ({"mesh": "replicate=1"}, {"PACELINE_RESUME": "runs/x"}, None, "the command has --resume"),
    "--checkpoint-every": ({"mesh": "replicate=1", "checkpoint_every": 3}, {}, None, "the plan has checkpoint_every=3"),
    "another mesh": ({"mesh": "replicate=2"}, RANK_OF_TWO, "shard=2", "2 ranks with the plan replicate=2"),
    "another option": ({"mesh": "shard=2", "zero": 1}, RANK_OF_TWO, "shard=2", "with the plan shard=2,zero=1"),
    "fewer ranks": ({"mesh": "replicate=1"}, {}, "replicate=2", "started 1 ranks with the plan replicate=1"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_settings_of_the_command_that_do_not_fit_are_refused(case, monkeypatch):
    command, variables, plan, found = COMMANDS[case]
    for name, value in {"PACELINE_RUN_DIR": "runs/x", "PACELINE_PLAN": json.dumps(command), **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=found):
        Strategy(plan=plan)


def test_a_plan_written_twice_alike_is_accepted(monkeypatch):
    plan = {"mesh": "shard=2", "zero": 1}
    for name, value in {"PACELINE_RUN_DIR": "runs/x", "PACELINE_PLAN": json.dumps(plan), **RANK_OF_TWO}.items():
        monkeypatch.setenv(name, value)
    assert Strategy(plan="shard=2,zero=1").plan.mesh == "shard=2"


class OwnPrecision(Precision):
    pass


PLUGINS = {
    "a precision plugin": (OwnPrecision, "the precision plugin is a OwnPrecision"),
    "a cluster": (TorchElasticEnvironment, "the plugins have a TorchElasticEnvironment"),
}


@pytest.mark.parametrize("case", PLUGINS)
def test_other_plugins_are_refused(case):
    make, found = PLUGINS[case]
    with pytest.raises(UsageError, match=found):
        lightning.Trainer(strategy=Strategy(plan="replicate=2"), **modules.quiet(plugins=[make()]))


class OwnAverage(own.StochasticWeightAveraging):
    pass


class Watching(own.Callback):
    def on_after_backward(self, trainer, module):
        pass


class Inheriting(Watching):
    pass


class WatchingModule(modules.Regression):
    def on_before_optimizer_step(self, optimizer):
        pass


# By name: the plan, a callback, the module's class, and what the error says; "" if there is none.
WATCHERS = {
    "an average, zero=3": ("shard=2", own.EMAWeightAveraging, modules.Regression, "EMAWeightAveraging averages"),
    "a class of one": ("shard=2,zero=2", lambda: OwnAverage(0.1), modules.Regression, "OwnAverage averages"),
    "an average, tensor": ("tensor=2", own.WeightAveraging, modules.Regression, "WeightAveraging averages"),
    "an average, zero=1": ("shard=2,zero=1", own.WeightAveraging, modules.Regression, ""),
    "a hook": ("tensor=2", Watching, modules.Regression, "on_after_backward of Watching"),
    "an inherited hook": ("tensor=2", Inheriting, modules.Regression, "on_after_backward of Inheriting"),
    "a hook of the module": ("tensor=2", own.Callback, WatchingModule, "on_before_optimizer_step of WatchingModule"),
    "a function": (
        "tensor=2",
        lambda: own.LambdaCallback(on_after_backward=print),
        modules.Regression,
        "on_after_backward of LambdaCallback",
    ),
    "a hook, shard": ("shard=2", Watching, WatchingModule, ""),
}


@pytest.mark.parametrize("case", WATCHERS)
def test_what_needs_whole_values_is_refused_under_parts(case):
    plan, callback, kind, found = WATCHERS[case]
    strategy = Strategy(plan=plan)
    trainer = lightning.Trainer(strategy=strategy, **modules.quiet(callbacks=[callback()]))
    refused = pytest.raises((PlanError, UsageError), match=found) if found else contextlib.nullcontext()
    with refused:
        strategy._check_module(trainer, modules.made(kind))


def average_all(rank, plan):
    """Train with each of Lightning's averages of parameters, under the plan, or under DDP."""
    begin()
    found = {}
    for make in (lambda: own.StochasticWeightAveraging(0.05, 2, 2), lambda: own.EMAWeightAveraging(decay=0.9)):
        strategy = Strategy(plan=plan) if plan else DDPStrategy(cluster_environment=LaunchedRanks())
        if not plan:
            api.init()
            strategy.parallel_devices = [torch.device("cpu")] * 2
        callback = make()
        trainer = lightning.Trainer(strategy=strategy, max_epochs=4, **modules.quiet(callbacks=[callback]))
        trainer.fit(modules.made(modules.Regression), modules.loader(), modules.loader(False))
        state = strategy.lightning_module_state_dict()
        found[type(callback).__name__] = {name: value.clone() for name, value in state.items()}
    return found


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2,zero=1"])
def test_averages_of_parameters_are_those_of_ddp(plan):
    expected_states = run_ranks(2, average_all, None)[0]
    for name, state in run_ranks(2, average_all, plan)[0].items():
        torch.testing.assert_close(state, expected_states[name], rtol=1e-9, atol=1e-12, msg=name)
