"""Every argument of lightning.Trainer and every hook is taken, called, or refused with what to write instead."""

from __future__ import annotations

import contextlib
import inspect
import io
import json

import pytest
import torch

from paceline.integrations import lightning_arguments as arguments
from paceline.integrations import lightning_hooks as hooks
from paceline.integrations.lightning import Trainer
from paceline.nouns.errors import LossError, PacelineError, PlanError, UsageError, WorkloadError

lightning = pytest.importorskip("lightning")
modules = pytest.importorskip("support.lightning_modules")
from lightning.pytorch import callbacks as of_lightning  # noqa: E402
from lightning.pytorch.core import hooks as core  # noqa: E402

REFUSED = [name for name, argument in arguments.ARGUMENTS.items() if argument.way == arguments.REFUSED]
OTHER = {
    "accelerator": "cpu",
    "strategy": "ddp",
    "devices": 2,
    "num_nodes": 2,
    "max_time": "00:01:00:00",
    "limit_predict_batches": 3,
    "overfit_batches": 1,
    "profiler": "simple",
    "barebones": True,
    "plugins": [object()],
    "reload_dataloaders_every_n_epochs": 1,
    "default_root_dir": "here",
    "model_registry": "there",
}


@pytest.fixture(autouse=True)
def float64():
    with modules.in_float64("plain"):
        yield


@contextlib.contextmanager
def fitted(module=None, loader=None, held_out=None, **options):
    """A trainer that has trained a module; its job is closed at the end."""
    trainer = Trainer(**{"max_epochs": 1, **options})
    try:
        trainer.fit(module or modules.Regression(), loader or modules.training_loader(), held_out)
        yield trainer
    finally:
        if "job" in vars(trainer):
            trainer.job.close()


