"""Every field of TrainingArguments is honoured, harmless or refused; and mistakes are said in words."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest
import torch
import transformers
from transformers import TrainingArguments

from paceline.integrations import training_arguments
from paceline.integrations.training_arguments import FIELDS, HARMLESS, HONOURED, REFUSED, check_arguments
from paceline.integrations.transformers import Trainer
from paceline.nouns.errors import CheckpointError, LossError, PacelineError, UsageError, WorkloadError

from support.documented_commands import ROOT
from support.fine_tuning import arguments, bert, classes, llama, texts

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
NAMES = [field.name for field in dataclasses.fields(TrainingArguments)]
PAGE = (ROOT / "docs" / "transformers.md").read_text()
# Other values than the defaults, where `_other` would make one of another type.
OTHERS = {
    "label_names": ["labels"],
    "lr_scheduler_type": "cosine",
    "optim": "sgd",
    "train_sampling_strategy": "sequential",
    "accelerator_config": transformers.trainer_pt_utils.AcceleratorConfig(split_batches=True),
    "fsdp": "full_shard",
    "fsdp_config": {"min_num_params": 1},
    "parallelism_config": object(),
    "hub_strategy": "end",
    "debug": ["underflow_overflow"],
    "include_for_metrics": ["loss"],
    "include_num_input_tokens_seen": "all",
}


def _other(name):
    """A value that is not the default."""
    field = next(field for field in dataclasses.fields(TrainingArguments) if field.name == name)
    default = None if field.default is dataclasses.MISSING else field.default
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return True if default is None else f"other {default}"


def test_every_field_has_a_rule():
    assert [name for name in NAMES if name not in FIELDS] == []
    assert {rule.kind for rule in FIELDS.values()} == {HONOURED, HARMLESS, REFUSED}
    assert all(rule.text for rule in FIELDS.values() if rule.kind != HONOURED or rule.takes)


@pytest.mark.parametrize("name", NAMES)
def test_a_field_is_taken_or_refused(name):
    args = arguments("out")
    check_arguments(args)
    setattr(args, name, _other(name))  # past TrainingArguments' own checks, which know other machines
    if FIELDS[name].kind != REFUSED:
        check_arguments(args)
        return
    with pytest.raises(WorkloadError) as failure:
        check_arguments(args)
    assert f"TrainingArguments({name}=" in failure.value.asked
    assert failure.value.fix == FIELDS[name].text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim", "adamw_8bit"),
        ("lr_scheduler_type", "greedy"),
        ("train_sampling_strategy", "batch_rebalance"),
        ("ddp_broadcast_buffers", False),
        ("accelerator_config", transformers.trainer_pt_utils.AcceleratorConfig(dispatch_batches=True)),
    ],
)
def test_a_value_of_an_honoured_field_may_be_refused(name, value):
    args = arguments("out")
    setattr(args, name, value)
    with pytest.raises(WorkloadError, match=rf"TrainingArguments\({name}="):
        check_arguments(args)


def test_a_field_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.delitem(training_arguments.FIELDS, "weight_decay")
    check_arguments(arguments("out", weight_decay=0.0))
    with pytest.raises(WorkloadError, match=r"weight_decay=0\.1"):
        check_arguments(arguments("out"))


def test_use_cpu_is_refused_where_there_is_a_gpu(monkeypatch):
    args = arguments("out")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(WorkloadError, match="use_cpu=True"):
        check_arguments(args)


def test_the_page_has_every_field():
    """docs/transformers.md lists the fields of this transformers under what becomes of them."""
    for kind, heading in ((HONOURED, "Honoured"), (HARMLESS, "Without an effect"), (REFUSED, "Refused")):
        text = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL).group(1)
        listed = set(re.findall(r"`(\w+)`", text))
        assert {name for name in NAMES if FIELDS[name].kind == kind} <= listed


def trainer(model=None, folder="out", changes=None, **data):
    return Trainer(model if model is not None else llama(), arguments(folder, **(changes or {})), **data)


class NoLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        return {"logits": self.linear(x)}


def overriding(**methods):
    return type("Own", (Trainer,), methods)


BAD = {
    "no arguments": (lambda: Trainer(llama(), args=3), WorkloadError, "args is a int"),
    "no model": (lambda: Trainer(args=arguments("out")), WorkloadError, "there is none"),
    "two models": (lambda: trainer(model_init=llama), WorkloadError, "both are given"),
    "a class": (lambda: trainer(transformers.LlamaForCausalLM), WorkloadError, "the model is"),
    "no evaluation": (lambda: trainer(changes={"eval_strategy": "epoch"}), WorkloadError, "no eval_dataset"),
    "best without evaluation": (lambda: trainer(changes={"save_strategy": "best"}), WorkloadError, "eval_strategy is"),
    "no samples": (lambda: trainer().train(), WorkloadError, "no train_dataset"),
    "no samples to evaluate": (lambda: trainer(train_dataset=texts()).evaluate(), WorkloadError, "no eval_dataset"),
    "no length": (lambda: trainer(train_dataset=iter_of(texts())), WorkloadError, "max_steps is not set"),
    "no batch": (
        lambda: trainer(train_dataset=texts(2), changes={"dataloader_drop_last": True}).train(),
        WorkloadError,
        "the first pass over it had none",
    ),
    "no loss": (
        lambda: trainer(NoLoss(), train_dataset=[{"x": torch.ones(2)}] * 8).train(),
        LossError,
        "NoLoss returned none, called with x",
    ),
    "two losses": (
        lambda: trainer(changes={"label_smoothing_factor": 0.1}, compute_loss_func=len),
        WorkloadError,
        "both are given",
    ),
    "smoothed multi-labels": (
        lambda: trainer(bert(problem_type="multi_label_classification"), changes={"label_smoothing_factor": 0.1}),
        WorkloadError,
        "multi_label_classification",
    ),
    "two optimizers": (
        lambda: trainer(optimizers=(object(), None), optimizer_cls_and_kwargs=(torch.optim.SGD, {})),
        WorkloadError,
        "both are given",
    ),
    "no accumulation": (lambda: trainer(changes={"gradient_accumulation_steps": 0}), WorkloadError, "they are 4 and 0"),
    "no such metric": (
        lambda: trainer(
            train_dataset=texts(),
            eval_dataset=texts(4),
            changes={"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "f1"},
        ).train(),
        WorkloadError,
        "eval_loss",
    ),
    "nothing to resume": (
        lambda: trainer(train_dataset=texts(), folder="nowhere").train(resume_from_checkpoint=True),
        CheckpointError,
        "there is none",
    ),
    "a trial": (lambda: trainer(train_dataset=texts()).train(trial={}), UsageError, "it is"),
    "push_to_hub": (lambda: trainer().push_to_hub(), UsageError, "has no such method"),
    "training_step": (lambda: overriding(training_step=lambda *_: 0), WorkloadError, "has its own training_step"),
}


def iter_of(rows):
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows)

    return Rows()


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, kind, found = BAD[case]
    with pytest.raises(kind) as failure:
        make()
    assert isinstance(failure.value, PacelineError)
    assert re.search(found, failure.value.found)
    assert failure.value.fix


def test_a_second_training_is_refused(tmp_path):
    once = trainer(train_dataset=classes(), model=bert(), folder=tmp_path, changes={"max_steps": 1})
    once.train()
    with pytest.raises(UsageError, match="trains once"):
        once.train()
    assert not hasattr(once, "push_to_hub")
    assert not hasattr(once, "no_such_name")


def test_a_subclass_may_override_what_is_called(tmp_path):
    called = []

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            called.append(int(num_items_in_batch))
            loss, outputs = super().compute_loss(model, inputs, True)
            return (loss * 2, outputs) if return_outputs else loss * 2

        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=5, collate_fn=self.data_collator)

    data = [{"input_ids": row["input_ids"], "labels": row["label"]} for row in classes(10)]
    own = Own(bert(), arguments(tmp_path, num_train_epochs=1), train_dataset=data)
    assert own.train().global_step == 2
    assert called == [5, 5]
    assert type(own.optimizer) is torch.optim.SGD


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_the_order_of_the_samples(strategy, tmp_path):
    seen = []

    def collate(rows):
        seen.extend(int(row["input_ids"][0]) for row in rows)
        return transformers.default_data_collator(rows)

    data = [{"input_ids": torch.tensor([number % 30 + 2] * (2 + number % 3)), "labels": 0} for number in range(12)]
    if strategy != "group_by_length":
        data = [{**row, "input_ids": row["input_ids"][:2]} for row in data]
    changes = {
        "train_sampling_strategy": strategy,
        "per_device_train_batch_size": 1,
        "data_seed": 3,
        "num_train_epochs": 1,
    }
    Trainer(bert(), arguments(tmp_path, **changes), train_dataset=data, data_collator=collate).train()
    assert sorted(seen) == list(range(2, 14))
    assert (seen == sorted(seen)) == (strategy == "sequential")


def test_precision_and_recomputation(tmp_path):
    """bf16 and fp16 change the numbers a little, recomputation not at all."""
    ends = {}
    for name in ("plain", "bf16", "fp16", "gradient_checkpointing"):
        model = llama().float()
        changes = {} if name == "plain" else {name: True}
        own = Trainer(model, arguments(tmp_path, max_steps=4, **changes), train_dataset=texts())
        own.train()
        ends[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert (own.scaler is not None) == (name == "fp16")
    assert torch.equal(ends["plain"], ends["gradient_checkpointing"])
    for name in ("bf16", "fp16"):
        assert 0 < (ends[name] - ends["plain"]).norm() / ends["plain"].norm() < 0.05


def test_a_stream_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"max_steps": 7, "report_to": ["tensorboard"]}
    own = Trainer(llama(), arguments("out", **changes), train_dataset=iter_of(texts()), eval_dataset={"a": texts(4)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = own.train()
    assert output.global_step == 7
    assert own.state.epoch == 1.0
    assert "eval_a_loss" in own.evaluate()
    own.log_metrics("train", output.metrics)
    own.save_metrics("train", output.metrics)
    own.save_state()
    own.save_model()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"train_results.json", "all_results.json", "trainer_state.json", "model.safetensors", "config.json"} <= names
    assert list(tmp_path.rglob("events.out.tfevents*"))
