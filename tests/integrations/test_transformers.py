"""`paceline.integrations.transformers.Trainer` ends where transformers' own does, on as many data ranks."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import ExportableState

from paceline.integrations.transformers import Trainer
from paceline.nouns.errors import CheckpointError, PacelineError, UsageError
from paceline.nouns.plan import Plan
from paceline.train.whole_state import whole_state

from support.accelerate_scripts import forget, join_by_torch
from support.fine_tuning import CLASSES, arguments, bert, classes, exact_loss, llama, tagged, texts, token_classifier
from support.ranks import preload, run_ranks

pytestmark = [
    # transformers' own trainer and modules warn of what they do themselves.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
preload("paceline.integrations.transformers", "support.fine_tuning", "transformers.models.llama.modeling_llama")
PLANS = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2"]
CELLS = {
    "causal": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "scheduled": {
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_steps": 8,
    },
    "smoothed": {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
    "classes": {"eval_strategy": "epoch", "seed": 7},
    "tokens": {"eval_strategy": "steps", "eval_steps": 5},
    "own loss": {"num_train_epochs": 1.5, "gradient_accumulation_steps": 3},
    "own batches": {"per_device_train_batch_size": 2, "accelerator_config": None},
    "adafactor": {"optim": "adafactor", "lr_scheduler_type": "constant"},
}
# Adafactor and label smoothing sum in float32, whatever the model's precision.
TOLERANCES = {"smoothed": 1e-5, "adafactor": 1e-5}


def accuracy(found):
    assert found.predictions.shape == (22, CLASSES)  # of all ranks
    return {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean(), "mean": found.predictions.mean()}


def own_loss(outputs, labels, num_items_in_batch=None):
    return exact_loss(outputs["logits"], labels, num_items_in_batch=num_items_in_batch)


def objects(cell):
    """The model, and what else a Trainer is handed."""
    if cell == "classes":
        return bert(), {"train_dataset": classes(), "eval_dataset": classes(), "compute_metrics": accuracy}
    if cell == "tokens":
        return token_classifier(), {"train_dataset": tagged(), "eval_dataset": tagged(9)}
    own = {"compute_loss_func": own_loss} if cell == "own loss" else {}
    return llama(), {"train_dataset": texts(), "eval_dataset": texts(9), **own}


def trained(kind, cell, folder, **changes):
    forget()
    model, data = objects(cell)
    trainer = kind(model=model, args=arguments(folder, **{**CELLS[cell], **changes}), **data)
    output = trainer.train()
    return trainer, (output.global_step, output.training_loss), trainer.evaluate()


def logs(trainer):
    return [dict(row) for row in trainer.state.log_history]


def theirs(rank):
    """transformers' own Trainer on several ranks, as torchrun starts them."""
    join_by_torch(rank)
    found = {}
    for cell in CELLS:
        with tempfile.TemporaryDirectory() as folder:
            trainer, output, metrics = trained(transformers.Trainer, cell, folder)
        found[cell] = {name: p.detach() for name, p in trainer.model.named_parameters()}, output, metrics, logs(trainer)
    return found


@functools.cache
def expected(size):
    return run_ranks(size, theirs, timeout_s=200)


def train_all(rank, plan, folder):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    results = {}
    for cell in CELLS:
        trainer, output, metrics = trained(Trainer, cell, folder)
        trainer.save_model(Path(folder, cell))
        state = whole_state(trainer.job, "", lambda name: True)
        results[cell] = state, output, metrics, logs(trainer)
        trainer.job.close()
    return results


@functools.cache
def results(plan, folder):
    return run_ranks(Plan.parse(plan).world_size, train_all, plan, folder, timeout_s=300)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    return lambda plan: made.setdefault(plan, str(tmp_path_factory.mktemp("plan")))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("plan", ["replicate=1", *PLANS])
