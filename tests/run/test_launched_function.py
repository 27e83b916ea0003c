"""`paceline.launch`: what is refused, what goes to the ranks and comes back, and how it ends in a plain file."""

from __future__ import annotations

import enum
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import paceline
from paceline.checkpoint.export import plan_export
from paceline.checkpoint.owner import take
from paceline.nouns.errors import MeshError, PlanError, ReadError, UsageError
from paceline.run.plain_values import read_value, write_value
from paceline.run.sent_function import SentFunction, pack
from paceline.run.supervise.progress import CellScreen, label_of

from support.jobs import TINY, events, leftovers, losses, marked, send, wait_for

# --- refused before anything starts


def train():
    raise AssertionError("it was called")


REFUSED = {
    "no function": (lambda: paceline.launch(3), UsageError, "without brackets after the function's name"),
    "no rank": (lambda: paceline.launch(train, ranks=0), UsageError, "write ranks=1"),
    "an unknown axis": (lambda: paceline.launch(train, plan="shards=2"), MeshError, "did you mean 'shard'"),
    "an option alone": (lambda: paceline.launch(train, ranks=2, plan="replicate=2,zero=3"), PlanError, "shard"),
    "ranks and plan differ": (
        lambda: paceline.launch(train, ranks=3, plan="shard=2"),
        MeshError,
        "the job has 3 ranks",
    ),
    "servers": (lambda: paceline.launch(train, plan="server=1,replicate=2"), UsageError, "the plan has server=1"),
    "resume without a place": (lambda: paceline.launch(train, resume=True), UsageError, "name it with run_dir"),
    "resume without a run": (lambda: paceline.launch(train, run_dir="a", resume=True), UsageError, "there is none"),
    "what can't be pickled": (lambda: paceline.launch(train, threading.Lock()), UsageError, "can't send train"),
}


@pytest.fixture
def nothing_starts(tmp_path, monkeypatch):
    def started(*words):
        raise AssertionError(words)

    monkeypatch.setattr("paceline.run.supervise.host_backend.start_ranks", started)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cant_be_launched_is_refused(case):
    call, kind, said = REFUSED[case]
    with pytest.raises(kind) as caught:
        call()
    assert said in str(caught.value)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PLACES = {
    "PACELINE_RANK": ({"PACELINE_RANK": "1"}, "this is rank 1 of a job"),
    "torchrun": (TORCHRUN, "torchrun started it"),
}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_launches_nothing(place, monkeypatch):
    environment, said = PLACES[place]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        paceline.launch(train, ranks=2)


@pytest.mark.usefixtures("nothing_starts")
def test_another_thread_launches_nothing():
    errors = []

    def call():
        try:
            paceline.launch(train)
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, name="other")
    thread.start()
    thread.join()
    assert "this is the thread other" in errors[0]


