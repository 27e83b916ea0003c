"""An option of a plan has an effect, or is refused: wherever the plan comes from."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, fields
from types import SimpleNamespace

import pytest

from paceline.nouns.errors import PlanError
from paceline.nouns.options import SCOPES, check_torchao
from paceline.nouns.plan import OPTIONS, Plan
from paceline.run.start.backends import check_programs
from paceline.run.supervise.elastic import rescaled

# Of every option that does not apply everywhere: a value, a plan in which it has an effect, and one in which not.
IN_A_LINE = {
    "zero": ("zero=2", "shard=2", "replicate=2"),
    "zero, as it is by default": ("zero=3", "shard=2", "replicate=2"),
    "zero beside tensor": ("zero=3", "shard=2", "shard=2,tensor=2"),
    "zero=1 beside tensor": ("zero=1", "shard=2,tensor=2", "tensor=2"),
    "zero beside pipeline": ("zero=2", "shard=2", "pipeline=2,shard=2"),
    "offload": ("offload=on", "shard=2", "tensor=2"),
    "offload beside tensor": ("offload=on", "shard=2,replicate=2", "shard=2,tensor=2"),
    "sequence": ("sequence=on", "tensor=2", "shard=2"),
    "context_by": ("context_by=ring", "context=2", "tensor=2"),
    "compression of gradients of context": ("compression=bf16", "context=2", "tensor=2"),
    "schedule": ("schedule=gpipe", "pipeline=2", "tensor=2"),
    "schedule, as it is by default": ("schedule=1f1b", "pipeline=2", "replicate=2"),
    "micro_batches": ("micro_batches=4", "pipeline=2", "replicate=2"),
    "transport": ("transport=gloo", "replicate=2", "shard=2"),
    "compression": ("compression=bf16", "shard=2", "tensor=2"),
    "transport beside tensor": ("transport=gloo", "shard=2,tensor=2", "tensor=2"),
    "bucket_bytes with zero=1": ("bucket_bytes=1024", "shard=2,zero=1", "shard=2,zero=2"),
    "bucket_bytes": ("bucket_bytes=1024", "replicate=2", "pipeline=2"),
    "mode": ("mode=async", "server=2", "replicate=2"),
    "mode, as it is by default": ("mode=sync", "server=2", "replicate=2"),
    "quorum": ("mode=quorum,quorum=1", "server=1,replicate=2", "replicate=2"),
    "staleness": ("mode=stale,staleness=2", "server=1", "replicate=2"),
    "deadline": ("mode=deadline,deadline=2", "server=1", "replicate=2"),
    "replicas": ("replicas=3", "server=3", "replicate=2"),
    "replicas, as they are by default": ("replicas=2", "server=2", "server=1"),
}
# The same, as values of a plan.json.
IN_A_FILE = {
    "transport": ("gloo", "replicate=2", "shard=2"),
    "compression": ("bf16", "shard=2", "tensor=2"),
    "compression beside tensor": ("bf16", "shard=2,tensor=2", "tensor=2"),
    "bucket_bytes": (1024, "replicate=2", "pipeline=2"),
}
ANYWHERE = {
    "float8",
    "optimizer_states",
    "checkpointing",
    "compile",
    "check",
    "server",
    "checkpoint_every",
    "keep",
    "copy_to",
}


def test_every_option_is_in_the_tables():
    assert set(SCOPES) == {field.name for field in fields(Plan)} - {"mesh", "version"}
    named = {case.replace(",", " ").split()[0].split("=")[0] for case in [*IN_A_LINE, *IN_A_FILE]}
    assert named | ANYWHERE == set(SCOPES)
    assert set(OPTIONS) <= set(SCOPES)


@pytest.mark.parametrize("case", IN_A_LINE)
def test_an_option_of_a_line(case):
    option, good, bad = IN_A_LINE[case]
    name = option.split("=")[0]
    for line in (f"{good},{option}", f"{option},{good}"):
        assert option.split("=")[1].split(",")[0] == str(getattr(Plan.parse(line), name))
    with pytest.raises(PlanError, match=f"{name}="):
        Plan.parse(f"{bad},{option}")


@pytest.mark.parametrize("case", IN_A_FILE)
def test_a_field_of_a_file(case, tmp_path):
    name, (value, good, bad) = case.split()[0], IN_A_FILE[case]
    path = tmp_path / "plan.json"
    for mesh in (good, bad):
        path.write_text(json.dumps({"mesh": mesh, name: value}))
        if mesh == good:
            assert getattr(Plan.read(path), name) == value
            continue
        with pytest.raises(PlanError, match=name):
            Plan.read(path)


@pytest.mark.parametrize("case", [case for case in IN_A_LINE if "default" not in case and case != "zero beside tensor"])
def test_an_option_of_a_line_is_refused_in_a_file_too(case):
    option, good, bad = IN_A_LINE[case]
    values = asdict(Plan.parse(f"{good},{option}"))
    assert Plan.of(values, "a file") == Plan.parse(f"{good},{option}")
    other = asdict(Plan.parse(bad))
    changed = {item.split("=")[0] for item in option.split(",")}
    with pytest.raises(PlanError):
        Plan.of({**other, **{name: values[name] for name in changed}}, "a file")


@pytest.mark.parametrize(
    "option", ["offload=off", "sequence=off", "micro_batches=0", "quorum=0", "deadline=0", "staleness=0", "compile=off"]
)
def test_a_value_that_asks_for_nothing_may_stand_anywhere(option):
    assert Plan.parse(f"replicate=2,{option}") == Plan.parse("replicate=2")


@pytest.mark.parametrize("line", ["shard=1,zero=2", "fsdp=1,zero=3", "tp=1,sequence=on", "pipeline=1,schedule=gpipe"])
def test_plan_axis_of_size_1_is_accepted_without_its_options(line):
    plan = Plan.parse(line)
    assert plan == Plan()
    assert Plan.of(asdict(plan), "a file") == plan


def test_one_line_may_name_an_axis_of_size_1_beside_tensor():
    assert Plan.parse("shard=1,tensor=2,zero=3") == Plan.parse("tensor=2")


@pytest.mark.parametrize(("word", "meant"), [("1", "on"), ("true", "on"), ("0", "off"), ("no", "off")])
def test_another_word_for_on_and_off_is_understood(word, meant):
    with pytest.raises(PlanError, match=f"did you mean '{meant}'"):
        Plan.parse(f"replicate=2,compile={word}")


def test_a_job_on_fewer_hosts_has_a_plan_that_can_be_read():
    plan = rescaled(Plan.parse("shard=4,zero=2"), 1)
    assert Plan.of(asdict(plan), "a file") == plan
    grown = rescaled(Plan(mesh="replicate=1", compression="bf16"), 4)
    assert (grown.mesh, grown.compression) == ("replicate=4", "bf16")


def test_without_torchao_its_options_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError) as caught:
        check_torchao("optimizer_states", "8bit")
    assert caught.value.asked == "the plan's optimizer_states=8bit"
    assert caught.value.found == "the package torchao is not installed"
    assert caught.value.fix == "pip install 'paceline[lowbits]'"


def test_plan_without_its_torchao_is_refused_before_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    request = SimpleNamespace(place="here")
    check_programs(request, Plan())
    with pytest.raises(PlanError, match="optimizer_states=4bit"):
        check_programs(request, Plan(optimizer_states="4bit"))
    with pytest.raises(PlanError, match="float8=rowwise"):
        check_programs(request, Plan(float8="rowwise"))
