"""State of the person's own in checkpoints: what `job.keep`, `job.ema` and `job.save_best` save and put back."""

from __future__ import annotations

import collections
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.comm import api
from paceline.nouns.errors import CheckpointError, PacelineError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.reading import parse_json
from paceline.train.job import Job
from paceline.train.python_state import decode, encode

from support.ranks import run_ranks
from support.whole_optimizers import data, workload

TOLERANCE = 1e-12


def there_and_back(value):
    import json

    tensors = []
    text = json.dumps(encode("it", value, tensors), allow_nan=False)
    return decode(parse_json(text, "it"), dict(enumerate(tensors)))


VALUES = {
    "numbers": [1, -(2**40), 2**100, True, None, 1.5, 1e-320, 0.1 + 0.2],
    "not finite": {"a": math.inf, "b": -math.inf},
    "text": "ä\n\"'\u2028",
    "nested": {"a": [(1, 2), {"b": (3,)}], 4: {"5": {6.5: None}}},
    "keys of every kind": {1: "a", "1": "b", 2.5: "c", (1, "x"): 2, None: 3},
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "a deque": collections.deque([1, 2, 3], maxlen=5),
    "a set": {1, "a", 2.5},
    "bytes": bytes(range(256)),
    "like a tag": {"tensor": 3, "float": "inf"},
    "a generator's state": random.Random(3).getstate(),
    "of numpy's": np.random.default_rng(3).bit_generator.state,
}
TENSORS = {
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "bfloat16": torch.randn(5).bfloat16(),
    "a number": torch.tensor(3),
    "none": torch.empty(0, 4),
    "not contiguous": torch.arange(12).reshape(3, 4).t(),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name):
    back = there_and_back(VALUES[name])
    assert back == VALUES[name]
    assert type(back) is type(VALUES[name])


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_and_arrays_come_back(name):
    tensor = TENSORS[name]
    (back,) = there_and_back([tensor])
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    if name != "bfloat16":
        array = there_and_back(tensor.numpy())
        assert isinstance(array, np.ndarray)
        assert np.array_equal(array, tensor.numpy())
    number = there_and_back(np.float32(1.25))
    assert (type(number), number) == (np.float32, 1.25)


def holds_itself():
    found = []
    found.append(found)
    return found


NOT_KEPT = {
    "an object": ({"a": [0, object()]}, "mine['a'][1]"),
    "a function": ([len], "mine[0]"),
    "strings of numpy": ([np.array(["a"])], "an array of <U1"),
    "a sparse tensor": ([torch.eye(3).to_sparse()], "sparse"),
    "itself": (holds_itself(), "holds itself"),
    "a number": (3, "state can be read and put back"),
    "None": (None, "state can be read and put back"),
    "a key": ({object: 1}, "a key of mine"),
    "half a state": (type("Half", (), {"state_dict": lambda self: {}})(), "state can be read and put back"),
}


@pytest.fixture
def job():
    api.init()
    return Job(workload("lamb"), Plan())


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_cant_be_kept_is_refused_at_once(name, job):
    target, said = NOT_KEPT[name]
    with pytest.raises(WorkloadError) as caught:
        job.keep("mine", target)
    assert said in str(caught.value)
    assert "mine" in str(caught.value)
    job.keep("mine", {})  # the name is free