@pytest.mark.usefixtures("nothing_starts")
def test_a_run_that_is_there_needs_resume(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").touch()
    with pytest.raises(UsageError, match="write resume=True"):
        paceline.launch(train, run_dir=tmp_path / "a")
    (tmp_path / "a" / "plan.json").unlink()
    (tmp_path / "a").rmdir()


@pytest.mark.usefixtures("nothing_starts")
def test_a_run_directory_that_a_living_job_has_is_refused(tmp_path):
    with take(tmp_path / "a", print, ""), pytest.raises(UsageError, match="or write another run_dir than a"):
        paceline.launch(train, run_dir=tmp_path / "a")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[notebook\]'"):
        pack(train, (), False)


# --- what comes back


class Level(enum.IntEnum):
    HIGH = 3


ROUND = [
    None,
    True,
    -(2**70),
    0.1,
    "text \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    b"\x00\xff",
    [],
    {},
    (1, [2.5, (None,)], {"a": {3: "x", (1, 2): b"y"}}),
]


@pytest.mark.parametrize("value", ROUND, ids=repr)
def test_plain_data_comes_back_as_it_was(value, tmp_path):
    write_value(tmp_path / "a", value, "train")
    found = read_value(tmp_path / "a")
    assert (found, type(found)) == (value, type(value))


def test_tensors_arrays_and_numbers_of_other_kinds_come_back(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    value = {"t": shared, "part": shared.t()[1], "b": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}
    value |= {"a": np.arange(3), "n": np.float32(0.5), "i": np.int64(7), "level": Level.HIGH, "nan": math.nan}
    write_value(tmp_path / "a", value, "train")
    found = read_value(tmp_path / "a")
    assert torch.equal(found["t"], shared)
    assert torch.equal(found["part"], torch.tensor([1.0, 4.0]))
    assert found["b"].dtype == torch.bfloat16
    assert not found["b"].requires_grad
    assert found["a"].tolist() == [0, 1, 2]
    assert isinstance(found["a"], np.ndarray)
    assert (found["n"], found["i"], found["level"]) == (0.5, 7, 3)
    assert {type(found["n"]), type(found["i"]), type(found["level"])} == {float, int}
    assert math.isnan(found["nan"])


NOT_PLAIN = {
    "a model": (torch.nn.Linear(1, 1), "Linear"),
    "inside": ({"a": [1, {2, 3}]}, "{2, 3}"),
    "objects": (np.array([object()]), "array"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "its layout is torch.sparse_coo"),
    "a tensor without values": (torch.ones(2, device="meta"), "it is on the device meta"),
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_what_is_not_plain_is_refused(case, tmp_path):
    value, said = NOT_PLAIN[case]
    with pytest.raises(UsageError) as caught:
        write_value(tmp_path / "a", value, "train")
    assert caught.value.asked in ("train should return plain data", "train should return dense tensors")
    assert said in caught.value.found


FORGED = [
    "",
    "[1]",
    "{}",
    '{"tensor": "1"}',
    '{"tensor": []}',
    '{"bytes": "x"}',
    '{"dict": [[{"list": []}, 1]]}',
    '{"dict": 3}',
    '{"set": [1]}',
    '{"a": 1, "b": 2}',
]


@pytest.mark.parametrize("text", FORGED)
def test_a_forged_value_is_refused(text, tmp_path):
    save_file({"0": torch.ones(1)}, tmp_path / "a", {"value": text})
    with pytest.raises(ReadError):
        read_value(tmp_path / "a")


def test_a_value_that_is_missing_or_torn_is_refused(tmp_path):
    with pytest.raises(ReadError):
        read_value(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"\x05")
    with pytest.raises(ReadError):
        read_value(tmp_path / "a")


# --- what goes there


def test_what_is_sent_is_read_as_often_as_there_are_ranks():
    sent = SentFunction(["/a"], {"<cell>": ["x = 1\n"]}, True, os.urandom(2**20) + b"\n{")
    descriptor = sent.write()
    try:
        assert [SentFunction.read(descriptor) for _ in range(2)] == [sent, sent]
    finally:
        os.close(descriptor)


def test_a_workload_is_sent_whole():
    names = {}
    exec(TINY, names)
    sent = pack(lambda workload: workload.batch_size, (names["workload"],), False)
    function, (workload,) = sent.load()
    assert function(workload) == 8
    assert workload.data is not names["workload"].data
    assert type(workload) is paceline.Workload


# --- in a notebook's cell


class Shown:
    def __init__(self):
        self.lines = []

    def display(self, data, raw, display_id):
        assert (raw, display_id) == (True, True)
        self.lines.append(["new", data["text/plain"]])
        return self

    def update(self, data, raw):
        self.lines.append(["changed", data["text/plain"]])


def test_the_line_of_progress_changes_in_place_and_not_too_often(monkeypatch):
    shown = Shown()
    module = type(sys)("IPython.display")
    module.display = shown.display
    package = type(sys)("IPython")
    package.display = module
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    screen = CellScreen()
    for line, now_s in (("a", 0.0), ("b", 0.1), ("c", 0.3), ("c", 9.0), ("d", math.inf)):
        screen.show_progress(line, now_s)
    assert shown.lines == [["new", "a"], ["changed", "c"], ["changed", "d"]]


def test_without_a_notebook_code_has_the_names_of_files():
    assert label_of(None, "/a/b.py") == ""


# --- whole launches from a plain file

FILE = """
import sys, os
import torch
import paceline
{more}
rate = 0.5

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1).double()
    def forward(self, inputs):
        return self.linear(inputs)

def train(epochs, hook=None):
    torch.manual_seed(0)
    x = torch.randn(37, 4).double()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate / 10)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for _ in job.epochs(epochs):
        for batch, target in loader:
            optimizer.zero_grad()
            job.backward(torch.nn.functional.mse_loss(model(batch), target))
            optimizer.step()
            if hook: hook(job)
    return {{"size": job.size, "steps": job.step_number, "weights": model.state_dict()}}

{call}
"""


def run_file(folder, call, more="", name="plain.py", **environment):
    (folder / name).write_text(FILE.format(call=call, more=more))
    env = marked(folder, environment)
    done = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=200, env=env)
    assert wait_for(lambda: not leftovers(folder)), leftovers(folder)
    return done


@pytest.mark.slow
def test_launch_results_are_equal_on_any_number_of_ranks(tmp_path):
    call = """
one = paceline.launch(train, 2)
two = paceline.launch(train, 2, ranks=2)
sharded = paceline.launch(train, 2, plan="shard=2,zero=1")
assert (one["size"], two["size"], sharded["size"]) == (1, 2, 2)
for other in (two, sharded):
    assert other["steps"] == one["steps"] == 10
    for name, weight in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, rtol=1e-12, atol=1e-12)
"""
    done = run_file(tmp_path, call)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.py", "tmp"], "something was saved"
    assert "step 10/10" in done.stderr


@pytest.mark.slow
def test_a_run_directory_keeps_checkpoints_and_goes_on(tmp_path):
    call = """
first = paceline.launch(train, 1, ranks=2, run_dir="kept")
try:
    paceline.launch(train, 2, ranks=2, run_dir="kept")
except paceline.PacelineError as error:
    assert "resume=True" in error.fix
second = paceline.launch(train, 2, ranks=2, run_dir="kept", resume=True)
assert (first["steps"], second["steps"]) == (5, 10)
"""
    done = run_file(tmp_path, call)
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in events(tmp_path / "kept", "resumed")] == [5]
    assert len(events(tmp_path / "kept", "step")) == len(losses(tmp_path / "kept")) == 10


ENDS = {
    "an exception": ("raise KeyError('the cause')", "found: KeyError: 'the cause'", 1),
    "a kill": ("os.kill(os.getpid(), 9)", "rank 1's process was ended by SIGKILL", 0),
    "an error of Paceline's": ("paceline.all_reduce(torch.ones(1), 'average')", "fix: write 'mean'", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_a_rank_that_fails_is_told_once(case, tmp_path):
    how, said, traces = ENDS[case]
    more = f"def hook(job):\n    if job.rank == 1 and job.step_number == 3: {how}"
    done = run_file(tmp_path, "paceline.launch(train, 2, hook, ranks=2)", more)
    assert done.returncode == 1
    assert done.stderr.count(said) == 1, done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1 + traces
    assert "paceline.nouns.errors.RankFailedError: [rank 1" in done.stderr
    assert ("in hook" in done.stderr) == bool(traces)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_launch_refuses_a_result_not_plain_but_saves_training(kept, tmp_path):
    more = "def train_only(epochs):\n    train(epochs)\n    return Net()\n"
    place = ", run_dir='kept'" if kept else ""
    (tmp_path / "plain.py").write_text(FILE.format(more=more, call=f"paceline.launch(train_only, 1, ranks=2{place})"))
    done = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, env=marked(tmp_path, {})
    )
    assert done.returncode == 1
    assert "train_only should return plain data\n  found: it returned Net(" in done.stderr
    assert "fix: return its weights, on every rank: job.whole_model().state_dict()" in done.stderr
    if kept:
        (saved,) = tmp_path.glob("kept/checkpoints/step-*")
    else:
        (saved,) = tmp_path.glob("tmp/paceline-job-*/step-*")
        assert f"step 5 is saved in {saved}" in done.stdout + done.stderr
    assert saved.name == "step-00000005"
    assert plan_export(saved, "safetensors", print).step == 5
    shutil.rmtree(saved.parent)
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)


PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"
AROUND = """
import torch
import paceline
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(128, 20).double()
labels = inputs[:, :5].argmax(dim=1)

def Classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5)).double()
"""


@pytest.mark.slow
def test_the_pages_example_gives_whole_weights_under_every_plan(tmp_path):
    (example,) = re.findall(r"```python\n(def train.+?)```", PAGE.read_text(), re.DOTALL)
    others = """
for plan in ("replicate=2", "shard=2,zero=1", "shard=2", "tensor=2"):
    found = paceline.launch(train, 4, plan=plan)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9)
"""
    one = example.replace("ranks=2", "ranks=1")
    (tmp_path / "page.py").write_text(AROUND + one + others)
    env = marked(tmp_path, {})
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "number"), [(False, signal.SIGINT), (True, signal.SIGINT), (True, signal.SIGTERM)])
def test_launch_interrupt_ends_ranks_and_saves_in_its_run_dir(kept, number, tmp_path):
    more = "import time\ndef hook(job):\n    time.sleep(0.05)\n    if job.step_number == 3: open('three', 'w')"
    place = ", run_dir='kept'" if kept else ""
    (tmp_path / "plain.py").write_text(FILE.format(more=more, call=f"paceline.launch(train, 99, hook, ranks=2{place})"))
    words = {"cwd": tmp_path, "env": marked(tmp_path, {}), "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen([sys.executable, "plain.py"], **words)
    assert wait_for((tmp_path / "three").exists, 60)
    send(job, number)
    _, err = job.communicate(timeout=30)
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)
    if number == signal.SIGTERM:
        assert job.returncode == 0, err
    else:
        assert job.returncode == -signal.SIGINT, err
        assert err.count("KeyboardInterrupt") == 1
    assert bool(list(tmp_path.glob("kept/checkpoints/step-*"))) == kept
    assert ("resume=True goes on" in err) == (kept and number == signal.SIGINT)


def test_code_that_is_sent_keeps_the_name_of_its_file():
    names = {}
    exec(compile("def outer():\n    def inner():\n        pass\n    return inner\n", "Cell In[9]", "exec"), names)
    function, _ = pack(names["outer"], (), False).load()
    assert (function.__code__.co_filename, function().__code__.co_filename) == ("Cell In[9]", "Cell In[9]")
