"""download >> train >> evaluate: a DAG for Airflow 3.

    AIRFLOW__CORE__DAGS_FOLDER=$PWD airflow dags test paceline_example

Airflow's scheduler finds the DAG if this folder is in its DAGs folder. `TRAINING_PYTHON` names the interpreter that has
Paceline and torch, if Airflow's own has not.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.request
from pathlib import Path

from airflow.sdk import DAG, Param, task

from paceline.integrations.airflow import PacelineOperator

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("TRAINING_PYTHON", sys.executable)
FOLDER = "{{ params.folder }}"

with DAG(
    dag_id="paceline_example",
    schedule=None,
    params={
        "folder": Param("paceline_example", type="string", description="gets the data, the runs and the model"),
        "train_url": Param("", type="string", description="a CSV file; empty: made up"),
        "test_url": Param("", type="string", description="a CSV file; empty: made up"),
    },
) as dag:

    @task
    def download(params: dict[str, str]) -> dict[str, str]:
        """Fetch both files, and return where they are; an empty path where the example makes up rows."""
        folder = Path(params["folder"]).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        paths = {}
        for part in ("train", "test"):
            url = params[f"{part}_url"]
            paths[part] = ""
            if url:
                target = folder / f"{part}.csv"
                with urllib.request.urlopen(url) as answer, target.open("wb") as file:
                    shutil.copyfileobj(answer, file)
                paths[part] = str(target)
        return paths

    def data(part: str) -> str:
        """Return the template of an argument: where a part of the data is."""
        return f"--data={{{{ ti.xcom_pull('download')['{part}'] }}}}"

    train = PacelineOperator(
        task_id="train",
        file=str(HERE / "workload.py"),
        arguments=[data("train"), "--save", f"{FOLDER}/model"],
        ranks=2,
        runs=f"{FOLDER}/runs",
        flags=["--checkpoint-every", "50"],
        python=PYTHON,
        retries=2,
    )
    evaluate = PacelineOperator(
        task_id="evaluate",
        file=str(HERE / "evaluate.py"),
        arguments=[f"{FOLDER}/model", data("test")],
        ranks=2,
        runs=f"{FOLDER}/runs",
        python=PYTHON,
    )
    download() >> train >> evaluate