def test_every_argument_of_lightnings_trainer_is_classified():
    parameters = inspect.signature(lightning.Trainer.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
    assert {name: argument.default for name, argument in arguments.ARGUMENTS.items()} == defaults
    assert {argument.way for argument in arguments.ARGUMENTS.values()} == {
        arguments.TAKEN,
        arguments.WITHOUT_EFFECT,
        arguments.REFUSED,
    }
    assert Trainer(**defaults).max_epochs == 1000
    assert sorted(OTHER) == sorted(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_not_done_is_refused_by_name(name):
    with pytest.raises(PacelineError, match=f"Trainer does not take {name}") as raised:
        Trainer(**{name: OTHER[name]})
    assert raised.value.fix


def functions_of(*kinds):
    found = set()
    for kind in kinds:
        for name, value in vars(kind).items():
            if callable(value) or isinstance(value, classmethod | staticmethod):
                found.add(name)
    return {name for name in found if not name.startswith("_")}


def test_every_function_of_a_module_is_classified():
    names = functions_of(lightning.LightningModule, core.ModelHooks, core.DataHooks, core.CheckpointHooks)
    groups = [set(hooks.CALLED), set(hooks.OF_PREDICT), set(hooks.REFUSED), set(hooks.OFFERED)]
    assert set().union(*groups) == names
    assert sum(map(len, groups)) == len(names)
    of_data = {name for name in functions_of(core.DataHooks, lightning.LightningDataModule) if "predict" not in name}
    known = {*hooks.CALLED_OF_DATA, *hooks.REFUSED_OF_DATA, "from_datasets", "load_from_checkpoint"}
    assert known == of_data
    of_callbacks = {name for name in functions_of(lightning.Callback) if "predict" not in name}
    assert set(hooks.CALLED_OF_CALLBACKS) == of_callbacks


def noting(base, names, seen):
    """A subclass that notes which of its functions run."""

    def note(name):
        plain = getattr(base, name)

        def hook(self, *values, **named):
            seen.append(name)
            return plain(self, *values, **named)

        return hook

    return type(f"Noting{base.__name__}", (base,), {name: note(name) for name in names})


class Everything(modules.Plateau):
    def test_step(self, batch, index):
        self.log("test_loss", batch[0].mean())

    def train_dataloader(self):
        return modules.training_loader()

    def val_dataloader(self):
        return modules.held_out_loader()

    def test_dataloader(self):
        return modules.held_out_loader(4)


def test_every_hook_that_is_said_to_be_called_is_called_in_order(tmp_path):
    seen, of_callback = [], []
    module = noting(Everything, hooks.CALLED, seen)()
    # parameters_of looks at the signature of a step.
    callback = noting(lightning.Callback, hooks.CALLED_OF_CALLBACKS, of_callback)()
    trainer = Trainer(max_epochs=1, callbacks=[callback, modules.Saves(str(tmp_path / "saved"), 2)])
    trainer.fit(module)
    trainer.test()
    trainer.job.load(tmp_path / "saved")
    trainer.job.close()
    assert set(seen) == set(hooks.CALLED)
    assert set(of_callback) == set(hooks.CALLED_OF_CALLBACKS) - {"on_exception"}
    first = list(dict.fromkeys(seen))
    batch = first[first.index("on_train_batch_start") : first.index("on_train_batch_end") + 1]
    assert batch[:7] == [
        "on_train_batch_start",
        "training_step",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    ]
    with pytest.raises(ZeroDivisionError):
        Trainer(callbacks=callback).fit(noting(Failing, [], seen)(), modules.training_loader())
    assert "on_exception" in of_callback


class Failing(modules.Regression):
    def on_fit_start(self):
        raise ZeroDivisionError


def test_the_order_of_hooks_is_lightnings(tmp_path):
    ours, theirs = [], []
    names = [name for name in hooks.CALLED if not name.endswith(("dataloader", "checkpoint"))]
    left_out = {"configure_optimizers", "on_fit_start"}  # Paceline has the loaders before them
    module = noting(Everything, names, ours)()
    with fitted(module, loader=modules.training_loader(), held_out=modules.held_out_loader(), max_epochs=2):
        pass
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
        trainer.fit(noting(Everything, names, theirs)(), modules.training_loader(), modules.held_out_loader())
    assert [name for name in ours if name not in left_out] == [name for name in theirs if name not in left_out]


@pytest.mark.parametrize("name", hooks.REFUSED)
def test_a_hook_that_is_never_called_is_refused(name):
    module = noting(modules.Regression, [name], [])()
    with pytest.raises(UsageError, match=f"Trainer does not call {name}\n  found: the NotingRegression overrides it"):
        Trainer().fit(module, modules.training_loader())


def test_prediction_is_refused():
    with pytest.raises(UsageError, match="is not offered"):
        Trainer().predict(modules.Regression(), modules.held_out_loader())


class Numbers(lightning.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.passes = {"fit": 0}

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        return modules.training_loader()

    def val_dataloader(self):
        return modules.held_out_loader()

    test_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch, number):
        return batch[0] * 0, batch[1]

    def teardown(self, stage):
        self.calls.append(f"{stage} is over")

    def state_dict(self):
        return dict(self.passes)

    def load_state_dict(self, state):
        self.passes = state


def test_a_data_module_has_the_loaders(tmp_path):
    data = Numbers()
    module = Everything()
    trainer = Trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    (found,) = trainer.test(datamodule=data, verbose=False)
    assert found == {"test_loss": 0.0}
    assert data.calls == ["prepare_data", "fit", "fit is over", "prepare_data", "test", "test is over"]
    data.passes = {"fit": 7}
    trainer.save_checkpoint(tmp_path / "saved")
    data.passes = {}
    trainer.job.load(tmp_path / "saved")
    assert data.passes == {"fit": 7}
    trainer.job.close()


def test_the_best_state_is_saved_and_tested(tmp_path):
    best = of_lightning.ModelCheckpoint(tmp_path / "best", monitor="val_loss", mode="max")
    module = Everything()
    trainer = Trainer(max_epochs=3, callbacks=best)
    trainer.fit(module)
    after = module.net[0].weight.clone()
    losses = [values["val_loss"] for values in module.history if "loss_epoch" in values]
    assert best.best_model_path == str(tmp_path / "best")
    assert float(best.best_model_score) == max(losses)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        trainer.validate()
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(max(losses))
    assert "val_loss" in shown.getvalue()
    assert not torch.equal(module.net[0].weight, after)
    trainer.job.close()


def test_a_training_that_has_stopped_early_does_not_go_on(tmp_path):
    stop = of_lightning.EarlyStopping("val_loss", min_delta=9.0, patience=1)
    with fitted(held_out=modules.held_out_loader(), max_epochs=9, callbacks=stop) as trainer:
        assert (trainer.global_step, trainer.should_stop) == (10, True)
        trainer.save_checkpoint(tmp_path / "saved")
    again = of_lightning.EarlyStopping("val_loss", min_delta=9.0, patience=1)
    hooked = [again, modules.Loads(str(tmp_path / "saved"))]
    with fitted(held_out=modules.held_out_loader(), max_epochs=9, callbacks=hooked) as trainer:
        assert trainer.global_step == 10
        assert (again.wait_count, float(again.best_score)) == (stop.wait_count, float(stop.best_score))


def test_what_is_logged_is_in_the_events_and_in_loggers(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_EVENTS", str(tmp_path))
    written = []

    class Noted(lightning.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            written.append((step, dict(metrics)))

    module = modules.Regression()
    module.save_hyperparameters({"width": 16})
    with fitted(module, held_out=modules.held_out_loader(), log_every_n_steps=2, logger=Noted()):
        assert module.logger is not None
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    logged = [event for event in events if event["event"] == "logged"]
    assert [event["step"] for event in logged] == [2, 4, 5]
    assert set(logged[0]) == {"event", "step", "epoch", "at", "loss_step", "largest_step"}
    (found,) = [event for event in events if event["event"] == "evaluation"]
    assert found["samples"] == modules.HELD_OUT
    assert [step for step, _ in written] == [2, 4, 5, 5]


class Nothing(modules.Regression):
    def training_step(self, batch, index):
        return None


class Several(modules.Regression):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Elsewhere(modules.Regression):
    def on_fit_start(self):
        self.log("early", 1.0)


class Twice(modules.Regression):
    def training_step(self, batch, index):
        self.log("value", 1.0, prog_bar=bool(index))
        return super().training_step(batch, index)


class Custom(modules.Regression):
    def training_step(self, batch, index):
        self.log("value", 1.0, reduce_fx=sorted)


class Vector(modules.Regression):
    def training_step(self, batch, index):
        self.log("value", batch[0])


class OnOneRank(modules.Regression):
    def training_step(self, batch, index):
        self.log("value", 1.0, rank_zero_only=True)


class Unmonitored(modules.Plateau):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class Missing(modules.Plateau):
    def configure_optimizers(self):
        found = super().configure_optimizers()
        found["lr_scheduler"] |= {"monitor": "absent", "strict": True}
        return found


class NoOptimizer(modules.Regression):
    def configure_optimizers(self):
        return None


BAD = {
    "no module": (lambda: fit(torch.nn.Linear(1, 1)), WorkloadError, "needs a LightningModule"),
    "unknown": (lambda: Trainer(max_epoch=1), UsageError, "did you mean max_epochs"),
    "epochs": (lambda: Trainer(max_epochs="3"), UsageError, "this value of max_epochs"),
    "endless": (lambda: Trainer(max_epochs=-1), UsageError, "when training ends"),
    "precision": (lambda: Trainer(precision="bf16-true"), UsageError, "module.bfloat16"),
    "clip": (lambda: Trainer(gradient_clip_algorithm="both"), UsageError, 'write "norm" or "value"'),
    "limit": (lambda: Trainer(limit_val_batches=1.5), UsageError, "a share of them"),
    "time": (lambda: Trainer(val_check_interval="00:00:10:00"), UsageError, "val_check_interval"),
    "flag": (lambda: Trainer(enable_progress_bar="no"), UsageError, "write True or False"),
    "batches": (lambda: Trainer(check_val_every_n_epoch=None), UsageError, "val_check_interval=100"),
    "callback": (lambda: Trainer(callbacks=[print]), WorkloadError, "callbacks are objects"),
    "Timer": (lambda: Trainer(callbacks=of_lightning.Timer()), UsageError, "one is a Timer"),
    "no monitor": (lambda: Trainer(callbacks=of_lightning.ModelCheckpoint()), UsageError, "it has no monitor"),
    "several best": (
        lambda: Trainer(callbacks=of_lightning.ModelCheckpoint(monitor="loss", save_top_k=3)),
        UsageError,
        "which has no save_top_k",
    ),
    "not saved": (
        lambda: Trainer(callbacks=of_lightning.ModelCheckpoint(monitor="loss"), enable_checkpointing=False),
        UsageError,
        "leave one of them out",
    ),
    "best of nothing": (
        lambda: fit(modules.Regression(), callbacks=of_lightning.ModelCheckpoint(monitor="absent")),
        UsageError,
        "'absent' is none of",
    ),
    "no loader": (lambda: fit(modules.Regression(), loader=False), WorkloadError, "needs the DataLoader of training"),
    "loaders": (
        lambda: fit(modules.Regression(), loader=[modules.training_loader()] * 2),
        WorkloadError,
        "trains on one DataLoader",
    ),
    "checkpoint": (
        lambda: Trainer().fit(modules.Regression(), modules.training_loader(), ckpt_path="last"),
        UsageError,
        "paceline run --resume",
    ),
    "no loss": (lambda: fit(Nothing()), LossError, "it returned None"),
    "two optimizers": (lambda: fit(Several()), UsageError, "automatic_optimization = False"),
    "no optimizer": (lambda: fit(NoOptimizer()), WorkloadError, "it returned None"),
    "manual": (lambda: fit(modules.Adversarial(), gradient_clip_val=1.0), UsageError, "automatic_optimization is off"),
    "logged early": (lambda: fit(Elsewhere()), UsageError, "'early' is logged in on_fit_start"),
    "logged twice": (lambda: fit(Twice()), UsageError, "'value' is logged in training_step with others"),
    "reduction": (lambda: fit(Custom()), UsageError, "reduce_fx"),
    "vector": (lambda: fit(Vector()), UsageError, "log value.mean"),
    "rank zero": (lambda: fit(OnOneRank()), UsageError, "does not take rank_zero_only"),
    "unmonitored": (lambda: fit(Unmonitored()), WorkloadError, "has no 'monitor'"),
    "missing metric": (lambda: fit(Missing()), UsageError, "'absent' is none of"),
    "rare": (
        lambda: fit(modules.Regression(), val_check_interval=9, held_out=True),
        UsageError,
        "it is 9, and an epoch has 5",
    ),
    "stream": (
        lambda: fit(modules.Regression(), loader=modules.DataLoader(modules.Stream(), 4), accumulate_grad_batches=2),
        UsageError,
        "the loader has no length",
    ),
    "no test": (lambda: run_test(modules.Regression()), WorkloadError, "the module has none"),
    "nothing to test": (lambda: Trainer().test(), UsageError, "needs a module"),
}


def fit(module, loader=None, held_out=None, **options):
    given = modules.training_loader() if loader is None else loader
    given = None if given is False else given
    trainer = Trainer(**{"max_epochs": 1, **options})
    try:
        trainer.fit(module, given, modules.held_out_loader() if held_out else None)
    finally:
        if "job" in vars(trainer):
            trainer.job.close(save=False)


def run_test(module):
    """What `trainer.test` finds, without a training before it."""
    trainer = Trainer()
    try:
        return trainer.test(module, verbose=False)
    finally:
        if "job" in vars(trainer):
            trainer.job.close()


def test_a_module_is_tested_without_a_training():
    (found,) = run_test(Everything())
    assert list(found) == ["test_loss"]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_error_with_a_fix(case):
    function, kind, text = BAD[case]
    with pytest.raises(kind, match=text.replace("(", r"\(")) as raised:
        function()
    assert raised.value.fix


FORMS = {
    "one": lambda one, _: (one, 1, []),
    "list": lambda one, _: ([one], 1, []),
    "two lists": lambda one, by: (([one], [by]), 1, ["epoch"]),
    "a list and one": lambda one, by: ([[one], by], 1, ["epoch"]),
    "dict": lambda one, by: ({"optimizer": one, "lr_scheduler": by}, 1, ["epoch"]),
    "dict of dict": lambda one, by: (
        {"optimizer": one, "lr_scheduler": {"scheduler": by, "interval": "step", "frequency": 3, "name": "rate"}},
        1,
        ["step"],
    ),
    "dicts": lambda one, by: (({"optimizer": one}, {"optimizer": one, "lr_scheduler": by}), 2, ["epoch"]),
    "tuple": lambda one, _: ((one, one), 2, []),
}


@pytest.mark.parametrize("form", FORMS)
def test_configure_optimizers_may_return_each_documented_form(form):
    from paceline.integrations.lightning_optimizers import read_optimizers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    result, count, intervals = FORMS[form](optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    optimizers, configs = read_optimizers(result, is_automatic=False)
    assert optimizers == [optimizer] * count
    assert [config.interval for config in configs] == intervals


def test_mixed_precision_is_that_of_a_plain_loop():
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(5)
        module = Narrow()
        with fitted(module, max_epochs=2, precision=precision, gradient_clip_val=0.1):
            pass
        torch.manual_seed(5)
        plain = Narrow()
        optimizer = plain.configure_optimizers()
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
        loader = modules.training_loader()
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype):
                    loss = torch.nn.functional.mse_loss(plain(x.float()).float(), y.float())
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
        for parameter, expected in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


class Narrow(modules.Regression):
    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self(batch[0].float()).float(), batch[1].float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_gradients_in_pieces_are_not_shown_to_hooks():
    trainer = Trainer()
    trainer.lightning_module, trainer.base = modules.Watched(), lightning.LightningModule

    class Job:
        class mesh:
            size = staticmethod(lambda axis: 2)

    trainer.job = Job()
    with pytest.raises(PlanError, match="on_after_backward finds whole gradients"):
        trainer._check_gradients_are_whole()
