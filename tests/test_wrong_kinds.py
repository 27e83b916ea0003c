"""Values of the wrong kind in every public function: one error of three parts, before anything is changed or lost."""
# ruff: noqa: E501 (a table, a case a line)

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan

ONES = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))


def loss(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum"), len(targets)


def workload(**parts):
    usual = {
        "model": lambda: torch.nn.Linear(4, 1),
        "loss": loss,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "data": ONES,
        "batch_size": 16,
    }
    return paceline.Workload(**{**usual, **parts})


@functools.cache
def declared():
    return paceline.distribute(workload())


def objects():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(ONES, batch_size=16)


@functools.cache
def loop():
    return paceline.prepare(*objects())[0]


def a_loss():
    return loop().model(torch.ones(2, 4)).mean()


def train():
    raise AssertionError("it was called")


# The call, and what the error says.
CASES = {
    # launch
    "launch: ranks as text": (lambda: paceline.launch(train, ranks="2"), "ranks of paceline.launch should be a whole number of at least 1"),
    "launch: half a rank": (lambda: paceline.launch(train, ranks=1.5), "it is 1.5 of type float"),
    "launch: ranks as truth": (lambda: paceline.launch(train, ranks=True), "it is True of type bool"),
    "launch: a plan object": (lambda: paceline.launch(train, plan=Plan()), "plan of paceline.launch should be a text"),
    "launch: no plan": (lambda: paceline.launch(train, plan=None), "write e.g. plan='shard=2'"),
    "launch: a dict as plan": (lambda: paceline.launch(train, plan={"shard": 2}), "plan of paceline.launch should be a text"),
    "launch: a number as folder": (lambda: paceline.launch(train, run_dir=3), "run_dir of paceline.launch should be a path"),
    "launch: an empty folder": (lambda: paceline.launch(train, run_dir=""), "run_dir of paceline.launch should be a path"),
    "launch: resume as text": (lambda: paceline.launch(train, run_dir="a", resume="no"), "resume of paceline.launch should be True or False"),
    "launch: a module": (lambda: paceline.launch(3), "should be handed a function"),
    # Plan
    "Plan.parse: nothing": (lambda: Plan.parse(None), "text of Plan.parse should be a text"),
    "Plan.parse: a number": (lambda: Plan.parse(2), "text of Plan.parse should be a text"),
    "Plan: a mesh as dict": (lambda: Plan({"shard": 2}), "the plan's mesh should be a word"),
    "Plan: zero as text": (lambda: Plan(zero="3"), "the plan's zero should be a whole number"),
    "Plan: keep of no kind": (lambda: Plan(keep=None), "the plan's keep should be a whole number"),
    # Workload and distribute
    "distribute: nothing": (lambda: paceline.distribute(None), "should be handed a workload"),
    "distribute: a class": (lambda: paceline.distribute(paceline.Workload), "should be handed a workload"),
    "Workload: a list of a batch size": (lambda: workload(batch_size=[16]), "batch_size should be a whole number"),
    "Workload: epochs as text": (lambda: workload(epochs="3"), "epochs should be a whole number"),
    "Workload: a float of steps": (lambda: workload(steps=1e3), "steps should be a whole number"),
    "Workload: a dtype as precision": (lambda: workload(precision=torch.bfloat16), "precision is torch.bfloat16"),
    "Workload: a list as precision": (lambda: workload(precision=["bf16"]), "precision is ['bf16']"),
    "Workload: a norm as text": (lambda: workload(clip_norm="1"), "clip_norm should be a number above 0"),
    "Workload: seed as text": (lambda: workload(seed="0"), "seed should be a whole number"),
    "Workload: deterministic as text": (lambda: workload(deterministic="yes"), "deterministic should be True or False"),
    "Workload: sinks as text": (lambda: workload(sinks="tensorboard"), "sinks should be a list"),
    "Workload: data as a number": (lambda: workload(data=3), "data should be a data set"),
    "Workload: workers as truth": (lambda: workload(loader_workers=True), "loader_workers should be a whole number"),
    # prepare
    "prepare: seed as text": (lambda: paceline.prepare(*objects(), seed="0"), "seed of paceline.prepare should be a whole number"),
    "prepare: seed below 0": (lambda: paceline.prepare(*objects(), seed=-1), "seed of paceline.prepare should be a whole number of at least 0"),
    "prepare: no seed": (lambda: paceline.prepare(*objects(), seed=None), "seed of paceline.prepare"),
    "prepare: shard_frozen as text": (lambda: paceline.prepare(*objects(), shard_frozen="no"), "shard_frozen of paceline.prepare should be True or False"),
    "prepare: whole as a name": (lambda: paceline.prepare(*objects(), whole="critic"), "whole is a list of models"),
    "prepare: whole as nothing": (lambda: paceline.prepare(*objects(), whole=None), "whole is a list of models"),
    "prepare: by_part as a model": (lambda: paceline.prepare(*objects(), by_part=torch.nn.Linear(1, 1)), "by_part is a list of models"),
    "prepare: nothing": (lambda: paceline.prepare(None), "object 1 is None"),
    # collectives
    "all_reduce: a list": (lambda: paceline.all_reduce([1.0]), "it is [1.0] of type list"),
    "all_reduce: a number": (lambda: paceline.all_reduce(1.0), "it is 1.0 of type float"),
    "all_reduce: nothing": (lambda: paceline.all_reduce(None), "it is None of type NoneType"),
    "all_reduce: op as a function": (lambda: paceline.all_reduce(torch.ones(1), max), "the reduction <built-in function max> is unknown"),
    "all_reduce: op as a list": (lambda: paceline.all_reduce(torch.ones(1), ["sum"]), "the reduction ['sum'] is unknown"),
    "all_reduce: op as an array": (lambda: paceline.all_reduce(torch.ones(1), torch.ones(2)), "is unknown"),
    "all_reduce: grad as text": (lambda: paceline.all_reduce(torch.ones(1), grad="no"), "grad of paceline.all_reduce should be True or False"),
    "all_gather: a list": (lambda: paceline.all_gather([torch.ones(1)]), "all_gather takes a dense tensor"),
    "broadcast: an object": (lambda: paceline.broadcast({"lr": 1.0}), "broadcast takes a dense tensor"),
    "broadcast: root as text": (lambda: paceline.broadcast(torch.ones(1), root="0"), "root of paceline.broadcast should be a whole number"),
    "broadcast: root below 0": (lambda: paceline.broadcast(torch.ones(1), root=-1), "root of paceline.broadcast should be a whole number of at least 0"),
    "reduce_scatter: a tuple": (lambda: paceline.reduce_scatter((1, 2)), "reduce_scatter takes a dense tensor"),
    "all_to_all: splits as text": (lambda: paceline.all_to_all(torch.ones(1), "1"), "splits of paceline.all_to_all should be a whole number"),
    "all_to_all: splits as a number": (lambda: paceline.all_to_all(torch.ones(1), 1.0), "splits of paceline.all_to_all should be a whole number"),
    "all_to_all: a split as text": (lambda: paceline.all_to_all(torch.ones(1), ["1"]), "splits of paceline.all_to_all should be a whole number"),
    "all_to_all: no splits": (lambda: paceline.all_to_all(torch.ones(1), []), "give one count per rank"),
    # a job
    "schedule: a text": (lambda: declared().schedule("x"), "the workload has no scheduler"),
    "evaluate: a number": (lambda: declared().evaluate(3), "evaluation should be a data set"),
    "evaluate: a score of no kind": (lambda: declared().evaluate(ONES, "accuracy"), "score of job.evaluate should be a function"),
    "evaluate: metrics of no kind": (lambda: declared().evaluate(ONES, metrics="f1"), "metrics of job.evaluate should be a Metric"),
    "log: a number": (lambda: declared().log(3), "job.log takes numbers by their names"),
    "log: a text": (lambda: declared().log("loss"), "job.log takes numbers by their names"),
    "log: a value as text": (lambda: declared().log(loss="low"), "can't log 'loss'"),
    "log: a name of no kind": (lambda: declared().log({3: 1.0}), "what is logged has a name"),
    "log_text: a number": (lambda: declared().log_text("a", 3), "can't log 'a' as text"),
    "save: a number": (lambda: declared().save(3), "path of job.save should be a path"),
    "save: nothing": (lambda: declared().save(None), "path of job.save should be a path"),
    "load: nothing": (lambda: declared().load(None), "path of job.load should be a path"),
    "load: flags as text": (lambda: declared().load("a", weights_only="no"), "weights_only of job.load should be True or False"),
    "keep: a name of no kind": (lambda: declared().keep(3, {}), "job.keep needs a name"),
    "keep: a number": (lambda: declared().keep("a", 3), "needs an object whose state can be read"),
    "keep: per_rank as text": (lambda: declared().keep("b", {}, per_rank="no"), "per_rank of job.keep should be True or False"),
    "keep_settings: an object": (lambda: declared().keep_settings(model=object()), "job.keep_settings"),
    "ema: a text": (lambda: declared().ema("0.9"), "the decay of an average should be a number"),
    "save_best: a text": (lambda: declared().save_best("low"), "job.save_best should be handed a number"),
    "save_best: a mode of no kind": (lambda: declared().save_best(1.0, mode=max), "should be 'min' or 'max'"),
    "save_best: a number as path": (lambda: declared().save_best(1.0, path=3), "path of job.save_best should be a path"),
    "generate: tokens as text": (lambda: declared().generate([[1]], "5"), "max_new_tokens of job.generate should be a whole number"),
    "generate: a number": (lambda: declared().generate(3, 5), "they are a int"),
    "close: save as text": (lambda: declared().close(save="no"), "save of job.close should be True or False"),
    # a job of a loop
    "epochs: a text": (lambda: next(loop().epochs("3")), "count of job.epochs should be a whole number"),
    "epochs: half a pass": (lambda: next(loop().epochs(1.5)), "count of job.epochs should be a whole number"),
    "epochs: below 0": (lambda: next(loop().epochs(-1)), "count of job.epochs should be a whole number of at least 0"),
    "backward: a number": (lambda: loop().backward(1.0), "job.backward needs the loss"),
    "backward: a weight as text": (lambda: loop().backward(a_loss(), weight="8"), "the weight of a loss should be a number"),
    "backward: a share as text": (lambda: loop().backward(a_loss(), share="1"), "the share of a loss should be a number"),
    "backward: retain_graph as text": (lambda: loop().backward(a_loss(), retain_graph="no"), "retain_graph of job.backward should be True or False"),
    "clip: a text": (lambda: loop().clip("1"), "job.clip needs the largest norm"),
    "clip: an optimizer of no kind": (lambda: loop().clip(1.0, "adam"), "this str is not"),
    "gradients: an optimizer of no kind": (lambda: loop().gradients(3), "this int is not"),
    "copy_weights: a dict": (lambda: loop().copy_weights({}, loop().model), "this dict is in none of them"),
    "job.all_reduce: a list": (lambda: loop().all_reduce([1.0]), "all_reduce takes a dense tensor"),
    "job.all_gather: a number": (lambda: loop().all_gather(1.0), "all_gather takes a dense tensor"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paceline.init()


@pytest.mark.parametrize("case", CASES)
def test_a_value_of_the_wrong_kind_is_one_error_of_three_parts(case, tmp_path):
    call, said = CASES[case]
    with pytest.raises(PacelineError) as caught:
        call()
    assert said in str(caught.value)
    assert caught.value.found
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_whole_numbers_of_other_libraries_are_taken():
    numpy = pytest.importorskip("numpy")
    for zero in (numpy.int64(0), torch.tensor(0)):
        assert paceline.broadcast(torch.ones(1), root=zero).item() == 1.0
    assert paceline.all_to_all(torch.ones(3), numpy.array([3]))[1] == [3]
