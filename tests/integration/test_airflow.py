"""The operator in Airflow itself: a DAG in its test mode, and how tasks end, are tried again and are stopped."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AIRFLOW = ROOT / ".venv-airflow" / "bin"
EXAMPLE = ROOT / "examples" / "airflow"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (AIRFLOW / "airflow").exists(), reason="needs Airflow: scripts/setup-airflow"),
]
TRAIN = """
import os, sys, time
import torch, paceline
def loss(model, x):
    return model(x[0]).square().sum(), len(x[0])
workload = paceline.Workload(
    model=lambda: torch.nn.Linear(4, 1), loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    data=torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=4, epochs=2)
job = paceline.distribute(workload)
print("begins after", job.step_number, sorted(name for name in os.environ if "AIRFLOW" in name), os.environ.get("MINE"))
for batch in job.batches():
    job.step(batch)
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fails.py").write_text("import paceline\nraise ValueError('no data today')\n")
    (tmp_path / "other.py").write_text("print(1)\n")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    own = {
        "AIRFLOW_HOME": str(folder / "home"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
        "TRAINING_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{AIRFLOW}{os.pathsep}{os.environ['PATH']}",
    }
    return {**os.environ, **own}


def airflow(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [AIRFLOW / "airflow", *words], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=240
    )


def try_tasks(folder: Path, *tasks: dict) -> tuple[list[dict], str]:
    """How tasks ended, one after another, and their log."""
    asked = json.dumps([{"python": sys.executable, **arguments} for arguments in tasks])
    script = Path(__file__).parents[1] / "support" / "airflow_tasks.py"
    done = subprocess.run(
        [AIRFLOW / "python", script, asked],
        cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended, has_torch = done.stdout.splitlines()[-2:]
    assert has_torch == "False"
    return json.loads(ended), done.stdout + done.stderr


def results(folder: Path) -> dict[str, dict]:
    """The XComs of the only DAG run, by task."""
    with sqlite3.connect(folder / "home" / "airflow.db") as database:
        rows = database.execute("select task_id, value from xcom where key = 'return_value'").fetchall()
    return {name: json.loads(value) for name, value in rows}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        """Say nothing."""


@pytest.fixture
def served(tmp_path):
    """The URL of a folder with two CSV files."""
    folder = tmp_path / "served"
    folder.mkdir()
    rows = ["0.1,0.9,0", "0.9,0.1,1", "0.5,0.5,2", "0.2,0.8,0", "0.8,0.2,1", "0.45,0.55,2"]
    (folder / "train.csv").write_text("\n".join(rows * 20) + "\n")
    (folder / "test.csv").write_text("\n".join(rows * 7) + "\n")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *words: Quiet(*words, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_dag_of_the_example_downloads_trains_and_evaluates(tmp_path, served):
    shutil.copytree(EXAMPLE, tmp_path / "dags")
    assert airflow(tmp_path, "db", "migrate").returncode == 0
    params = {"folder": str(tmp_path / "work"), "train_url": f"{served}/train.csv", "test_url": f"{served}/test.csv"}
    done = airflow(tmp_path, "dags", "test", "paceline_example", "--conf", json.dumps(params))
    assert done.returncode == 0, done.stdout + done.stderr
    log = done.stdout + done.stderr
    assert "state=success" in log
    assert "Failed to import" not in log
    assert "samples/s" in log  # the job's progress
    assert "[0] accuracy" in log
    got = results(tmp_path)
    assert got["download"]["train"] == str(tmp_path / "work" / "train.csv")
    assert got["train"]["status"] == "done"
    assert got["train"]["steps"] == 20 * -(-120 // 32)
    assert got["evaluate"]["evaluation"]["accuracy"] > 0.6
    assert list((tmp_path / "work" / "model").iterdir())


def test_airflow_retry_resumes_and_a_cleared_task_trains_anew(here):
    slow = {"file": "train.py", "arguments": ["0.2"], "ranks": 2}
    quick = {**slow, "arguments": ["0"]}
    (stopped, retried, cleared), log = try_tasks(here, {**slow, "is_ended": True}, quick, quick)
    assert stopped["error"] == "AirflowException", log
    assert "was stopped at step" in stopped["text"]
    assert retried["result"]["status"] == "done"
    assert retried["result"]["steps"] == 32
    assert "goes on at step-0000" in log
    assert cleared["result"]["job"] == "dag-train-run-1-2"
    begins = [int(step) for step in re.findall(r"\[0\] begins after (\d+)", log)]
    assert begins[0] == begins[2] == 0
    assert begins[1] > 0


def test_airflow_variables_stay_out_and_mapped_task_has_own_run(here):
    mapped = {"file": "train.py", "arguments": ["0"], "env": {"MINE": "1"}, "map_index": 3, "plan": "replicate=1"}
    (ended,), log = try_tasks(here, mapped)
    assert ended["result"]["job"] == "dag-train-run-1-3"
    assert "begins after 0 [] 1" in log


OF_FLAGS = "is among them\n  fix: use the arguments"
FAILING = [
    ({"file": "fails.py"}, "AirflowException", "no data today"),
    ({"file": "other.py"}, "AirflowFailException", "log above"),
    ({"file": "none.py"}, "AirflowFailException", "none.py"),
    ({"file": "train.py", "ranks": 2, "plan": "tensor=3"}, "AirflowFailException", "found: the job has 2 ranks"),
    ({"file": "train.py", "ranks": "many"}, "AirflowFailException", "log above"),
    ({"file": "train.py", "flags": ["--no-such"]}, "AirflowFailException", "log above"),
    ({"file": "train.py", "flags": ["--job=x"]}, "UsageError", f"--job {OF_FLAGS}"),
    ({"file": "train.py", "flags": ["--keep", "2", "--resume"]}, "UsageError", f"--resume {OF_FLAGS}"),
    ({"file": "train.py", "flags": ["-n", "2"]}, "UsageError", f"-n {OF_FLAGS}"),
]


def test_airflow_failure_has_a_reason_and_a_retry_only_if_useful(here):
    ended, log = try_tasks(here, *(arguments for arguments, _, _ in FAILING))
    assert [one.get("error") for one in ended] == [error for _, error, _ in FAILING], log
    for one, (_, _, text) in zip(ended, FAILING, strict=True):
        assert text in one["text"]