def test_it_ends_where_transformers_does(plan, cell, folders):
    has_one_data_rank = plan in ("replicate=1", "tensor=2")
    wanted = [answer[cell] for answer in expected(1 if has_one_data_rank else 2)]
    tolerance = TOLERANCES.get(cell, 1e-9)
    answers = [answer[cell] for answer in results(plan, folders(plan))]
    for name, parameter in wanted[0][0].items():
        torch.testing.assert_close(answers[0][0][name], parameter, rtol=tolerance, atol=tolerance)
    for rank, (_, steps, found, own) in enumerate(answers):
        _, output, metrics, history = wanted[rank % len(wanted)]
        assert steps == (output[0], pytest.approx(output[1], rel=1e-5))  # transformers adds up float32
        assert numbers_of(found) == pytest.approx(numbers_of(metrics), rel=1e-5)
        assert [numbers_of(row) for row in own] == [pytest.approx(numbers_of(row), rel=1e-4) for row in history]


def numbers_of(row):
    """What does not depend on the time."""
    return {name: value for name, value in row.items() if "second" not in name and "time" not in name}


@pytest.mark.parametrize("cell", ["causal", "classes"])
@pytest.mark.parametrize("plan", ["replicate=1", *PLANS])
def test_a_saved_model_is_one_of_transformers(plan, cell, folders):
    answers = results(plan, folders(plan))
    kind = type(objects(cell)[0])
    loaded = kind.from_pretrained(Path(folders(plan), cell))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, answers[0][cell][0][name])
    assert loaded.config.architectures == [kind.__name__]


