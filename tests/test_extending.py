"""The examples of docs/extending.md work as they stand there."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import STEPS, losses, paceline, write_workload

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"^<!-- test: ([^\n]*) -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
# With one more folder of schedulers, as if the example's file lay among the others.
WITH_SCHEDULER = """
import sys
from paceline.launch.kubernetes import schedulers
schedulers.__path__.append(sys.argv[1])
from paceline.launch.kubernetes.kubernetes_job import GANGS
from paceline.launch.kubernetes.submit import check, notes, render, to_text
from paceline.nouns.errors import PacelineError
from support.on_kubernetes import COMBINATIONS, a_job, rendered, validate_all
def refused(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except PacelineError as error:
        return error.found
"""


@pytest.fixture
def with_scheduler(tmp_path):
    """Runs code in a process that has the example's scheduler."""
    (tmp_path / "schedulers").mkdir()
    (tmp_path / "schedulers" / "example.py").write_text(EXAMPLES["schedulers/example.py"])

    def run(code):
        line = [sys.executable, "-c", WITH_SCHEDULER + code, str(tmp_path / "schedulers")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_scheduler_renders_manifests_that_kubernetes_takes(with_scheduler):
    text = with_scheduler("job = a_job(gang='example')\nprint(to_text(render(job), notes(job)))")
    assert "# the queue ml must be open" in text
    assert text.count("schedulerName: example-scheduler") == 1
    assert "example.org/queue: ml" in text
    assert "example.org/members: '2'" in text
    valid = with_scheduler(
        "assert 'example' in GANGS\n"
        "jobs = {name: job for name, job in COMBINATIONS.items() if job.gang == 'example'}\n"
        "for job in jobs.values(): validate_all(render(job))\n"
        "print(*jobs)"
    )
    kinds = {"jobset-example", "trainjob-example", "job-example", "mpijob-example"}
    assert set(valid.split()) == {*kinds, "jobset-example-servers", "job-example-servers"}


def test_the_schedulers_check_finds_an_edit(with_scheduler):
    code = (
        "manifests = rendered(gang='example')\n"
        "assert refused(check, manifests) is None\n"
        "pods = manifests[-1]['spec']['replicatedJobs'][0]['template']['spec']['template']\n"
        "pods['metadata']['annotations']['example.org/members'] = '3'\n"
        "print(refused(check, manifests))"
    )
    assert "the annotation example.org/members says '3' and there are 2 pods" in with_scheduler(code)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"queue": ""}, "no queue is named"),
        ({"queue": "M L"}, "example has no such names"),
        ({"kind": "rayjob"}, "its operator replaces the pods' annotations"),
        ({"kind": "trainjob", "runtime": "torch"}, "a TrainJob can't name a scheduler: its runtime does"),
    ],
)
def test_the_scheduler_refuses_what_it_says(with_scheduler, changes, found):
    assert with_scheduler(f"print(refused(a_job, gang='example', **{changes}))").strip() == found


@pytest.mark.slow
def test_the_sink_keeps_the_losses(tmp_path):
    file = write_workload(tmp_path)
    text = EXAMPLES["a workload file begins with this"] + file.read_text()
    file.write_text(text.replace("    clip_norm=1.0,\n", "    clip_norm=1.0,\n    sinks=[LossFile],\n"))
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", file)
    assert ended.code == 0, ended.err
    run_dir = tmp_path / "runs" / "a"
    with (run_dir / "losses.csv").open() as rows:
        kept = {int(step): float(loss) for step, loss in csv.reader(rows)}
    assert kept == losses(run_dir)
    assert len(kept) == STEPS


def test_the_examples_keep_the_rules_of_the_source(tmp_path):
    fragments = {"a row of AXIS_TABLE", "a line of DeclaredEngine.reduce_gradients"}
    whole = [text for name, text in EXAMPLES.items() if name not in fragments]
    for number, text in enumerate(whole):
        (tmp_path / f"example_{number}.py").write_text(text)
    assert len(whole) == len(EXAMPLES) - len(fragments) == 3
    lint = [sys.executable, "-m", "ruff", "check", "--ignore", "D100,D102", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*lint, "--no-cache", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


AXIS_WORKLOAD = """
import torch
import paceline
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
workload = paceline.Workload(
    model=model, loss=loss, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), data=data,
    batch_size=16, epochs=2, precision="float64", clip_norm=0.1)
job = paceline.distribute(workload)
for batch in job.batches():
    job.step(batch)
if job.rank == 0:
    print("total", repr(sum(float(parameter.detach().sum()) for parameter in job.model.parameters())))
"""


@pytest.fixture
def with_axis(tmp_path):
    """Runs a workload with a copy of the package to which the example's axis was added."""
    package = tmp_path / "src" / "paceline"
    shutil.copytree(ROOT / "src" / "paceline", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "parallel" / "pod.py").write_text(EXAMPLES["parallel/pod.py"])
    mesh = package / "nouns" / "mesh.py"
    table = "AXIS_TABLE = (\n"
    mesh.write_text(mesh.read_text().replace(table, f"{table}{EXAMPLES['a row of AXIS_TABLE'].rstrip()},\n"))
    engine = package / "parallel" / "engine" / "declared.py"
    call = EXAMPLES["a line of DeclaredEngine.reduce_gradients"]
    text, calls = re.subn(r"^ {12}\w+\.reduce_gradients\(\)\n", rf"\g<0>{call}", engine.read_text(), flags=re.MULTILINE)
    first = "from paceline.parallel.observer import FORWARD, GATHER\n"
    assert calls == text.count(first) == 1
    engine.write_text(text.replace(first, f"{first}from paceline.parallel.pod import sum_over_pods\n"))
    (tmp_path / "train.py").write_text(AXIS_WORKLOAD)

    def total(plan):
        main = "import sys; from paceline.cli.main import main; sys.exit(main())"
        line = [sys.executable, "-c", main, "run", "--plan", plan, "train.py"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return float(re.search(r"total (\S+)", done.stdout)[1])

    return total


@pytest.mark.slow
def test_an_axis_trains_as_one_process_does(with_axis):
    alone = with_axis("replicate=1")
    for plan in ("pod=2", "pod=2,replicate=2"):
        assert with_axis(plan) == pytest.approx(alone, rel=1e-12, abs=1e-13)