MISUSES = {
    "name": (lambda job: job.keep("a/b", {}), "it is 'a/b'"),
    "no name": (lambda job: job.keep({}, "a"), "it is {}"),
    "taken": (lambda job: [job.keep("a", {}), job.keep("a", [])], "'a' is that of {} of type dict"),
    "decay": (lambda job: job.ema(1.0), "it is 1.0"),
    "decay in percent": (lambda job: job.ema(99), "it is 99"),
    "taken average": (lambda job: [job.ema(0.9), job.ema(0.99)], "there is one of the name 'ema'"),
    "decay of an update": (lambda job: job.ema(0.9).update(decay=-1), "it is -1"),
    "mode": (lambda job: job.save_best(1.0, "lowest"), "it is 'lowest'"),
    "metric": (lambda job: job.save_best("1.0"), "it is '1.0'"),
    "other mode": (lambda job: [job.save_best(1.0, "min"), job.save_best(1.0, "max")], "'max' now, and was 'min'"),
    "strict": (lambda job: job.load("x", strict=False), "weights_only=True, strict=False"),
    "weights only": (lambda job: job.load("x", weights_only="yes"), "it is 'yes'"),
    "no weights": (lambda job: job.load("nowhere", weights_only=True), "neither a file nor a folder"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_said(name, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ask, said = MISUSES[name]
    with pytest.raises(PacelineError) as caught:
        ask(job)
    assert said in str(caught.value)


def test_an_average_is_swapped_once_and_not_moved_meanwhile(job):
    ema = job.ema(0.9)
    with ema.applied():
        with pytest.raises(UsageError, match="outside of `with ema"):
            ema.update()
        with pytest.raises(UsageError, match="they have it"), ema.applied():
            pass


class Replay:
    """A buffer as people write it."""

    def __init__(self):
        self.rows = collections.deque(maxlen=3)

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


def kept_of(job):
    return {
        "plateau": job.keep("plateau", torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(), patience=1)),
        "stop": job.keep("stop", {"best": math.inf, "bad": 0}),
        "replay": job.keep("replay", Replay(), per_rank=True),
        "random": job.keep("random", random.Random(job.rank), per_rank=True),
        "numpy": job.keep("numpy", np.random.default_rng(2)),
        "generator": job.keep("generator", torch.Generator().manual_seed(2)),
        "list": job.keep("list", []),
        "tensor": job.keep("tensor", torch.zeros(2)),
        "array": job.keep("array", np.zeros(2)),
    }


def sgd():
    return torch.optim.SGD([torch.zeros(1)], lr=1.0)


def change(kept, rank, step):
    mean = 1.0 / (step % 3 + 1)
    kept["plateau"].step(mean)
    kept["stop"]["bad"] = 0 if mean < kept["stop"]["best"] else kept["stop"]["bad"] + 1
    kept["stop"]["best"] = min(mean, kept["stop"]["best"])
    kept["replay"].rows.append(torch.full((2,), float(10 * rank + step)))
    drawn = (kept["numpy"].random(), float(torch.rand((), generator=kept["generator"])))
    kept["list"].append(drawn)
    kept["tensor"] += drawn[1]
    kept["array"] += drawn[0]
    return kept["random"].random()


def shown(kept, own):
    replay = [row.tolist() for row in kept["replay"].rows]
    lists = (kept["list"], kept["tensor"].tolist(), kept["array"].tolist())
    return (kept["plateau"].state_dict(), dict(kept["stop"]), replay, own, *lists)


def keep_and_go_back(rank, folder, plan):
    """Six steps, saved after the third; then those after it again by a second job. What both ended with."""
    api.init()
    ends = []
    for again in (False, True):
        job = Job(workload("lamb"), Plan.parse(plan))
        if again:
            job.load(folder)
        kept = kept_of(job)
        ema = job.ema(0.7)
        own = None
        for batch in job.batches():
            job.step(batch)
            ema.update()
            own = change(kept, job.rank, job.step_number)
            if job.step_number == 3 and not again:
                job.save(folder)
        with ema.applied():
            averaged = job.evaluate(data())["loss"]
        ends.append((*shown(kept, own), averaged))
        job.close()
    return ends


PLANS = ["replicate=1", "replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "pipeline=2"]


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_kept_goes_on_as_it_was(plan, tmp_path):
    size = Plan.parse(plan).world_size
    averages = []
    for first, second in run_ranks(size, keep_and_go_back, str(tmp_path / "third"), plan):
        assert second == first
        averages.append(first[-1])
    assert averages == pytest.approx([averaged_alone()] * size, rel=1e-9)


def averaged_alone():
    """The loss of torch's own average, in a plain loop."""
    api.init()
    job = Job(workload("lamb"), Plan())
    moving = torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)
    average = torch.optim.swa_utils.AveragedModel(job.model, multi_avg_fn=moving)
    average.update_parameters(job.model)  # the first is a copy
    for batch in job.batches():
        job.step(batch)
        average.update_parameters(job.model)
    job.model.load_state_dict(average.module.state_dict())
    return job.evaluate(data())["loss"]


def save_average(rank, folder, plan):
    api.init()
    job = Job(workload("lamb"), Plan.parse(plan))
    ema = job.ema(0.7)
    for batch in job.batches():
        job.step(batch)
        ema.update()
    job.save(folder)
    with ema.applied():
        job.save(folder + "-averaged")
        return job.evaluate(data())["loss"]


def load_average(rank, folder, plan):
    api.init()
    job = Job(workload("lamb"), Plan.parse(plan))
    job.load(folder)
    ema = job.ema(0.7)
    with ema.applied():
        found = job.evaluate(data())["loss"]
    job.load(folder + "-averaged", weights_only=True)
    assert job.evaluate(data())["loss"] == pytest.approx(found, rel=TOLERANCE)
    assert job.step_number > 0
    return found


MESHES = [("shard=2", "tensor=2"), ("tensor=2", "replicate=1"), ("pipeline=2", "shard=3")]


@pytest.mark.parametrize(("one", "other"), MESHES)
def test_an_average_goes_on_under_another_mesh(one, other, tmp_path):
    saved = run_ranks(Plan.parse(one).world_size, save_average, str(tmp_path / "a"), one)
    for found in run_ranks(Plan.parse(other).world_size, load_average, str(tmp_path / "a"), other):
        assert found == pytest.approx(saved[0], rel=1e-9)


def test_the_checkpoint_of_a_step_has_what_the_loop_did_after_it(tmp_path, monkeypatch):
    """As a run with a run directory writes it: when the loop asks for the next batch."""
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    api.init()
    job = Job(workload("lamb"), Plan(checkpoint_every=2))
    count = job.keep("count", {"steps": 0})
    for batch in job.batches():
        job.step(batch)
        count["steps"] += 1
        if job.step_number == 4:
            break
    job.close()
    again = {"steps": 0}
    monkeypatch.delenv("PACELINE_RUN_DIR")
    second = Job(workload("lamb"), Plan())
    second.load(tmp_path / "checkpoints" / "step-00000002")
    assert second.keep("count", again) == {"steps": 2}


def test_a_job_does_not_resume_with_other_settings(job, tmp_path):
    job.keep_settings(data="letters", fold=2, sizes=(1, 2), nothing=None)
    job.step(next(job.batches()))
    job.save(tmp_path / "saved")

    def resumed():
        second = Job(workload("lamb"), Plan())
        second.load(tmp_path / "saved")
        return second

    resumed().keep_settings(data="letters", fold=2, sizes=(1, 2), nothing=None, more=1)
    for settings, found in (({"fold": 3}, "began with fold = 2"), ({"nothing": 0}, "began with nothing = None")):
        with pytest.raises(UsageError, match=f"{found}\n  fix: resume with that, or begin another job"):
            resumed().keep_settings(**{"data": "letters", "fold": 2, "nothing": None, **settings})


def test_what_the_file_keeps_no_more_is_told(job, tmp_path, capsys):
    job.keep("gone", [1])
    job.ema(0.9)
    job.save(tmp_path / "a")
    second = Job(workload("lamb"), Plan())
    second.load(tmp_path / "a")
    second.keep("new", [2])
    assert "a has nothing of 'new'" in capsys.readouterr().out
    second.save(tmp_path / "b")
    assert "a has 'gone', 'ema', which the file keeps no more" in capsys.readouterr().out
    third = Job(workload("lamb"), Plan())
    third.load(tmp_path / "b")
    assert third.keep("new", []) == [2]
    third.ema(0.9)
    assert "b has no average 'ema'" in capsys.readouterr().out


def test_a_state_that_does_not_fit_is_refused(job, tmp_path):
    job.keep("a", torch.zeros(3))
    job.keep("b", [1], per_rank=True)
    job.save(tmp_path / "a")
    second = Job(workload("lamb"), Plan())
    second.load(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"shape \(3,\), not \(4,\)"):
        second.keep("a", torch.zeros(4))
    with pytest.raises(CheckpointError, match="it is per rank there and the same on all ranks here"):
        second.keep("b", [])


def keep_apart(rank, how):
    api.init()
    job = Job(workload("lamb"), Plan.parse("replicate=2"))
    target = {"seen": rank}
    if how == "on one rank":
        if rank == 0:
            job.keep("mine", target)
    else:
        job.keep("mine", target, per_rank=how == "per rank")
    try:
        if how == "metric":
            job.save_best(float(rank))
        else:
            job.save(how)
    except PacelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("equal", "'mine', which job.keep was handed, should be the same on every rank"),
        ("metric", "the same metric on every rank"),
        ("per rank", None),
    ],
)
def test_what_differs_between_ranks_is_refused(how, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in run_ranks(2, keep_apart, how):
        assert (said or "") in text
        assert bool(text) == bool(said)


def resume_on_three(rank, folder):
    api.init()
    job = Job(workload("lamb"), Plan.parse("replicate=3"))
    job.load(folder)
    assert job.keep("same", []) == [1]
    try:
        job.keep("own", [])
    except PacelineError as error:
        first = str(error)
    try:
        job.keep("other", [], per_rank=True)
    except PacelineError as error:
        return first, str(error)


def save_two(rank, folder):
    api.init()
    job = Job(workload("lamb"), Plan.parse("replicate=2"))
    job.keep("same", [1])
    job.keep("own", [rank], per_rank=True)
    job.keep("other", [rank], per_rank=True)
    job.save(folder)


def test_what_is_kept_per_rank_goes_on_on_as_many(tmp_path):
    run_ranks(2, save_two, str(tmp_path / "two"))
    for first, second in run_ranks(3, resume_on_three, str(tmp_path / "two")):
        assert "per_rank=True" in first
        assert "2 ranks wrote two, and 3 read it" in second
        assert "resume on 2 ranks" in second


def test_the_best_is_saved_and_goes_on(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metrics = [3.0, math.nan, 2.0, 2.0, torch.tensor(2.5), np.float32(1.0)]
    assert [job.save_best(metric) for metric in metrics] == [True, False, True, False, False, True]
    assert job.save_best(0.5, "max", "other")
    job.save("now")
    second = Job(workload("lamb"), Plan())
    second.load("now")
    second.save("later")  # before it is asked again
    third = Job(workload("lamb"), Plan())
    third.load("later")
    assert [third.save_best(1.5), third.save_best(0.4, "max", "other"), third.save_best(0.9)] == [False, False, True]


def move_weights(job):
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)


def weights_of(job):
    return {name: value.clone() for name, value in job.model.state_dict().items()}


def test_weights_alone_come_from_a_file_or_a_folder(job, tmp_path, capsys):
    move_weights(job)
    weights = weights_of(job)  # a tied one under both names
    (tmp_path / "exported").mkdir()
    save_file(weights, tmp_path / "exported" / "model.safetensors")
    for path in (tmp_path / "exported", tmp_path / "exported" / "model.safetensors"):
        second = Job(workload("lamb"), Plan())
        second.load(path, weights_only=True)
        assert all(torch.equal(value, weights[name]) for name, value in weights_of(second).items())
    tied = [name for name in weights if torch.equal(weights[name], weights["back.weight"])]
    assert len(tied) == 2
    name, *others = [one for one in weights if one not in tied]
    fewer = {other: weights[other] for other in [*others, tied[1]]} | {"more": torch.zeros(1)}
    save_file(fewer, tmp_path / "fewer.safetensors")
    third = Job(workload("lamb"), Plan())
    before = weights_of(third)
    with pytest.raises(CheckpointError) as caught:
        third.load(tmp_path / "fewer.safetensors", weights_only=True)
    assert f"{name}: not there; more: not in the model" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(third).items())
    third.load(tmp_path / "fewer.safetensors", weights_only=True, strict=False)
    assert "are taken but for some" in capsys.readouterr().out
    after = weights_of(third)
    assert torch.equal(after[tied[0]], weights[tied[0]])
    assert torch.equal(after[name], before[name])
    assert all(torch.equal(after[other], weights[other]) for other in others)


def test_weights_of_another_shape_are_refused(job, tmp_path):
    name, *_ = weights_of(job)
    save_file({name: torch.zeros(7, 7, 7)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"the shape \(7, 7, 7\) there"):
        job.load(tmp_path / "other.safetensors", weights_only=True, strict=False)
    save_file({"nothing": torch.zeros(1)}, tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match="no name in common"):
        job.load(tmp_path / "nothing.safetensors", weights_only=True, strict=False)


def load_file(rank, path, plan):
    api.init()
    job = Job(workload("lamb"), Plan.parse(plan))
    job.load(path, weights_only=True)
    return job.evaluate(data())["loss"]


@pytest.mark.parametrize("plan", ["shard=2", "tensor=2", "pipeline=2"])
def test_weights_alone_are_cut_as_the_plan_says(plan, job, tmp_path):
    move_weights(job)
    save_file(weights_of(job), tmp_path / "a.safetensors")
    expected = job.evaluate(data())["loss"]
    for found in run_ranks(2, load_file, str(tmp_path / "a.safetensors"), plan):
        assert found == pytest.approx(expected, rel=1e-9)
