"""Run `execute` of PacelineOperators as tasks would, and print how each ended as JSON. Airflow's Python runs this file.

python airflow_tasks.py '[{"file": "train.py", "ranks": 2}, ...]'

With "is_ended" a task is ended as Airflow ends it, once its job has taken a step.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.integrations.airflow import PacelineOperator


def end_after_a_step(operator: PacelineOperator, folder: Path) -> None:
    """Call `on_kill` when a step has been written."""
    while not any('"step"' in path.read_text() for path in folder.glob("runs/*/events.jsonl")):
        time.sleep(0.05)
    operator.on_kill()


def ended(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one try of a task, and return its result or its error."""
    map_index = arguments.pop("map_index", -1)
    is_ended = arguments.pop("is_ended", False)
    try:
        operator = PacelineOperator(task_id="train", job=arguments.pop("job", "dag-train-run:1"), **arguments)
        if is_ended:
            threading.Thread(target=end_after_a_step, args=(operator, Path.cwd()), daemon=True).start()
        return {"result": operator.execute({"ti": SimpleNamespace(map_index=map_index)})}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


if __name__ == "__main__":
    print(json.dumps([ended(arguments) for arguments in json.loads(sys.argv[1])]))
    print("torch" in sys.modules)