def train_resumed(rank, plan, folder):
    """A training in one go; and one that stops at step 4 of 12, in the middle of a pass, and goes on."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    found = {}
    for name, changes in (("whole", {}), ("first", {"save_strategy": "steps", "save_steps": 2}), ("rest", {})):
        forget()
        model, data = objects("causal")
        evaluates = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
        args = arguments(
            Path(folder, "run"),
            **evaluates,
            save_total_limit=2,
            restore_callback_states_from_checkpoint=True,
            **changes,
        )
        trainer = Trainer(
            model,
            args,
            callbacks=[StepCounter(), EarlyStoppingCallback(5), *([StopAt(4)] if name == "first" else [])],
            **data,
        )
        output = trainer.train(resume_from_checkpoint=name == "rest")
        history = [numbers_of(row) for row in logs(trainer)[:-1]]
        # transformers makes a restored callback anew.
        counters = [each for each in trainer.callback_handler.callbacks if isinstance(each, StepCounter)]
        found[name] = whole_state(trainer.job, "", lambda name: True), output, history, counters[0].count
        trainer.job.close()
    return found, sorted(path.name for path in Path(folder, "run").iterdir())


class StepCounter(transformers.TrainerCallback, ExportableState):
    """A callback with a state, which checkpoints should have."""

    def __init__(self):
        self.count = 0

    def on_step_end(self, args, state, control, **named):
        self.count += 1

    def state(self):
        return {"args": {}, "attributes": {"count": self.count}}


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **named):
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2"])
def test_a_resumed_training_ends_as_the_whole(plan, tmp_path):
    for found, saved in run_ranks(2, train_resumed, plan, tmp_path, timeout_s=200):
        assert saved == ["checkpoint-2", "checkpoint-4"]
        assert found["first"][1].global_step == 4
        assert found["rest"][1].global_step == found["whole"][1].global_step == 12
        for name, value in found["whole"][0].items():
            assert torch.equal(found["rest"][0][name], value)
        assert found["rest"][2] == found["whole"][2]
        assert (found["first"][3], found["rest"][3], found["whole"][3]) == (4, 12, 12)


class SpoilThird(transformers.TrainerCallback):
    """Keep the model of the second pass, and clear it before the third."""

    def __init__(self):
        self.metrics, self.kept = [], {}

    def on_evaluate(self, args, state, control, metrics, **named):
        self.metrics.append(metrics["eval_loss"])

    def on_epoch_begin(self, args, state, control, model, **named):
        if state.epoch == 2:
            self.kept.update({name: value.clone() for name, value in model.state_dict().items()})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    spoiler = SpoilThird()
    model, data = objects("causal")
    changes = {"eval_strategy": "epoch", "save_strategy": "best", "load_best_model_at_end": True, "num_train_epochs": 3}
    trainer = Trainer(model, arguments(tmp_path, **changes), callbacks=[spoiler], **data)
    trainer.train()
    assert trainer.state.best_metric == min(spoiler.metrics) == spoiler.metrics[1] < spoiler.metrics[2]
    assert (trainer.state.best_global_step, trainer.state.best_model_checkpoint) == (
        12,
        str(tmp_path / "checkpoint-12"),
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, spoiler.kept[name])


def test_predictions_are_those_of_transformers(tmp_path):
    theirs, ours = (_predicted(kind, tmp_path) for kind in (transformers.Trainer, Trainer))
    numpy.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=1e-12)
    assert (ours.label_ids == theirs.label_ids).all()
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-6)


def _predicted(kind, folder):
    return kind(bert(), arguments(folder), train_dataset=classes()).predict(classes(9))


def refused(rank, cases):
    """The errors of Trainers that are made or train under each case."""
    found = {}
    for name, (plan, changes, resume) in cases.items():
        forget()
        os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
        with pytest.raises(PacelineError) as failure:
            Trainer(llama(), arguments("out", **changes), train_dataset=texts(), eval_dataset=texts()).train(resume)
        found[name] = type(failure.value), failure.value.asked, failure.value.found
    return found


REFUSED = {
    "fsdp": ({"fsdp": "full_shard"}, "fsdp_plugin"),
    "torch_compile": ({"torch_compile": True}, "dynamo_plugin"),
    "ddp_bucket_cap_mb": ({"ddp_bucket_cap_mb": 3}, "bucket_cap_mb"),
    "ddp_broadcast_buffers": ({"ddp_broadcast_buffers": False}, "broadcast_buffers"),
    "ddp_backend": ({"ddp_backend": "gloo"}, "ddp_backend"),
    "ddp_timeout": ({"ddp_timeout": 7}, "ddp_timeout"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    "bf16_full_eval": ({"bf16_full_eval": True, "eval_strategy": "epoch"}, "precision of training"),
    "save_only_model": (
        {
            "save_only_model": True,
            "load_best_model_at_end": True,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
        },
        "load_best_model_at_end",
    ),
}


def test_what_can_not_be_met_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = {name: ("shard=2", changes, None) for name, (changes, _) in REFUSED.items()}
    for answer in run_ranks(2, refused, cases):
        for name, (kind, asked, _) in answer.items():
            assert kind is UsageError
            assert REFUSED[name][1] in asked
    assert not (tmp_path / "out").exists()


def damaged(folder, *parts):
    """A folder of checkpoints that were not written to their end."""
    for number, text in enumerate(parts):
        path = Path(folder, "out", f"checkpoint-{number}")
        path.mkdir(parents=True)
        if text is not None:
            (path / "trainer_state.json").write_text(text)


CHECKPOINTS = {
    "none": ((), True, "there is none"),
    "incomplete": ((None, '{"epoch": 1.'), True, "2 are there, none of them complete"),
    "of another plan": (("{}",), "out/checkpoint-0", "in a folder of their own"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_can_not_be_used_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts, resume, found = CHECKPOINTS[case]
    damaged(tmp_path, *parts)
    for answer in run_ranks(2, refused, {case: ("shard=2", {}, resume)}):
        assert answer[case][0] is CheckpointError
        assert found in answer[case][2]


def resumed_elsewhere(rank, folder):
    """The end of a training under one plan that goes on from the middle of one under another."""
    found = []
    for plan, stop in (("shard=2", None), ("shard=2", 4), ("shard=2,zero=1", None), ("replicate=2", None)):
        forget()
        os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
        is_first = len(found) < 2
        args = arguments(Path(folder, "whole" if stop is None and is_first else "run"), save_strategy="no")
        args = arguments(args.output_dir, save_strategy="steps", save_steps=4) if stop else args
        trainer = Trainer(llama(), args, train_dataset=texts(), callbacks=[StopAt(stop)] if stop else [])
        trainer.train(resume_from_checkpoint=not is_first)
        found.append(whole_state(trainer.job, "", lambda name: True))
        trainer.job.close()
    return found


def test_parts_load_under_other_plans(tmp_path):
    whole, _, *others = run_ranks(2, resumed_elsewhere, tmp_path)[0]
    for other in others:
        for name, value in whole.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-12)


def trained_twice(rank):
    forget()
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse("shard=2")))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(llama(), arguments(folder), train_dataset=texts())
        first, second = trainer.train(), trainer.train()
    return first.training_loss, second.training_loss, second.global_step


def test_a_trainer_may_train_again():
    for first, second, steps in run_ranks(2, trained_twice):
        assert second < first
        assert steps == 12
